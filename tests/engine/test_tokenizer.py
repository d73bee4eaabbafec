"""The tokenizer against real vocabularies and the `tokenizers` library, and metadata that lies."""

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers

from engine import EngineError
from engine.tokenizer import from_metadata
from engine.tokenizer.pretokenizers import (
    DIGIT,
    DIGITS,
    GPT2,
    PRETOKENIZERS,
    PUNCTUATION,
    TABLE,
    find,
    get_pretokenizer,
    nearest,
    normal_form,
)

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("GGUFTOOLS_SHARED", ROOT.parent / "shared"))
TINY = ROOT / "gguftools" / "data" / "tiny" / "tokenizer.json"

TEXT = (
    "Hello WORLD's, we'Re 'told' 1234567 12 ½ \n\n\n  x  3.14\r\n\t\tdef foo_bar(x): # ok?!\n你好 こんにちは 안녕 नमस्ते "
    "Привет, ЧеЛовек! ÄpFEL <|end|> 🙂👍🏽   "
)


def metadata(**changes):
    """The tiny model's vocabulary as metadata; `changes` by the last part of the key, None removes."""
    found = json.loads(TINY.read_text(encoding="utf-8"))
    vocab = found["model"]["vocab"]
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": sorted(vocab, key=vocab.get),
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(vocab) - 2),
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in found["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    keys |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return {key: value for key, value in keys.items() if value is not None}


def with_tokens(*texts, types=None, **changes):
    """The same with tokens added at the end, user-defined unless `types` says otherwise."""
    keys = metadata()
    kinds = [*keys["tokenizer.ggml.token_type"], *(types or [4] * len(texts))]
    return metadata(tokens=[*keys["tokenizer.ggml.tokens"], *texts], token_type=kinds, **changes)


@pytest.mark.parametrize("name", ["deepseek-coder", "falcon", "gpt-2", "llama-bpe", "qwen2"])
def test_real_vocabularies(name):
    from gguftools.gguf import GGUF

    path = SHARED / "golden" / "vocab" / f"{name}.gguf"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    t = from_metadata(GGUF(path).metadata)
    cases = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    assert len(cases) > 40
    for case in cases:
        assert t.tokenize(case["text"], add_special=False) == case["ids"], case["text"]
        assert t.detokenize(case["ids"]) == case["text"]


def test_large_text():
    path = SHARED / "data" / "valid.txt"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    text = path.read_bytes().decode()
    t = from_metadata(metadata())
    ids = t.tokenize(text)
    assert len(ids) == 176_007
    assert t.detokenize(ids) == text


def test_same_as_the_library():
    t, library = from_metadata(metadata()), Tokenizer.from_file(str(TINY))
    rng = random.Random(0)
    alphabet = [*list("abcXYZ 019'.!_-\n\t\r"), "é", "你", "́", "🙂", " the", "'ll", "\xa0"]
    for text in [TEXT, *("".join(rng.choices(alphabet, k=rng.randrange(60))) for _ in range(300))]:
        ids = t.tokenize(text, add_special=False)
        assert ids == library.encode(text, add_special_tokens=False).ids, repr(text)
        assert t.detokenize(ids) == text


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.names[0])
def test_every_pretokenizer(row):
    """Compiles, cuts without losing anything, and cuts the text into more than one piece."""
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in row.patterns]
    pieces = [piece for piece, _ in pre_tokenizers.Sequence(steps).pre_tokenize_str(TEXT)]
    assert "".join(pieces) == TEXT
    assert len(pieces) > 5
    for name in row.names:
        t = from_metadata(metadata(pre=name))
        assert t.detokenize(t.tokenize(TEXT)) == TEXT
        assert t.add_bos == row.add_bos


