"""A checkpoint's tensors as rows that are read piece by piece, and what conversion does to them beyond their type.

`Rows` is the one view that everything here gives and takes: of a file's bytes, of weights that are dequantized on the
way, of rows in another order, of many experts as one tensor. Nothing is computed before it is read.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.models.arch import Hparams
from engine.models.steps import Map, Step, Take, Transpose, Whole
from gguftools.errors import GGUFError
from gguftools.safetensors import SafetensorView
from quant.formats import FORMATS

#: safetensors types that weights come in
SOURCE_TYPES = ("F32", "F16", "BF16", "F64")


@dataclass(frozen=True)
class Rows:
    """A tensor as rows along its last axis; a vector is rows of one element.

    name: where it comes from, for messages; dtype: one of SOURCE_TYPES, or the name of a block format, whose bytes can
    be taken as they are; shape: of the tensor, NumPy order; fetch: function of lo and hi that gives these rows,
    [hi - lo, n] elements or [hi - lo, blocks], of BF16 as uint16, perhaps over a memory map;
    at: what finds rows in any order, if that is cheaper than reading all between them.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    fetch: Callable[[int, int], np.ndarray]
    at: Callable[[np.ndarray], np.ndarray] | None = None

    @property
    def n(self) -> int:
        """Length of a row."""
        return self.shape[-1] if len(self.shape) > 1 else 1

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return math.prod(self.shape[:-1]) if len(self.shape) > 1 else math.prod(self.shape)

    def read(self, lo: int, hi: int, threads: int | None = None) -> np.ndarray:
        """Rows lo to hi as a new float32 array [hi - lo, n]."""
        from quant.quantize import dequantize_blocks

        piece = self.fetch(lo, hi)
        if self.dtype not in ("F32", "F64"):
            fmt = FORMATS[self.dtype]
            blocks = np.require(piece, requirements=["A", "C"]).view(fmt.block)
            return dequantize_blocks(blocks.reshape(hi - lo, -1), fmt, threads)
        with np.errstate(over="ignore"):  # the check for infinity that follows is ours
            return np.array(piece, np.float32, order="C")

    def pick(self, order: np.ndarray) -> np.ndarray:
        """Rows in the given order, as `fetch` gives them."""
        if self.at is not None:
            return self.at(order)
        return np.concatenate([self.fetch(int(r), int(r) + 1) for r in order]) if len(order) else self.fetch(0, 0)


def rows_of_array(name: str, dtype: str, shape: tuple[int, ...], data: np.ndarray) -> Rows:
    """Rows of an array [rows, n] that is there, or mapped."""
    return Rows(name, dtype, shape, lambda lo, hi: data[lo:hi], lambda order: data[order])


def rows_of(view: SafetensorView) -> Rows:
    """A checkpoint's tensor. Raises GGUFError for types that are not weights."""
    if view.dtype not in SOURCE_TYPES:
        types = ", ".join(SOURCE_TYPES)
        raise GGUFError(f"{view.path}: tensor '{view.name}' is of type {view.dtype}; weights are {types}")
    n_rows = math.prod(view.shape[:-1]) if len(view.shape) > 1 else math.prod(view.shape)
    return rows_of_array(view.name, view.dtype, view.shape, view.array().reshape(n_rows, -1 if n_rows else 1))


def apply(steps: tuple[Step, ...], rows: Rows, shape: tuple[int, ...], h: Hparams, i: int) -> Rows:
    """The rows after all steps, in `shape`. Raises GGUFError where steps do not fit the tensor."""
    try:
        for step in steps:
            if isinstance(step, Take):
                rows = _taken(rows, step.rows(h, i))
            elif isinstance(step, Map):
                rows = _mapped(rows, step)
            elif isinstance(step, Transpose):
                rows = transposed(rows, step.shape(h, i))
            elif isinstance(step, Whole):
                rows = _whole(rows, step, shape, h, i)
        return _reshaped(rows, shape)
    except (ValueError, IndexError) as error:
        if isinstance(error, GGUFError):
            raise
        raise GGUFError(f"tensor '{rows.name}' of shape {list(rows.shape)}: {error}") from None


def _taken(rows: Rows, order: np.ndarray) -> Rows:
    if order.size and (order.min() < 0 or order.max() >= rows.n_rows):
        raise ValueError(f"has no row {int(order.max())}, which config.json implies")
    return Rows(
        rows.name,
        rows.dtype,
        (len(order), rows.n) if len(rows.shape) > 1 else (len(order),),
        lambda lo, hi: rows.pick(order[lo:hi]),
        lambda wanted: rows.pick(order[wanted]),
    )


