"""Vocabularies of model folders: what conversion makes of them gives the ids that the original gives."""

import importlib.util
import io
import json
import random
import re
import shutil
from pathlib import Path

import pytest
from tokenizers import (
    AddedToken,
    BertWordPieceTokenizer,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from engine.tokenizer import from_metadata, verify_selftest
from engine.tokenizer.vocab import EOS_IDS, LSTRIP_IDS
from gguftools import GGUFError, demo_text
from gguftools.conversion.sentencepiece_file import read_model
from gguftools.conversion.vocab import vocab_keys
from gguftools.vocabulary import open_vocabulary

spm = pytest.importorskip("sentencepiece")

LINES = [line for line in Path(demo_text("valid")).read_text("utf-8").split("\n") if line.strip()][:600]
ALPHABET = [
    *"abcdefgh ETAOIN shrdlu    019.,'!?\n\t",
    *"éÅﬁ½①你好世こプﾌﾟ\u0301ПЖив🙂👍🏽\u3000\xa0\u200b",
    " the",
    "'ll",
]


def cases(count=300):
    rng = random.Random(0)
    return LINES[:60] + ["".join(rng.choices(ALPHABET, k=rng.randrange(40))) for _ in range(count)]


CASES = cases()


def folder_of(path, **files):
    """A folder; name with _ for the last . -> bytes, text, or an object as JSON."""
    path.mkdir()
    for name, content in files.items():
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (path / ".".join(name.rsplit("_", 1))).write_bytes(data)
    return path


def train(model_type="bpe", **options):
    data = io.BytesIO()
    settings = {"vocab_size": 800, "minloglevel": 2, "num_threads": 1, "normalization_rule_name": "identity"}
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter([*LINES, *["你好世界 Привет naïve"] * 20]),
        model_writer=data,
        model_type=model_type,
        **(settings | options),
    )
    return data.getvalue()


def same(t, scores, found, expected):
    """Equal ids, or ids of equal scores: SentencePiece adds these up in single precision, which decides ties."""
    total, wanted = (sum(scores[i] for i in ids) for ids in (found, expected))
    return found == expected or (t.kind == "Unigram" and abs(total - wanted) < 1e-4)


def keys_of(folder, config=None, **options):
    return dict(vocab_keys(folder, config or {}, **options))


# --- SentencePiece files ----------------------------------------------------------------------------------------------

SPACES = {"add_dummy_prefix": True, "remove_extra_whitespaces": True}
NO_SPACES = {"add_dummy_prefix": False, "remove_extra_whitespaces": False}
PREFIX = {"add_dummy_prefix": True, "remove_extra_whitespaces": False}
TRAINED = [
    (kind, rule, fallback, spaces)
    for kind in ("bpe", "unigram")
    for rule in ("identity", "nmt_nfkc")
    for fallback in (True, False)
    for spaces in (SPACES, NO_SPACES, PREFIX)
]


@pytest.mark.parametrize(("kind", "rule", "fallback", "spaces"), TRAINED)
def test_sentencepiece_files(kind, rule, fallback, spaces, tmp_path):
    data = train(kind, normalization_rule_name=rule, byte_fallback=fallback, **spaces)
    folder = folder_of(tmp_path / "m", tokenizer_model=data)
    keys = keys_of(folder, {"vocab_size": 832}, selftest=True)
    assert keys["tokenizer.ggml.model"] == {"bpe": "llama", "unigram": "t5"}[kind]
    assert keys["tokenizer.ggml.tokens"][800:802] == ["[PAD800]", "[PAD801]"]
    assert keys["tokenizer.ggml.scores"][800] == -10000
    assert keys["tokenizer.ggml.token_type"][800] == 5
    t, source = from_metadata(keys), spm.SentencePieceProcessor(model_proto=data)
    for text in CASES:
        assert same(t, keys["tokenizer.ggml.scores"], t.tokenize(text, False), source.encode(text)), text
        if t.lossless:
            assert t.detokenize(t.tokenize(text)) == text
    assert verify_selftest(keys, t) == []


