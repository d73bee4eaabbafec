"""The tokens that may come next: what every sampler of a chain narrows or weighs.

Arrays of one length: `ids`, `logits` (float32) and, once somebody has asked, `p` (float32, sums to 1). A chain starts
with the whole vocabulary in the order of ids; filters keep some, sorting puts the likeliest first. Equal logits keep
the order in which they are, so that a chain gives the same token on every machine.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.errors import EngineError

NONE_LEFT = "no token is left to choose from: every logit is -inf; check the grammar, the biases and the penalties"


class Candidates:
    """ids: int64 [n]; logits: float32 [n]; p: float32 [n] or None; sorted: whether the likeliest come first;
    dense: whether position and id are the same; selected: position of the chosen token, or None."""

    __slots__ = ("dense", "ids", "logits", "p", "selected", "sorted")

    def __init__(self, logits: np.ndarray, ids: np.ndarray | None = None):
        """Logits [n] of the ids 0 to n - 1, or of `ids`. The array is copied.

        Raises EngineError for another shape, and for logits that are NaN or +inf.
        """
        self.logits = np.array(logits, np.float32)
        if self.logits.ndim != 1 or (ids is not None and len(ids) != len(self.logits)):
            raise EngineError(f"expected one row of logits, one for each token; got the shape {self.logits.shape}")
        top = self.logits.max() if len(self.logits) else np.float32(0)  # NaN if any is
        if not top < np.inf:
            bad = int(np.count_nonzero(~(self.logits < np.inf)))
            raise EngineError(f"{bad} of {len(self.logits)} logits are NaN or +inf: the model or its input is damaged")
        self.ids = np.arange(len(self.logits)) if ids is None else np.array(ids, np.int64)
        self.dense = ids is None
        self.p: np.ndarray | None = None
        self.sorted = False
        self.selected: int | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def token(self) -> int:
        """The chosen id. Raises EngineError if none was chosen."""
        if self.selected is None:
            raise EngineError("no token was chosen: the chain of samplers must end with one that selects")
        return int(self.ids[self.selected])

    def take(self, positions: np.ndarray | slice) -> None:
        """Keep these positions, in this order (or where a mask is true)."""
        self.ids, self.logits = self.ids[positions], self.logits[positions]
        if self.p is not None:
            self.p = self.p[positions]
        self.dense = False
        self.selected = None

    def set_logits(self, positions: np.ndarray, values: np.ndarray) -> None:
        """Replace some logits; the order is lost."""
        self.logits[positions] = values
        self.p = None
        self.sorted = False

    def positions(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where these distinct ids are: (positions, indexes into `tokens` of those that are there)."""
        if self.dense:
            which = np.flatnonzero((tokens >= 0) & (tokens < len(self.ids)))
            return tokens[which], which
        order = np.argsort(tokens)
        slot = np.searchsorted(tokens, self.ids, sorter=order)
        slot = order[np.minimum(slot, len(tokens) - 1)] if len(tokens) else slot
        where = np.flatnonzero(tokens[slot] == self.ids) if len(tokens) else np.empty(0, np.int64)
        return where, slot[where]

    def sort(self, k: int | None = None) -> None:
        """The likeliest first; only the first `k` of them are kept."""
        k = len(self) if k is None else min(k, len(self))
        if self.sorted:
            if k < len(self):
                self.take(slice(0, k))
            return
        self.take(largest(self.logits, k))
        self.sorted = True

    def softmax(self) -> np.ndarray:
        """`p` of these candidates: exp(logit - max) / sum. Raises EngineError if all logits are -inf."""
        top = self.logits.max(initial=-np.inf)
        if top == -np.inf:
            raise EngineError(NONE_LEFT)
        p = np.exp(self.logits - top)
        p /= p.sum()
        self.p = p
        return p


def largest(values: np.ndarray, k: int) -> np.ndarray:
    """Positions of the `k` largest values, largest first, equal ones in the order in which they are."""
    n = len(values)
    if k <= 0:
        return np.empty(0, np.int64)
    if k >= n:
        return np.argsort(-values, kind="stable")
    border = np.partition(values, n - k)[n - k]
    above = np.flatnonzero(values > border)
    kept = np.concatenate([above, np.flatnonzero(values == border)[: k - len(above)]])
    return kept[np.argsort(-values[kept], kind="stable")]


class TokenProbability(NamedTuple):
    id: int
    log_probability: float


def log_probabilities(logits: np.ndarray, n: int) -> list[TokenProbability]:
    """The `n` likeliest tokens of a row of logits [n_vocab] with their natural log-probabilities, likeliest first.

    These are the model's own, before any sampler. Raises EngineError as Candidates does.
    """
    c = Candidates(logits)
    c.softmax()
    top = float(c.logits.max())
    total = top + float(np.log(np.exp(c.logits.astype(np.float64) - top).sum()))
    return [TokenProbability(int(i), float(c.logits[i]) - total) for i in largest(c.logits, n)]
