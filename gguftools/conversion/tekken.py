"""Mistral's tekken.json as metadata keys: a byte-level BPE, its tokens byte strings in the order of their ranks."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.tokenizer.bpe import BYTE_OF
from engine.tokenizer.pretokenizers import find, nearest
from engine.tokenizer.vocab import SPECIAL_KEYS, TokenType
from gguftools.conversion.card import Pair
from gguftools.conversion.hf import load_json
from gguftools.conversion.structure import MAX_VOCAB
from gguftools.errors import GGUFError

#: special tokens of files that name none, in the order of their ids
_SPECIAL_TEXTS = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] "
    "[IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
)
_SPECIAL = dict(enumerate(_SPECIAL_TEXTS.split()))
_IDS = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "<pad>"}
_SPELLED = {byte: character for character, byte in BYTE_OF.items()}


def tekken_keys(path: Path) -> list[Pair]:
    """The keys of a tekken.json. Raises GGUFError for a damaged file and an unknown pre-tokenizer."""
    found = load_json(path)
    config = found.get("config")
    if not isinstance(config, dict):
        raise GGUFError(f"{path}: has no 'config'; the file is damaged")
    size, n_special = (_size(path, config, key) for key in ("default_vocab_size", "default_num_special_tokens"))
    patterns = (str(config.get("pattern")),)
    name = find(patterns, ignore_merges=True)
    if name is None:
        raise GGUFError(f"{path}: cuts words in a way that has no name; the nearest are {', '.join(nearest(patterns))}")
    special = _special(path, found, n_special)
    words = _words(path, found.get("vocab"), size - n_special)
    ids = [(SPECIAL_KEYS[kind], special.index(text)) for kind, text in _IDS.items() if text in special]
    return [
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", name),
        ("tokenizer.ggml.merges", _merges(words)),
        *ids,
        ("tokenizer.ggml.tokens", special + [_spell(word) for word in words]),
        ("tokenizer.ggml.scores", [0.0] * size),
        ("tokenizer.ggml.token_type", [int(TokenType.CONTROL)] * n_special + [int(TokenType.NORMAL)] * len(words)),
        ("tokenizer.ggml.add_bos_token", True),
        ("tokenizer.ggml.add_eos_token", False),
    ]


def _size(path: Path, config: Mapping[str, Any], key: str) -> int:
    size = config.get(key)
    if type(size) is not int or not 0 < size <= MAX_VOCAB:
        raise GGUFError(f"{path}: 'config.{key}' is {size!r}, expected a number of tokens; the file is damaged")
    return size


def _special(path: Path, found: Mapping[str, Any], n: int) -> list[str]:
    """Texts of the special tokens; unnamed ids are `<SPECIAL_20>`."""
    named = _SPECIAL
    if found.get("special_tokens"):
        try:
            named = {int(token["rank"]): str(token["token_str"]) for token in found["special_tokens"]}
        except (TypeError, KeyError, ValueError):
            raise GGUFError(f"{path}: 'special_tokens' is damaged") from None
    return [named.get(i, f"<SPECIAL_{i}>") for i in range(n)]


def _words(path: Path, vocab: Any, n: int) -> list[bytes]:
    """The first `n` tokens as bytes, by rank."""
    try:
        words = {token["rank"]: base64.b64decode(token["token_bytes"], validate=True) for token in vocab}
        return [words[rank] for rank in range(n)]
    except (TypeError, KeyError, ValueError, binascii.Error):
        raise GGUFError(f"{path}: 'vocab' is damaged, or has fewer tokens than its 'config' says") from None


def _merges(words: list[bytes]) -> list[str]:
    """All ways to make each token of two others, tokens by rank, ways by the ranks of the two."""
    ranks = {word: rank for rank, word in enumerate(words)}
    merges = []
    for word in words:
        ways = [(word[:n], word[n:]) for n in range(1, len(word))]
        known = [(ranks[a], ranks[b], a, b) for a, b in ways if a in ranks and b in ranks]
        merges += [f"{_spell(a)} {_spell(b)}" for _, _, a, b in sorted(known)]
    return merges


def _spell(word: bytes) -> str:
    return "".join(_SPELLED[byte] for byte in word)
