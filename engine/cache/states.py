"""States of recurrent layers: one row a sequence in each tensor, and the last position that it has seen."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from engine.batch import Ubatch
from engine.context import Context, allocate
from engine.ops.op import F32
from engine.tensor import Tensor


class States:
    """shapes: (layer, name) -> shape of one sequence's state. A sequence's row is its number; it begins as zeros.

    States cannot go back: positions are removed all or not at all.
    """

    def __init__(self, shapes: Mapping[tuple[int, str], tuple[int, ...]], n_seq: int):
        self.shapes = dict(shapes)
        self.pos = np.full(n_seq, -1, np.int32)
        self._headers = Context()
        self.tensors: dict[tuple[int, str], Tensor] = {
            key: self._headers.tensor(F32, math.prod(ne), n_seq, name=f"state_{key[1]}_l{key[0]}")
            for key, ne in self.shapes.items()
        }
        allocate(self._headers)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    def apply(self, u: Ubatch) -> None:
        """The ubatch's tokens are seen."""
        for seqs, pos in zip(u.seqs, u.pos):
            self.pos[list(seqs)] = pos

    def rows(self, u: Ubatch) -> np.ndarray:
        """The rows of the ubatch's sequences: int32 [n_seqs]."""
        return np.array([u.seqs[i * u.n_seq_tokens][0] for i in range(u.n_seqs)], np.int32)

    def share(self, u: Ubatch) -> None:
        """Tokens of several sequences were run for the first of them: the others get its states."""
        for i in range(u.n_seqs):
            first, *others = u.seqs[i * u.n_seq_tokens]
            for other in others:
                self._copy_rows(first, other)

    def can_remove(self, seq: int, first: int, last: int) -> bool:
        """Whether the positions are all, or none."""
        held = int(self.pos[seq])
        return held < 0 or first > held or (first <= 0 and last > held)

    def remove(self, seq: int, first: int, last: int) -> None:
        if first <= self.pos[seq] < last:
            self.pos[seq] = -1
            for tensor in self.tensors.values():
                tensor.array()[0, 0, seq] = 0

    def copy(self, source: int, target: int) -> None:
        """All of a sequence's states."""
        if source != target:
            self._copy_rows(source, target)
            self.pos[target] = self.pos[source]

    def _copy_rows(self, source: int, target: int) -> None:
        for tensor in self.tensors.values():
            rows = tensor.array()[0, 0]
            rows[target] = rows[source]

    def keep(self, seq: int) -> None:
        for other in range(len(self.pos)):
            if other != seq:
                self.remove(other, 0, 1 << 30)

    def clear(self) -> None:
        self.pos[:] = -1
        for tensor in self.tensors.values():
            tensor.array()[...] = 0

    def snapshot(self, seq: int) -> tuple:
        """A sequence's states, for `restore`."""
        return int(self.pos[seq]), [t.array()[0, 0, seq].copy() for t in self.tensors.values()]

    def restore(self, seq: int, held: tuple) -> None:
        """What `snapshot` gave."""
        self.pos[seq] = held[0]
        for tensor, row in zip(self.tensors.values(), held[1]):
            tensor.array()[0, 0, seq] = row
