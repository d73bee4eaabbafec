"""Random numbers: the Mersenne Twister with 32-bit seeds, drawn from as the reference's C++ library does.

So a seed means the same stream here as there: `std::mt19937`, `std::uniform_real_distribution` and
`std::discrete_distribution` of libstdc++. Source: Matsumoto and Nishimura 1998, "Mersenne Twister".
"""

from __future__ import annotations

import secrets
from copy import deepcopy
from typing import Any

import numpy as np

#: This seed asks for one that nobody knows.
RANDOM_SEED = 0xFFFFFFFF

_FLOAT32_BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))


class Stream:
    """A stream of random numbers. seed: what was asked for; used: the 32-bit seed that was taken."""

    def __init__(self, seed: int = RANDOM_SEED):
        self.seed = seed
        self._bits = np.random.MT19937()
        self.reset()

    def reset(self) -> None:
        """Begin again; with the random seed, another stream."""
        self.used = secrets.randbits(32) if self.seed == RANDOM_SEED else self.seed & 0xFFFFFFFF
        # RandomState seeds by Knuth's recurrence, as std::mt19937 does; a bare MT19937 hashes its seed
        state: Any = np.random.RandomState(self.used).get_state(legacy=False)
        self._bits.state = state

    def clone(self) -> Stream:
        """A stream that goes on with the same numbers."""
        return deepcopy(self)

    def bits(self) -> int:
        """32 random bits."""
        return int(self._bits.random_raw())

    def uniform(self) -> float:
        """A float64 in [0, 1) of two draws."""
        low, high = self.bits(), self.bits()
        return min((low + high * 2.0**32) / 2.0**64, float(np.nextafter(1.0, 0.0)))

    def uniform32(self) -> float:
        """A float32 in [0, 1) of one draw."""
        return min(float(np.float32(self.bits()) / np.float32(2**32)), _FLOAT32_BELOW_ONE)

    def choice(self, p: np.ndarray) -> int:
        """An index with probability p / sum(p). A single choice draws nothing."""
        if len(p) < 2:
            return 0
        return self.draw(p)

    def draw(self, p: np.ndarray) -> int:
        """An index with probability p / sum(p); draws one float64."""
        cumulative = np.cumsum(p, dtype=np.float64)
        i = int(np.searchsorted(cumulative, self.uniform() * cumulative[-1]))
        return i if p[i] > 0 else int(np.flatnonzero(p)[0])  # a draw of 0 is before all, also what cannot come
