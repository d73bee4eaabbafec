"""The memory of a context: caches of keys and values by window, and recurrent states, as one. Which of them a model has
follows from its layers: attention, recurrent, or both (hybrid)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.batch import FullBatch, Ubatch, split_equal, split_simple
from engine.cache.cells import ENDLESS
from engine.cache.kv import KVCache, Slot, cache_type, padded
from engine.cache.layout import Layout
from engine.cache.states import States
from engine.errors import EngineError


@dataclass(frozen=True)
class Step:
    """A ubatch and its slots, one for each cache."""

    ubatch: Ubatch
    slots: tuple[Slot, ...]


class CacheMemory:
    """n_ctx: positions of one sequence, or with `unified` of all together; full_windows: caches of windowed layers as
    large as the others, so that any position can be removed."""

    def __init__(
        self,
        layout: Layout,
        n_ctx: int,
        n_ubatch: int,
        n_seq_max: int,
        unified: bool = False,
        type_k: str = "F16",
        type_v: str = "F16",
        full_windows: bool = False,
    ):
        self.layout, self.n_seq_max = layout, n_seq_max
        self.unified = unified or n_seq_max == 1
        k, v = cache_type(type_k, "keys"), cache_type(type_v, "values")
        self.caches: list[KVCache] = []
        for window in layout.windows:
            layers = {i: a for i, a in layout.attention.items() if a.window == window}
            cells = n_ctx
            if window and not full_windows:
                cells = padded(min(n_ctx, window * (n_seq_max if self.unified else 1) + n_ubatch))
            kept = 0 if full_windows else window
            self.caches.append(KVCache(layers, kept, cells, n_seq_max, self.unified, k, v))
        self.states = States(layout.states, n_seq_max) if layout.states else None
        #: whether positions can be moved: keys are rotated, or know no positions, and there are no states
        self.can_shift = self.states is None and all(a.shifts for a in layout.attention.values())
        self.cache_of = {i: c for c, cache in enumerate(self.caches) for i in cache.layers}

    @property
    def _parts(self) -> list[KVCache | States]:
        return [*self.caches, *([self.states] if self.states is not None else [])]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys, values and states."""
        return sum(part.nbytes for part in self._parts)

    @property
    def is_quantized(self) -> bool:
        return any(t.block_size > 1 for c in self.caches for t in (c.type_k, c.type_v))

    # --- batches ---

    def split(self, batch: FullBatch, n_ubatch: int) -> list[Ubatch]:
        """The batch as ubatches that this memory can take."""
        if self.states is None and self.unified:
            return list(split_simple(batch, n_ubatch))
        return list(split_equal(batch, n_ubatch, sequential=not self.unified))

    def prepare(self, ubatches: Sequence[Ubatch]) -> list[Step] | None:
        """Slots for all of them before any is run; None if there is no room."""
        found = [cache.prepare(ubatches) for cache in self.caches]
        if any(slots is None for slots in found):
            return None
        return [Step(u, tuple(slots[i] for slots in found if slots is not None)) for i, u in enumerate(ubatches)]

    def apply(self, step: Step) -> None:
        """The step's tokens are in memory now."""
        for cache, slot in zip(self.caches, step.slots):
            cache.apply(step.ubatch, slot)
        if self.states is not None:
            self.states.apply(step.ubatch)

    def roll_back(self, ubatch: Ubatch) -> None:
        """Forget a ubatch that failed: its positions, and with states the sequence, which cannot go back."""
        for seq, first in ubatch.first_positions().items():
            for cache in self.caches:
                cache.remove(seq, first if self.states is None else 0, ENDLESS)
            if self.states is not None:
                self.states.remove(seq, 0, ENDLESS)

    # --- sequences ---

    def pos_min(self, seq: int) -> int:
        """The first position from which on a sequence is there in all parts, or -1."""
        self._check(seq)
        found = [cache.pos_min(seq) for cache in self.caches]
        if self.states is not None:
            found.append(int(self.states.pos[seq]))
        return max(found, default=-1)

    def pos_max(self, seq: int) -> int:
        """The last position of a sequence, or -1."""
        self._check(seq)
        found = [cache.pos_max(seq) for cache in self.caches]
        if self.states is not None:
            found.append(int(self.states.pos[seq]))
        return min(found, default=-1)

    def remove(self, seq: int, first: int = 0, last: int = -1) -> bool:
        """Take positions first..last-1 from a sequence (-1: every sequence; last -1: to the end). False, and nothing is
        changed, if what would be left cannot be continued: states do not go back, and windowed layers forget."""
        last = ENDLESS if last < 0 else last
        if seq >= 0:
            self._check(seq)
        seqs = range(self.n_seq_max) if seq < 0 else (seq,)
        if not all(part.can_remove(s, first, last) for part in self._parts for s in seqs):
            return False
        for part in self._parts:
            for s in seqs:
                part.remove(s, first, last)
        return True

    def copy(self, source: int, target: int, first: int = 0, last: int = -1) -> None:
        """Give a sequence what another has: cells are shared in one stream, copied between streams. Raises EngineError
        for a part of the positions where they cannot be shared."""
        self._check(source)
        self._check(target)
        end = ENDLESS if last < 0 else last
        if (not self.unified or self.states is not None) and (first > 0 or end <= self.pos_max(source)):
            raise EngineError("only whole sequences can be copied here; use kv_unified, and a model without states")
        for cache in self.caches:
            cache.copy(source, target, first, end)
        if self.states is not None:
            self.states.copy(source, target)

    def keep(self, seq: int) -> None:
        """Forget all other sequences."""
        self._check(seq)
        for part in self._parts:
            part.keep(seq)

    def add(self, seq: int, first: int, last: int, delta: int) -> None:
        """Move positions first..last-1 of a sequence by `delta`; keys are rotated before the next batch. Raises
        EngineError where that is not possible."""
        self._check(seq)
        self._need_shift()
        for cache in self.caches:
            cache.add(seq, first, ENDLESS if last < 0 else last, delta)

    def divide(self, seq: int, first: int, last: int, by: int) -> None:
        """Divide positions, rounded down (self-extend: Jin et al. 2024, arXiv 2401.01325). Raises EngineError as
        `add`."""
        self._check(seq)
        self._need_shift()
        if by < 1:
            raise EngineError(f"positions cannot be divided by {by}")
        for cache in self.caches:
            cache.divide(seq, first, ENDLESS if last < 0 else last, by)

    def clear(self) -> None:
        """Forget everything."""
        for part in self._parts:
            part.clear()

    def _need_shift(self) -> None:
        if not self.can_shift:
            raise EngineError("positions of this model cannot be moved: its states or keys depend on them; start anew")

    def _check(self, seq: int) -> None:
        if not 0 <= seq < self.n_seq_max:
            raise EngineError(f"there is no sequence {seq}: there are {self.n_seq_max}, from 0 on (n_seq_max)")
