"""From the tensors of a checkpoint to those of the GGUF file, by the rows of the model's family. Nothing is dropped
silently: a tensor without a place, a place without its tensor, and rows that nobody takes are errors with names."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import EngineError
from engine.models.arch import Arch, Hparams, TensorRow
from engine.models.steps import Step, Take, Transpose
from gguftools.conversion.transforms import Rows, apply, rows_of, rows_of_array, stacked, transposed
from gguftools.errors import GGUFError
from gguftools.safetensors import SafetensorView

#: tensors that are no weights, in whatever family
_SKIPPED = (".attention.masked_bias", ".attention.bias", ".rotary_emb.inv_freq")


def mapped(
    folder: Path, tensors: Mapping[str, Rows], arch: Arch, config: Mapping[str, Any], h: Hparams
) -> dict[str, Rows]:
    """GGUF name -> rows: first the tensors that come from the config alone, then those of the checkpoint, in the order
    in which `tensors` completes them.

    Raises GGUFError for tensors that the family does not have, that are missing, or whose shape is not the config's.
    """
    if h.n_layer > len(tensors):
        raise GGUFError(
            f"{folder}: config.json names {h.n_layer} layers, the checkpoint has only {len(tensors)} tensors"
        )
    finder = _Finder(folder, tensors, arch, h)
    untied = config.get("tie_word_embeddings") is False
    found = _made(arch, config, h)
    placed: list[tuple[int, str, Rows]] = []
    missing: dict[str, str] = {}
    for row in arch.tensors:
        if not any(row.sources):
            continue
        for i in row.places(h):
            name = row.name.format(i=i)
            rows = finder.find(row, i)
            if rows is not None:
                placed.append((finder.place, name, finder.changed(row, rows, i)))
            elif not row.optional or (name == "output.weight" and untied):
                missing.setdefault(name, row.sources[0].replace("{e}", "0").format(i=i))
    for name in missing.keys() - {name for _, name, _ in placed}:  # a name may have several rows, for several forms
        raise GGUFError(f"{folder}: tensor '{missing[name]}' is missing; download the model again")
    finder.check_all_used()
    placed.sort(key=lambda entry: entry[0])
    return found | {name: rows for _, name, rows in placed}


def numbers(views: Mapping[str, SafetensorView], arch: Arch) -> dict[str, list[float]]:
    """Field -> values of the parameters that a checkpoint has as tensors of one number, one a layer.

    Raises GGUFError for one that is no number.
    """
    found = {}
    for row in arch.rows:
        values: list[float] = []
        while row.source and (view := views.get(row.source.format(i=len(values)))) is not None:
            rows = rows_of(view)
            if rows.n_rows * rows.n != 1:
                raise GGUFError(f"{view.path}: tensor '{view.name}' has shape {list(view.shape)}, expected one number")
            values.append(float(rows.read(0, 1)[0, 0]))
        if values:
            found[row.field] = values
    return found


def is_skipped(name: str, arch: Arch) -> bool:
    """Whether a tensor of a checkpoint is none of the model's weights, or left out on purpose."""
    return name.endswith(_SKIPPED) or any(name.startswith(p) or name.endswith(p) for p in arch.ignored)


def _is_beyond(name: str, arch: Arch, h: Hparams) -> bool:
    """Whether a tensor is of a layer behind the last, where the family leaves these out."""
    number = name.removeprefix(arch.beyond).split(".", 1)[0] if arch.beyond and name.startswith(arch.beyond) else ""
    return number.isdecimal() and int(number) >= h.n_layer


def _made(arch: Arch, config: Mapping[str, Any], h: Hparams) -> dict[str, Rows]:
    """Tensors of the family that come from the config alone."""
    found = {}
    for row in arch.tensors:
        if row.make is None:
            continue
        try:
            values = row.make(config, h)
        except EngineError as error:
            raise GGUFError(str(error)) from None
        if values is not None:
            data = np.asarray(values, np.float32)
            flat = data.reshape(-1, data.shape[-1] if data.ndim > 1 else 1)
            found[row.name] = rows_of_array("", "F32", data.shape, flat)
    return found