def test_sentencepiece_file_is_read_as_sentencepiece_reads_it(tmp_path):
    data = train(
        "unigram", normalization_rule_name="nmt_nfkc", user_defined_symbols=["<tool>"], control_symbols=["[c]"]
    )
    path = tmp_path / "spiece.model"
    path.write_bytes(data)
    found, source = read_model(path), spm.SentencePieceProcessor(model_proto=data)
    n = source.get_piece_size()
    assert found.tokens == [source.id_to_piece(i) for i in range(n)]
    assert found.scores == [source.get_score(i) for i in range(n)]
    assert found.types[:5] == [2, 3, 3, 3, 4]
    assert found.special == {"unk": 0, "bos": 1, "eos": 2}
    assert keys_of(tmp_path)["tokenizer.ggml.model"] == "t5"


@pytest.mark.parametrize("damage", [b"", b"\n\x0e", b"not a model at all", b"\xff" * 40, "cut", "flipped"])
def test_damaged_sentencepiece_files(damage, tmp_path):
    data = train()
    data = {"cut": data[:-7], "flipped": b"\x0b" + data[1:]}.get(damage, damage)
    folder = folder_of(tmp_path / "m", tokenizer_model=data)
    with pytest.raises(GGUFError, match=r"tokenizer\.model: is no SentencePiece model, or is damaged"):
        keys_of(folder)


def test_kinds_of_sentencepiece_without_a_place(tmp_path):
    folder = folder_of(tmp_path / "m", tokenizer_model=train("char", vocab_size=60))
    with pytest.raises(GGUFError, match="characters"):
        keys_of(folder)
    folder = folder_of(tmp_path / "n", tokenizer_model=train(treat_whitespace_as_suffix=True))
    with pytest.raises(GGUFError, match="treat_whitespace_as_suffix"):
        keys_of(folder)


def test_tokens_added_to_a_sentencepiece_file(tmp_path, caplog):
    """A list that names tokens which are there changes nothing; new ones count; `added_tokens_decoder` counts most."""
    decoder = {
        "1": {"content": "<s>", "special": True},
        "801": {"content": "<|end|>", "special": False},
        "802": {"content": "▁▁x", "special": False, "lstrip": True},
    }
    folder = folder_of(
        tmp_path / "m",
        tokenizer_model=train(),
        added_tokens_json={"<unk>": 0, "<s>": 1, "</s>": 2, "<pad>": 800},
        tokenizer_config_json={"added_tokens_decoder": decoder, "bos_token": "<s>", "add_bos_token": True},
    )
    keys = keys_of(folder, {"vocab_size": 803, "bos_token_id": 1})
    assert keys["tokenizer.ggml.tokens"][800:] == ["<pad>", "<|end|>", "  x"]
    assert keys["tokenizer.ggml.token_type"][:3] == [2, 3, 3]
    assert keys["tokenizer.ggml.token_type"][800:] == [4, 3, 4]
    assert keys["tokenizer.ggml.scores"][800:] == [-1000.0] * 3
    assert keys[LSTRIP_IDS].tolist() == [802]
    assert keys["tokenizer.ggml.add_bos_token"] is True
    assert "replaced" not in caplog.text
    with pytest.raises(GGUFError, match=r"ids up to 802, but.*'vocab_size' is 802.*no rows"):
        keys_of(folder, {"vocab_size": 802})


def test_added_token_that_replaces_another_warns(tmp_path, caplog):
    folder = folder_of(tmp_path / "m", tokenizer_model=train(), added_tokens_json={"<new>": 5})
    assert keys_of(folder)["tokenizer.ggml.tokens"][5] == "<new>"
    assert "token 5" in caplog.text


DAMAGED_ADDED = [
    ({"added_tokens_json": {"x": "7"}}, "has the id '7'"),
    ({"added_tokens_json": {"x": -7}}, "has the id -7"),
    ({"tokenizer_config_json": {"added_tokens_decoder": {"seven": {"content": "x"}}}}, "damaged at 'seven'"),
    ({"tokenizer_config_json": {"added_tokens_decoder": {"7": "x"}}}, "damaged at '7'"),
]


