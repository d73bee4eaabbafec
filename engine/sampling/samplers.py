"""Samplers with a memory or a stream of random numbers, and what makes a sampler of a pure function.

All have `name`, `apply(candidates)`, `accept(token)`, `reset()` and `clone()`. `accept` is told every token of the
text, those of the prompt as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from engine.errors import EngineError
from engine.sampling.candidates import NONE_LEFT, Candidates
from engine.sampling.filters import xtc
from engine.sampling.rng import Stream


class Sampler(Protocol):
    """One link of a chain. `name` is for people; the rest is described above."""

    @property
    def name(self) -> str: ...
    def apply(self, c: Candidates) -> None: ...
    def accept(self, token: int) -> None: ...
    def reset(self) -> None: ...
    def clone(self) -> Any: ...


@dataclass(frozen=True)
class Filter:
    """A pure function of the candidates, with its parameters."""

    kind: str
    function: Callable[..., None]
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return " ".join(
            [self.kind, *(f"{key}={_short(value)}" for key, value in self.values.items() if key != "min_keep" or value)]
        )

    def apply(self, c: Candidates) -> None:
        self.function(c, **self.values)

    def accept(self, token: int) -> None:
        pass

    def reset(self) -> None:
        pass

    def clone(self) -> Filter:
        return self


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def nothing(name: str) -> Filter:
    """A link whose parameters switch it off: it keeps its place in the printed chain, behind a question mark."""
    return Filter("?" + name, lambda c: None)


class Xtc:
    """XTC with its coin: with `probability`, the top choices are excluded (see `filters.xtc`)."""

    def __init__(self, probability: float, threshold: float, min_keep: int, stream: Stream):
        self.probability, self.threshold, self.min_keep, self.stream = probability, threshold, min_keep, stream
        self.name = f"xtc p={probability:g} threshold={threshold:g}"

    def apply(self, c: Candidates) -> None:
        if len(c) >= 2 and self.stream.uniform32() <= np.float32(self.probability):
            xtc(c, self.threshold, self.min_keep)

    def accept(self, token: int) -> None:
        pass

    def reset(self) -> None:
        self.stream.reset()

    def clone(self) -> Xtc:
        return _with_own_stream(self)


class LogitBias:
    """Adds a number to the logits of some ids; -inf bans them."""

    def __init__(self, biases: Mapping[int, float]):
        self.tokens = np.array(list(biases), np.int64)
        self.values = np.array(list(biases.values()), np.float32)
        self.name = f"logit-bias n={len(biases)}"

    def apply(self, c: Candidates) -> None:
        where, which = c.positions(self.tokens)
        c.set_logits(where, c.logits[where] + self.values[which])

    def accept(self, token: int) -> None:
        pass

    def reset(self) -> None:
        pass

    def clone(self) -> LogitBias:
        return self


class Penalties:
    """Makes what was said among the last n tokens less likely.

    repeat: positive logits are divided by it, others multiplied (Keskar et al. 2019, arXiv 1909.05858, which only
    divides); then frequency * count and presence are subtracted.
    """

    def __init__(self, last_n: int, repeat: float, frequency: float, presence: float):
        self.repeat, self.frequency, self.presence = np.float32(repeat), np.float32(frequency), np.float32(presence)
        self.recent: deque[int] = deque(maxlen=last_n)
        self.name = f"penalties n={last_n} repeat={repeat:g} frequency={frequency:g} presence={presence:g}"

    def apply(self, c: Candidates) -> None:
        if not self.recent:
            return
        tokens, counts = np.unique(np.array(self.recent, np.int64), return_counts=True)
        where, which = c.positions(tokens)
        x = c.logits[where]
        x = np.where(x <= 0, x * self.repeat, x / self.repeat)
        c.set_logits(where, x - (counts[which].astype(np.float32) * self.frequency + self.presence))

    def accept(self, token: int) -> None:
        self.recent.append(token)

    def reset(self) -> None:
        self.recent.clear()

    def clone(self) -> Penalties:
        other = copy(self)
        other.recent = self.recent.copy()
        return other


class Greedy:
    """Selects the likeliest; of equal ones the first."""

    name = "greedy"

    def apply(self, c: Candidates) -> None:
        c.selected = int(np.argmax(c.logits)) if len(c) else None
        if c.selected is None or c.logits[c.selected] == -np.inf:
            raise EngineError(NONE_LEFT)

    def accept(self, token: int) -> None:
        pass

    def reset(self) -> None:
        pass

    def clone(self) -> Greedy:
        return self


class Dist:
    """Selects by the probabilities of what is left. Draws one float64 for every token, also if there is no choice."""

    def __init__(self, stream: Stream):
        self.stream = stream
        self.name = "dist"

    def apply(self, c: Candidates) -> None:
        c.selected = self.stream.draw(c.softmax())

    def accept(self, token: int) -> None:
        pass

    def reset(self) -> None:
        self.stream.reset()

    def clone(self) -> Dist:
        return _with_own_stream(self)


class Mirostat:
    """Holds the surprise of the text near tau bits: mu = mu - eta * (surprise - tau) after every token.

    Basu et al. 2020, arXiv 2007.14966. Version 1 fits Zipf's exponent to the m likeliest tokens and cuts at the k
    that it implies; version 2 cuts where the surprise exceeds mu.
    """

    M = 100

    def __init__(self, version: int, tau: float, eta: float, stream: Stream, n_vocab: int = 0):
        self.version, self.tau, self.eta, self.stream, self.n_vocab = version, tau, eta, stream, n_vocab
        self.mu = 2 * tau
        self.name = f"mirostat{'-v2' if version == 2 else ''} tau={tau:g} eta={eta:g}"

    def apply(self, c: Candidates) -> None:
        c.sort()
        p = c.softmax()
        if self.version == 1:
            c.sort(zipf_k(p, self.mu, self.n_vocab or len(c), self.M))
        else:
            with np.errstate(divide="ignore"):
                kept = int(np.count_nonzero(-np.log2(p) <= self.mu))
            c.take(slice(0, max(kept, 1)))
        p = c.softmax()
        c.selected = self.stream.choice(p)
        self.mu -= self.eta * (float(-np.log2(p[c.selected])) - self.tau)

    def accept(self, token: int) -> None:
        pass

    def reset(self) -> None:
        self.mu = 2 * self.tau
        self.stream.reset()

    def clone(self) -> Mirostat:
        return _with_own_stream(self)


def zipf_k(p: np.ndarray, mu: float, n_vocab: int, m: int) -> int:
    """How many of the sorted probabilities have an expected surprise below mu, at least 1 (Basu et al., section 4).

    s is the least-squares slope of log p over log rank; k = (eps * 2^mu / (1 - n^-eps))^(1/s), eps = s - 1.
    """
    p = p[p > 0][:m].astype(np.float64)
    if len(p) < 2:
        return 1
    ranks = np.arange(1, len(p))
    t = np.log((ranks + 1) / ranks)
    s = float((t * np.log(p[:-1] / p[1:])).sum() / (t * t).sum())
    if s <= 0:  # all alike: nothing to cut
        return n_vocab
    eps = s - 1
    with np.errstate(over="ignore"):
        # the limit at eps = 0 is 1 / log n
        ratio = 1 / np.log(n_vocab) if abs(eps) < 1e-9 else eps / -np.expm1(-eps * np.log(n_vocab))
        k = np.power(ratio * np.exp2(np.float64(mu)), 1 / s)
    return int(np.clip(k, 1, n_vocab))


class AdaptiveP:
    """Selects tokens near a probability, which it moves so that the average over the text comes out at `target`.

    Logits become 5 - 10 d^2 / (1 + d) with d = |p - adapted| / 0.3, where adapted = 2 target - average of the original
    p of the last tokens, weighted by decay^age (llama.cpp pull request 17927). target < 0: select by p.
    """

    WIDTH, PEAK, SHARPNESS = np.float32(0.3), np.float32(5), np.float32(10)

    def __init__(self, target: float, decay: float, stream: Stream):
        self.target, self.decay, self.stream = target, min(max(decay, 0.0), 0.99), stream
        self.name = f"adaptive-p target={target:g} decay={self.decay:g}"
        self._begin()

    def _begin(self) -> None:
        self.total = 1 / (1 - self.decay)
        self.weighted = self.target * self.total
        self.pending: tuple[int, float] | None = None

    def apply(self, c: Candidates) -> None:
        p = c.softmax()
        if self.target >= 0:
            adapted = np.float32(np.clip(2 * min(self.target, 1.0) - self.weighted / self.total, 0, 1))
            d = np.abs(p - adapted) / self.WIDTH
            c.logits = np.where(c.logits == -np.inf, c.logits, self.PEAK - self.SHARPNESS * d * d / (1 + d))
            c.sorted = False
        c.selected = self.stream.choice(c.softmax())
        self.pending = c.token, float(p[c.selected])

    def accept(self, token: int) -> None:
        if self.pending is not None and self.pending[0] == token:
            self.weighted = self.pending[1] + self.decay * self.weighted
            self.total = 1 + self.decay * self.total
        self.pending = None

    def reset(self) -> None:
        self._begin()
        self.stream.reset()

    def clone(self) -> AdaptiveP:
        return _with_own_stream(self)


def _with_own_stream(sampler: Any) -> Any:
    """A copy that draws the same numbers from a stream of its own."""
    other = copy(sampler)
    other.stream = sampler.stream.clone()
    return other