class _Finder:
    """Tensors by the spellings of rows, and the account of what was used."""

    def __init__(self, folder: Path, tensors: Mapping[str, Rows], arch: Arch, h: Hparams):
        self._folder, self._tensors, self._arch, self._h = folder, tensors, arch, h
        self._order = {name: n for n, name in enumerate(tensors)}
        self._unused = {name: None for name in tensors if not is_skipped(name, arch) and not _is_beyond(name, arch, h)}
        self._taken: dict[str, np.ndarray] = {}  # rows of sources of which tensors take parts
        self._experts = _expert_names(tensors)
        self.place = 0  # of the last source of what was found, in the order of the checkpoint

    def find(self, row: TensorRow, i: int) -> Rows | None:
        """The source of a tensor, None if it is not there."""
        for spelling in row.sources:
            parts = self._named(spelling, i)
            if parts:
                self.place = max(self._order[part.name] for part in parts)
                for part in parts:
                    self._unused.pop(part.name, None)
                return stacked(parts) if "{e}" in spelling else parts[0]
        return None

    def _named(self, spelling: str, i: int) -> list[Rows]:
        if "{e}" not in spelling:
            found = self._tensors.get(spelling.format(i=i))
            return [] if found is None else [found]
        name = spelling.replace("{e}", "\0").format(i=i)
        numbers = sorted(self._experts.get(name, ()))
        if numbers and numbers != list(range(numbers[-1] + 1)):
            lost = next(n for n in range(numbers[-1] + 1) if n not in self._experts[name])
            raise GGUFError(
                f"{self._folder}: tensor '{name.replace(chr(0), str(lost))}' is missing; download the model again"
            )
        return [self._tensors[name.replace("\0", str(n))] for n in numbers]

    def changed(self, row: TensorRow, rows: Rows, i: int) -> Rows:
        """The source after the row's steps, in the row's shape."""
        shape = row.shape_of(self._h, i)
        if not row.steps:
            if rows.shape != shape:
                raise GGUFError(
                    f"{self._folder}: tensor '{rows.name}' has shape {rows.shape}, config.json implies {shape}"
                )
            return rows
        steps = row.steps
        if isinstance(steps[0], (Take, Transpose)) and math.prod(shape) > rows.n_rows * rows.n:
            raise GGUFError(f"{self._folder}: tensor '{rows.name}' has shape {rows.shape}, config.json implies {shape}")
        try:
            if isinstance(steps[0], Transpose):
                rows, steps = self._turned(rows, steps[0], i), steps[1:]
            self._note(steps, rows, i)
            return apply(steps, rows, shape, self._h, i)
        except GGUFError as error:
            raise GGUFError(f"{self._folder}: {error}; config.json implies {list(shape)}") from None

    def _turned(self, rows: Rows, step: Transpose, i: int) -> Rows:
        try:
            return transposed(rows, step.shape(self._h, i))
        except ValueError as error:
            raise GGUFError(f"tensor '{rows.name}' of shape {list(rows.shape)} {error}") from None

    def _note(self, steps: tuple[Step, ...], rows: Rows, i: int) -> None:
        step = steps[0] if steps else None
        if not isinstance(step, Take) or step.drops:
            self._taken[rows.name] = np.ones(rows.n_rows, bool)
            return
        taken = self._taken.setdefault(rows.name, np.zeros(rows.n_rows, bool))
        try:
            order = step.rows(self._h, i)
        except (ValueError, IndexError):
            return  # `apply` says it
        taken[order[(order >= 0) & (order < len(taken))]] = True

    def check_all_used(self) -> None:
        """Raises GGUFError for a tensor without a place, and for rows that no tensor took."""
        unknown = list(self._unused)
        if unknown:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            raise GGUFError(
                f"{self._folder}: no place for tensor '{unknown[0]}'{more}: "
                f"a '{self._arch.name}' model here has none such"
            )
        for name, taken in self._taken.items():
            if not taken.all():
                raise GGUFError(
                    f"{self._folder}: tensor '{name}' has {taken.size} rows, config.json implies {taken.sum()}"
                )


def _expert_names(tensors: Mapping[str, Rows]) -> dict[str, set[int]]:
    """Names with one of their numbers replaced by \\0 -> the numbers that are there."""
    found: dict[str, set[int]] = {}
    for name in tensors:
        for match in re.finditer(r"(?<=\.)\d+(?=\.)", name):
            key = f"{name[: match.start()]}\0{name[match.end() :]}"
            found.setdefault(key, set()).add(int(match.group()))
    return found
