"""The weights of a model in whatever it is stored: GGUF (one file or a set), a safetensors file, or a Hugging Face
folder, whose names and layout are brought to GGUF's by the rows of its family."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gguftools.errors import GGUFError
from gguftools.gguf import TensorView
from gguftools.gguf.endian import LITTLE
from gguftools.toolbox.shards import open_set
from quant.errors import QuantError
from quant.format import Format

ROWS = 1 << 22  # weights that are held as float32 at a time


@dataclass(frozen=True)
class Tensor:
    """One tensor; type: name of its format or safetensors dtype; rows: (lo, hi, threads) -> float32 [hi - lo, n];
    n_rows; view: the `TensorView` of one from a GGUF file, else None."""

    name: str
    shape: tuple[int, ...]
    type: str
    n_rows: int
    rows: Callable[[int, int, int | None], np.ndarray]
    view: TensorView | None = None

    @property
    def n(self) -> int:
        """Weights of a row; a vector is one row."""
        return math.prod(self.shape) // self.n_rows if self.n_rows else 0


@dataclass(frozen=True)
class Weights:
    """A model: its metadata (empty where the store has none) and tensors by GGUF's names, or by its own."""

    path: Path
    kind: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


@contextmanager
def open_weights(path: str | os.PathLike) -> Iterator[Weights]:
    """Open a model. Raises GGUFError and EngineError for one that cannot be read or whose family is not known."""
    path = Path(path)
    if path.is_dir():
        yield _folder(path)
        return
    if is_safetensors(path):
        from gguftools.safetensors import SafetensorsFile

        with SafetensorsFile(path) as f:
            yield Weights(
                path, "safetensors", dict(f.metadata), {name: _plain(view) for name, view in f.tensors.items()}
            )
        return
    with open_set(path) as model:
        tensors = {name: _blocks(view) for name, view in model.tensors.items()}
        yield Weights(path, "GGUF", model.metadata, tensors)


def is_safetensors(path: Path) -> bool:
    """Whether the file begins as one: a length, then JSON."""
    try:
        with path.open("rb") as file:
            return file.read(9)[8:] == b"{"
    except OSError:
        return False


def _blocks(view: TensorView) -> Tensor:
    n = view.ne[0] if view.ne else 1
    n_rows = view.size // n if n else 0
    return Tensor(
        view.name, view.shape, view.format.name, n_rows, lambda lo, hi, t: rows_of_view(view, lo, hi, t), view
    )


def rows_of_view(view: TensorView, lo: int, hi: int, threads: int | None = None) -> np.ndarray:
    """Rows lo to hi of a GGUF tensor as float32. Raises QuantError for a type that cannot be computed with."""
    from quant.quantize import dequantize_blocks

    fmt = view.format
    if fmt.module is None and fmt.name in _INTEGERS:
        return block_rows(view, lo, hi).view(_INTEGERS[fmt.name]).astype(np.float32)
    return dequantize_blocks(block_rows(view, lo, hi).view(fmt.block), fmt, threads)


_INTEGERS = {"I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}


def block_rows(view: TensorView, lo: int, hi: int) -> np.ndarray:
    """Bytes of rows lo to hi, little-endian, uint8 [hi - lo, row bytes]."""
    from gguftools.gguf.endian import swapped

    size = row_bytes(view.format, view.ne[0] if view.ne else 1)
    raw = view.raw[lo * size : hi * size]
    return (raw if view.order == LITTLE else swapped(raw, view.format)).reshape(hi - lo, size)


def row_bytes(fmt: Format, n: int) -> int:
    return n // fmt.block_size * fmt.type_size


def _plain(view: Any) -> Tensor:
    """A tensor of a safetensors file, under its own name."""
    n = view.shape[-1] if view.shape else 1
    n_rows = math.prod(view.shape) // n if n else 0

    def rows(lo: int, hi: int, threads: int | None) -> np.ndarray:
        from gguftools.conversion.transforms import rows_of

        source = rows_of(view)
        if (source.n_rows, source.n) == (n_rows, n):
            return source.read(lo, hi, threads)
        return source.read(lo * n, hi * n, threads).reshape(hi - lo, n)  # a vector, whose rows are its elements there

    return Tensor(view.name, view.shape, view.dtype, n_rows, rows)


def _folder(path: Path) -> Weights:
    from gguftools.conversion.run import plan

    conversion = plan(path)
    tensors = {item.name: _converted(item.name, item.rows) for item in conversion.items}
    return Weights(path, "Hugging Face folder", dict(conversion.keys), tensors)


def _converted(name: str, source: Any) -> Tensor:
    n_rows = source.n_rows
    if len(source.shape) < 2:  # rows of one element: one row of all
        return Tensor(
            name, source.shape, source.dtype, 1, lambda lo, hi, t: source.read(0, n_rows, t).reshape(1, -1)[lo:hi]
        )
    return Tensor(name, source.shape, source.dtype, n_rows, source.read)


def pairs(a: Tensor, b: Tensor, threads: int | None = None) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(first row, rows of a, rows of b) of two tensors of one shape, piece by piece, float32.

    Raises QuantError for types that cannot be computed with, GGUFError for safetensors types that are no weights.
    """
    if a.shape != b.shape:
        raise QuantError(f"{a.name}: shapes {a.shape} and {b.shape} differ")
    step = max(1, ROWS // max(1, a.n))
    for lo in range(0, a.n_rows, step):
        hi = min(a.n_rows, lo + step)
        yield lo, a.rows(lo, hi, threads), b.rows(lo, hi, threads)


def rename_for(path: Path, weights: Weights, other: Weights) -> Weights:
    """A lone safetensors file beside its config.json, when the other model is named as GGUF is: the folder's mapping.

    Raises GGUFError where there is no config.json to map by.
    """
    if weights.kind != "safetensors" or other.kind == "safetensors":
        return weights
    if not (path.parent / "config.json").is_file():
        raise GGUFError(f"{path}: no config.json beside it, so its names cannot be mapped; name the model's folder")
    return _folder(path.parent)
