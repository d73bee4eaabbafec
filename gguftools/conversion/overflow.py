"""Weights that F16 cannot hold: they are counted before the first byte is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from gguftools.conversion.transforms import Rows
from gguftools.errors import GGUFError
from gguftools.quantizing.pipeline import in_parallel
from gguftools.quantizing.source import of_item
from quant.formats import FORMATS

if TYPE_CHECKING:
    from gguftools.conversion.run import Item

LARGEST = 65504.0  # of F16
BEYOND = 65520.0  # from here on, rounding gives infinity


def settle(
    items: Iterable[Item], policy: str, threads: int | None = None, advance: Callable[[int], None] | None = None
) -> list[Item]:
    """The items with weights beyond F16 clipped (`clip`), or their tensors in BF16 (`bf16`).

    advance: called with bytes that were looked at. Raises GGUFError (`error`) with the number of such weights.
    """
    items = list(items)
    checked = [item for item in items if item.format.name == "F16" and item.rows.dtype != "F16"]
    found: dict[str, _Found] = {}
    for item, one in in_parallel(iter(checked), _count, threads or os.cpu_count() or 1):
        if one.n:
            found[item.name] = one
        if advance is not None:
            advance(item.n_bytes)
    if found and policy == "error":
        total = sum(one.n for one in found.values())
        name = max(found, key=lambda name: found[name].largest)
        top = found[name]
        others = f" in {len(found)} tensors" if len(found) > 1 else ""
        raise GGUFError(
            f"{name}: row {top.row}, column {top.column}: {top.largest:.6g} overflows F16, {total:,} weights do"
            f"{others}; take another type, or --on-overflow bf16 (for such tensors) or clip"
        )
    return [item if item.name not in found else _settled(item, policy) for item in items]


@dataclass(frozen=True)
class _Found:
    """Number of finite weights beyond F16, the largest magnitude, and where it is."""

    n: int = 0
    largest: float = 0.0
    row: int = -1
    column: int = -1


def _count(item: Item) -> tuple[Item, _Found]:
    tensor = of_item(item)
    found = _Found()
    for lo, hi in tensor.spans():
        values = np.abs(tensor.fetch(lo, hi))
        if float(values.max(initial=0)) < BEYOND:
            continue
        values[~np.isfinite(values)] = 0
        n, at = int(np.count_nonzero(values >= BEYOND)), int(values.argmax())
        top, (row, column) = float(values.flat[at]), divmod(at, values.shape[1])
        if top > found.largest:
            found = _Found(found.n, top, lo + row, column)
        found = replace(found, n=found.n + n)
    return item, found


def _settled(item: Item, policy: str) -> Item:
    if policy == "bf16":
        return replace(item, format=FORMATS["BF16"])
    rows = item.rows

    def fetch(lo: int, hi: int) -> np.ndarray:
        values = rows.read(lo, hi, 1)
        beyond = np.isfinite(values) & (np.abs(values) > LARGEST)
        return np.where(beyond, np.copysign(np.float32(LARGEST), values), values)

    return replace(item, rows=Rows(rows.name, "F32", rows.shape, fetch))
