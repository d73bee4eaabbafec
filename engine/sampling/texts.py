"""What samplers ask of a vocabulary: the bytes of every token, which ones end a text, how a text is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class TokenTexts:
    """pieces: bytes of each id, empty for control tokens; spelled: the same with the names of control tokens;
    eog: ids that end generation; tokenize: ids of a text, names of control tokens understood.

    Made once for a model, and shared by all samplers of it.
    """

    pieces: Sequence[bytes]
    spelled: Sequence[bytes]
    eog: frozenset[int] = frozenset()
    tokenize: Callable[[str], list[int]] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, tokenizer: Any) -> TokenTexts:
        """Of an `engine.tokenizer.Tokenizer`. Takes a moment: one call for every id."""
        ids = range(tokenizer.n_vocab)
        return cls(
            tuple(tokenizer.token_to_piece(i) for i in ids),
            tuple(tokenizer.token_to_piece(i, special=True) for i in ids),
            frozenset(tokenizer.eog),
            lambda text: tokenizer.tokenize(text, add_special=False, parse_special=True),
        )

    @cached_property
    def packed(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The pieces in one row: bytes, and where each begins, and how long it is (int64 [n_vocab])."""
        lengths = np.fromiter(map(len, self.pieces), np.int64, len(self.pieces))
        return np.frombuffer(b"".join(self.pieces), np.uint8), np.cumsum(lengths) - lengths, lengths
