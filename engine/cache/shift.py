"""Keys whose positions were moved are rotated by the difference: rotations add up, so it is as if they had been there
from the beginning."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine import ops
from engine.cache.kv import KVCache
from engine.cache.reads import hadamard, rotation
from engine.context import Context
from engine.graph import Graph
from engine.ops.op import F32, I32, node
from engine.tensor import Flag, Tensor
from quant import Format

_OFFSET, _FACTOR = 4, 8  # places in ROPE's parameters
_SECTIONS = slice(9, 13)

#: What an input gets, from the cells that moved and by how much.
Values = Callable[[np.ndarray, np.ndarray], np.ndarray]


def shift_graph(ctx: Context, graph: Graph, cache: KVCache, n: int) -> dict[Tensor, Values]:
    """Add the rotation of `n` cells' keys in all layers to a graph; returns its inputs."""
    inputs: dict[Tensor, Values] = {}

    def add(format: Format, *ne: int, values: Values) -> Tensor:
        tensor = ctx.tensor(format, *ne)
        tensor.flags |= Flag.INPUT
        inputs[tensor] = values
        return tensor

    rows = add(I32, n, values=lambda cells, by: cells)
    plain = add(I32, n, values=lambda cells, by: by)
    fourfold = add(I32, 4 * n, values=lambda cells, by: np.tile(by, 4))
    matrices: dict[int, Tensor] = {}

    def matrix(size: int) -> Tensor | None:
        if size and size not in matrices:
            matrices[size] = add(F32, size, size, values=lambda cells, by: hadamard(size))
        return matrices.get(size)

    for i, a in cache.layers.items():
        if a.rotation is None:
            continue
        held = ops.reshape(ctx, cache.k[i], a.row_k, cache.n_cells * cache.n_stream)
        size = rotation(a.d_k, cache.type_k, a.d_k)
        x = _turned(ctx, ops.get_rows(ctx, held, rows), matrix(size))
        x = ops.reshape(ctx, x, a.d_k, a.n_head_kv, n)
        params = list(a.rotation.params)
        params[_OFFSET] += a.rotated_at
        params[_FACTOR] = 1.0  # values have grown already
        by = fourfold if any(params[_SECTIONS]) else plain
        x = node(ctx, "ROPE", F32, x.ne, (x, by, a.rotation.src[2]), tuple(params))
        x = _turned(ctx, ops.reshape(ctx, x, a.row_k, n), matrix(size))
        graph.expand(ops.set_rows(ctx, held, ops.reshape(ctx, x, a.row_k, n), rows))
    return {t: values for t, values in inputs.items() if t in graph.leafs}


def _turned(ctx: Context, x: Tensor, matrix: Tensor | None) -> Tensor:
    """Rows x, each piece as long as the Hadamard matrix times it: its own inverse."""
    if matrix is None:
        return x
    return ops.mul_mat(ctx, matrix, ops.reshape(ctx, x, matrix.ne[0], x.n_elements // matrix.ne[0]))
