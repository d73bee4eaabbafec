"""Keys and values of the layers that see equally far: one tensor each a layer, and the books of their cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from engine.batch import Ubatch
from engine.cache.cells import ENDLESS, Cells
from engine.cache.layout import AttentionLayer
from engine.context import Context, allocate
from engine.errors import EngineError
from engine.tensor import Tensor
from quant import FORMATS, Format

PAD = 256  # cells that graphs are built for at a time, so that they serve as many tokens

#: What keys and values can be kept as.
CACHE_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "IQ4_NL", "Q5_0", "Q5_1")

#: A slot: the cells of each stream that a ubatch writes, one list a stream.
Slot = list[np.ndarray]


def padded(n: int) -> int:
    """`n` up to a multiple of PAD."""
    return -(-n // PAD) * PAD


def cache_type(name: str, which: str) -> Format:
    """The format called `name`. Raises EngineError for one that a cache cannot have."""
    if name.upper() not in CACHE_TYPES:
        raise EngineError(f"a cache of {which} cannot be of type {name}; use one of {', '.join(CACHE_TYPES)}")
    return FORMATS[name.upper()]


class KVCache:
    """Cells and tensors of the layers with one window.

    Streams: one that all sequences share (`unified`), or one a sequence. n_cells: of one stream. Keys of layer i are
    `cache_k_li` [n_head_kv * d, n_cells, n_stream], values likewise.
    """

    def __init__(
        self,
        layers: Mapping[int, AttentionLayer],
        window: int,
        n_cells: int,
        n_seq: int,
        unified: bool,
        type_k: Format,
        type_v: Format,
    ):
        self.window, self.n_cells, self.unified = window, n_cells, unified
        self.layers = dict(layers)
        self.n_stream = 1 if unified else n_seq
        self.streams = [Cells(n_cells, n_seq, window) for _ in range(self.n_stream)]
        self.type_k, self.type_v = type_k, type_v
        for i, a in layers.items():
            for which, size, format in (("keys", a.d_k, type_k), ("values", a.d_v, type_v)):
                if size % format.block_size:
                    raise EngineError(
                        f"a cache of {which} cannot be {format}: heads of layer {i} have {size} elements, no multiple "
                        f"of its block of {format.block_size}; use F16"
                    )
        self._headers = Context()
        self.k: dict[int, Tensor] = {}
        self.v: dict[int, Tensor] = {}
        for i, a in layers.items():
            shape = n_cells, self.n_stream
            self.k[i] = self._headers.tensor(type_k, a.row_k, *shape, name=f"cache_k_l{i}")
            self.v[i] = self._headers.tensor(type_v, a.row_v, *shape, name=f"cache_v_l{i}")
        allocate(self._headers)

    @property
    def nbytes(self) -> int:
        """Of all keys and values."""
        return sum(t.nbytes for t in (*self.k.values(), *self.v.values()))

    def stream_of(self, seq: int) -> int:
        """Where a sequence's cells are."""
        return 0 if self.unified else seq

    # --- slots ---

    def prepare(self, ubatches: Sequence[Ubatch]) -> list[Slot] | None:
        """Slots for ubatches that come one after another, or None if there is no room; nothing changes."""
        if len(ubatches) == 1:
            slot = self._slot(ubatches[0])
            return None if slot is None else [slot]
        held = [cells.snapshot() for cells in self.streams]
        slots: list[Slot] = []
        for ubatch in ubatches:
            slot = self._slot(ubatch)
            if slot is None:
                break
            slots.append(slot)
            self.apply(ubatch, slot)
        for cells, before in zip(self.streams, held):
            cells.restore(before)
        return slots if len(slots) == len(ubatches) else None

    def _slot(self, u: Ubatch) -> Slot | None:
        slot = []
        for stream, tokens in self.parts(u):
            found = self.streams[stream].slot(len(tokens))
            if found is None:
                return None
            slot.append(found)
        return slot

    def apply(self, u: Ubatch, slot: Slot) -> None:
        """Mark the cells of a slot as the ubatch's."""
        for (stream, tokens), cells in zip(self.parts(u), slot):
            self.streams[stream].put(cells, u.pos[tokens], [u.seqs[i] for i in tokens])

    def parts(self, u: Ubatch) -> list[tuple[int, np.ndarray]]:
        """(stream, tokens of the ubatch) in the ubatch's order."""
        everything = np.arange(u.n_tokens)
        if self.unified:
            return [(0, everything)]
        first = u.seqs[0][0]
        return [(first + i, part) for i, part in enumerate(np.split(everything, u.n_seqs))]

    def n_kv(self, streams: Sequence[int]) -> int:
        """Cells that a graph reads: those in use, padded."""
        return min(self.n_cells, max(PAD, padded(max(self.streams[s].end for s in streams))))

    def rows(self, u: Ubatch, slot: Slot) -> np.ndarray:
        """Where each token's keys and values go, counted over all streams: int64 [n_tokens]."""
        places = [stream * self.n_cells + cells for (stream, _), cells in zip(self.parts(u), slot)]
        return np.concatenate(places).astype(np.int64)

    def mask(self, u: Ubatch, n_kv: int, causal: bool, window: int, biased: bool) -> np.ndarray:
        """0 where a token sees a cell, or with `biased` minus the distance; minus infinity elsewhere: float32
        [n_streams of the ubatch, 1, n_tokens of each, n_kv]."""
        parts = self.parts(u)
        out = np.full((len(parts), 1, u.n_tokens // len(parts), n_kv), -np.inf, np.float32)
        primary = np.array([seqs[0] for seqs in u.seqs])
        for (stream, tokens), mask in zip(parts, out[:, 0]):
            cells, pos = self.streams[stream], u.pos[tokens]
            seen = cells.visible(primary[tokens], pos, n_kv, causal, window)
            mask[seen] = -np.abs(cells.pos[:n_kv] - pos[:, None])[seen] if biased else 0
        return out

    # --- sequences ---

    def pos_min(self, seq: int) -> int:
        return self.streams[self.stream_of(seq)].pos_min(seq)

    def pos_max(self, seq: int) -> int:
        return self.streams[self.stream_of(seq)].pos_max(seq)

    def can_remove(self, seq: int, first: int, last: int) -> bool:
        """Whether what tokens behind the removed positions will see is still there."""
        if not self.window or last <= self.pos_max(seq) or first > self.pos_max(seq) + 1:
            return True
        return first <= 0 or self.pos_min(seq) <= max(0, first + 1 - self.window)

    def remove(self, seq: int, first: int, last: int) -> None:
        self.streams[self.stream_of(seq)].remove(seq, first, last)

    def copy(self, source: int, target: int, first: int, last: int) -> None:
        """See `Cells.copy`; between streams keys and values are copied too, of all positions."""
        a, b = self.stream_of(source), self.stream_of(target)
        if a == b:
            self.streams[a].copy(source, target, first, last)
            return
        if source == target:
            return
        held = self.streams[a].snapshot()
        self.streams[b].restore(held)
        self.streams[b].owners[:] = False
        self.streams[b].owners[target] = self.streams[a].owners[source]
        self.streams[b].remove(target, last, ENDLESS)
        self.streams[b].remove(target, 0, first)
        for tensor in (*self.k.values(), *self.v.values()):
            rows = tensor.array()[0]
            rows[b] = rows[a]

    def keep(self, seq: int) -> None:
        for stream, cells in enumerate(self.streams):
            if stream == self.stream_of(seq):
                cells.keep(seq)
            else:
                cells.clear()

    def add(self, seq: int, first: int, last: int, delta: int) -> None:
        self.streams[self.stream_of(seq)].add(seq, first, last, delta)

    def divide(self, seq: int, first: int, last: int, by: int) -> None:
        self.streams[self.stream_of(seq)].divide(seq, first, last, by)

    def clear(self) -> None:
        for cells in self.streams:
            cells.clear()

    # --- shifted keys ---

    @property
    def is_shifted(self) -> bool:
        """Whether keys have to be rotated to their new positions."""
        return any(cells.shift.any() for cells in self.streams)

    def shifts(self) -> np.ndarray:
        """By how much each cell's key has to be rotated: int32 [n_stream * n_cells]."""
        return np.concatenate([cells.shift for cells in self.streams])

    def shifted(self) -> None:
        """It was done."""
        for cells in self.streams:
            cells.shift[:] = 0
