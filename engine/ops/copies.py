"""Copies, and ops that only move elements: CPY, DUP, CONT, REPEAT, CONCAT, PAD, TRI, DIAG_MASK_INF.

A copy may change the format on the way, also to and from block formats; rows of blocks stay whole.
"""

from __future__ import annotations

import math

import numpy as np

from engine.context import Context
from engine.ops.op import F32, Op, encoded, need, need_rows, node, repeated, repeats, values
from engine.tensor import Tensor
from quant import Format

_NUMBERS = ("F32", "F16", "BF16", "I32", "I64")


def _convertible(a: Format, b: Format) -> bool:
    return a is b or all(f.name in _NUMBERS or f.module is not None for f in (a, b))


def cast(ctx: Context, a: Tensor, format: Format) -> Tensor:
    """A contiguous copy in another format. Raises EngineError where rows are no whole number of blocks."""
    need(_convertible(a.format, format), "CPY", f"cannot become {format}", a)
    need(a.ne[0] % format.block_size == 0, "CPY", f"rows are no whole blocks of {format}", a)
    return node(ctx, "CPY", format, a.ne, (a, None))


def cpy(ctx: Context, a: Tensor, b: Tensor) -> Tensor:
    """Write the elements of `a`, in their order, into `b`, whatever the shapes and formats of both. Returns a view of
    b."""
    need(a.n_elements == b.n_elements, "CPY", "different numbers of elements", a, b)
    need(_convertible(a.format, b.format), "CPY", "formats do not convert", a, b)
    piece = math.gcd(a.ne[0], b.ne[0])
    need(piece % a.format.block_size == 0 and piece % b.format.block_size == 0, "CPY", "blocks would be cut", a, b)
    return node(ctx, "CPY", b.format, b.ne, (a, b), into=b)


def dup(ctx: Context, a: Tensor) -> Tensor:
    """A copy of the same format, contiguous."""
    return node(ctx, "DUP", a.format, a.ne, (a,))


def cont(ctx: Context, a: Tensor) -> Tensor:
    """A contiguous copy: what a kernel needs that cannot follow strides."""
    return node(ctx, "CONT", a.format, a.ne, (a,))


def repeat(ctx: Context, a: Tensor, *ne: int) -> Tensor:
    """`a` repeated along every axis up to `ne`."""
    need_rows("REPEAT", a)
    shape = Tensor(F32, ne)
    need(repeats(a, shape), "REPEAT", f"does not repeat to {list(shape.ne)}", a)
    return node(ctx, "REPEAT", F32, shape.ne, (a,))


def concat(ctx: Context, a: Tensor, b: Tensor, axis: int) -> Tensor:
    """`b` behind `a` along an axis; the other axes are equal."""
    need_rows("CONCAT", a, b)
    need(0 <= axis < 4, "CONCAT", f"no axis {axis}", a, b)
    need(all(i == axis or a.ne[i] == b.ne[i] for i in range(4)), "CONCAT", f"differ beside axis {axis}", a, b)
    ne = tuple(n + m if i == axis else n for i, (n, m) in enumerate(zip(a.ne, b.ne)))
    return node(ctx, "CONCAT", F32, ne, (a, b), (axis,))


def pad(ctx: Context, a: Tensor, *behind: int, before: tuple[int, ...] = ()) -> Tensor:
    """Zeros behind `a` along axes 0.. (and in front of it)."""
    need_rows("PAD", a)
    behind = (*behind, *[0] * (4 - len(behind)))
    before = (*before, *[0] * (4 - len(before)))
    need(min(*behind, *before) >= 0, "PAD", "negative width", a)
    ne = tuple(n + x + y for n, x, y in zip(a.ne, before, behind))
    return node(ctx, "PAD", F32, ne, (a,), before)


def tri(ctx: Context, a: Tensor, lower: bool = True, diagonal: bool = True) -> Tensor:
    """Square matrices with zeros above the diagonal (`lower`), or below it; `diagonal` keeps the diagonal itself."""
    need_rows("TRI", a)
    need(a.ne[0] == a.ne[1], "TRI", "square matrices", a)
    return node(ctx, "TRI", F32, a.ne, (a,), (int(lower), int(diagonal)))


def diag_mask_inf(ctx: Context, a: Tensor, past: int) -> Tensor:
    """-infinity where column > row + past: what a token must not see."""
    need_rows("DIAG_MASK_INF", a)
    need(past >= 0, "DIAG_MASK_INF", f"negative past {past}", a)
    return node(ctx, "DIAG_MASK_INF", F32, a.ne, (a,), (int(past),))


def _copy(n: Tensor) -> np.ndarray:
    a = n.src[0]
    if a.format is n.format and a.ne == n.ne:
        return a.array()
    return encoded(values(a).reshape(n.shape), n.format)


def _pad(n: Tensor) -> np.ndarray:
    a = values(n.src[0])
    widths = [(x, out - x - size) for x, out, size in zip(n.params[::-1], n.shape, a.shape)]
    return np.pad(a, widths)


def _tri(n: Tensor) -> np.ndarray:
    lower, diagonal = n.params
    x = values(n.src[0])
    return np.tril(x, 0 if diagonal else -1) if lower else np.triu(x, 0 if diagonal else 1)


def _diag_mask_inf(n: Tensor) -> np.ndarray:
    x = values(n.src[0])
    column, row = np.arange(x.shape[-1]), np.arange(x.shape[-2])[:, None]
    return np.where(column > row + n.params[0], np.float32(-np.inf), x)


def _copy_covered(n: Tensor) -> bool:
    """Elements of plain numbers anywhere; rows of blocks side by side, to or from float32."""
    a, b = n.src[0].format, n.format
    if a is b:
        return a.block_size == 1 or (n.src[0].has_rows and n.has_rows)
    if a.name not in ("F32", "F16", "BF16", "I32", "I64") and b.name != "F32":
        return False
    if a.block_size > 1 and not n.src[0].has_rows:
        return False
    if b.block_size > 1:
        return n.has_rows and b.module is not None and b.kernels.quantize is not None and b.tables == ()
    return True


def _copy_scratch(n: Tensor, threads: int) -> int:
    a = n.src[0]
    if a.format is n.format:
        return 0
    return threads * (4 * math.gcd(a.ne[0], n.ne[0]) + 64)


def _copying(name: str) -> Op:
    kernel = "engine.kernels.copies:copy"
    return Op(name, _copy, kernel, scratch=_copy_scratch, covers=_copy_covered)


_KERNELS = "engine.kernels.copies:"

OPS = (
    _copying("CPY"),
    _copying("DUP"),
    _copying("CONT"),
    Op("REPEAT", lambda n: repeated(n.src[0], n), _KERNELS + "repeat"),
    Op("CONCAT", lambda n: np.concatenate([values(s) for s in n.src], axis=3 - n.params[0]), _KERNELS + "concat"),
    Op("PAD", _pad, _KERNELS + "pad"),
    Op("TRI", _tri, _KERNELS + "tri"),
    Op("DIAG_MASK_INF", _diag_mask_inf, _KERNELS + "diag_mask_inf", inplace=True),
)
