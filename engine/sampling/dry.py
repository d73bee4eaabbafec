"""DRY, "don't repeat yourself": tokens that would go on with a repetition lose logits, the more the longer it is.

Source: p-e-w, text-generation-webui pull request 5677; the way in which breakers meet tokens follows the KoboldCpp
pull request 982. A token that would extend a repeated sequence of n tokens loses multiplier * base ** (n - allowed),
for n >= allowed. Sequences do not reach across a breaker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from math import log

import numpy as np

from engine.sampling.candidates import Candidates
from engine.sampling.texts import TokenTexts

#: breakers are cut to so many bytes, and what follows their first token to so many tokens
MAX_BREAKER_BYTES, MAX_TAIL = 40, 20
_FLOAT_MAX_LOG = 88.7228391

#: first token of a breaker -> what may follow it to complete the breaker
Breakers = dict[int, set[tuple[int, ...]]]


class Dry:
    """See above. last_n: how many tokens are searched."""

    def __init__(self, multiplier: float, base: float, allowed: int, last_n: int, breakers: Breakers):
        self.multiplier, self.base, self.allowed = multiplier, base, allowed
        self.breakers = breakers
        self.recent: deque[int] = deque(maxlen=last_n)
        self.limit = int(_FLOAT_MAX_LOG / log(base)) if base > 1.000001 else 0  # exponents beyond it overflow
        self.name = f"dry multiplier={multiplier:g} base={base:g} allowed={allowed} n={last_n}"

    def apply(self, c: Candidates) -> None:
        tokens = list(self.recent)
        if len(tokens) <= self.allowed:
            return
        reach = since_breaker(tokens, self.breakers)
        longest = {
            token: n
            for token, n in continuations(tokens, reach).items()
            if n >= self.allowed and () not in self.breakers.get(token, ())
        }
        if not longest:
            return
        exponents = np.array([n - self.allowed for n in longest.values()], np.float64)
        if self.limit:
            exponents = np.minimum(exponents, self.limit)
        penalty = (self.multiplier * np.power(self.base, exponents)).astype(np.float32)
        where, which = c.positions(np.array(list(longest), np.int64))
        c.set_logits(where, c.logits[where] - penalty[which])

    def accept(self, token: int) -> None:
        self.recent.append(token)

    def reset(self) -> None:
        self.recent.clear()

    def clone(self) -> Dry:
        other = copy(self)
        other.recent = self.recent.copy()
        return other


def since_breaker(tokens: Sequence[int], breakers: Breakers) -> int:
    """How many tokens there are behind the last breaker (all, if there is none)."""
    n = len(tokens)
    for i in range(n):  # i tokens from the end
        fits = [
            len(tail)
            for tail in breakers.get(tokens[n - 1 - i], ())
            if len(tail) <= i and tuple(tokens[n - i : n - i + len(tail)]) == tail
        ]
        if fits:
            return i - max(fits)
    return n


def continuations(tokens: Sequence[int], reach: int) -> dict[int, int]:
    """Token -> length of the longest suffix of `tokens`, at most `reach`, that it followed earlier.

    The suffix function of the reversed tokens, by the Z-algorithm (Gusfield 1997), so the time is linear.
    """
    found: dict[int, int] = {}
    reverse = tokens[::-1]
    for at, n in enumerate(suffix_lengths(reverse)):
        if at and n:
            token = reverse[at - 1]
            found[token] = max(found.get(token, 0), min(n, reach))
    return found


def suffix_lengths(x: Sequence[int]) -> list[int]:
    """z[i]: how far x[i:] agrees with the beginning of x (z[0] is 0)."""
    z = [0] * len(x)
    left = right = 0
    for i in range(1, len(x)):
        n = min(z[i - left], right - i) if i < right else 0
        while i + n < len(x) and x[n] == x[i + n]:
            n += 1
        z[i] = n
        if i + n > right:
            left, right = i, i + n
    return z


def breakers_of(texts: TokenTexts, strings: Iterable[str]) -> Breakers:
    """Where breakers can begin: in which tokens, and what must follow these.

    A token that holds a whole breaker breaks alone; one that ends with the beginning of a breaker, together with the
    tokens of the rest.
    """
    found: Breakers = {}
    tokenize: Callable[[str], list[int]] = texts.tokenize or (lambda text: [])
    for text in strings:
        whole = text.encode()[:MAX_BREAKER_BYTES]
        parts = [(whole[:i], whole[i:]) for i in range(1, len(whole))]
        tails: dict[bytes, tuple[int, ...]] = {}
        for token, piece in enumerate(texts.spelled):
            if whole and whole in piece:
                found.setdefault(token, set()).add(())
                continue
            for start, rest in parts:
                if piece.endswith(start):
                    if rest not in tails:
                        tails[rest] = tuple(tokenize(rest.decode(errors="ignore"))[:MAX_TAIL])
                    if tails[rest]:
                        found.setdefault(token, set()).add(tails[rest])
    return found
