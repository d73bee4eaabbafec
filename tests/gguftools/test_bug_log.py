"""Faults that other converters had, on the smallest input that showed them."""

import numpy as np
import pytest

import gguftools
from gguftools.conversion.run import convert
from gguftools.errors import GGUFError
from gguftools.gguf import GGUF, Writer
from tests.gguftools.test_convert import TINY, make, tokenizer_json


def test_ids_are_those_of_the_original(tmp_path):
    from tokenizers import Tokenizer

    text = "Hello world! Café déjà vu — 123 😊"
    path = convert(make(tmp_path / "m"), tmp_path / "out.gguf").output
    ids = gguftools.load(path, vocab_only=True).tokenize(text, add_special=False)
    assert ids == Tokenizer.from_file(str(TINY / "tokenizer.json")).encode(text, add_special_tokens=False).ids


VALUES = {
    "number for a text": ("general.name", 7, "string"),
    "bool for an int": ("llama.block_count", True, "uint32"),
    "float for an int": ("llama.block_count", 1.5, "uint32"),
    "negative": ("llama.block_count", -1, "uint32"),
    "text for a float": ("llama.rope.freq_base", "10000", None),
}


@pytest.mark.parametrize("case", VALUES)
def test_values_of_a_wrong_kind(case, tmp_path):
    key, value, kind = VALUES[case]
    with pytest.raises(GGUFError, match=key), Writer(tmp_path / "x.gguf") as w:
        w.add(key, value, kind)
    assert not (tmp_path / "x.gguf").exists()


def test_tokens_given_as_bytes_are_texts(tmp_path):
    """The list is one of texts, not of arrays of bytes; bytes that are no text are refused."""
    key = "tokenizer.ggml.tokens"
    with Writer(tmp_path / "x.gguf") as w:
        w.add(key, [b"a", "\u00e9".encode()])
    assert list(GGUF(tmp_path / "x.gguf").metadata[key]) == ["a", "\u00e9"]


def test_embedding_of_another_size_than_the_vocabulary(tmp_path):
    """More rows than tokens are unused tokens; fewer are an error that says so."""
    from tests.gguftools.test_convert import weights

    tensors = weights()
    dtype, x = tensors["model.embed_tokens.weight"]
    more = tensors | {"model.embed_tokens.weight": (dtype, np.concatenate([x, x[:64]]))}
    path = convert(make(tmp_path / "more", more, {"vocab_size": 2112}), tmp_path / "more.gguf").output
    f = GGUF(path)
    assert f.metadata["tokenizer.ggml.tokens"][2111] == "[PAD2111]"
    assert f.metadata["tokenizer.ggml.token_type"][2111] == 5
    fewer = tensors | {"model.embed_tokens.weight": (dtype, x[:2000])}
    with pytest.raises(GGUFError, match=r"has ids up to 2047, but config\.json's 'vocab_size' is 2000"):
        convert(make(tmp_path / "fewer", fewer, {"vocab_size": 2000}), tmp_path / "fewer.gguf")
    with pytest.raises(GGUFError, match=r"has shape \(2000, 64\), config.json implies \(2048, 64\)"):
        convert(make(tmp_path / "lies", fewer), tmp_path / "lies.gguf")


def test_an_added_token_beyond_the_embedding(tmp_path):
    added = [*tokenizer_json()["added_tokens"], {"id": 5000, "content": "<x>", "special": True}]
    with pytest.raises(GGUFError, match=r"has ids up to 5000, but config\.json's 'vocab_size' is 2048"):
        convert(make(tmp_path / "m", tokenizer=tokenizer_json(added_tokens=added)), tmp_path / "out.gguf")
