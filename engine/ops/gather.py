"""Rows by index: GET_ROWS decodes them on the way, SET_ROWS encodes."""

from __future__ import annotations

import numpy as np

from engine.context import Context
from engine.ops.op import F32, I32, I64, Op, encoded, need, node, values
from engine.tensor import Tensor


def get_rows(ctx: Context, a: Tensor, rows: Tensor) -> Tensor:
    """out[:, i, j, l] = a[:, rows[i, j, l], j, l] as float32 (I32 stays I32).

    a: any format with whole rows, [n, n_rows, b2, b3]; rows: I32 [m, b2, b3], each below a's number of rows (whoever
    fills `rows` sees to that: kernels do not check).
    """
    need(a.has_rows, "GET_ROWS", "whole rows", a)
    need(rows.format is I32 and rows.nb[0] == 4 and rows.ne[3] == 1, "GET_ROWS", "I32 indices", rows)
    need(a.ne[2:] == rows.ne[1:3], "GET_ROWS", "one list of indices for each matrix", a, rows)
    format = I32 if a.format is I32 else F32
    return node(ctx, "GET_ROWS", format, (a.ne[0], *rows.ne[:3]), (a, rows))


def set_rows(ctx: Context, a: Tensor, values: Tensor, rows: Tensor) -> Tensor:
    """a[:, rows[i, j, l], j, l] = values[:, i, j, l], encoded in a's format. Returns a view of `a`.

    a: any format that can be written, [n, n_rows, b2, b3]; values: float32 [n, m, b2, b3]; rows: I64 or I32 [m, c2,
    c3], where c2 and c3 divide b2 and b3; each below a's number of rows, and none twice.
    """
    need(a.has_rows and values.is_float_rows, "SET_ROWS", "whole rows, float32 values", a, values)
    need(rows.format in (I32, I64) and rows.has_rows and rows.ne[3] == 1, "SET_ROWS", "I64 or I32 indices", rows)
    need(a.ne[0] == values.ne[0] and a.ne[2:] == values.ne[2:], "SET_ROWS", "rows do not fit", a, values)
    need(values.ne[1] == rows.ne[0], "SET_ROWS", "one index a row", values, rows)
    fits = values.ne[2] % rows.ne[1] == 0 and values.ne[3] % rows.ne[2] == 0
    need(fits, "SET_ROWS", "indices do not repeat", values, rows)
    return node(ctx, "SET_ROWS", a.format, a.ne, (values, rows, a), into=a)


def _get_rows(n: Tensor) -> np.ndarray:
    a, rows = n.src
    array, index = a.array(), values(rows)[0]
    picked = np.empty((*n.shape[:3], array.shape[-1]), array.dtype)
    for j in np.ndindex(picked.shape[:2]):
        picked[j] = array[j][index[j]]
    out = Tensor(a.format, n.ne)
    out.bind(picked.view(np.uint8).reshape(-1))
    return values(out)


def _set_rows(n: Tensor) -> np.ndarray:
    new, rows, _ = n.src
    out, index = n.array(), values(rows)[0]
    blocks = encoded(values(new), n.format)
    for i3, i2 in np.ndindex(out.shape[:2]):
        out[i3, i2, index[i3 % index.shape[0], i2 % index.shape[1]]] = blocks[i3, i2]
    return out


def _set_covered(n: Tensor) -> bool:
    return n.format.module is not None and n.format.kernels.quantize is not None and n.format.tables == ()


OPS = (
    Op("GET_ROWS", _get_rows, "engine.kernels.gather:get_rows"),
    Op("SET_ROWS", _set_rows, "engine.kernels.gather:set_rows", covers=_set_covered, store=True),
)
