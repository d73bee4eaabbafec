"""SentencePiece, Unigram, WordPiece and BPE over characters on small vocabularies; special tokens; the self-test."""

import contextlib
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import EngineError
from engine.tokenizer import from_metadata, verify_selftest
from engine.tokenizer.cleanup import clean_up
from engine.tokenizer.normalizer import CHARSMAP, Normalizer, read_charsmap
from engine.tokenizer.selftest import PROBES, selftest_keys
from engine.tokenizer.vocab import EOS_IDS, LSTRIP_IDS, RSTRIP_IDS, TokenType, byte_of

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = TokenType
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def keys_of(model, rows, **more):
    """Metadata of a vocabulary: rows of text, score, type."""
    texts, scores, types = zip(*rows)
    keys = {"model": model, "tokens": list(texts), "scores": list(scores), "token_type": list(map(int, types))} | more
    return {f"tokenizer.ggml.{key}" if "." not in key else key: value for key, value in keys.items()}


SPECIAL = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
WORDS = ["▁a", "ab", "▁ab", "bc", "abc", "▁▁", "▁", "a", "b", "c", "</", "s>", "<", "/", "s", ">", "x", "0", "<0"]


def sentencepiece(bytes_too=True, **more):
    rows = [*SPECIAL, *((text, 0.0, BYTE) for text in BYTES if bytes_too)]
    rows += [(text, -float(n), NORMAL) for n, text in enumerate(WORDS)]
    rows += [("<tool>", 0.0, USER), ("[x]", 0.0, CONTROL)]
    return keys_of("llama", rows, **more)


def texts(t, ids):
    return [t.vocab.tokens[i] for i in ids]


def test_sentencepiece_joins_by_score_then_from_the_left():
    t = from_metadata(sentencepiece())
    assert texts(t, t.tokenize("abc", False)) == ["▁ab", "c"]  # "▁a" comes first; "▁ab" is better than "bc" then
    assert texts(t, t.tokenize("bc", False)) == ["▁", "bc"]
    assert texts(t, t.tokenize("xabc", False)) == ["▁", "x", "abc"]
    assert texts(t, t.tokenize("a  a", False)) == ["▁a", "▁", "▁a"]
    assert texts(t, t.tokenize("   ", False)) == ["▁▁", "▁▁"]
    assert texts(t, t.tokenize("é", False)) == ["▁", "<0xC3>", "<0xA9>"]
    assert t.tokenize("a") == [1, *t.tokenize("a", False)]
    assert from_metadata(sentencepiece(add_space_prefix=False)).tokenize("a", False) == [t.vocab.ids["a"]]


def test_no_text_becomes_a_control_token_or_a_byte():
    t = from_metadata(sentencepiece())
    ids = t.tokenize("</s><0x0A>[x]", False)
    assert not {t.vocab.types[i] for i in ids if t.vocab.tokens[i] in ("</s>", "[x]", "<0x0A>")}
    assert t.detokenize(ids) == "</s><0x0A>[x]"
    assert t.tokenize("</s>[x]", False, parse_special=True) == [2, t.vocab.ids["[x]"]]


def test_a_space_before_every_stretch_of_text_and_none_when_it_comes_back():
    t = from_metadata(sentencepiece())
    ids = t.tokenize("a<tool>a</s> a", False, parse_special=True)
    assert texts(t, ids) == ["▁a", "<tool>", "▁a", "</s>", "▁", "▁a"]
    assert t.detokenize(ids, special=True) == "a<tool>a</s> a"
    assert t.detokenize([1, *ids]) == "a<tool>a a"
    assert t.token_to_piece(ids[0]) == b" a"
    assert t.token_to_piece(ids[0], lstrip=3) == b"a"


def test_unknown_characters_without_bytes():
    t = from_metadata(sentencepiece(bytes_too=False))
    assert texts(t, t.tokenize("aéüa", False)) == ["▁a", "<unk>", "a"]
    assert not t.lossless
    assert t.detokenize([0]) == ""
    with pytest.raises(EngineError, match="unknown_token_id"):
        from_metadata(keys_of("t5", [("a", 0.0, NORMAL), ("b", 0.0, NORMAL)]))


def test_pieces_with_a_space_inside_are_found():
    rows = [*SPECIAL, *((text, 0.0, BYTE) for text in BYTES)]
    rows += [("a", -9.0, NORMAL), ("▁", -9.0, NORMAL), ("a▁", -1.0, NORMAL), ("a▁a", -2.0, NORMAL)]
    t = from_metadata(keys_of("llama", rows, add_space_prefix=False))
    assert texts(t, t.tokenize("a a", False)) == ["a▁a"]


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁")))
def test_any_text_survives(text):
    assert SPM.detokenize(SPM.tokenize(text)) == text
    assert SPM.detokenize(SPM.tokenize(text, parse_special=True), special=True).removeprefix("<s>") == text


