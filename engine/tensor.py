"""The tensor header: what a value is, where it lies, how it comes about. Data container and graph node in one.

`ne[i]` counts elements and `nb[i]` is the byte stride of axis i, axis 0 is the fastest; four axes always. NumPy's shape
and strides are the same numbers in reverse. A block format counts weights in `ne[0]` and bytes per block in `nb[0]`.
Nothing is computed here: a header with an op is a promise, and its data appear when a backend runs the graph.
"""

from __future__ import annotations

import math
from enum import IntFlag
from typing import Any

import numpy as np

from engine.errors import EngineError
from quant import Format

MAX_DIMS = 4
MAX_SRC = 10
MAX_PARAMS = 16  # numbers that an op may carry

#: Ops that compute nothing.
EMPTY_OPS = frozenset((None, "RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE"))

#: Formats that NumPy has as numbers.
DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}


class Flag(IntFlag):
    """INPUT: written by the caller before a run. OUTPUT: read after it, so never overwritten by a later node. PARAM:
    a leaf that a training step would change; it is listed among the nodes. LOSS: what such a step would lower (both
    are kept for their numbers: there is no training here). COMPUTE: on the chosen branch of the graph; others rest.
    """

    NONE = 0
    INPUT = 1
    OUTPUT = 2
    PARAM = 4
    LOSS = 8
    COMPUTE = 16


class Tensor:
    """A header. Made by `Context.tensor` and by the ops; see the module's docstring for the fields.

    `op` is None for a leaf. `params` are the op's scalars. `view_src` and `view_offs` (bytes) say whose memory a view
    uses; a view of a view points to the root at once. `buffer` is the uint8 memory that holds the data once it is
    bound, `offset` the place in it. `backend` names the backend that owns this memory; None is memory that all of them
    read (a file's map). What the header says of its shape never changes.
    """

    __slots__ = (
        *("backend", "buffer", "flags", "format", "name", "nb", "ne", "offset", "op", "params", "src", "view_offs"),
        "view_src",
    )

    def __init__(self, format: Format, ne: tuple[int, ...], nb: tuple[int, ...] | None = None, name: str = ""):
        self.format = format
        self.ne = tuple(ne) + (1,) * (MAX_DIMS - len(ne))
        self.nb = nb or strides(format, self.ne)
        self.name = name
        self.op: str | None = None
        self.params: tuple = ()
        self.src: tuple[Any, ...] = ()  # tensors, None where an optional source is absent
        self.flags = Flag.NONE
        self.view_src: Tensor | None = None
        self.view_offs = 0
        self.buffer: np.ndarray | None = None
        self.offset = 0
        self.backend: str | None = None

    def __repr__(self) -> str:
        return f"<{self.name or '?'} {self.op or 'leaf'} {self.format} {list(self.ne)}>"

    @property
    def shape(self) -> tuple[int, ...]:
        """NumPy's order: the last axis is contiguous."""
        return self.ne[::-1]

    @property
    def n_elements(self) -> int:
        return math.prod(self.ne)

    @property
    def n_rows(self) -> int:
        return self.ne[1] * self.ne[2] * self.ne[3]

    @property
    def nbytes(self) -> int:
        """Bytes from the first to behind the last element, strides included."""
        if not all(self.ne):
            return 0
        row = self.ne[0] // self.format.block_size
        return (
            self.format.type_size + (row - 1) * self.nb[0] + sum((n - 1) * b for n, b in zip(self.ne[1:], self.nb[1:]))
        )

    @property
    def is_contiguous(self) -> bool:
        return self.nb == strides(self.format, self.ne)

    @property
    def is_float_rows(self) -> bool:
        """Rows of adjacent float32: what most kernels ask for."""
        return self.format.name == "F32" and self.nb[0] == 4

    @property
    def has_rows(self) -> bool:
        """Elements or blocks of a row lie side by side."""
        return self.nb[0] == self.format.type_size

    @property
    def is_empty_op(self) -> bool:
        """Nothing to compute: a leaf, or another header for the same memory."""
        return self.op in EMPTY_OPS

    def view_of(self, other: Tensor, offset: int = 0) -> None:
        """Use the memory of `other` from byte `offset` on; a view of a view points to the root. Raises EngineError
        for a view that leaves it."""
        if offset < 0 or offset + self.nbytes > other.nbytes:
            raise EngineError(f"VIEW: {list(self.ne)} at byte {offset} leaves {other!r}")
        self.view_src = other.view_src or other
        self.view_offs = offset + other.view_offs

    def same_layout(self, other: Tensor) -> bool:
        return self.format is other.format and self.ne == other.ne and self.nb == other.nb

    def bind(self, buffer: np.ndarray, offset: int = 0) -> None:
        """Give the tensor its memory: a one-dimensional uint8 array and the place of the first byte in it."""
        assert buffer.dtype == np.uint8, self
        assert buffer.ndim == 1, self
        assert offset + self.nbytes <= buffer.size, (self, offset, buffer.size)
        self.buffer, self.offset = buffer, offset

    def raw(self) -> np.ndarray:
        """The bytes from the first to behind the last element."""
        assert self.buffer is not None, f"{self!r} has no memory yet"
        return self.buffer[self.offset : self.offset + self.nbytes]

    @property
    def address(self) -> int:
        """Machine address of the first byte."""
        assert self.buffer is not None, f"{self!r} has no memory yet"
        return self.buffer.ctypes.data + self.offset

    def array(self) -> np.ndarray:
        """The data as a NumPy view, numbers or blocks, in NumPy's order and with the tensor's strides."""
        assert self.buffer is not None, f"{self!r} has no memory yet"
        dtype: np.dtype = DTYPES.get(self.format.name) or self.format.block
        shape = (*self.ne[:0:-1], self.ne[0] // self.format.block_size)
        return np.ndarray(shape, dtype, self.buffer, self.offset, self.nb[::-1])


def strides(format: Format, ne: tuple[int, ...]) -> tuple[int, ...]:
    """Byte strides of a contiguous tensor. Raises EngineError when a row is not a whole number of blocks."""
    if ne[0] % format.block_size:
        raise EngineError(f"row length {ne[0]} is not a multiple of {format.block_size} ({format}'s block)")
    nb = [format.type_size, format.type_size * (ne[0] // format.block_size)]
    for n in ne[1:-1]:
        nb.append(nb[-1] * n)
    return tuple(nb)
