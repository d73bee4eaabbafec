"""What a graph under construction sees of a context's memory.

New keys and values are written into the rows that an input names, then the first cells are read as a view of what was
written; so one graph serves as long as the number of cells that it reads does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from engine import ops
from engine.cache.kv import KVCache
from engine.cache.memory import CacheMemory, Step
from engine.context import Context
from engine.models.build import Build
from engine.ops.op import F32, I32, I64
from engine.tensor import Flag, Tensor
from quant import Format

MIN_ROTATION = 64  # elements that are rotated together where cells are quantized, at least


@dataclass(frozen=True)
class Mask:
    """What an attention mask depends on, beside the tokens. cache: its number; biased: holds distances (ALiBi)."""

    cache: int
    causal: bool
    window: int
    biased: bool


@dataclass
class CacheReads:
    """n_kv: cells to be read of each cache; first: the stream of the first token; n_seq: groups of as many tokens.

    inputs: what `fill` writes before each run; stores: nodes that have to be run although nothing reads them, and those
    that read what they overwrite, in order.
    """

    memory: CacheMemory
    n_seq: int
    n_kv: tuple[int, ...]
    first: int = 0
    inputs: dict[str, Tensor] = field(default_factory=dict)
    masks: dict[Mask, Tensor] = field(default_factory=dict)
    stores: list[Tensor] = field(default_factory=list)
    causal: bool | None = None
    _held: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    # --- attention ---

    def attend(
        self,
        b: Build,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        scale: float,
        *,
        causal: bool = True,
        window: int = 0,
        max_bias: float = 0.0,
        **options: Any,
    ) -> Tensor:
        number = self.memory.cache_of[layer]
        cache, a = self.memory.caches[number], self.memory.caches[number].layers[layer]
        turn_k, turn_v = rotation(a.d_k, cache.type_k, a.d_k), rotation(a.d_v, cache.type_v)
        if k is not None and v is not None:
            rows = self._input(b.ctx, f"rows_{number}", I64, k.ne[2])
            self._held[layer] = (
                _store(b.ctx, cache.k[layer], self._turned(b.ctx, k, turn_k), rows),
                _store(b.ctx, cache.v[layer], self._turned(b.ctx, v, turn_v), rows),
            )
        held_k, held_v = self._held[layer]
        mask = self._mask(b.ctx, Mask(number, self._causal(causal), window, max_bias > 0), cache, q.ne[2])
        q = self._turned(b.ctx, q, turn_k)
        n_stream = self._n_stream(cache)
        q = ops.permute(b.ctx, _apart(b.ctx, q, n_stream), 0, 2, 1, 3)
        keys = self._cells(b.ctx, cache, held_k, a.d_k, a.n_head_kv, self.n_kv[number])
        values = self._cells(b.ctx, cache, held_v, a.d_v, a.n_head_kv, self.n_kv[number])
        y = ops.attention(b.ctx, q, keys, values, scale, mask, max_bias=max_bias, **options)
        n = y.ne[2] * y.ne[3]
        y = self._turned(b.ctx, ops.reshape(b.ctx, y, y.ne[0], y.ne[1], n), turn_v)
        return ops.reshape(b.ctx, y, y.ne[0] * y.ne[1], n)

    def _causal(self, wanted: bool) -> bool:
        return wanted if self.causal is None else self.causal

    def _n_stream(self, cache: KVCache) -> int:
        return 1 if cache.unified else self.n_seq

    def _cells(self, ctx: Context, cache: KVCache, held: Tensor, d: int, n_head: int, n_kv: int) -> Tensor:
        """The first cells of the tokens' streams: [d, n_kv, n_head, n_stream]."""
        row, head = held.nb[1], held.nb[0] * (d // held.format.block_size)
        stream = row * cache.n_cells
        shape = (d, n_head, n_kv, self._n_stream(cache))
        first = 0 if cache.unified else self.first
        return ops.permute(ctx, ops.view(ctx, held, shape, (head, row, stream), first * stream), 0, 2, 1, 3)

    def _mask(self, ctx: Context, key: Mask, cache: KVCache, n: int) -> Tensor:
        if key not in self.masks:
            n_stream = self._n_stream(cache)
            name = f"mask_{len(self.masks)}"
            self.masks[key] = self._input(ctx, name, F32, self.n_kv[key.cache], n // n_stream, 1, n_stream)
        return self.masks[key]

    def _turned(self, ctx: Context, x: Tensor, size: int) -> Tensor:
        """Heads x [d, n_head, n], each piece of `size` elements times a Hadamard matrix; size 0 changes nothing."""
        if not size:
            return x
        matrix = self._input(ctx, f"hadamard_{size}", F32, size, size)
        d, n_head, n = x.ne[:3]
        flat = ops.reshape(ctx, x if x.is_contiguous else ops.cont(ctx, x), size, d // size * n_head * n)
        return ops.reshape(ctx, ops.mul_mat(ctx, matrix, flat), d, n_head, n)

    def _input(self, ctx: Context, name: str, format: Format, *ne: int) -> Tensor:
        if name not in self.inputs:
            tensor = ctx.tensor(format, *ne, name=name)
            tensor.flags |= Flag.INPUT
            self.inputs[name] = tensor
        return self.inputs[name]

    # --- states ---

    def state(self, b: Build, layer: int, name: str, *ne: int) -> Tensor:
        assert self.memory.states is not None
        rows = self._input(b.ctx, "state_rows", I32, self.n_seq)
        read = ops.get_rows(b.ctx, self.memory.states.tensors[layer, name], rows)
        self.stores.append(read)
        return ops.reshape(b.ctx, read, *ne, self.n_seq)

    def keep(self, b: Build, layer: int, name: str, new: Tensor) -> None:
        assert self.memory.states is not None
        rows = self._input(b.ctx, "state_rows", I32, self.n_seq)
        new = new if new.is_contiguous else ops.cont(b.ctx, new)
        flat = ops.reshape(b.ctx, new, new.n_elements // self.n_seq, self.n_seq)
        self.stores.append(ops.set_rows(b.ctx, self.memory.states.tensors[layer, name], flat, rows))

    # --- values of the inputs ---

    def fill(self, step: Step) -> None:
        """Write the inputs for a ubatch that is applied to the memory."""
        u = step.ubatch
        for number, (cache, slot) in enumerate(zip(self.memory.caches, step.slots)):
            self._write(f"rows_{number}", lambda cache=cache, slot=slot: cache.rows(u, slot))
        states = self.memory.states
        if states is not None:
            self._write("state_rows", lambda: states.rows(u))
        for key, tensor in self.masks.items():
            cache = self.memory.caches[key.cache]
            tensor.array()[...] = cache.mask(u, self.n_kv[key.cache], key.causal, key.window, key.biased)
        for name, tensor in self.inputs.items():
            if name.startswith("hadamard_"):
                tensor.array()[0, 0] = hadamard(tensor.ne[0])

    def _write(self, name: str, values: Any) -> None:
        if name in self.inputs:
            self.inputs[name].array()[...] = values()


def _store(ctx: Context, into: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    """Heads x [d, n_head, n] into rows of `into`: the whole of it, afterwards."""
    d, n_head, n = x.ne[:3]
    if x.nb[1] != d * x.nb[0] or not x.is_float_rows:
        x = ops.cont(ctx, x)
    flat = ops.view(ctx, x, (d * n_head, n), (x.nb[2],))
    return ops.set_rows(ctx, ops.reshape(ctx, into, into.ne[0], into.ne[1] * into.ne[2]), flat, rows)


def _apart(ctx: Context, t: Tensor, n_stream: int) -> Tensor:
    """[d, n_head, n] -> [d, n_head, n / n_stream, n_stream]."""
    n = t.ne[2] // n_stream
    return ops.view(ctx, t, (t.ne[0], t.ne[1], n, n_stream), (t.nb[1], t.nb[2], t.nb[2] * n))


def rotation(d: int, kept_as: Format, most: int = MIN_ROTATION) -> int:
    """Elements of a head of `d` that are rotated together before they are quantized: a power of two from 64 to `most`;
    0 for none. A rotation spreads what is large over its block (Ashkboos et al. 2024, arXiv 2404.00456)."""
    if kept_as.block_size == 1 or d % MIN_ROTATION:
        return 0
    size = MIN_ROTATION
    while 2 * size <= most and d % (2 * size) == 0:
        size *= 2
    return size


@lru_cache(maxsize=8)
def hadamard(n: int) -> np.ndarray:
    """The orthonormal Walsh-Hadamard matrix, n a power of two: float32 [n, n], its own inverse."""
    out = np.full((1, 1), 1.0 / math.sqrt(n), np.float32)
    while len(out) < n:
        out = np.block([[out, out], [out, -out]])
    return out
