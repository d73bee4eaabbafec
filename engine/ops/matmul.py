"""MUL_MAT: the product of a weight matrix, in any format, with float32 activations."""

from __future__ import annotations

import numpy as np

from engine.context import Context
from engine.ops.op import F32, Op, need, node, values
from engine.tensor import Tensor

TILE = 256  # rows of the weight that are decoded at a time, at most


def mul_mat(ctx: Context, w: Tensor, x: Tensor) -> Tensor:
    """out[n, m] = sum over k of w[k, n] * x[k, m]: rows of w times rows of x.

    w: [k, n, a2, a3] in any format with whole rows; x: float32 [k, m, b2, b3], where b2 and b3 are multiples of a2 and
    a3 (grouped heads share a matrix). Returns float32 [n, m, b2, b3].
    """
    need(w.ne[0] == x.ne[0], "MUL_MAT", "rows differ in length", w, x)
    need(x.ne[2] % w.ne[2] == 0 and x.ne[3] % w.ne[3] == 0, "MUL_MAT", "matrices do not repeat", w, x)
    need(w.nb[0] == w.format.type_size and x.is_float_rows, "MUL_MAT", "whole rows, float32 activations", w, x)
    return node(ctx, "MUL_MAT", F32, (w.ne[1], *x.ne[1:]), (w, x))


def tile_rows(n: int, threads: int) -> int:
    """Rows of the weight in one unit of work: at most TILE, and some units for every thread."""
    share = -(-n // (2 * threads))
    return max(16, min(TILE, -(-share // 16) * 16))


def _mul_mat(n: Tensor) -> np.ndarray:
    w, x = (values(s) for s in n.src)
    w = np.repeat(np.repeat(w, x.shape[1] // w.shape[1], 1), x.shape[0] // w.shape[0], 0)
    return np.matmul(x, w.swapaxes(-1, -2))


def _scratch(n: Tensor, threads: int) -> int:
    w = n.src[0]
    if w.format is F32:
        return 0
    rows = 1 if n.n_rows == 1 else tile_rows(w.ne[1], threads)
    return threads * rows * w.ne[0] * 4


OPS = (Op("MUL_MAT", _mul_mat, "engine.kernels.matmul:mul_mat", scratch=_scratch),)
