"""Importance matrices as files, in both of llama.cpp's forms, told apart by what is in them.

GGUF, with raw sums and counts. Per weight `W` of n columns: `W.in_sum2` float32 [n_mat, n] (sums of squares),
`W.counts` float32 [n_mat, 1], where known `W.in_sum` (plain sums), and `W.stats`, twelve statistics
(`quant/imatrix_statistics.py`). Keys: imatrix.datasets, imatrix.chunk_count, imatrix.chunk_size, imatrix.stats_schema.
Ours, which others ignore: gguftools.imatrix.sha256 and .weights of the datasets, .sketch (`overlap.py`), .run
(`measure.py`: how far a run is).

The older `.dat`, little-endian: int32 n_entries; per entry int32 length, name, int32 calls, int32 n, float32 [n] of
mean squares times calls; then, optionally, int32 chunks, int32 length, name of the text.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gguftools.errors import GGUFError
from gguftools.files import atomic_output, map_file
from gguftools.gguf.reader import GGUF, MAGIC, TensorView
from gguftools.gguf.writer import Writer
from quant.imatrix import Entry, IMatrix
from quant.imatrix_statistics import SCHEMA, weight_statistics

FORMATS = ("gguf", "dat")

_SQUARES, _SUMS, _COUNTS, _STATS = ".in_sum2", ".in_sum", ".counts", ".stats"
_OURS = "gguftools.imatrix."
_DAMAGED = "the file is damaged, collect it again"
_MAX_COUNT = float(1 << 53)
_MAX_NAME = 4096  # bytes of a name in a .dat file


def write_imatrix(
    path: str | os.PathLike,
    imatrix: IMatrix,
    inputs: Iterable[str | os.PathLike] = (),
    format: str = "gguf",
    run: Mapping[str, Any] | None = None,
) -> None:
    """Write the matrix. run: how far its collection is, as JSON can hold it (GGUF only).

    Raises GGUFError if the file cannot be written or is one of `inputs`.
    """
    if format == "dat":
        _write_legacy(path, imatrix, inputs)
        return
    statistics = {s.name: s for s in weight_statistics(imatrix)}
    with Writer(path, inputs) as w:
        w.add("general.type", "imatrix")
        w.add("imatrix.datasets", imatrix.datasets, "string")
        w.add("imatrix.chunk_count", imatrix.chunk_count, "uint32")
        w.add("imatrix.chunk_size", imatrix.chunk_size, "uint32")
        w.add("imatrix.stats_schema", list(SCHEMA), "string")
        if imatrix.hashes:
            w.add(_OURS + "sha256", [imatrix.hashes.get(name, "") for name in imatrix.datasets], "string")
        if imatrix.weights:
            w.add(_OURS + "weights", [imatrix.weights.get(name, 1.0) for name in imatrix.datasets], "float32")
        if imatrix.sketch is not None:
            w.add(_OURS + "sketch", [int(v) for v in imatrix.sketch], "uint64")
        if run is not None:
            w.add(_OURS + "run", json.dumps(run), "string")
        parts: dict[str, np.ndarray] = {}
        for name in sorted(imatrix.entries):
            entry = imatrix.entries[name]
            parts[name + _SQUARES] = entry.squares
            parts[name + _COUNTS] = entry.counts[:, None]
            if entry.sums is not None:
                parts[name + _SUMS] = entry.sums
            if name in statistics:
                parts[name + _STATS] = np.array([getattr(statistics[name], field) for field in SCHEMA.values()])
        for name, values in parts.items():
            w.declare(name, values.shape, "F32")
        for name, values in parts.items():
            w.write(name, np.ascontiguousarray(values, np.float32))


def is_legacy(path: str | os.PathLike) -> bool:
    """Whether the file is not GGUF. Raises GGUFError if it cannot be read."""
    return bytes(map_file(Path(path))[:4]) != MAGIC


def read_imatrix(path: str | os.PathLike, chunk_size: int = 512) -> IMatrix:
    """Read a matrix of either form, whatever its name. chunk_size: tokens of a chunk, which the older form does not
    say.

    Raises GGUFError for a file that is damaged, of another kind, or holds values that are not finite.
    """
    path = Path(path)
    if is_legacy(path):
        return _read_legacy(path, chunk_size)
    with GGUF(path) as f:
        kind = f.metadata.get("general.type")
        if kind != "imatrix":
            raise GGUFError(f"{path}: holds {kind!r}, not an importance matrix; make one with `gguftools imatrix`")
        names = [name.removesuffix(_SQUARES) for name in f.tensors if name.endswith(_SQUARES)]
        if not names:
            raise GGUFError(f"{path}: the importance matrix has no entries; collect it again")
        datasets = _list(path, f.metadata, "imatrix.datasets", str)
        sketch = _list(path, f.metadata, _OURS + "sketch", int)
        imatrix = IMatrix(
            datasets=datasets,
            chunk_count=_count(path, f.metadata.get("imatrix.chunk_count", 0)),
            chunk_size=_count(path, f.metadata.get("imatrix.chunk_size", 0)),
            hashes={n: h for n, h in zip(datasets, _list(path, f.metadata, _OURS + "sha256", str)) if h},
            weights={n: w for n, w in zip(datasets, _list(path, f.metadata, _OURS + "weights", float)) if w != 1},
            sketch=np.array(sketch, np.uint64) if sketch else None,
        )
        for name in names:
            imatrix.entries[name] = _entry(path, name, f.tensors)
    return imatrix


def read_run(path: Path) -> dict[str, Any] | None:
    """How far the collection in this file was when it was saved; None where that is not known."""
    try:
        with GGUF(path) as f:
            run = json.loads(f.metadata[_OURS + "run"])
    except (GGUFError, KeyError, TypeError, ValueError):
        return None
    return run if isinstance(run, dict) else None


def _entry(path: Path, name: str, tensors: Mapping[str, TensorView]) -> Entry:
    squares = _values(path, tensors[name + _SQUARES])
    if name + _COUNTS not in tensors:
        raise GGUFError(f"{path}: '{name}' has sums but no counts: {_DAMAGED}")
    counts = _values(path, tensors[name + _COUNTS])
    sums = _values(path, tensors[name + _SUMS]) if name + _SUMS in tensors else None
    if counts.shape not in ((len(squares), 1), (1, 1)) or (sums is not None and sums.shape != squares.shape):
        raise GGUFError(f"{path}: '{name}' has sums and counts that do not fit: {_DAMAGED}")
    if (squares < 0).any() or (counts < 0).any() or (counts > _MAX_COUNT).any():
        raise GGUFError(f"{path}: '{name}' has sums of squares or counts out of range: {_DAMAGED}")
    whole = np.rint(counts[:, 0]).astype(np.int64)
    return Entry(squares, np.broadcast_to(whole, len(squares)).copy(), sums)


def _values(path: Path, view: TensorView) -> np.ndarray:
    """float64 [n_mat, n]."""
    if view.format.name != "F32" or not view.shape or view.size == 0:
        raise GGUFError(f"{path}: '{view.name}' is {view.format} {list(view.shape)}, expected F32 rows: {_DAMAGED}")
    values = view.data.view("<f4").reshape(-1, view.shape[-1]).astype(np.float64)
    if not np.isfinite(values).all():
        raise GGUFError(f"{path}: '{view.name}' holds values that are not finite; collect the importance matrix again")
    return values


def _count(path: Path, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 32:
        raise GGUFError(f"{path}: chunk count or size is {value!r}, expected a whole number: the file is damaged")
    return value


def _list(path: Path, metadata: Mapping[str, Any], key: str, kind: type) -> list:
    found = metadata.get(key, ())
    if not isinstance(found, Sequence) or isinstance(found, str) or not all(isinstance(v, kind) for v in found):
        raise GGUFError(f"{path}: {key} is {found!r}, expected a list of {kind.__name__}: {_DAMAGED}")
    return list(found)


# --- the older form ---------------------------------------------------------------------------------------------------


def _write_legacy(path: str | os.PathLike, imatrix: IMatrix, inputs: Iterable[str | os.PathLike]) -> None:
    """Entries that no input reached are left out; single matrices that none reached get ones."""
    chunk = max(1, imatrix.chunk_size)
    reached = {name: e for name, e in sorted(imatrix.entries.items()) if (e.counts > 0).any()}
    with atomic_output(path, inputs) as file:
        file.write(struct.pack("<i", len(reached)))
        for name, entry in reached.items():
            calls = -(-int(entry.counts.max()) // chunk)
            values = (imatrix.importance(name) * np.float32(calls)).astype("<f4")
            file.write(_packed(name) + struct.pack("<ii", calls, values.size) + values.tobytes())
        file.write(struct.pack("<i", imatrix.chunk_count) + _packed(imatrix.datasets[-1] if imatrix.datasets else ""))


def _packed(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<i", len(data)) + data


class _Bytes:
    """A file's bytes, taken from the front; every size is checked against what is left."""

    def __init__(self, path: Path):
        self.path, self._data, self._at = path, map_file(path), 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, size: int, what: str) -> np.ndarray:
        if not 0 <= size <= self.left:
            raise GGUFError(
                f"{self.path}: neither a GGUF file nor a whole importance matrix of the older kind: {what} would end "
                f"at byte {self._at + size:,}, the file has {len(self._data):,}; collect it again"
            )
        self._at += size
        return self._data[self._at - size : self._at]

    def number(self, what: str) -> int:
        return int(self.take(4, what).view("<i4")[0])

    def text(self, what: str) -> str:
        length = self.number(what)
        if not 0 <= length <= _MAX_NAME:
            raise GGUFError(
                f"{self.path}: not an importance matrix: {what} would have {length:,} bytes; make one with "
                "`gguftools imatrix`"
            )
        return bytes(self.take(length, what)).decode(errors="replace")


