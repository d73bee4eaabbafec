"""How conversion changes a checkpoint's tensor beyond its type, as values that tensor rows of a family hold.

Each is a small description; `gguftools/conversion/transforms.py` carries it out, piece by piece where it can. `h` are
the model's parameters, `i` is the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TypeAlias

import numpy as np


@dataclass(frozen=True)
class Take:
    """Rows in another order, or some of them: `rows(h, i)` are indices of the source's rows (all axes but the last
    count as rows; a vector's elements are its rows). Works on the bytes, whatever the type. Every row of a source must
    be taken by some tensor, unless `drops`."""

    rows: Callable[[SimpleNamespace, int], np.ndarray]
    drops: bool = False


@dataclass(frozen=True)
class Map:
    """Other values: `values(x)` of a float32 array, element by element; inverse: the way back, for export."""

    values: Callable[[np.ndarray], np.ndarray]
    inverse: Callable[[np.ndarray], np.ndarray] | None = None


@dataclass(frozen=True)
class Whole:
    """Anything else: `change(x, h, i)` of the whole tensor as float32, which is in memory for that time; inverse: the
    way back, for export."""

    change: Callable[[np.ndarray, SimpleNamespace, int], np.ndarray]
    inverse: Callable[[np.ndarray, SimpleNamespace, int], np.ndarray] | None = None


@dataclass(frozen=True)
class Transpose:
    """The last two axes exchanged, of a source that has the shape `shape(h, i)` or is rows of it. Works on the numbers
    as they are stored; block formats, which cannot be turned, come in the right order already and stay."""

    shape: Callable[[SimpleNamespace, int], tuple[int, int, int]]


@dataclass(frozen=True)
class Shape:
    """The same elements in another shape, as when axes of length 1 are dropped. The other steps may change it too.
    source: the shape in the checkpoint, for export."""

    source: Callable[[SimpleNamespace, int], tuple[int, ...]] | None = None


Step: TypeAlias = Take | Map | Whole | Transpose | Shape


def interleaved(n_rows: int, n_head: int) -> np.ndarray:
    """From rotating halves of a head (checkpoints) to rotating neighbours (GGUF's llama): rows of the halves in turn.

    Raises ValueError for rows that are not heads of an even size.
    """
    if n_head < 1 or n_rows % (2 * n_head):
        raise ValueError(f"{n_rows} rows cannot be {n_head} heads of an even size")
    return np.arange(n_rows).reshape(n_head, 2, -1).swapaxes(1, 2).reshape(-1)
