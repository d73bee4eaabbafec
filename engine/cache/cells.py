"""The books of a cache: which cell holds which position of which sequences. Pure NumPy; no keys, no values."""

from __future__ import annotations

import numpy as np

ENDLESS = 1 << 30  # a position that is behind all others


class Cells:
    """`size` cells of one stream, for `n_seq` sequences.

    pos: int32 [size], -1 in an empty cell; owners: bool [n_seq, size], the sequences that a cell belongs to; shift:
    int32 [size], what positions were moved by since their keys were rotated; head: where the search for a slot begins.
    window: > 0 if tokens see that many positions only, so that older cells may be used again.
    """

    def __init__(self, size: int, n_seq: int, window: int = 0):
        self.size, self.window = size, window
        self.pos = np.full(size, -1, np.int32)
        self.owners = np.zeros((n_seq, size), bool)
        self.shift = np.zeros(size, np.int32)
        self.head = 0

    def clear(self) -> None:
        """Empty all cells."""
        self.pos[:] = -1
        self.owners[:] = False
        self.shift[:] = 0
        self.head = 0

    @property
    def used(self) -> int:
        """Cells that hold something."""
        return int(np.count_nonzero(self.pos >= 0))

    @property
    def end(self) -> int:
        """One behind the last used cell."""
        found = np.flatnonzero(self.pos >= 0)
        return int(found[-1]) + 1 if found.size else 0

    def pos_min(self, seq: int) -> int:
        """The first position of a sequence that is there, or -1."""
        held = self.pos[self.owners[seq]]
        return int(held.min()) if held.size else -1

    def pos_max(self, seq: int) -> int:
        """The last position of a sequence, or -1."""
        held = self.pos[self.owners[seq]]
        return int(held.max()) if held.size else -1

    # --- slots ---

    def slot(self, n: int) -> np.ndarray | None:
        """Cells for `n` tokens, in the order from the head on, not always side by side; None if there are too few."""
        if self.head > self.used + 2 * n:  # many empty cells lie before the head
            self.head = 0
        if n > self.size:
            return None
        free = self._free()
        found = np.concatenate([np.flatnonzero(free[self.head :]) + self.head, np.flatnonzero(free[: self.head])])
        return found[:n] if len(found) >= n else None

    def _free(self) -> np.ndarray:
        """Empty cells, and those of one sequence that no token to come will see."""
        free = self.pos < 0
        if self.window:
            single = self.owners.sum(0) == 1
            for seq in np.flatnonzero(self.owners.any(1)):
                free |= single & self.owners[seq] & (self.pos <= self.pos_max(int(seq)) + 1 - self.window)
        return free

    def put(self, slot: np.ndarray, pos: np.ndarray, seqs: list[tuple[int, ...]]) -> None:
        """Write tokens into the cells of a slot. What a sequence has before an overwritten position goes too, so that
        its positions stay without gaps."""
        lost = {
            int(seq): int(self.pos[slot][self.owners[seq][slot]].max())
            for seq in np.flatnonzero(self.owners[:, slot].any(1))
        }
        self._empty(slot)
        for seq, last in lost.items():
            self.remove(seq, 0, last + 1)
        self.pos[slot] = pos
        for cell, of in zip(slot, seqs):
            self.owners[list(of), cell] = True
        self.head = (int(slot[-1]) + 1) % self.size

    def _empty(self, cells: np.ndarray) -> None:
        self.pos[cells] = -1
        self.shift[cells] = 0
        self.owners[:, cells] = False

    # --- sequences ---

    def _within(self, seq: int, first: int, last: int) -> np.ndarray:
        return self.owners[seq] & (self.pos >= first) & (self.pos < last)

    def remove(self, seq: int, first: int, last: int) -> None:
        """Take positions first..last-1 from a sequence; cells that belong to none are empty."""
        hit = self._within(seq, first, last)
        self.owners[seq] &= ~hit
        gone = np.flatnonzero(hit & ~self.owners.any(0))
        if gone.size:
            self._empty(gone)
            self.head = min(self.head, int(gone[0]))

    def copy(self, source: int, target: int, first: int, last: int) -> None:
        """Let a sequence share positions first..last-1 of another; it loses its own before."""
        if source != target:
            self.remove(target, 0, ENDLESS)
            self.owners[target] |= self._within(source, first, last)

    def keep(self, seq: int) -> None:
        """Empty all cells that do not belong to a sequence."""
        gone = np.flatnonzero((self.pos >= 0) & ~self.owners[seq])
        self._empty(gone)
        mine = self.owners[seq].copy()
        self.owners[:] = False
        self.owners[seq] = mine
        self.head = 0

    def add(self, seq: int, first: int, last: int, delta: int) -> None:
        """Move positions first..last-1 by `delta`; what falls below 0 is removed."""
        hit = np.flatnonzero(self._within(seq, first, last))
        self.pos[hit] += delta
        self.shift[hit] += delta
        self._empty(hit[self.pos[hit] < 0])
        self.head = 0

    def divide(self, seq: int, first: int, last: int, by: int) -> None:
        """Divide positions first..last-1, rounded down."""
        hit = np.flatnonzero(self._within(seq, first, last))
        new = self.pos[hit] // by
        self.shift[hit] += new - self.pos[hit]
        self.pos[hit] = new

    def snapshot(self) -> tuple:
        """All of it, for `restore`."""
        return self.pos.copy(), self.owners.copy(), self.shift.copy(), self.head

    def restore(self, held: tuple) -> None:
        """What `snapshot` gave."""
        self.pos, self.owners, self.shift, self.head = held[0].copy(), held[1].copy(), held[2].copy(), held[3]

    def visible(self, seq: np.ndarray, pos: np.ndarray, n_kv: int, causal: bool, window: int) -> np.ndarray:
        """Which of the first cells each token sees: bool [n_tokens, n_kv]. seq, pos: int [n_tokens]."""
        cells, own = self.pos[:n_kv], pos[:, None]
        seen = self.owners[:, :n_kv][seq]
        if causal:
            seen &= cells <= own
        if window:
            seen &= cells > own - window
        return seen