def _mapped(rows: Rows, step: Map) -> Rows:
    def fetch(lo: int, hi: int) -> np.ndarray:
        return step.values(rows.read(lo, hi, 1)).astype(np.float32, copy=False)

    return Rows(rows.name, "F32", rows.shape, fetch)


def transposed(rows: Rows, shape: tuple[int, int, int]) -> Rows:
    """The tensor, seen in `shape`, with its last two axes exchanged; one of a block format as it is.

    Raises ValueError if it has another shape.
    """
    if rows.dtype not in SOURCE_TYPES:
        return rows
    if len(rows.shape) == 3 and rows.shape != shape:
        raise ValueError(f"is not {list(shape)}")
    source = _reshaped(rows, shape)
    n_old, n_new = shape[1:]

    def at(order: np.ndarray) -> np.ndarray:
        matrix, row = order // n_new, order % n_new
        found = np.empty((len(order), n_old), source.fetch(0, 0).dtype)
        for m in np.unique(matrix):
            found[matrix == m] = source.fetch(m * n_old, (m + 1) * n_old)[:, row[matrix == m]].T
        return found

    new = (shape[0], n_new, n_old)
    return Rows(rows.name, rows.dtype, new, lambda lo, hi: at(np.arange(lo, hi)), at)


def _reshaped(rows: Rows, shape: tuple[int, ...]) -> Rows:
    """Other axes: rows stay as they are, or all elements become rows of one, or one row."""
    if math.prod(shape) != math.prod(rows.shape):
        raise ValueError(f"cannot become {list(shape)}")
    new = replace(rows, shape=shape)
    if (new.n_rows, new.n) == (rows.n_rows, rows.n):
        return new
    if rows.dtype not in SOURCE_TYPES:
        raise ValueError(f"{rows.dtype} cannot become {list(shape)}")

    def fetch(lo: int, hi: int) -> np.ndarray:
        first, last = lo * new.n // rows.n, -(-hi * new.n // rows.n)
        flat = rows.fetch(first, last).reshape(-1)
        skip = lo * new.n - first * rows.n
        return flat[skip : skip + (hi - lo) * new.n].reshape(hi - lo, new.n)

    return replace(new, fetch=fetch, at=None)


def _whole(rows: Rows, step: Whole, shape: tuple[int, ...], h: Hparams, i: int) -> Rows:
    held = _Held(lambda: step.change(rows.read(0, rows.n_rows).reshape(rows.shape), h, i), shape, rows.name)
    return Rows(rows.name, "F32", shape, lambda lo, hi: held.array()[lo:hi], lambda order: held.array()[order])


@dataclass
class _Held:
    """An array that is made when it is first read; only the last few that were made stay in memory."""

    make: Callable[[], np.ndarray]
    shape: tuple[int, ...]
    name: str
    _found: np.ndarray | None = None

    def array(self) -> np.ndarray:
        with _HELD_LOCK:
            if self._found is None:
                made = np.ascontiguousarray(self.make(), np.float32)
                if made.size != math.prod(self.shape):
                    raise GGUFError(f"tensor '{self.name}': config.json implies the shape {list(self.shape)}")
                self._found = made.reshape(-1, self.shape[-1] if len(self.shape) > 1 else 1)
                _HELD.append(self)
                while len(_HELD) > _MOST_HELD:
                    _HELD.pop(0)._found = None
            return self._found


_HELD: list[_Held] = []
_HELD_LOCK = threading.RLock()
_MOST_HELD = 2  # a tensor, and the next one that is read ahead


def stacked(parts: Sequence[Rows]) -> Rows:
    """Tensors of one shape and type as one with an axis more, in front. Raises GGUFError if they differ."""
    first = parts[0]
    for other in parts:
        if other.shape != first.shape or other.dtype != first.dtype:
            kinds = f"{first.dtype} {list(first.shape)} and {other.dtype} {list(other.shape)}"
            raise GGUFError(f"tensors '{first.name}' and '{other.name}' are experts of one layer, but {kinds}")
    shape = (len(parts), *first.shape)
    n_each = math.prod(first.shape[:-1])
    if len(first.shape) == 1:  # biases: an expert's vector is a row
        return Rows(
            first.name,
            first.dtype,
            shape,
            lambda lo, hi: np.stack([part.fetch(0, part.n_rows).reshape(-1) for part in parts[lo:hi]]),
        )

    def fetch(lo: int, hi: int) -> np.ndarray:
        pieces = []
        while lo < hi:
            e, at = divmod(lo, n_each)
            end = min(hi - e * n_each, n_each)
            pieces.append(parts[e].fetch(at, end))
            lo = e * n_each + end
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    return Rows(first.name, first.dtype, shape, fetch)
