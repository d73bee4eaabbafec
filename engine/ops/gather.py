"""GET_ROWS: rows by index, decoded on the way."""

from __future__ import annotations

import numpy as np

from engine.context import Context
from engine.ops.op import F32, I32, Op, need, node, values
from engine.tensor import Tensor


def get_rows(ctx: Context, a: Tensor, rows: Tensor) -> Tensor:
    """out[:, i] = a[:, rows[i]] as float32. a: any format, a matrix; rows: I32 [n], each below a's number of rows
    (whoever fills `rows` sees to that: kernels do not check)."""
    need(a.ne[2] == a.ne[3] == 1 and a.nb[0] == a.format.type_size, "GET_ROWS", "a matrix with whole rows", a)
    need(rows.format is I32 and rows.n_rows == 1, "GET_ROWS", "a list of I32 indices", rows)
    return node(ctx, "GET_ROWS", F32, (a.ne[0], rows.ne[0]), (a, rows))


def _get_rows(n: Tensor) -> np.ndarray:
    a, rows = n.src
    picked = Tensor(a.format, (a.ne[0], rows.ne[0]))
    picked.bind(np.ascontiguousarray(a.array()[0, 0][values(rows)[0, 0, 0]]).view(np.uint8).reshape(-1))
    return values(picked)


OPS = (Op("GET_ROWS", _get_rows, "engine.kernels.gather:get_rows"),)