SPM = from_metadata(sentencepiece())


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, SPM.n_vocab - 1)))
def test_any_ids_give_a_text(ids):
    assert isinstance(SPM.detokenize(ids), str)
    assert b"".join(SPM.token_to_piece(i, special=True) for i in ids) is not None


@pytest.mark.parametrize("alphabet", ["a", " ", "ab ", "你好", "\U0001f642"])
def test_long_texts_end(alphabet):
    """No step of the encoder is quadratic: half a million characters without a space, or of spaces alone."""
    text = "".join(random.Random(0).choices(alphabet, k=1 << 17))
    assert SPM.detokenize(SPM.tokenize(text)) == text


@pytest.mark.parametrize("token", ["<0x-1>", "<0x1>", "<0xGG>", "<0x+1>", "<0x 1>", "<0x0A", "0x0A>", "<0x00A>"])
def test_what_only_looks_like_a_byte(token):
    assert byte_of(token) is None
    rows = [*SPECIAL, (token, 0.0, BYTE), ("▁", 0.0, NORMAL)]
    t = from_metadata(keys_of("llama", rows))
    assert t.token_to_piece(3) == token.encode()
    assert t.tokenize("\n", False) == [4, 0]


def test_huge_tokens():
    rows = [*SPECIAL, ("a" * (1 << 20), 0.0, NORMAL), ("a", 0.0, NORMAL), ("▁", 0.0, NORMAL), ("aa", 1.0, NORMAL)]
    t = from_metadata(keys_of("llama", rows))
    assert t.tokenize("a" * 5, False) == [5, 6, 6, 4]
    assert len(t.token_to_piece(3)) == 1 << 20


# --- Unigram ----------------------------------------------------------------------------------------------------------

PIECES = {"▁": -4.0, "▁a": -3.0, "a": -2.5, "ab": -3.5, "b": -2.0, "▁hello": -8.0, "abab": -4.5, "é": -5.0, ".": -1.0}


def unigram(bytes_too=False, **more):
    rows = [("<pad>", 0.0, CONTROL), ("</s>", 0.0, CONTROL), ("<unk>", 0.0, UNKNOWN)]
    rows += [(text, score, NORMAL) for text, score in PIECES.items()]
    rows += [("[PAD]x", -10000.0, UNUSED), ("<extra>", 0.0, USER)]
    rows += [(text, 0.0, BYTE) for text in BYTES if bytes_too]
    more = {"add_space_prefix": True, "remove_extra_whitespaces": True} | more
    return keys_of("t5", rows, **more)


def test_unigram_finds_the_greatest_sum():
    t = from_metadata(unigram())
    assert texts(t, t.tokenize("ab", False)) == ["▁a", "b"]  # -5, against -7.5 and -9.5
    assert texts(t, t.tokenize("aabab", False)) == ["▁a", "abab"]
    assert texts(t, t.tokenize("  hello   hello ", False)) == ["▁hello", "▁hello"]
    assert texts(t, t.tokenize("aüüa", False)) == ["▁a", "<unk>", "a"]
    assert t.tokenize("a") == [*t.tokenize("a", False), 1]
    assert t.tokenize("", False) == t.tokenize("   ", False) == []
    assert texts(t, t.tokenize("</s>", False)) == ["▁", "<unk>"]
    assert texts(t, t.tokenize("a<extra>a", False)) == ["▁a", "<extra>", "▁a"]
    assert t.detokenize(t.tokenize("a a<extra>a")) == "a a<extra>a"
    assert not t.lossless


def test_unigram_spells_bytes_where_it_can():
    t = from_metadata(unigram(bytes_too=True))
    assert texts(t, t.tokenize("aüa", False)) == ["▁a", "<0xC3>", "<0xBC>", "a"]
    assert t.detokenize(t.tokenize("aüa")) == "aüa"


# --- normalizer map ---------------------------------------------------------------------------------------------------


def double_array(table):
    """A map in SentencePiece's form, the simplest that is right: every node's children in a block of their own."""
    texts, at = bytearray(), {}
    for value in table.values():
        at[value] = len(texts)
        texts += value.encode() + b"\0"
    trie = {}
    for key, value in table.items():
        node = trie
        for byte in key.encode():
            node = node.setdefault(byte, {})
        node[0] = at[value]
    units, blocks = [0] * 256, []

    def place(node, where):
        base = 256 * (1 + len(blocks))
        blocks.append(node)
        units.extend([0] * 256)
        units[where] |= (base ^ where) << 10 if (base ^ where) < 1 << 21 else 0
        for byte, child in node.items():
            if byte == 0:
                units[where] |= 1 << 8
                units[base] = 1 << 31 | child
            else:
                units[base ^ byte] |= byte
                place(child, base ^ byte)

    place(trie, 0)
    data = np.array(units, "<u4").tobytes()
    return np.frombuffer(len(data).to_bytes(4, "little") + data + bytes(texts), np.uint8)


