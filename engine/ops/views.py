"""Other headers for the same memory (RESHAPE, VIEW, PERMUTE, TRANSPOSE), and CONT, which copies."""

from __future__ import annotations

import numpy as np

from engine.context import Context
from engine.ops.op import F32, Op, need, node, values
from engine.tensor import Tensor, strides


def _view(
    ctx: Context, op: str, a: Tensor, ne: tuple[int, ...], nb: tuple[int, ...], offset: int = 0, params: tuple = ()
) -> Tensor:
    tensor = ctx.add(Tensor(a.format, ne, nb))
    tensor.op, tensor.src, tensor.params = op, (a,), params
    tensor.view_src = a.view_src or a
    tensor.view_offs = offset + a.view_offs
    return tensor


def reshape(ctx: Context, a: Tensor, *ne: int) -> Tensor:
    """The same elements under other axes; `a` must be contiguous."""
    ne = (*ne, *[1] * (4 - len(ne)))
    need(a.is_contiguous and int(np.prod(ne)) == a.n_elements, "RESHAPE", f"cannot become {list(ne)}", a)
    return _view(ctx, "RESHAPE", a, ne, strides(a.format, ne))


def view(ctx: Context, a: Tensor, ne: tuple[int, ...], nb: tuple[int, ...], offset: int = 0) -> Tensor:
    """A window into `a`: `ne` elements, byte strides `nb` of axes 1 to 3, from byte `offset`."""
    ne = (*ne, *[1] * (4 - len(ne)))
    full = [a.nb[0], *nb]
    while len(full) < 4:
        full.append(full[-1] * ne[len(full) - 1])
    tensor = _view(ctx, "VIEW", a, ne, tuple(full), offset, (offset,))
    need(
        offset >= 0 and offset + tensor.nbytes <= a.nbytes, "VIEW", f"{list(ne)} at byte {offset} leaves the tensor", a
    )
    return tensor


def permute(ctx: Context, a: Tensor, *axes: int) -> Tensor:
    """Axis i of `a` becomes axis `axes[i]`."""
    need(sorted(axes) == [0, 1, 2, 3], "PERMUTE", f"axes {axes} are no order of 0..3", a)
    need(a.format.block_size == 1 or axes[0] == 0, "PERMUTE", "blocks lie along axis 0", a)
    ne, nb = [0] * 4, [0] * 4
    for i, axis in enumerate(axes):
        ne[axis], nb[axis] = a.ne[i], a.nb[i]
    return _view(ctx, "PERMUTE", a, tuple(ne), tuple(nb), params=axes)


def transpose(ctx: Context, a: Tensor) -> Tensor:
    """Swap axes 0 and 1."""
    need(a.format.block_size == 1, "TRANSPOSE", "blocks lie along axis 0", a)
    ne, nb = (a.ne[1], a.ne[0], *a.ne[2:]), (a.nb[1], a.nb[0], *a.nb[2:])
    return _view(ctx, "TRANSPOSE", a, ne, nb)


def cont(ctx: Context, a: Tensor) -> Tensor:
    """A contiguous copy of a float32 tensor."""
    need(a.format is F32, "CONT", "float32 only", a)
    return node(ctx, "CONT", F32, a.ne, (a,))


OPS = (
    Op("RESHAPE", None),
    Op("VIEW", None),
    Op("PERMUTE", None),
    Op("TRANSPOSE", None),
    Op("CONT", lambda n: values(n.src[0]), "engine.kernels.elementwise:cont"),
)
