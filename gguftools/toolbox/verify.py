"""Does a quantized file derive from a base? Each tensor of the base is quantized again, to the type that it has in the
file (a recipe says which it should have), and the bytes are compared. Where they differ, the distance of every block
from the base is set against that of our own quantization: a block that another search chose lies about as far; one that
was tampered with, or comes from another model, does not.
"""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gguftools.errors import GGUFError, naming
from gguftools.gguf import TensorView
from gguftools.imatrix_file import read_imatrix
from gguftools.quantize_file import convert_tensor
from gguftools.quantizing.importance import Importance, resolve
from gguftools.quantizing.prepare import OURS, RECIPE
from gguftools.quantizing.source import of_view
from gguftools.recipe_file import load_recipe, preset_recipe
from gguftools.toolbox.copying import Progress
from gguftools.toolbox.shards import Model, open_set
from gguftools.toolbox.weights import ROWS, block_rows, row_bytes, rows_of_view
from quant.format import Format
from quant.mixes import TensorInfo, plan
from quant.recipes import Recipe, read_recipe

#: a block may be so many times farther from the base than ours, and still be a rounding of it
FAR = 3.0

#: keys that quantization sets or drops
_OWN_KEYS = ("general.file_type", "general.quantization_version")
_OWN_PREFIXES = ("quantize.", "split.", OURS)
_IMPORTANCE = "quantize.imatrix.entries_count"  # the file was made with an importance matrix


@dataclass(frozen=True)
class TensorVerdict:
    """One tensor of the file.

    verdict: `identical` (to the byte), `close` (no block is more than FAR times as far from the base as ours), `far`,
    `missing` (in the base), `shape`, `type` (the recipe gives it another: `wanted`), or `unknown` (a type that cannot
    be computed with); blocks, differing: numbers of blocks; distance, ours: largest root mean square difference of a
    differing block from the base, and of ours there; ratio: largest of the ratios of these two; block: where that is,
    counted through all rows.
    """

    name: str
    type: str
    verdict: str
    blocks: int = 0
    differing: int = 0
    distance: float = 0.0
    ours: float = 0.0
    ratio: float = 0.0
    block: int | None = None
    wanted: str = ""


@dataclass(frozen=True)
class Verification:
    """verdict: `identical` if the weights derive from the base to the byte, `close`, or `different`; keys: those whose
    values differ, but for what quantization itself sets; lost: tensors of the base that the file lacks; recipe: name of
    the recipe whose types the tensors were held against, "" for none."""

    file: Path
    base: Path
    tensors: tuple[TensorVerdict, ...]
    keys: tuple[str, ...]
    lost: tuple[str, ...]
    recipe: str = ""

    @property
    def verdict(self) -> str:
        found = {t.verdict for t in self.tensors}
        if self.lost or found - {"identical", "close"}:
            return "different"
        return "close" if "close" in found else "identical"

    def summary(self) -> dict[str, Any]:
        return {
            "file": str(self.file),
            "base": str(self.base),
            "verdict": self.verdict,
            "recipe": self.recipe,
            "keys": list(self.keys),
            "lost": list(self.lost),
            "tensors": [asdict(t) for t in self.tensors],
        }


def verify(
    file: str | os.PathLike,
    base: str | os.PathLike,
    imatrix: str | os.PathLike | None = None,
    threads: int | None = None,
    progress: Progress = None,
    recipe: str | os.PathLike | Recipe | None = None,
) -> Verification:
    """Compare a quantized model with the base that it is said to be made from.

    imatrix: the importance matrix that was used; progress: called with bytes of the file; recipe: a preset or recipe
    that must give the tensors the types that they have; None takes the one that the file holds, if it does.

    >>> import gguftools
    >>> gguftools.verify(gguftools.demo_model(), gguftools.demo_model()).verdict
    'identical'

    Raises GGUFError and QuantError for files that cannot be read, or an importance matrix of another model.
    """
    with open_set(file) as made, open_set(base) as source:
        importance = None
        if imatrix is not None:
            views = [of_view(view) for view in source.tensors.values()]
            importance = resolve(Path(imatrix), read_imatrix(imatrix), views)
        told = _recipe(made, recipe)
        wanted = _types(made, source, told, importance is not None) if told is not None else {}
        found = []
        for view in made.tensors.values():
            found.append(_verify(view, source.tensors.get(view.name), importance, threads, wanted.get(view.name)))
            if progress is not None:
                progress(view.nbytes)
        lost = tuple(name for name in source.tensors if name not in made.tensors)
        name = "" if told is None else told.name
        return Verification(Path(file), Path(base), tuple(found), _keys(made, source), lost, name)


def _recipe(made: Model, recipe: str | os.PathLike | Recipe | None) -> Recipe | None:
    if isinstance(recipe, Recipe):
        return recipe
    if recipe is not None:
        return load_recipe(recipe)
    told = made.metadata.get(RECIPE)
    return read_recipe(told, f"{made.path}: {RECIPE}", preset_recipe) if isinstance(told, str) else None


