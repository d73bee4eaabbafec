"""Unigram (`tokenizer.ggml.model` = t5): a text is normalized, then cut so that the scores of its tokens, which are
log-probabilities, have the greatest sum (Kudo 2018). The search is done by the `tokenizers` library.

The normalizer map, `tokenizer.ggml.precompiled_charsmap`, is SentencePiece's: uint32 size in bytes of a trie, the trie
as a double array (Darts), then the replacements, each ended by a zero byte.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from engine.errors import EngineError
from engine.tokenizer.vocab import TokenType, Vocab, byte_tokens, escaped_piece, read_bool, read_scores

CHARSMAP = "tokenizer.ggml.precompiled_charsmap"

#: what an unknown character costs more than the least likely token
_UNKNOWN_PENALTY = 10.0
_MAX_KEY = 256  # bytes of a sequence that a normalizer map replaces


class Unigram:
    """Encoder and decoder of plain text. Raises EngineError for a vocabulary that is damaged."""

    lossless = False

    def __init__(self, vocab: Vocab, metadata: Mapping[str, Any]):
        from tokenizers import Tokenizer, models

        scores = read_scores(metadata, len(vocab.tokens))
        self.vocab = vocab
        self.adds_space = bool(read_bool(metadata, "tokenizer.ggml.add_space_prefix"))
        self._merges_spaces = bool(read_bool(metadata, "tokenizer.ggml.remove_extra_whitespaces"))
        self._normalizer = _Normalizer(read_charsmap(metadata))
        self._unknown = vocab.special.get("unk")
        if self._unknown is None:
            raise EngineError("the vocabulary has no token for unknown characters (tokenizer.ggml.unknown_token_id)")
        self._bytes = byte_tokens(vocab) if len(byte_tokens(vocab)) == 256 else {}
        self._tokenizer = Tokenizer(models.Unigram(_pieces(vocab, scores, self._unknown), self._unknown, False))

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text. Consecutive unknown characters are one unknown token, or their bytes if there are tokens
        for these."""
        normal = [self.normalize(text) for text in texts]
        if not self._bytes:
            return [e.ids for e in self._tokenizer.encode_batch_fast(normal, add_special_tokens=False)]
        encoded = self._tokenizer.encode_batch(normal, add_special_tokens=False)
        return [self._spelled(text, e) for text, e in zip(normal, encoded)]

    def _spelled(self, text: str, encoding: Any) -> list[int]:
        ids: list[int] = []
        for i, (start, stop) in zip(encoding.ids, encoding.offsets):
            ids += [self._bytes[b] for b in text[start:stop].encode()] if i == self._unknown else [i]
        return ids

    def piece(self, i: int) -> bytes:
        """The bytes that a token stands for."""
        return escaped_piece(self.vocab, i)

    def normalize(self, text: str) -> str:
        """The text that is cut: characters replaced by the map, spaces joined if the model wants it and written as
        U+2581, one of them put in front."""
        text = self._normalizer(text)
        if self._merges_spaces:
            text = re.sub(" +", " ", text.strip(" "))
        if text and self.adds_space:
            text = " " + text
        return text.replace(" ", "▁")


def _pieces(vocab: Vocab, scores: list[float], unknown: int) -> list[tuple[str, float]]:
    """Tokens and scores as the library wants them: its unknown penalty counts from the lowest score of all, and tokens
    that no text may give get a name with a space, which no normalized text has."""
    usable = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
    normal = [scores[i] for i, kind in enumerate(vocab.types) if kind == TokenType.NORMAL]
    lowest = min(normal, default=0.0)
    pieces = []
    for i, (token, kind) in enumerate(zip(vocab.tokens, vocab.types)):
        if i == unknown or kind not in usable:
            pieces.append((f" {i}", lowest))
        else:
            pieces.append((token, 0.0 if kind == TokenType.USER_DEFINED else max(scores[i], lowest)))
    return pieces


