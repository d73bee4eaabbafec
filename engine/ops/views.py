"""Other headers for the same memory: RESHAPE, VIEW, PERMUTE, TRANSPOSE. They cost a header, and nothing at run time."""

from __future__ import annotations

import math

from engine.context import Context
from engine.ops.op import Op, need
from engine.tensor import Tensor, strides


def _view(
    ctx: Context, op: str, a: Tensor, ne: tuple[int, ...], nb: tuple[int, ...], offset: int = 0, params: tuple = ()
) -> Tensor:
    tensor = Tensor(a.format, ne, nb)
    tensor.view_of(a, offset)
    tensor.op, tensor.src, tensor.params = op, (a,), params
    return ctx.add(tensor)


def reshape(ctx: Context, a: Tensor, *ne: int) -> Tensor:
    """The same elements under other axes; `a` must be contiguous."""
    ne = (*ne, *[1] * (4 - len(ne)))
    need(a.is_contiguous and math.prod(ne) == a.n_elements, "RESHAPE", f"cannot become {list(ne)}", a)
    return _view(ctx, "RESHAPE", a, ne, strides(a.format, ne))


def view(ctx: Context, a: Tensor, ne: tuple[int, ...], nb: tuple[int, ...], offset: int = 0) -> Tensor:
    """A window into `a`: `ne` elements, byte strides `nb` of axes 1 to 3, from byte `offset`."""
    ne = (*ne, *[1] * (4 - len(ne)))
    row = a.nb[0] * (ne[0] // a.format.block_size)
    full = [a.nb[0], *(nb or (row,))]
    while len(full) < 4:
        full.append(full[-1] * ne[len(full) - 1])
    need(ne[0] % a.format.block_size == 0, "VIEW", f"a row of {ne[0]} is not whole blocks", a)
    need(min(ne) >= 0 and min(full) >= 0, "VIEW", f"negative size or stride in {list(ne)}, {full}", a)
    extent = Tensor(a.format, ne, tuple(full)).nbytes
    need(offset >= 0 and offset + extent <= a.nbytes, "VIEW", f"{list(ne)} at byte {offset} leaves the tensor", a)
    return _view(ctx, "VIEW", a, ne, tuple(full), offset, (offset,))


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


OPS = (Op("RESHAPE", None), Op("VIEW", None), Op("PERMUTE", None), Op("TRANSPOSE", None))