TABLE = {"ﬁ": "fi", "\t": " ", "ｱ": "ア", "ｶﾞ": "ガ", "ｶ": "カ", "a\u0301": "á", "\u200b": ""}


def test_charsmap():
    assert read_charsmap({CHARSMAP: double_array(TABLE)}) == TABLE
    assert read_charsmap({CHARSMAP: double_array(TABLE).tobytes()}) == TABLE
    assert read_charsmap({}) == {}
    normalize = Normalizer({CHARSMAP: double_array(TABLE)}, by_default=False)
    assert normalize("ﬁsh\tｱ\u200bb") == "fish▁アb"
    assert normalize("ｶﾞｶｶﾞ aa\u0301a") == "ガカガ▁aáa"
    assert normalize("") == ""
    assert not normalize.lossless


def loop():
    """A trie whose node for "a" is its own parent."""
    data = double_array({"a": "b"}).copy()
    units = data[4 : 4 + int.from_bytes(data[:4].tobytes(), "little")].view("<u4")
    place = 256 ^ ord("a")
    units[place] = ord("a") | (256 ^ place) << 10
    return data


DAMAGED_MAPS = {
    "text": "abc",
    "numbers": np.arange(9.0),
    "wide": np.arange(9),
    "empty": np.zeros(0, np.uint8),
    "short": np.zeros(3, np.uint8),
    "no texts": np.frombuffer(b"\4\0\0\0\0\0\0\0", np.uint8),
    "too large": np.frombuffer(b"\xf0\xff\xff\xff" + bytes(64), np.uint8),
    "odd size": np.frombuffer(b"\5\0\0\0" + bytes(64), np.uint8),
    "unterminated": double_array(TABLE)[:-1],
    "texts cut": double_array(TABLE)[:-9],
    "loop": loop(),
}


@pytest.mark.parametrize("case", DAMAGED_MAPS)
def test_damaged_charsmap(case):
    with pytest.raises(EngineError, match="precompiled_charsmap") as caught:
        from_metadata(unigram(precompiled_charsmap=DAMAGED_MAPS[case]))
    assert "\n" not in str(caught.value)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_random_maps_never_crash(data):
    for blob in (data, len(data).to_bytes(4, "little") + data + b"abc\0"):
        with contextlib.suppress(EngineError):
            assert isinstance(read_charsmap({CHARSMAP: np.frombuffer(blob, np.uint8)}), dict)


# --- WordPiece --------------------------------------------------------------------------------------------------------

_BERT = "[PAD] [UNK] [CLS] [SEP] ▁hello ▁wor ld ▁, ▁. ▁' ▁s ▁it ▁你 ▁naive ▁Hello"
BERT = _BERT.split()


def wordpiece(**more):
    rows = [(text, 0.0, CONTROL if text.startswith("[") else NORMAL) for text in BERT]
    ids = {"unknown_token_id": 1, "cls_token_id": 2, "seperator_token_id": 3}
    return keys_of("bert", rows, **(ids | more))


def test_wordpiece():
    t = from_metadata(wordpiece())
    assert texts(t, t.tokenize("Hello, world. it's")) == [
        "[CLS]", "▁hello", "▁,", "▁wor", "ld", "▁.", "▁it", "▁'", "▁s", "[SEP]"
    ]  # fmt: skip
    assert texts(t, t.tokenize("naïve 你你 worldx", False)) == ["▁naive", "▁你", "▁你", "[UNK]"]
    assert texts(t, t.tokenize("\0wor\u200bld\ufffd", False)) == ["▁wor", "ld"]
    assert t.tokenize("") == [2, 3]
    assert texts(t, t.tokenize("hello" * 21, False)) == ["[UNK]"]  # more than 100 characters
    assert t.detokenize(t.tokenize("Hello, world.")) == "hello, world."
    assert t.detokenize(t.tokenize("Hello, world."), clean=False) == "hello , world ."
    cased = from_metadata(wordpiece(**{"tokenizer.ggml.normalizer.lowercase": False}))
    assert texts(cased, cased.tokenize("Hello naïve", False)) == ["▁Hello", "[UNK]"]
    with pytest.raises(EngineError, match="lowercase"):
        from_metadata(wordpiece(**{"tokenizer.ggml.normalizer.lowercase": 1}))


CLEANED = {
    "a , b . c ? d !": "a, b. c? d!",
    "it 's , I 'm , we 've , we 're , do n't": "it's, I'm, we've, we're, don't",
    "rock ' n": "rock'n",
    "a  .": "a .",
    "": "",
}