CUTS = {
    "llama-bpe": ["Hello", " ", "123", "456", "7", " it", "'S", " !\n\n", " ", " x"],
    "gpt-2": ["Hello", " 1234567", " it", "'", "S", " !", "\n\n ", " x"],
    "smollm": ["Hello", " ", "1", "2", "3", "4", "5", "6", "7", " it", "'", "S", " !", "\n\n ", " x"],
    "qwen2": ["Hello", " ", "1", "2", "3", "4", "5", "6", "7", " it", "'S", " !\n\n", " ", " x"],
    "tiny_aya": ["Hello", " ", "1", "234", "567", " it'S", " !\n\n", " ", " x"],
    "superbpe": ["Hello ", "1", "234", "567", " it'S !\n\n  x"],
}


@pytest.mark.parametrize("name", CUTS)
def test_where_words_are_cut(name):
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRETOKENIZERS[name].patterns]
    pieces = pre_tokenizers.Sequence(steps).pre_tokenize_str("Hello 1234567 it'S !\n\n  x")
    assert [piece for piece, _ in pieces] == CUTS[name]


def test_names_are_found_by_structure():
    for row in TABLE:
        first = find(row.patterns, row.ignore_merges)
        assert PRETOKENIZERS[first].patterns == row.patterns
    llama3 = PRETOKENIZERS["llama-bpe"].patterns
    assert find(llama3, True) == "llama-bpe"
    assert find(llama3, False) == "dbrx"
    assert find((DIGIT, GPT2), False) == "smollm"
    assert find((PUNCTUATION, GPT2, DIGITS, "[0-9][0-9][0-9]"), False) == "falcon"
    words = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    assert find((words + r"|\s*[\r\n]+|\s+(?!\S)|\s+",), False) == "dbrx"
    assert find((r"\w+",), False) is None
    assert nearest((llama3[0].replace("{1,3}", "{1,4}"),))[0] in ("llama-bpe", "glm4", "dbrx")
    assert normal_form("[\r\n]") == r"[\r\n]"


def test_unknown_name_names_the_nearest():
    with pytest.raises(EngineError, match=r"'llama-bqe'.*llama-bpe"):
        get_pretokenizer("llama-bqe")


def test_begin_and_end():
    keys = metadata(add_bos_token=True, add_eos_token=True)
    t = from_metadata(keys)
    plain = t.tokenize("Hi", add_special=False)
    assert t.tokenize("Hi") == [0, *plain, 1]
    assert t.tokenize("") == [0, 1]
    assert t.tokenize("", add_special=False) == []
    assert from_metadata(metadata()).tokenize("Hi") == [0, *plain]  # the default of llama-bpe
    assert from_metadata(metadata(pre="gpt-2")).tokenize("Hi")[0] != 0
    assert from_metadata(metadata(bos_token_id=None)).tokenize("Hi") == plain
    assert (t.bos, t.eos, t.n_vocab) == (0, 1, 2048)


def test_control_tokens_only_when_asked():
    t = from_metadata(metadata())
    text = "a<|end_of_text|>b"
    plain, parsed = (t.tokenize(text, False, parse) for parse in (False, True))
    assert not set(plain) & {0, 1}
    assert t.detokenize(plain) == text
    assert parsed == [*t.tokenize("a", False), 1, *t.tokenize("b", False)]
    assert t.detokenize(parsed) == "ab"
    assert t.detokenize(parsed, special=True) == text
    assert t.token_to_piece(1) == b""
    assert t.token_to_piece(1, special=True) == b"<|end_of_text|>"


def test_user_defined_tokens_longest_first():
    t = from_metadata(with_tokens("☃b", "b☃☃", "  "))
    assert t.tokenize("☃b☃☃", False) == [*t.tokenize("☃", False), 2049]
    assert t.tokenize("☃bx☃b", False) == [2048, *t.tokenize("x", False), 2048]
    assert t.tokenize("    ", False) == [2050, 2050]
    assert t.token_to_piece(2050) == b"  "


