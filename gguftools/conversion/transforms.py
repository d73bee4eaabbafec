"""What conversion does to tensors beyond changing their type, as views that are read piece by piece."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from engine.models.arch import Hparams
from gguftools.errors import GGUFError
from gguftools.safetensors import SafetensorView
from quant.formats import FORMATS

#: safetensors types that weights come in
SOURCE_TYPES = ("F32", "F16", "BF16", "F64")


@dataclass(frozen=True)
class Rows:
    """A tensor as rows along its last axis; a vector is rows of one element.

    name: where it comes from, for messages; dtype: one of SOURCE_TYPES; shape: of the tensor, NumPy order;
    data: [rows, n], over a memory map perhaps; order: None, or which row of `data` each row is.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray
    order: np.ndarray | None = None

    def read(self, lo: int, hi: int, threads: int | None = None) -> np.ndarray:
        """Rows lo to hi as a new float32 array [hi - lo, n]."""
        from quant.quantize import dequantize_blocks

        piece = self.data[lo:hi] if self.order is None else self.data[self.order[lo:hi]]
        if self.dtype in ("F16", "BF16"):
            fmt = FORMATS[self.dtype]
            return dequantize_blocks(np.require(piece, requirements=["A", "C"]).view(fmt.block), fmt, threads)
        with np.errstate(over="ignore"):  # the check for infinity that follows is ours
            return np.array(piece, np.float32, order="C")


def rows_of(view: SafetensorView) -> Rows:
    """A checkpoint's tensor. Raises GGUFError for types that are not weights."""
    if view.dtype not in SOURCE_TYPES:
        types = ", ".join(SOURCE_TYPES)
        raise GGUFError(f"{view.path}: tensor '{view.name}' is of type {view.dtype}; weights are {types}")
    n_rows = math.prod(view.shape[:-1]) if len(view.shape) > 1 else math.prod(view.shape)
    return Rows(view.name, view.dtype, view.shape, view.array().reshape(n_rows, -1 if n_rows else 1))


def permute_heads(rows: Rows, n_head: int) -> Rows:
    """From rotating halves of a head (checkpoints) to rotating neighbours (GGUF's llama): halves are interleaved."""
    n = len(rows.data)
    if n_head < 1 or n % (2 * n_head):
        raise GGUFError(f"tensor '{rows.name}': {n} rows cannot be {n_head} heads of an even size")
    return replace(rows, order=np.arange(n).reshape(n_head, 2, -1).swapaxes(1, 2).reshape(-1))


#: `TensorRow.transform` -> function
TRANSFORMS: dict[str, Callable[[Rows, Hparams], Rows]] = {
    "permute_heads_q": lambda rows, h: permute_heads(rows, h.n_head),
    "permute_heads_k": lambda rows, h: permute_heads(rows, h.n_head_kv),
}