@pytest.mark.parametrize(("files", "message"), DAMAGED_ADDED)
def test_damaged_added_tokens(files, message, tmp_path):
    with pytest.raises(GGUFError, match=message):
        keys_of(folder_of(tmp_path / "m", tokenizer_model=train(), **files))


def mistral_files():
    spec = importlib.util.find_spec("mistral_common")
    folder = Path(spec.origin).parent / "data" if spec and spec.origin else Path()
    return sorted(path for path in folder.glob("*") if ".model." in path.name or path.name.startswith("tekken_"))


@pytest.mark.parametrize("source", mistral_files() or [pytest.param(None, marks=pytest.mark.skip("no mistral_common"))])
def test_mistral(source, tmp_path):
    folder = folder_of(tmp_path / "m")
    if source.suffix == ".json":
        from mistral_common.tokens.tokenizers.tekken import Tekkenizer

        shutil.copy(source, folder / "tekken.json")
        tekken = Tekkenizer.from_file(source)

        def encode(text):
            return tekken.encode(text, bos=False, eos=False)
    else:
        shutil.copy(source, folder / "tokenizer.model")
        encode = spm.SentencePieceProcessor(model_file=str(source)).encode
    _, t = open_vocabulary(folder)
    assert (t.bos, t.eos, t.add_bos, t.add_eos) == (1, 2, True, False)
    for text in cases(1000):
        ids = t.tokenize(text, add_special=False)
        assert ids == encode(text), text
        assert t.detokenize(ids) == text


# --- tokenizer.json ---------------------------------------------------------------------------------------------------


def saved(path, tokenizer, **files):
    folder = folder_of(path, **files)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def character_bpe(style):
    """A SentencePiece BPE as transformers saves it: all ways to make each piece, pieces by score."""
    data = train(byte_fallback=True)
    model = spm.SentencePieceProcessor(model_proto=data)
    vocab = {model.id_to_piece(i): i for i in range(model.get_piece_size())}
    ways = [
        (-model.get_score(i), vocab[text[:n]], vocab[text[n:]], text[:n], text[n:])
        for text, i in vocab.items()
        for n in range(1, len(text))
        if text[:n] in vocab and text[n:] in vocab
    ]
    merges = [(a, b) for *_, a, b in sorted(ways)]
    t = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    if style == "prepend":
        t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif style == "metaspace":
        t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        t.normalizer = normalizers.Replace(" ", "▁")
    t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    t.add_special_tokens(["<unk>", "<s>", "</s>"])
    t.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    return t, data


@pytest.mark.parametrize("style", ["prepend", "metaspace", "none"])
def test_bpe_over_characters(style, tmp_path):
    library, _ = character_bpe(style)
    folder = saved(tmp_path / "m", library, tokenizer_config_json={"bos_token": "<s>", "eos_token": "</s>"})
    keys = keys_of(folder, selftest=True)
    assert keys["tokenizer.ggml.model"] == "llama"
    assert keys.get("tokenizer.ggml.add_space_prefix", True) is (style != "none")
    assert keys["tokenizer.ggml.token_type"][3:5] == [6, 6]
    t = from_metadata(keys)
    for text in CASES:
        if not text.startswith(" "):  # there the library's Metaspace adds no space, as SentencePiece does
            assert t.tokenize(text) == library.encode(text).ids, text
    assert verify_selftest(keys, t) == []


def test_the_sentencepiece_file_counts_more(tmp_path):
    library, data = character_bpe("prepend")
    folder = saved(tmp_path / "m", library, tokenizer_model=data)
    source = spm.SentencePieceProcessor(model_proto=data)
    assert keys_of(folder)["tokenizer.ggml.scores"][:800] == [source.get_score(i) for i in range(800)]


