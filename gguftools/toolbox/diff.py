"""Two models side by side: keys, types, and how far apart the weights of each tensor are."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gguftools.errors import GGUFError
from gguftools.gguf.values import Array
from gguftools.toolbox.copying import Progress
from gguftools.toolbox.weights import Tensor, Weights, open_weights, pairs, rename_for
from quant.errors import QuantError

#: value of a key that one side lacks
ABSENT = None


@dataclass(frozen=True)
class KeyDifference:
    """a, b: values as JSON can hold them, arrays as text; ABSENT where there is none."""

    key: str
    a: Any
    b: Any


@dataclass(frozen=True)
class TensorDifference:
    """One tensor of both sides, or of one (its other type is None).

    rmse: root of the mean of (a - b)^2; relative: rmse / root mean square of a; cosine: of the angle between them;
    largest: largest |a - b|; all None where nothing could be computed, and `note` says why.
    """

    name: str
    a: str | None
    b: str | None
    shape_a: tuple[int, ...] | None = None
    shape_b: tuple[int, ...] | None = None
    identical: bool = False
    rmse: float | None = None
    relative: float | None = None
    cosine: float | None = None
    largest: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Difference:
    a: Path
    b: Path
    keys: tuple[KeyDifference, ...]
    tensors: tuple[TensorDifference, ...]

    @property
    def is_same(self) -> bool:
        """Same keys, types and weights."""
        return not self.keys and all(t.identical and t.a == t.b for t in self.tensors)

    def summary(self) -> dict[str, Any]:
        return {
            "a": str(self.a),
            "b": str(self.b),
            "same": self.is_same,
            "keys": [asdict(k) for k in self.keys],
            "tensors": [asdict(t) for t in self.tensors],
        }


def diff(
    a: str | os.PathLike,
    b: str | os.PathLike,
    data: bool = True,
    threads: int | None = None,
    progress: Progress = None,
) -> Difference:
    """Compare two models: GGUF files or sets, Hugging Face folders, safetensors files.

    data: also compare weights; progress: called with the number of weights that are done.

    >>> import gguftools
    >>> gguftools.diff(gguftools.demo_model(), gguftools.demo_folder()).tensors[0].rmse
    0.0

    Raises GGUFError and EngineError for models that cannot be read.
    """
    with open_weights(a) as first, open_weights(b) as second:
        first, second = rename_for(Path(a), first, second), rename_for(Path(b), second, first)
        names = [*first.tensors, *(name for name in second.tensors if name not in first.tensors)]
        tensors = []
        for name in names:
            tensors.append(_compare(name, first.tensors.get(name), second.tensors.get(name), data, threads))
            if progress is not None and name in first.tensors:
                progress(math.prod(first.tensors[name].shape))
        return Difference(Path(a), Path(b), tuple(_keys(first, second)), tuple(tensors))


def _keys(a: Weights, b: Weights) -> list[KeyDifference]:
    if not a.metadata or not b.metadata:  # a lone safetensors file has none
        return []
    found = []
    for key in [*a.metadata, *(key for key in b.metadata if key not in a.metadata)]:
        mine, other = a.metadata.get(key), b.metadata.get(key)
        if not _equal(mine, other):
            found.append(KeyDifference(key, _shown(mine), _shown(other)))
    return found


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, float) or isinstance(b, float):
        try:  # float32 in one store, float64 in the other
            return np.float32(a) == np.float32(b) or (a != a and b != b)
        except (TypeError, ValueError, OverflowError):
            return False
    if isinstance(a, bool) is not isinstance(b, bool):
        return False
    if isinstance(a, Array) and isinstance(b, (list, tuple)):
        return a == b
    return (b == a) if isinstance(b, Array) else bool(a == b)


def _shown(value: Any) -> Any:
    if isinstance(value, (Array, list, tuple)):
        head = ", ".join(map(repr, list(value[:4])))
        return f"[{len(value)}]({head}{', ...' if len(value) > 4 else ''})"
    return value


def _compare(name: str, a: Tensor | None, b: Tensor | None, data: bool, threads: int | None) -> TensorDifference:
    if a is None or b is None:
        return TensorDifference(
            name,
            a=a.type if a else None,
            b=b.type if b else None,
            shape_a=a.shape if a else None,
            shape_b=b.shape if b else None,
            note="not in b" if a else "not in a",
        )
    found: dict[str, Any] = {"name": name, "a": a.type, "b": b.type, "shape_a": a.shape, "shape_b": b.shape}
    if a.shape != b.shape:
        return TensorDifference(**found, note="shapes differ")
    if _same_bytes(a, b):
        return TensorDifference(**found, identical=True, rmse=0.0, relative=0.0, cosine=1.0, largest=0.0)
    if not data:
        return TensorDifference(**found, note="not compared")
    try:
        return TensorDifference(**(found | _errors(a, b, threads)))
    except (QuantError, GGUFError) as error:
        return TensorDifference(**found, note=str(error))


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    if a.view is None or b.view is None or a.type != b.type or a.view.order != b.view.order:
        return False
    return np.array_equal(a.view.raw, b.view.raw)


def _errors(a: Tensor, b: Tensor, threads: int | None) -> dict[str, Any]:
    squares = aa = bb = ab = largest = 0.0
    count = 0
    with np.errstate(invalid="ignore", over="ignore"):
        for _, x, y in pairs(a, b, threads):
            x64, y64 = x.astype(np.float64), y.astype(np.float64)
            difference = x64 - y64
            squares += float(np.vdot(difference, difference))
            aa += float(np.vdot(x64, x64))
            bb += float(np.vdot(y64, y64))
            ab += float(np.vdot(x64, y64))
            largest = max(largest, float(np.abs(difference).max(initial=0)))
            count += x.size
    if not math.isfinite(squares):
        return {"note": "holds values that are not finite"}
    norm = math.sqrt(aa) * math.sqrt(bb)
    return {
        "identical": largest == 0,
        "rmse": math.sqrt(squares / count) if count else 0.0,
        "relative": math.sqrt(squares / aa) if aa else (math.inf if squares else 0.0),
        "cosine": min(1.0, ab / norm) if norm else float(aa == bb),
        "largest": largest,
    }


def by_type(tensors: tuple[TensorDifference, ...]) -> Mapping[tuple[str, str], int]:
    """(type in a, type in b) -> number of tensors, most frequent first."""
    counts: dict[tuple[str, str], int] = {}
    for t in tensors:
        if t.a is not None and t.b is not None:
            counts[t.a, t.b] = counts.get((t.a, t.b), 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))
