"""The loop of generation: decode, sample, decode what was sampled, until the text or the context ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from engine.batch import Batch
from engine.errors import EngineError
from engine.generation.draft import Drafter
from engine.generation.prefix import continue_from
from engine.sampling import Chain, TokenProbability, log_probabilities
from engine.sampling.speculative import verify_by_matching

if TYPE_CHECKING:
    from engine.contexts import ModelContext

#: Why generation ended.
END, LENGTH, FULL = "end of text", "length", "context full"


@dataclass(frozen=True)
class Token:
    """A generated token: its id, the log-probability that the model gave it (before samplers), and the likeliest
    ones."""

    id: int
    logprob: float
    top: list[TokenProbability] = field(default_factory=list)


class Generator:
    """Text of sequence 0 of a context.

    chain: chooses; drafter: guesses at most n_draft tokens ahead, which the model checks at once: the text is the same;
    shift: make room when the context is full: half of the tokens behind the first `keep` are forgotten; n_probs: how
    many of the likeliest tokens to report with each.

    tokens: what is in memory; stop: why it ended; drafted, accepted: counts of guesses. Raises EngineError for models
    that do not generate.
    """

    def __init__(
        self,
        context: ModelContext,
        chain: Chain | None = None,
        drafter: Drafter | None = None,
        n_draft: int = 16,
        shift: bool = False,
        keep: int = 0,
        n_probs: int = 0,
    ):
        if context.memory is None or context.params.embeddings:
            raise EngineError("this model or context gives embeddings: it cannot generate text; use `embed`")
        if shift and not context.memory.can_shift:
            raise EngineError("positions of this model cannot be moved: leave the shifting of the context off")
        self.context, self.memory = context, context.memory
        self.chain = chain or Chain.greedy()
        self.drafter, self.n_draft = drafter, n_draft
        self.shift, self.keep, self.n_probs = shift, keep, n_probs
        self.tokens: list[int] = []
        self.stop = ""
        self.drafted = self.accepted = 0
        self._eog = context.session.tokenizer.eog

    def feed(self, tokens: Sequence[int]) -> None:
        """Make `tokens` the text; what is in memory already is not computed again. Raises EngineError for a text that
        is empty, or longer than the context."""
        if len(tokens) == 0:
            raise EngineError("the prompt is empty: give some text")
        if len(tokens) >= self.context.n_ctx_seq:
            raise EngineError(
                f"the prompt has {len(tokens)} tokens, the context room for {self.context.n_ctx_seq}: use a larger -c"
            )
        known = self.tokens
        new = next((i for i, (a, b) in enumerate(zip(known, tokens)) if a != b), min(len(known), len(tokens)))
        self.tokens = continue_from(self.context, known, tokens)
        for token in tokens[new:]:
            self.chain.accept(token, generated=False)

    def run(self, n: int = -1) -> Iterator[Token]:
        """The tokens that follow, at most `n` (-1: without a limit), without the one that ends the text."""
        self.stop = LENGTH
        if n == 0:
            return
        queue = [self._choose(-1)]
        made = 0
        while queue:
            for token in queue:
                if token.id in self._eog:
                    self.stop = END
                    return
                made += 1
                yield token
                if made == n:
                    return
            queue = self._advance(queue[-1].id, -1 if n < 0 else n - made)
        self.stop = FULL

    def _choose(self, row: int) -> Token:
        """Sample from the result of a row, and remember."""
        logits = self.context.logits(row)
        chosen = self.chain.sample(logits)
        self.chain.accept(chosen)
        top = log_probabilities(logits, self.n_probs) if self.n_probs > 0 else []
        wide = logits.astype(np.float64)
        largest = wide.max()
        return Token(chosen, float(wide[chosen] - largest - np.log(np.exp(wide - largest).sum())), top)

    def _advance(self, last: int, left: int) -> list[Token]:
        """Decode the last token, perhaps with a draft behind it; the tokens chosen then. None if there is no room."""
        room = self.context.n_ctx_seq - len(self.tokens) - 1
        if room < 0:
            if not self._make_room():
                return []
            room = self.context.n_ctx_seq - len(self.tokens) - 1
        n = min(self.n_draft, room, self.context.n_ubatch - 1, left - 1 if left > 0 else self.n_draft)
        draft = self.drafter.draft([*self.tokens, last], n) if self.drafter is not None and n > 0 else []
        if not draft:
            self.context.process([last])
            self.tokens.append(last)
            return [self._choose(-1)]
        return self._verify(last, draft)

    def _verify(self, last: int, draft: list[int]) -> list[Token]:
        start = len(self.tokens)
        before = self.memory.states.snapshot(0) if self.memory.states is not None else None
        self.context.process(Batch([last, *draft], outputs=[True] * (len(draft) + 1)))
        chosen: list[Token] = []

        def sample(row: int) -> int:
            chosen.append(self._choose(row))
            return chosen[-1].id

        kept, _ = verify_by_matching(draft, sample, self._eog)
        self.drafted += len(draft)
        self.accepted += kept
        self.tokens += [last, *draft[:kept]]
        if before is None:
            removed = self.memory.remove(0, len(self.tokens))
            assert removed, "one ubatch overwrites nothing that its first token needs"
        elif kept < len(draft):  # states do not go back: start again from those before, with what was kept
            self._again(start, before)
        return chosen

    def _again(self, start: int, before: tuple) -> None:
        assert self.memory.states is not None
        for cache in self.memory.caches:
            cache.remove(0, start, len(self.tokens) + self.n_draft + 1)
        self.memory.states.restore(0, before)
        self.context.process(self.tokens[start:])

    def _make_room(self) -> bool:
        """Forget half of what is behind the first `keep` tokens, and move the rest down."""
        if not self.shift:
            return False
        keep = min(self.keep, len(self.tokens) - 2)
        gone = max(1, (len(self.tokens) - keep) // 2)
        if not self.memory.remove(0, keep, keep + gone):
            return False
        self.memory.add(0, keep + gone, -1, -gone)
        del self.tokens[keep : keep + gone]
        return True