# --- normalizer map ---------------------------------------------------------------------------------------------------


class _Normalizer:
    """Replaces the longest sequences that a map has, from left to right."""

    def __init__(self, table: Mapping[str, str]):
        self._singles = str.maketrans({key: value for key, value in table.items() if len(key) == 1})
        self._table = table
        self._longest: dict[str, int] = {}
        for key in table:
            self._longest[key[0]] = max(self._longest.get(key[0], 0), len(key))
        later = {c for key in table for c in key[1:]}
        self._later = re.compile(f"[{re.escape(''.join(sorted(later)))}]") if later else None

    def __call__(self, text: str) -> str:
        if self._later is None or not self._later.search(text):
            return text.translate(self._singles)  # no sequence of several characters can be in it
        parts = []
        at = 0
        while at < len(text):
            for length in range(self._longest.get(text[at], 0), 0, -1):
                found = self._table.get(text[at : at + length])
                if found is not None:
                    break
            else:
                length, found = 1, text[at]
            parts.append(found)
            at += length
        return "".join(parts)


def read_charsmap(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The normalizer map: sequence of characters -> what replaces it; {} if there is none.

    Raises EngineError for one that is not an array of bytes, or whose trie or texts are damaged.
    """
    value = metadata.get(CHARSMAP)
    if value is None:
        return {}
    data = None if isinstance(value, str) else np.asarray(np.frombuffer(value, "u1") if isinstance(value, bytes) else value)
    if data is None or data.ndim != 1 or data.dtype not in (np.uint8, np.int8):
        raise EngineError(f"key '{CHARSMAP}' is not an array of bytes: the file is damaged")
    blob = data.astype(np.uint8).tobytes()
    size = int.from_bytes(blob[:4], "little")
    if len(blob) < 4 or size % 4 or not 4 <= size < len(blob) - 4:
        raise EngineError(f"key '{CHARSMAP}': a trie of {size:,} bytes does not fit in {len(blob):,}: the file is damaged")
    units = np.frombuffer(blob, "<u4", size // 4, 4)
    replacements = blob[4 + size :]
    try:
        return {key.decode(): _text_at(replacements, at) for key, at in _keys(units)}
    except (ValueError, IndexError):
        raise EngineError(f"key '{CHARSMAP}': the trie or its texts are damaged") from None


def _text_at(texts: bytes, start: int) -> str:
    return texts[start : texts.index(b"\0", start)].decode()


def _keys(units: np.ndarray) -> list[tuple[bytes, int]]:
    """All keys of a double array with their values. Raises ValueError and IndexError for one that is no trie.

    A unit of an inner node holds its byte (bits 0 to 7), whether a value hangs on it (bit 8), and the offset of its
    children (bits 10 to 30, times 256 if bit 9 is set); child c of a node lies at place XOR offset XOR c. A value's
    unit has bit 31 set.
    """
    labels = units & np.uint32(0x8000_00FF)
    offsets = (units >> np.uint32(10)) << ((units & np.uint32(1 << 9)) >> np.uint32(6))
    every = np.arange(1, 256, dtype=np.uint32)
    found: list[tuple[bytes, int]] = []
    seen = np.zeros(len(units), bool)
    todo = [(b"", int(offsets[0]))]
    while todo:
        prefix, base = todo.pop()
        places = np.uint32(base) ^ every
        fits = places < len(units)
        children = every[fits][labels[places[fits]] == every[fits]]
        for c in children.tolist():
            place = base ^ c
            if seen[place] or len(prefix) >= _MAX_KEY:
                raise ValueError("a unit with two parents")
            seen[place] = True
            key = prefix + bytes([c])
            below = place ^ int(offsets[place])
            if units[place] >> np.uint32(8) & np.uint32(1):
                found.append((key, int(units[below]) & 0x7FFF_FFFF))
            todo.append((key, below))
    return found