@pytest.mark.parametrize("text", CLEANED)
def test_clean_up(text):
    assert clean_up(text) == CLEANED[text]


# --- BPE over characters ----------------------------------------------------------------------------------------------


def test_bpe_over_characters():
    rows = [("<pad>", 0.0, CONTROL), ("<eos>", 0.0, CONTROL), ("<bos>", 0.0, CONTROL), ("<unk>", 0.0, CONTROL)]
    rows += [(text, 0.0, BYTE) for text in BYTES]
    rows += [(text, 0.0, NORMAL) for text in ("▁", "a", "b", "▁a", "ab", "\n", "\n\n", "▁▁")]
    ids = {"bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3}
    merges = ["\n \n", "▁ a", "▁ ▁", "a b"]
    keys = keys_of("gemma4", rows, merges=merges, **ids)
    t = from_metadata(keys)
    assert texts(t, t.tokenize(" ab\n\n\nab")) == ["<bos>", "▁a", "b", "\n\n", "\n", "ab"]
    assert texts(t, t.tokenize("é", False)) == ["<0xC3>", "<0xA9>"]
    text = "  a ☃\n\n b"
    assert t.detokenize(t.tokenize(text)) == text
    assert t.lossless
    named = {**keys, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "sarvam-moe"}
    assert from_metadata(named).tokenize(text, False) == t.tokenize(text, False)


# --- special tokens ---------------------------------------------------------------------------------------------------


def test_tokens_that_strip():
    rows = [*SPECIAL, *((text, 0.0, BYTE) for text in BYTES), ("▁", 0.0, NORMAL), ("a", 0.0, NORMAL)]
    rows += [("<l>", 0.0, CONTROL), ("<r>", 0.0, USER), ("<mask>", 0.0, CONTROL)]
    left, right, mask = (len(rows) - n for n in (3, 2, 1))
    plain = keys_of("llama", rows, add_space_prefix=False)
    t = from_metadata(plain | {LSTRIP_IDS: np.array([left]), RSTRIP_IDS: np.array([right])})
    a, space = t.vocab.ids["a"], t.vocab.ids["▁"]
    assert t.tokenize("a \n<l> a", False, True) == [a, left, space, a]
    assert t.tokenize("a <r> \n a", False) == [a, space, right, a]
    assert t.tokenize(" <l>", False, True) == [left]
    assert from_metadata(plain).tokenize("a <l>", False, True) == [a, space, left]
    phi = from_metadata(plain | {"general.name": "Phi-3 mini"})
    assert phi.tokenize("<l> a<s> a</s> a", False, True) == [left, a, 1, space, a, 2, a]
    nomic = from_metadata(plain | {"general.architecture": "nomic-bert-moe"})
    assert nomic.tokenize("a <mask> a", False, True) == [a, mask, space, a]
    with pytest.raises(EngineError, match="lstrip"):
        from_metadata(plain | {LSTRIP_IDS: [9999]})


def test_all_that_ends_generation():
    t = from_metadata(sentencepiece() | {EOS_IDS: np.array([2, 270], np.int32)})
    assert t.eog == {2, 270}
    assert from_metadata(sentencepiece(eot_token_id=271, eom_token_id=272)).eog == {2, 271, 272}


def test_second_begin_warns(caplog):
    SPM.tokenize("<s>a", parse_special=True)
    assert "begins with '<s>' already" in caplog.text


# --- self-test --------------------------------------------------------------------------------------------------------


def test_selftest():
    keys = sentencepiece()
    assert verify_selftest(keys, SPM) is None
    keys |= dict(selftest_keys(SPM))
    assert verify_selftest(keys, SPM) == []
    assert len(keys["gguftools.tokenizer.selftest.texts"]) == len(PROBES)
    other = from_metadata(keys | {"tokenizer.ggml.add_space_prefix": False})
    wrong = verify_selftest(keys, other)
    assert len(wrong) == len(PROBES)
    assert "from the token 1 on" in wrong[0]


def test_selftest_leaves_out_what_the_source_does_otherwise(caplog):
    keys = dict(selftest_keys(SPM, lambda text: SPM.tokenize(text, False) if "é" in text else [5]))
    assert keys["gguftools.tokenizer.selftest.texts"] == [text for text in PROBES if "é" in text]
    assert "other ids" in caplog.text


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("ids", [1], "does not fit"), ("lengths", [-1] * 9, "does not fit"), ("lengths", None, "missing"),
     ("texts", [1], "strings"), ("ids", "a", "whole numbers")],
)  # fmt: skip
def test_damaged_selftest(name, value, message):
    keys = sentencepiece() | dict(selftest_keys(SPM)) | {f"gguftools.tokenizer.selftest.{name}": value}
    with pytest.raises(EngineError, match=message):
        verify_selftest(keys, SPM)