def test_gemma4_keeps_its_merges(tmp_path):
    library, _ = character_bpe("none")
    library.add_special_tokens(["<|tool_response>"])
    folder = saved(tmp_path / "m", library)
    keys = keys_of(folder, {"model_type": "gemma4_text"})
    assert keys["tokenizer.ggml.model"] == "gemma4"
    assert keys["tokenizer.ggml.token_type"][800] == 4
    t = from_metadata(keys)
    for text in CASES:
        assert t.tokenize(text, False) == library.encode(text, add_special_tokens=False).ids, text


@pytest.mark.parametrize("style", ["split", "joined"])
def test_unigram(style, tmp_path):
    data = train("unigram", normalization_rule_name="nmt_nfkc")
    (tmp_path / "source.model").write_bytes(data)
    found = read_model(tmp_path / "source.model")
    library = Tokenizer(models.Unigram(list(zip(found.tokens, found.scores)), 0, False))
    precompiled = normalizers.Precompiled(found.charsmap)
    if style == "split":  # as transformers once saved them, and now
        library.normalizer = precompiled
        library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    else:
        library.normalizer = normalizers.Sequence(
            [precompiled, normalizers.Strip(False, True), normalizers.Replace(Regex(" {2,}"), "▁")]
        )
        library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.add_special_tokens(["<unk>", "<s>", "</s>", AddedToken("<mask>", lstrip=True, special=True)])
    library.post_processor = processors.TemplateProcessing("<s> $A </s>", "<s> $A </s> $B", [("<s>", 1), ("</s>", 2)])
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    keys = keys_of(saved(tmp_path / "m", library, tokenizer_config_json=settings), {"type_vocab_size": 1})
    assert keys["tokenizer.ggml.model"] == "t5"
    assert keys["tokenizer.ggml.token_type_count"] == 1
    assert keys["tokenizer.ggml.add_space_prefix"] is keys["tokenizer.ggml.remove_extra_whitespaces"] is True
    assert keys[LSTRIP_IDS].tolist() == [800]
    t, source = from_metadata(keys), spm.SentencePieceProcessor(model_proto=data)
    for text in CASES:
        first, *ids, last = t.tokenize(text)
        assert (first, last) == (1, 2)
        assert same(t, found.scores, ids, source.encode(text)), text
    text = "word <mask> other"
    assert t.tokenize(text, parse_special=True) == library.encode(text).ids