def _types(made: Model, source: Model, recipe: Recipe, has_importance: bool) -> dict[str, Format]:
    """Name -> type that the recipe gives to a tensor of the base. Of the keys those of the file count: they may have
    been set when it was made."""
    tensors = [TensorInfo(view.name, view.shape, view.format) for view in source.tensors.values()]
    with naming(source.path):
        choices = plan(tensors, made.metadata, recipe, has_importance or _IMPORTANCE in made.metadata)
    return {choice.name: choice.target for choice in choices}


def _keys(made: Model, source: Model) -> tuple[str, ...]:
    names = [*source.fields, *(key for key in made.fields if key not in source.fields)]
    return tuple(
        key
        for key in names
        if key not in _OWN_KEYS and not key.startswith(_OWN_PREFIXES) and _raw(made, key) != _raw(source, key)
    )


def _raw(model: Model, key: str) -> tuple[int, bytes] | None:
    field = model.fields.get(key)
    return None if field is None else (field.type, bytes(field.encoded()))


def _verify(
    view: TensorView, base: TensorView | None, importance: Importance | None, threads: int | None, wanted: Format | None
) -> TensorVerdict:
    name, fmt = view.name, view.format
    if base is None:
        return TensorVerdict(name, fmt.name, "missing")
    if base.shape != view.shape:
        return TensorVerdict(name, fmt.name, "shape")
    n_blocks = view.nbytes // fmt.type_size
    if wanted is not None and wanted is not fmt:
        return TensorVerdict(name, fmt.name, "type", n_blocks, wanted=wanted.name)
    if base.format is fmt and np.array_equal(base.data, view.data):
        return TensorVerdict(name, fmt.name, "identical", n_blocks)
    if fmt.module is None or base.format.module is None:
        return TensorVerdict(name, fmt.name, "unknown", n_blocks)
    return _measure(view, base, importance, threads)


def _measure(view: TensorView, base: TensorView, importance: Importance | None, threads: int | None) -> TensorVerdict:
    fmt = view.format
    find = None if importance is None else importance.of(view.name)
    if find is None and fmt.kernels.quantize is None:
        raise GGUFError(f"{view.name}: {fmt} is made with an importance matrix; give the one that was used (--imatrix)")
    n = view.ne[0] if view.ne else 1
    size = row_bytes(fmt, n)
    differing, distance, own, ratio, worst = 0, 0.0, 0.0, 0.0, None
    row = 0
    for piece in convert_tensor(base, fmt, None if find is None else find(), threads):
        ours = piece.reshape(-1).view(np.uint8).reshape(-1, size)
        theirs = block_rows(view, row, row + len(ours))
        for lo in range(0, len(ours), max(1, ROWS // max(1, n))):
            hi = min(len(ours), lo + max(1, ROWS // max(1, n)))
            blocks = (ours[lo:hi] != theirs[lo:hi]).reshape(-1, fmt.type_size).any(axis=1)
            if not blocks.any():
                continue
            differing += int(blocks.sum())
            x = rows_of_view(base, row + lo, row + hi, threads).reshape(-1, fmt.block_size)[blocks]
            a = _distance(x, theirs[lo:hi], blocks, fmt, threads)
            b = _distance(x, ours[lo:hi], blocks, fmt, threads)
            with np.errstate(divide="ignore", invalid="ignore"):
                ratios = np.where(a <= b, np.where(b > 0, a / b, 1.0), a / b)
            ratios = np.where(np.isfinite(a), ratios, np.inf)
            at = int(ratios.argmax())
            if worst is None or ratios[at] > ratio:
                ratio = float(ratios[at])
                worst = ((row + lo) * n) // fmt.block_size + int(np.flatnonzero(blocks)[at])
            distance, own = max(distance, float(a.max())), max(own, float(b.max()))
        row += len(ours)
    verdict = "identical" if not differing else "close" if ratio <= FAR else "far"
    return TensorVerdict(
        view.name, fmt.name, verdict, view.nbytes // fmt.type_size, differing, distance, own, ratio, worst
    )


def _distance(x: np.ndarray, rows: np.ndarray, chosen: np.ndarray, fmt: Any, threads: int | None) -> np.ndarray:
    """Root mean square difference per chosen block, float64."""
    from quant.quantize import dequantize_blocks

    blocks = np.ascontiguousarray(rows).view(fmt.block).reshape(-1, 1)[chosen]
    y = dequantize_blocks(blocks, fmt, threads)
    with np.errstate(invalid="ignore", over="ignore"):
        found = np.sqrt(np.mean((x.astype(np.float64) - y) ** 2, axis=1))
    return np.where(np.isnan(found), math.inf, found)
