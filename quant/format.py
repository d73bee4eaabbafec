"""What a tensor format is: a row of facts, and the module that holds its kernels.

The facts (`Format`) need no numba, so `inspect` and `--help` start quickly; the module (`quant/formats/<name>.py`) is
imported when a kernel or the block layout is first asked for.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from quant.errors import QuantError


@dataclass(frozen=True)
class Format:
    """One tensor type of GGUF.

    name: as in llama.cpp's presets (`Q4_K`); ggml_type: its number in the file; block_size: weights per block;
    type_size: bytes per block; module: file in `quant/formats` with the kernels, or None for types whose size is known
    but which we can only copy.

    A format module holds, in this order: `BLOCK` (the packed dtype of one block), the kernels `dequantize(b, y)`
    (block -> float32 [block_size]), `quantize(x, blocks)` and `quantize_weighted(x, w, blocks)` (one row: float32 [n],
    importance float32 [n], blocks [n / block_size]). A format that cannot be written without importance has
    `quantize = None`; one that ignores importance has `quantize_weighted = None`. A format that searches in tables too
    large to be compiled into its kernels also has `tables()`, a tuple of arrays, the last argument of both quantizers.
    """

    name: str
    ggml_type: int
    block_size: int
    type_size: int
    module: str | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def bpw(self) -> float:
        """Bits per weight."""
        return 8 * self.type_size / self.block_size

    @property
    def ggml_name(self) -> str:
        """The spelling of GGUF tools: `q4_K`, `iq2_xxs`, `f16`."""
        name = self.name.lower()
        return name[:-1] + "K" if name.endswith("_k") else name

    @property
    def is_quantized(self) -> bool:
        return self.block_size > 1

    @property
    def kernels(self) -> ModuleType:
        """The format's module. Raises QuantError where we have none."""
        if self.module is None:
            raise QuantError(f"{self.name}: this type can be listed and copied, but not computed with")
        return importlib.import_module(f"quant.formats.{self.module}")

    @property
    def block(self) -> np.dtype:
        """The dtype of one block in memory."""
        return self.kernels.BLOCK

    @property
    def tables(self) -> tuple[np.ndarray, ...]:
        """What the quantizers take as last argument, or () where they need no tables."""
        make = getattr(self.kernels, "tables", None)
        return make() if make else ()

    def row_size(self, n: int) -> int:
        """Bytes of a row of `n` weights. Raises QuantError when `n` is not a multiple of the block."""
        if n % self.block_size:
            raise QuantError(f"row length {n} is not a multiple of {self.block_size} ({self.name}'s block)")
        return n // self.block_size * self.type_size


def block_dtype(name: str, **fields) -> np.dtype:
    """Packed little-endian block of the format `name`: field -> dtype, or (dtype, shape).

    The title on the first field makes the dtype unique to the format (Q4_0 and IQ4_NL share a layout): numpy and
    numba then tell them apart, and kernels find the format of a block by it (`format_of`).
    """
    (first, first_type), *rest = fields.items()

    def row(key, kind):
        return (key, *kind) if isinstance(kind, tuple) else (key, kind)

    return np.dtype([row((name, first), first_type)] + [row(key, kind) for key, kind in rest])


def format_of(block: np.dtype) -> str:
    """Name of the format that a block dtype belongs to (see `block_dtype`)."""
    assert block.fields is not None
    first = block.fields[block.names[0]]  # type: ignore[index]
    return first[2]  # type: ignore[misc]
