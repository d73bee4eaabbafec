"""Drafts for speculative decoding: tokens that the model may well choose, to be checked all at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from engine.errors import EngineError
from engine.generation.prefix import continue_from
from engine.sampling.speculative import look_up

if TYPE_CHECKING:
    from engine.contexts import ModelContext
    from engine.session import Session

MAX_DIFFERENCE = 128  # ids that one of two vocabularies may have more


class Drafter(Protocol):
    """What guesses how a text goes on."""

    def draft(self, tokens: Sequence[int], n: int) -> list[int]:
        """At most `n` tokens behind `tokens`; none if there is no good guess."""
        ...


class LookUp:
    """What followed in the text itself when its last tokens came before; see `speculative.look_up`."""

    def __init__(self, longest: int = 12, shortest: int = 2):
        self.longest, self.shortest = longest, shortest

    def draft(self, tokens: Sequence[int], n: int) -> list[int]:
        """See `Drafter`."""
        return look_up(tokens, self.longest, self.shortest, n) if n > 0 else []


class DraftModel:
    """The likeliest tokens by a smaller model with the same vocabulary, as long as it is sure: p_min is the least
    probability. Raises EngineError for another vocabulary."""

    def __init__(self, context: ModelContext, target: Session, p_min: float = 0.0):
        check_vocabularies(context.session, target)
        self.context, self.p_min = context, p_min
        self._tokens: list[int] = []

    def draft(self, tokens: Sequence[int], n: int) -> list[int]:
        """See `Drafter`."""
        if n < 1 or len(tokens) + n > self.context.n_ctx_seq:
            return []
        self._tokens = continue_from(self.context, self._tokens, tokens)
        out: list[int] = []
        while True:
            token, probability = _likeliest(self.context.logits())
            if probability < self.p_min or token >= self.context.n_vocab:
                break
            out.append(token)
            if len(out) == n:
                break
            self.context.process([token])
            self._tokens.append(token)
        return out


def _likeliest(logits: np.ndarray) -> tuple[int, float]:
    token = int(logits.argmax())
    return token, float(1.0 / np.exp(logits.astype(np.float64) - logits[token]).sum())


def check_vocabularies(draft: Session, target: Session) -> None:
    """Raises EngineError unless the same ids mean the same to both models."""
    a, b = draft.tokenizer.vocab.tokens, target.tokenizer.vocab.tokens
    if abs(len(a) - len(b)) > MAX_DIFFERENCE:
        raise EngineError(f"the draft model has a vocabulary of {len(a)}, the model one of {len(b)}: use one like it")
    different = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), None)
    if different is not None:
        raise EngineError(f"token {different} of the draft model is {a[different]!r}, of the model {b[different]!r}")
