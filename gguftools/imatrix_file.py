"""Importance matrices as files: GGUF with raw sums and counts per weight, as llama.cpp's imatrix tool writes them.

Per weight `W` of n columns: `W.in_sum2` float32 [n_mat, n] (sums of squares), `W.counts` float32 [n_mat, 1], and where
known `W.in_sum` (plain sums). Keys: imatrix.datasets, imatrix.chunk_count, imatrix.chunk_size.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from gguftools.errors import GGUFError
from gguftools.gguf.reader import GGUF, TensorView
from gguftools.gguf.writer import Writer
from quant.imatrix import Entry, IMatrix

_SQUARES, _SUMS, _COUNTS = ".in_sum2", ".in_sum", ".counts"


def write_imatrix(path: str | os.PathLike, imatrix: IMatrix, inputs: Iterable[str | os.PathLike] = ()) -> None:
    """Write the matrix. Raises GGUFError if the file cannot be written or is one of `inputs`."""
    with Writer(path, inputs) as w:
        w.add("general.type", "imatrix")
        w.add("imatrix.datasets", imatrix.datasets, "string")
        w.add("imatrix.chunk_count", imatrix.chunk_count, "uint32")
        w.add("imatrix.chunk_size", imatrix.chunk_size, "uint32")
        parts: dict[str, np.ndarray] = {}
        for name in sorted(imatrix.entries):
            entry = imatrix.entries[name]
            if entry.sums is not None:
                parts[name + _SUMS] = entry.sums
            parts[name + _SQUARES] = entry.squares
            parts[name + _COUNTS] = entry.counts[:, None]
        for name, values in parts.items():
            w.declare(name, values.shape, "F32")
        for name, values in parts.items():
            w.write(name, np.ascontiguousarray(values, np.float32))


def read_imatrix(path: str | os.PathLike) -> IMatrix:
    """Read a matrix. Raises GGUFError for a file that is damaged, of another kind, or holding NaN or infinities."""
    path = Path(path)
    with GGUF(path) as f:
        kind = f.metadata.get("general.type")
        if kind != "imatrix":
            raise GGUFError(f"{path}: holds {kind!r}, not an importance matrix; make one with `gguftools imatrix`")
        names = [name.removesuffix(_SQUARES) for name in f.tensors if name.endswith(_SQUARES)]
        if not names:
            raise GGUFError(f"{path}: the importance matrix has no entries; collect it again")
        imatrix = IMatrix(
            datasets=[str(d) for d in f.metadata.get("imatrix.datasets", ())],
            chunk_count=_count(path, f.metadata.get("imatrix.chunk_count", 0)),
            chunk_size=_count(path, f.metadata.get("imatrix.chunk_size", 0)),
        )
        for name in names:
            imatrix.entries[name] = _entry(path, name, f.tensors)
    return imatrix


def _entry(path: Path, name: str, tensors) -> Entry:
    squares = _values(path, tensors[name + _SQUARES])
    if name + _COUNTS not in tensors:
        raise GGUFError(f"{path}: '{name}' has sums but no counts: the file is damaged, collect it again")
    counts = _values(path, tensors[name + _COUNTS])
    sums = _values(path, tensors[name + _SUMS]) if name + _SUMS in tensors else None
    if counts.shape != (len(squares), 1) or (sums is not None and sums.shape != squares.shape):
        raise GGUFError(f"{path}: '{name}' has sums and counts that do not fit: the file is damaged, collect it again")
    if (squares < 0).any() or (counts < 0).any():
        raise GGUFError(
            f"{path}: '{name}' has negative sums of squares or counts: the file is damaged, collect it again"
        )
    return Entry(squares, np.rint(counts[:, 0]).astype(np.int64), sums)


def _values(path: Path, view: TensorView) -> np.ndarray:
    """float64 [n_mat, n]."""
    if view.format.name != "F32" or not view.shape or view.size == 0:
        raise GGUFError(
            f"{path}: '{view.name}' is {view.format} {list(view.shape)}, expected F32 rows: the file is damaged"
        )
    values = view.data.view("<f4").reshape(-1, view.shape[-1]).astype(np.float64)
    if not np.isfinite(values).all():
        raise GGUFError(f"{path}: '{view.name}' holds values that are not finite; collect the importance matrix again")
    return values


def _count(path: Path, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise GGUFError(f"{path}: chunk count or size is {value!r}, expected a whole number: the file is damaged")
    return value
