"""What an op is: its NumPy definition, and what allocator and backends need to know about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engine.context import Context
from engine.errors import EngineError
from engine.tensor import Tensor
from quant import FORMATS, Format

F32, I32 = FORMATS["F32"], FORMATS["I32"]


@dataclass(frozen=True)
class Op:
    """One row of the table.

    reference: node -> float32 array of the node's shape, from its sources' data: the op's definition.
    kernel: `module:function`; the function takes the node and returns compiled code (see `engine/kernels/node.py`);
    None for ops that only make another header (`empty`).
    inplace: the result may overwrite a source of the same layout.
    scratch: (node, threads) -> bytes of shared scratch memory.
    """

    name: str
    reference: Callable[[Tensor], np.ndarray] | None
    kernel: str | None = None
    inplace: bool = False
    scratch: Callable[[Tensor, int], int] | None = None

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
) -> Tensor:
    """A new header with an op. Nothing is computed."""
    tensor = ctx.add(Tensor(format, ne, name=name))
    tensor.op, tensor.src, tensor.params = op, src, params
    return tensor


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


def need(condition: bool, op: str, message: str, *tensors: Tensor) -> None:
    """Check what a builder asks of its sources. Raises EngineError naming op and shapes."""
    if not condition:
        shapes = ", ".join(f"{t.name or '?'} {t.format} {list(t.ne)}" for t in tensors)
        raise EngineError(f"{op}: {message}: {shapes}")