def _read_legacy(path: Path, chunk_size: int) -> IMatrix:
    file = _Bytes(path)
    n = file.number("the number of entries")
    if not 0 < n <= file.left // 12:
        raise GGUFError(
            f"{path}: not an importance matrix: it begins with {n:,} entries; make one with `gguftools imatrix`"
        )
    imatrix = IMatrix(chunk_size=chunk_size)
    for i in range(n):
        name = file.text(f"the name of entry {i}")
        calls, size = file.number(f"entry '{name}'"), file.number(f"entry '{name}'")
        if calls < 0 or size < 1 or not name or name in imatrix.entries:
            raise GGUFError(f"{path}: entry {i} ('{name}') has {size:,} values of {calls:,} calls: {_DAMAGED}")
        values = file.take(4 * size, f"entry '{name}'").view("<f4").astype(np.float64)[None]
        if not np.isfinite(values).all() or (values < 0).any():
            raise GGUFError(f"{path}: '{name}' holds values that are negative or not finite; collect it again")
        # without calls the values stand for themselves
        counts = np.array([calls * imatrix.chunk_size or 1], np.int64)
        imatrix.entries[name] = Entry(values * (imatrix.chunk_size if calls else 1), counts, None)
    if file.left:
        imatrix.chunk_count = max(0, file.number("the number of chunks"))
    if file.left:
        imatrix.datasets = [text] if (text := file.text("the name of the text")) else []
    return imatrix
