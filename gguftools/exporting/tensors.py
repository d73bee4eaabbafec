"""From the tensors of a GGUF file to those of a checkpoint, by the rows of the model's family: conversion backwards.

Rows that were put in another order go back, parts of one tensor are joined, experts become tensors of their own.
Nothing is computed before it is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from engine.models.arch import Arch, Hparams, TensorRow
from engine.models.steps import Map, Shape, Step, Take, Whole
from gguftools.conversion.transforms import Rows, _whole
from gguftools.errors import GGUFError
from gguftools.gguf.reader import TensorView


def rows_of_view(view: TensorView) -> Rows:
    """A tensor of a GGUF file."""
    n = view.shape[-1] if len(view.shape) > 1 else 1
    n_rows = view.size // max(1, n)
    if len(view.shape) < 2:
        data = view.dequantize(1).reshape(-1, 1)
        return Rows(view.name, "F32", view.shape, lambda lo, hi: data[lo:hi], lambda order: data[order])
    blocks = view.blocks.reshape(n_rows, -1)
    return Rows(view.name, view.format.name, view.shape, lambda lo, hi: blocks[lo:hi], lambda order: blocks[order])


@dataclass(frozen=True)
class Part:
    """A tensor that holds some rows of a tensor of the checkpoint: row, rows before its steps, layer."""

    row: TensorRow
    rows: Rows
    layer: int


def checkpoint(tensors: Mapping[str, TensorView], arch: Arch, h: Hparams) -> dict[str, Rows]:
    """Name in the checkpoint -> rows.

    Raises GGUFError for tensors that the family does not have, that are missing or of another shape, and for changes
    that cannot be undone.
    """
    left = dict(tensors)
    parts: dict[str, list[Part]] = {}
    for row in arch.tensors:
        for i in row.places(h):
            name = row.name.format(i=i)
            view = left.pop(name, None)
            if not any(row.sources):
                continue
            if view is None and name in tensors:
                continue  # an earlier row has it: this one is another way to store it
            if view is None:
                if not row.optional:
                    raise GGUFError(f"tensor '{name}' is missing; the file is incomplete")
                continue
            if view.shape != row.shape_of(h, i):
                raise GGUFError(f"tensor '{name}' has shape {view.shape}, the keys imply {row.shape_of(h, i)}")
            source = next(spelling for spelling in row.sources if spelling)
            parts.setdefault(source.replace("{e}", "\0").format(i=i), []).append(Part(row, rows_of_view(view), i))
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise GGUFError(f"no place for tensor '{next(iter(left))}'{more}: a '{arch.name}' checkpoint has none such")
    found: dict[str, Rows] = {}
    for source, some in parts.items():
        rows = _undone(source, some, h)
        if "\0" not in source:
            found[source] = rows
            continue
        for e in range(rows.shape[0]):
            found[source.replace("\0", str(e))] = _expert(rows, e)
    return found


def _undone(source: str, parts: list[Part], h: Hparams) -> Rows:
    """The tensor of which `parts` hold the rows."""
    if len(parts) == 1:
        rows = parts[0].rows
        for step in reversed(parts[0].row.steps):
            rows = _undo(step, rows, parts[0], h)
        return replace(rows, name=source)
    orders = [_order(part, h) for part in parts]
    return _joined(source, parts, orders)


def _undo(step: Step, rows: Rows, part: Part, h: Hparams) -> Rows:
    if isinstance(step, Take) and not step.drops:
        order = _checked(step.rows(h, part.layer), rows.n_rows, part)
        back = np.argsort(order)
        return replace(
            rows,
            fetch=lambda lo, hi: rows.pick(back[lo:hi]),
            at=lambda wanted: rows.pick(back[wanted]),
        )
    if isinstance(step, Map) and step.inverse is not None:
        inverse = step.inverse

        def fetch(lo: int, hi: int) -> np.ndarray:
            return inverse(rows.read(lo, hi, 1)).astype(np.float32, copy=False)

        return Rows(rows.name, "F32", rows.shape, fetch)
    if isinstance(step, Whole) and step.inverse is not None:
        shape = step.inverse(np.empty(rows.shape, np.float32), h, part.layer).shape
        return _whole(rows, Whole(step.inverse), shape, h, part.layer)
    if isinstance(step, Shape):
        shape = rows.shape if step.source is None else step.source(h, part.layer)
        return replace(rows, shape=shape) if math.prod(shape[:-1]) == rows.n_rows else _flat(rows, shape)
    raise GGUFError(f"tensor '{rows.name}' was changed in a way that cannot be undone here; it cannot be exported")


def _flat(rows: Rows, shape: tuple[int, ...]) -> Rows:
    """All elements in another shape; only small tensors come in several."""
    n = shape[-1] if len(shape) > 1 else 1
    data = rows.read(0, rows.n_rows, 1).reshape(-1, n)
    return Rows(rows.name, "F32", shape, lambda lo, hi: data[lo:hi], lambda order: data[order])


def _order(part: Part, h: Hparams) -> np.ndarray:
    if len(part.row.steps) != 1 or not isinstance(part.row.steps[0], Take) or part.row.steps[0].drops:
        raise GGUFError(f"tensor '{part.rows.name}' is part of one that cannot be put together here")
    return part.row.steps[0].rows(h, part.layer)


def _checked(order: np.ndarray, n_rows: int, part: Part) -> np.ndarray:
    if len(order) != n_rows or not np.array_equal(np.sort(order), np.arange(n_rows)):
        raise GGUFError(f"tensor '{part.rows.name}' holds only some rows of its source; it cannot be exported")
    return order


def _joined(source: str, parts: list[Part], orders: list[np.ndarray]) -> Rows:
    """One tensor out of several that each hold some of its rows."""
    total = sum(map(len, orders))
    if not np.array_equal(np.sort(np.concatenate(orders)), np.arange(total)):
        raise GGUFError(f"the parts of '{source}' do not make a whole; it cannot be exported")
    owner, place = np.empty(total, np.int32), np.empty(total, np.int64)
    for number, order in enumerate(orders):
        owner[order], place[order] = number, np.arange(len(order))
    first = parts[0].rows
    lead = first.shape[:-2] if len(first.shape) > 2 else ()
    shape = (total,) if len(first.shape) < 2 else (*lead, total // math.prod(lead), first.n)
    rows = [part.rows for part in parts]
    plain = any(other.dtype != first.dtype or other.n != first.n for other in rows)

    def pick(wanted: np.ndarray) -> np.ndarray:
        pieces = []
        for number in dict.fromkeys(owner[wanted].tolist()):
            mine = np.flatnonzero(owner[wanted] == number)
            found = rows[number].pick(place[wanted[mine]])
            pieces.append((mine, _floats(rows[number], found) if plain else found))
        out = np.empty((len(wanted), *pieces[0][1].shape[1:]), pieces[0][1].dtype)
        for mine, piece in pieces:
            out[mine] = piece
        return out

    return Rows(source, "F32" if plain else first.dtype, shape, lambda lo, hi: pick(np.arange(lo, hi)), pick)


def _floats(rows: Rows, piece: np.ndarray) -> np.ndarray:
    return replace(rows, fetch=lambda lo, hi: piece).read(0, len(piece), 1)


def _expert(rows: Rows, e: int) -> Rows:
    """One of the matrices, or vectors, along the first axis."""
    shape = rows.shape[1:]
    n = math.prod(shape[:-1]) if len(shape) > 1 else 1
    name = rows.name.replace("\0", str(e))
    if len(shape) > 1:
        return Rows(name, rows.dtype, shape, lambda lo, hi: rows.fetch(e * n + lo, e * n + hi))
    return Rows(name, "F32", shape, lambda lo, hi: rows.read(e, e + 1, 1).reshape(-1, 1)[lo:hi])
