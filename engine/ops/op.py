"""What an op is: its NumPy definition, and what allocator and backends need to know about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engine.context import Context
from engine.errors import EngineError
from engine.tensor import MAX_PARAMS, MAX_SRC, Tensor
from quant import FORMATS, Format

F32, F16, I32, I64 = (FORMATS[name] for name in ("F32", "F16", "I32", "I64"))


@dataclass(frozen=True)
class Op:
    """One row of the table.

    reference: node -> array of the node's shape, from its sources' data: the op's definition; None for ops that only
    make another header (`empty`). An op whose node writes into another tensor (`store`) has the definition write.
    kernel: `module:function`; the function is a kernel, or makes one for the node (see `engine/kernels/node.py`).
    covers: node -> does the kernel handle these formats and layouts? Elsewhere the definition runs.
    inplace: the result may overwrite a source of the same layout.
    scratch: (node, threads) -> bytes of shared scratch memory.
    label: node -> its variant, for people to read.
    """

    name: str
    reference: Callable[[Tensor], np.ndarray] | None
    kernel: str | None = None
    inplace: bool = False
    scratch: Callable[[Tensor, int], int] | None = None
    covers: Callable[[Tensor], bool] | None = None
    store: bool = False
    label: Callable[[Tensor], str] | None = None

    @property
    def empty(self) -> bool:
        return self.reference is None


def node(
    ctx: Context,
    op: str,
    format: Format,
    ne: tuple[int, ...],
    src: tuple[Tensor | None, ...],
    params: tuple = (),
    name: str = "",
    into: Tensor | None = None,
) -> Tensor:
    """A new header with an op. Nothing is computed.

    params: at most 16 numbers; into: the tensor whose memory the result uses (a store, or an in-place variant).
    """
    assert len(src) <= MAX_SRC, op
    assert len(params) <= MAX_PARAMS, op
    tensor = Tensor(format, ne, into.nb if into is not None else None, name=name)
    if into is not None:
        tensor.view_of(into)
    tensor.op, tensor.src, tensor.params = op, src, params
    return ctx.add(tensor)


def values(tensor: Tensor) -> np.ndarray:
    """The tensor's data as numbers of its shape: float32, or integers."""
    from quant.quantize import dequantize_blocks

    array = tensor.array()
    if tensor.format.name in ("F32", "I32", "I64"):
        return array
    if tensor.format.name == "F16":
        return array.astype(np.float32)
    rows = np.ascontiguousarray(array).reshape(-1, array.shape[-1])
    return dequantize_blocks(rows, tensor.format, 1).reshape(tensor.shape)


def encoded(x: np.ndarray, format: Format) -> np.ndarray:
    """Numbers as data of `format`, in the shape of `Tensor.array`: the inverse of `values`."""
    from quant.quantize import quantize

    if format.name == "F32":
        return np.asarray(x, np.float32)
    if format.name in ("I32", "I64"):
        return np.trunc(x).astype(np.dtype(f"<i{format.type_size}"))
    if format.name == "F16":
        with np.errstate(over="ignore"):
            return np.asarray(x, np.float32).astype(np.float16)
    rows = np.ascontiguousarray(x, np.float32).reshape(-1, x.shape[-1])
    return quantize(rows, format, threads=1).view(format.block).reshape(*x.shape[:-1], -1)


def need(condition: bool, op: str, message: str, *tensors: Tensor) -> None:
    """Check what a builder asks of its sources. Raises EngineError naming op and shapes."""
    if not condition:
        shapes = ", ".join(f"{t.name or '?'} {t.format} {list(t.ne)}" for t in tensors)
        raise EngineError(f"{op}: {message}: {shapes}")


def need_rows(op: str, *tensors: Tensor | None) -> None:
    """Every tensor that is there must have rows of adjacent float32."""
    there = [t for t in tensors if t is not None]
    need(all(t.is_float_rows for t in there), op, "float32 rows only", *there)


def repeats(small: Tensor, large: Tensor) -> bool:
    """Can the first be repeated along every axis to the second's shape?"""
    return all(n % m == 0 for n, m in zip(large.ne, small.ne))


def repeated(b: Tensor, like: Tensor) -> np.ndarray:
    """The values of `b`, repeated to the shape of `like`."""
    return np.tile(values(b), [n // m for n, m in zip(like.shape, b.shape)])
