"""SentencePiece BPE (`tokenizer.ggml.model` = llama): characters are joined to pieces of the vocabulary, the pair with
the highest score first and the leftmost of equal ones; what has no token becomes tokens of single bytes.

Spaces are written as U+2581. No piece has one after another character in nearly all vocabularies; then what lies
between two of them is independent of the rest, and is remembered.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Mapping
from typing import Any

from engine.tokenizer.normalizer import Normalizer
from engine.tokenizer.vocab import TokenType, Vocab, byte_tokens, escaped_piece, read_scores

_WORDS = re.compile("▁*[^▁]+|▁+")
_WHOLE = re.compile(".+", re.DOTALL)
#: words that are remembered: at most so many, of at most so many characters
_CACHE_WORDS, _CACHE_LENGTH = 1 << 17, 64


class SentencePieceBPE:
    """Encoder and decoder of plain text. Raises EngineError for scores or a normalizer that are damaged."""

    def __init__(self, vocab: Vocab, metadata: Mapping[str, Any]):
        scores = read_scores(metadata, len(vocab.tokens))
        self.vocab = vocab
        self.normalize = Normalizer(metadata, by_default=True)
        self.adds_space = self.normalize.adds_space
        # control tokens and bytes are no pieces: what a text spells never becomes one of them
        kinds = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
        self._ids = {text: i for text, i in vocab.ids.items() if vocab.types[i] in kinds}
        self._scores = {text: scores[i] for text, i in self._ids.items()}
        self._bytes = byte_tokens(vocab)
        self._unknown = vocab.special["unk"]
        self.lossless = self.normalize.lossless and len(self._bytes) == 256
        inner = any("▁" in text.lstrip("▁") for text in self._ids)
        self._words = _WHOLE if inner else _WORDS
        self._cache: dict[str, list[int]] = {}

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text."""
        return [self._encode(self.normalize(text)) for text in texts]

    def piece(self, i: int) -> bytes:
        """The bytes that a token stands for."""
        return escaped_piece(self.vocab, i)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for word in self._words.findall(text):
            found = self._cache.get(word)
            if found is None:
                found = self._spell(self._merge(word))
                if len(word) <= _CACHE_LENGTH and len(self._cache) < _CACHE_WORDS:
                    self._cache[word] = found
            ids += found
        return ids

    def _merge(self, word: str) -> list[str]:
        """The pieces of a word. A symbol is known by its first character's place; joined ones become empty."""
        scores = self._scores
        symbols = list(word)
        before, after = list(range(-1, len(word) - 1)), [*range(1, len(word)), -1]
        queue: list[tuple[float, int, int, int]] = []

        def offer(left: int, right: int) -> None:
            if left >= 0 <= right:
                joined = symbols[left] + symbols[right]
                score = scores.get(joined)
                if score is not None:
                    heapq.heappush(queue, (-score, left, right, len(joined)))

        for right in range(1, len(word)):
            offer(right - 1, right)
        while queue:
            _, left, right, length = heapq.heappop(queue)
            if not symbols[left] or not symbols[right] or len(symbols[left]) + len(symbols[right]) != length:
                continue  # one of the two has been joined with another since
            symbols[left] += symbols[right]
            symbols[right] = ""
            after[left] = after[right]
            if after[left] >= 0:
                before[after[left]] = left
            offer(before[left], left)
            offer(left, after[left])
        return [symbol for symbol in symbols if symbol]

    def _spell(self, pieces: list[str]) -> list[int]:
        """Ids of pieces that cannot be joined further; consecutive unknown ones are one."""
        ids: list[int] = []
        for piece in pieces:
            i = self._ids.get(piece)
            if i is not None:
                ids.append(i)
            elif all(byte in self._bytes for byte in piece.encode()):
                ids += [self._bytes[byte] for byte in piece.encode()]
            elif ids[-1:] != [self._unknown]:
                ids.append(self._unknown)
        return ids
