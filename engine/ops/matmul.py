"""Products of weight matrices, in any format, with float32 activations: MUL_MAT, and MUL_MAT_ID for experts."""

from __future__ import annotations

import numpy as np

from engine.context import Context
from engine.ops.op import F32, I32, Op, need, node, values
from engine.tensor import Tensor

TILE = 256  # rows of the weight that are decoded at a time, at most
ROWS = 64  # activation rows of one expert that are gathered at a time


def mul_mat(ctx: Context, w: Tensor, x: Tensor) -> Tensor:
    """out[n, m] = sum over k of w[k, n] * x[k, m]: rows of w times rows of x.

    w: [k, n, a2, a3] in any format with whole rows; x: float32 [k, m, b2, b3], where b2 and b3 are multiples of a2 and
    a3 (grouped heads share a matrix). Returns float32 [n, m, b2, b3].
    """
    need(w.ne[0] == x.ne[0], "MUL_MAT", "rows differ in length", w, x)
    need(x.ne[2] % w.ne[2] == 0 and x.ne[3] % w.ne[3] == 0, "MUL_MAT", "matrices do not repeat", w, x)
    need(w.has_rows and x.is_float_rows, "MUL_MAT", "whole rows, float32 activations", w, x)
    return node(ctx, "MUL_MAT", F32, (w.ne[1], *x.ne[1:]), (w, x))


def mul_mat_id(ctx: Context, w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    """out[:, i, t] = w[:, :, ids[i, t]] x[:, i % m, t]: each row goes through the expert that was chosen for it.

    w: [k, n, n_expert] in any format with whole rows; x: float32 [k, m, n_tokens] with m a divisor of n_used;
    ids: I32 [n_used, n_tokens], 0 to n_expert - 1 (a row with another id gives zeros).
    Returns float32 [n, n_used, n_tokens].
    """
    need(w.has_rows and x.is_float_rows, "MUL_MAT_ID", "whole rows, float32 activations", w, x)
    need(ids.format is I32 and ids.nb[0] == 4, "MUL_MAT_ID", "I32 ids", ids)
    need(w.ne[0] == x.ne[0] and w.ne[3] == x.ne[3] == 1, "MUL_MAT_ID", "rows differ in length", w, x)
    need(ids.ne[1] == x.ne[2] and ids.ne[2] == ids.ne[3] == 1, "MUL_MAT_ID", "one list of experts a token", x, ids)
    need(ids.ne[0] % x.ne[1] == 0, "MUL_MAT_ID", "rows do not repeat to the experts", x, ids)
    return node(ctx, "MUL_MAT_ID", F32, (w.ne[1], ids.ne[0], x.ne[2]), (w, x, ids))


def tile_rows(n: int, threads: int) -> int:
    """Rows of the weight in one unit of work: at most TILE, and some units for every thread."""
    share = -(-n // (2 * threads))
    return max(16, min(TILE, -(-share // 16) * 16))


def _mul_mat(n: Tensor) -> np.ndarray:
    w, x = (values(s) for s in n.src)
    w = np.repeat(np.repeat(w, x.shape[1] // w.shape[1], 1), x.shape[0] // w.shape[0], 0)
    return np.matmul(x, w.swapaxes(-1, -2))


def _mul_mat_id(n: Tensor) -> np.ndarray:
    w, x, ids = (values(s)[0] for s in n.src)
    out = np.zeros(n.shape, np.float32)
    for token, used in np.ndindex(*ids[0].shape):
        expert = ids[0, token, used]
        if 0 <= expert < len(w):
            out[0, token, used] = w[expert] @ x[token, used % x.shape[1]]
    return out


def _scratch(n: Tensor, threads: int) -> int:
    w = n.src[0]
    if w.format is F32:
        return 0
    rows = 1 if n.n_rows == 1 else tile_rows(w.ne[1], threads)
    return threads * rows * w.ne[0] * 4


def _scratch_id(n: Tensor, threads: int) -> int:
    """A decoded tile, gathered activations, their products, and the list of each expert's rows."""
    w, ids = n.src[0], n.src[2]
    tile = tile_rows(w.ne[1], threads)
    floats = (tile + ROWS) * w.ne[0] + ROWS * tile
    lists = w.ne[2] + 1 + ids.n_elements
    return threads * (4 * floats + 8 * lists + 64)


OPS = (
    Op("MUL_MAT", _mul_mat, "engine.kernels.matmul:mul_mat", scratch=_scratch),
    Op("MUL_MAT_ID", _mul_mat_id, "engine.kernels.matmul:mul_mat_id", scratch=_scratch_id),
)