@pytest.mark.parametrize("lower", [True, False])
def test_wordpiece(lower, tmp_path):
    library = BertWordPieceTokenizer(lowercase=lower)
    library.train_from_iterator(LINES, vocab_size=600, show_progress=False)
    ids = [(name, library.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    library.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ids)
    settings = {f"{name.lower()}_token": f"[{name}]" for name in ("CLS", "SEP", "UNK", "PAD", "MASK")}
    keys = keys_of(saved(tmp_path / "m", library, tokenizer_config_json=settings), {"type_vocab_size": 2})
    assert keys["tokenizer.ggml.model"] == "bert"
    assert keys["tokenizer.ggml.token_type_count"] == 2
    assert keys["tokenizer.ggml.normalizer.lowercase"] is lower
    assert keys["tokenizer.ggml.cls_token_id"] == library.token_to_id("[CLS]")
    assert not [token for token in keys["tokenizer.ggml.tokens"] if token.startswith("##")]
    t = from_metadata(keys)
    for text in CASES:
        assert t.tokenize(text) == library.encode(text).ids, text


REFUSED = {
    "words": (Tokenizer(models.WordLevel({"a": 0}, "a")), {}, "WordLevel"),
    "no unknown token": (Tokenizer(models.Unigram([("a", 0.0)], None, False)), {}, "'unk_id' is None"),
    "another prefix": (Tokenizer(models.WordPiece({"[UNK]": 0}, continuing_subword_prefix="@@")), {}, "'@@'"),
    "RWKV": (Tokenizer(models.WordLevel()), {"rwkv_vocab_v20230424_txt": b"1 'a' 1"}, "RWKV"),
    "PLaMo": (Tokenizer(models.WordLevel()), {"tokenizer_jsonl": b"[]"}, "PLaMo 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, tmp_path):
    library, files, message = REFUSED[case]
    with pytest.raises(GGUFError, match=message) as caught:
        keys_of(saved(tmp_path / "m", library, **files))
    assert "\n" not in str(caught.value)


def test_normalizers_without_a_place(tmp_path):
    library, _ = character_bpe("none")
    library.normalizer = normalizers.NFKC()
    with pytest.raises(GGUFError, match=r"\(NFKC\)"):
        keys_of(saved(tmp_path / "m", library))


def test_pre_is_for_byte_level_vocabularies(tmp_path):
    with pytest.raises(GGUFError, match="--pre"):
        keys_of(folder_of(tmp_path / "m", tokenizer_model=train()), pre="qwen2")


DAMAGED_TEKKEN = {
    "no config": ({"config": 3}, "no 'config'"),
    "no sizes": ({"config": {}}, "default_vocab_size"),
    "too few": ({"config": {"default_vocab_size": 900}}, "fewer tokens"),
    "vocab": ({"vocab": [{"rank": 0, "token_bytes": "!!"}]}, "damaged"),
    "pattern": ({"config": {"pattern": r"\w+"}}, "nearest are"),
    "special": ({"special_tokens": [{"rank": "x"}]}, "special_tokens"),
}


@pytest.mark.parametrize("case", DAMAGED_TEKKEN)
def test_damaged_tekken(case, tmp_path):
    from base64 import b64encode

    from engine.tokenizer.pretokenizers import PRETOKENIZERS

    config = {
        "default_vocab_size": 300,
        "default_num_special_tokens": 30,
        "pattern": PRETOKENIZERS["tekken"].patterns[0],
    }
    words = [bytes([n]) for n in range(256)] + [b"ab"] * 14
    vocab = [{"rank": n, "token_bytes": b64encode(word).decode()} for n, word in enumerate(words)]
    changes, message = DAMAGED_TEKKEN[case]
    if isinstance(changes.get("config"), dict) and changes["config"]:
        changes = changes | {"config": config | changes["config"]}
    with pytest.raises(GGUFError, match=message):
        keys_of(folder_of(tmp_path / "m", tekken_json={"config": config, "vocab": vocab} | changes))


# --- what ends generation ---------------------------------------------------------------------------------------------

ENDS = [
    ([2], {}, {}),
    ([2, 10], {}, {"eot": 10}),
    ([2, 10, 11], {}, {"eot": 10, "eom": 11}),
    ([2, 10, 11, 12], {}, {"eot": 10, "eom": 11, "all": [2, 10, 11, 12]}),
    (10, {"eos_token_id": [2, 11]}, {"eot": 10, "eom": 11}),
    ([2, 99999], {}, {}),
]


@pytest.mark.parametrize(("listed", "config", "expected"), ENDS)
def test_several_ends_of_generation(listed, config, expected, tmp_path, caplog):
    folder = folder_of(tmp_path / "m", tokenizer_model=train(), generation_config_json={"eos_token_id": listed})
    keys = keys_of(folder, config)
    assert keys["tokenizer.ggml.eos_token_id"] == 2
    for kind in ("eot", "eom"):
        assert keys.get(f"tokenizer.ggml.{kind}_token_id") == expected.get(kind)
    assert list(keys.get(EOS_IDS, [])) == expected.get("all", [])
    assert ("99999" in caplog.text) == (99999 in (listed if isinstance(listed, list) else []))
    wanted = {i for i in (listed if isinstance(listed, list) else [listed]) if i < 800}
    assert from_metadata(keys).eog >= wanted


def test_the_readme_names_all_kinds_and_pretokenizers():
    from engine.tokenizer import KINDS
    from engine.tokenizer.pretokenizers import CHARACTER_NAMES, PRETOKENIZERS

    readme = Path(__file__).resolve().parents[2] / "README.md"
    section = readme.read_text("utf-8").partition("## Tokenizers")[2].partition("\n## ")[0]
    words = set(re.findall(r"[\w.-]*\w", section))
    assert {*KINDS, *PRETOKENIZERS, *CHARACTER_NAMES} - words == set()