def test_pieces():
    t = from_metadata(with_tokens("<0x0A>", "[PAD2049]", types=[6, 5]))
    assert t.token_to_piece(2048) == b"\n"
    assert t.token_to_piece(2049, special=True) == b""
    eacute = t.tokenize("🙂", False)
    assert len(eacute) > 1
    assert b"".join(t.token_to_piece(i) for i in eacute) == "🙂".encode()
    assert t.detokenize(eacute[:1]) == "\ufffd"
    assert t.detokenize(np.array(eacute)) == "🙂"
    for wrong in (-1, t.n_vocab, 1 << 40):
        with pytest.raises(EngineError, match=f"{wrong}"):
            t.detokenize([wrong])


def test_end_of_generation():
    assert from_metadata(metadata()).eog == {1}
    t = from_metadata(with_tokens("<|im_end|>", "<|end|>", "<|file_sep|>"))
    assert t.eog == {1, 2048, 2049, 2050}
    assert t.detokenize([2048]) == ""  # it ends generation, so it is a control token whatever the file says
    assert from_metadata(with_tokens("x|y", eot_token_id=2048)).eog == {1, 2048}
    harmony = from_metadata(with_tokens("<|end|>", "<|return|>", "<|call|>", "<|channel|>", types=[3] * 4))
    assert harmony.eog == {1, 2049, 2050}
    assert harmony.detokenize([2048, 2051]) == "<|end|><|channel|>"


def test_empty_tokens_get_a_name():
    t = from_metadata(with_tokens("", types=[5]))
    assert t.vocab.tokens[2048] == "[EMPTY_2048]"


def test_text_that_is_not_unicode():
    t = from_metadata(metadata())
    with pytest.raises(EngineError, match="surrogate"):
        t.tokenize("a\ud800b")


TOKENS = metadata()["tokenizer.ggml.tokens"]

DAMAGED = {
    "no model": ({"model": None}, "tokenizer.ggml.model' is missing"),
    "SentencePiece": ({"model": "llama"}, "'llama' .SentencePiece"),
    "unknown model": ({"model": "nonsense"}, "'nonsense'"),
    "model is a number": ({"model": 3}, "is 3"),
    "unknown pre": ({"pre": "qwen"}, "'qwen'.*qwen2"),
    "pre is a list": ({"pre": ["a"]}, "tokenizer.ggml.pre"),
    "no tokens": ({"tokens": None}, "tokens' is missing"),
    "empty tokens": ({"tokens": []}, "is empty"),
    "tokens are text": ({"tokens": "abc"}, "not an array of strings"),
    "tokens are numbers": ({"tokens": [1, 2]}, "not an array of strings"),
    "tokens twice": ({"tokens": [*TOKENS[:-1], TOKENS[5]]}, "more than once"),
    "tokens not UTF-8": ({"tokens": [*TOKENS[:-1], "\udcff"]}, "not UTF-8"),
    "no merges": ({"merges": None}, "merges' is missing"),
    "merges are numbers": ({"merges": np.arange(4)}, "not an array of strings"),
    "merge of one": ({"merges": ["ab"]}, "not a pair"),
    "merge of strangers": ({"merges": ["qqqq zzzz"]}, "does not fit"),
    "types too short": ({"token_type": [1, 1]}, "2 entries for 2048"),
    "types are text": ({"token_type": ["a"] * 2048}, "whole numbers"),
    "types are floats": ({"token_type": [1.5] * 2048}, "whole numbers"),
    "bos too large": ({"bos_token_id": 2048}, "bos_token_id' is 2048"),
    "bos negative": ({"bos_token_id": -1}, "is -1"),
    "eos is text": ({"eos_token_id": "</s>"}, "eos_token_id"),
    "eot is a bool": ({"eot_token_id": True}, "eot_token_id"),
    "add_bos is a number": ({"add_bos_token": 1}, "add_bos_token"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_metadata(case):
    changes, message = DAMAGED[case]
    with pytest.raises(EngineError, match=message) as caught:
        from_metadata(metadata(**changes))
    assert "\n" not in str(caught.value)
