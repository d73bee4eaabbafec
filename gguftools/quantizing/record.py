"""Proof of where a quantized file's tensors came from, and their reuse in another.

A record holds for every tensor the SHA-256 of its source, of its importance (zeros for none) and of its data. It stands
in the file's metadata, or in a file beside it (`OUT.gguf.record.json`), so that the plain file stays as it is. A tensor
of an older file is taken over if source, importance, type and the version of the program are the same, and its data is
what the record says.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguftools._version import __version__
from gguftools.errors import GGUFError
from gguftools.files import atomic_output, read_whole
from gguftools.gguf.reader import GGUF
from gguftools.quantizing.prepare import OURS, VERSION, Recorded
from gguftools.quantizing.source import SourceTensor, of_view
from gguftools.safetensors import read_json
from quant.mixes import Choice
from quant.recipes import Recipe, write_recipe

SCHEMA = "gguftools.record/1"
_HEX = 64  # digits of a SHA-256


def sidecar_path(path: Path) -> Path:
    """Where the record of a file lies that does not hold it.

    >>> sidecar_path(Path("q4.gguf")).name
    'q4.gguf.record.json'
    """
    return path.with_name(path.name + ".record.json")


def write_sidecar(path: Path, recipe: Recipe, choices: Sequence[Choice], recorded: Recorded) -> None:
    """Write the record of the file at `path` beside it."""
    rows = zip(recorded.sources, recorded.importances, recorded.results)
    tensors = {c.name: dict(zip(Recorded.FIELDS, row)) for c, row in zip(choices, rows)}
    found = {"schema": SCHEMA, "version": __version__, "recipe": write_recipe(recipe), "tensors": tensors}
    with atomic_output(sidecar_path(path), [path]) as file:
        file.write(json.dumps(found, indent=1).encode())


@dataclass(frozen=True)
class Old:
    """An older output. tensors: as rows; records: name -> source, importance, result."""

    path: Path
    tensors: Mapping[str, SourceTensor]
    records: Mapping[str, tuple[str, ...]]

    def find(self, choice: Choice, source: str, importance: str) -> SourceTensor | None:
        """The tensor, if it is the same by its record. Raises GGUFError if its data is not what the record says."""
        tensor, record = self.tensors.get(choice.name), self.records.get(choice.name)
        same = tensor is not None and tensor.format is choice.target and tensor.shape == choice.shape
        if not same or record is None or not source or record[:2] != (source, importance):
            return None
        assert tensor is not None
        if data_digest(tensor) != record[2]:
            raise GGUFError(
                f"{self.path}: tensor '{choice.name}' is not what its record says: damaged; leave out --reuse"
            )
        return tensor


def data_digest(tensor: SourceTensor) -> str:
    """SHA-256 of a tensor's bytes."""
    state = hashlib.sha256()
    for lo, hi in tensor.spans():
        state.update(tensor.fetch(lo, hi).data)
    return state.hexdigest()


@contextmanager
def open_old(path: str | os.PathLike) -> Iterator[Old]:
    """A file made with --record or --sidecar.

    Raises GGUFError if it cannot be read, or nothing proves where its tensors came from.
    """
    path = Path(path)
    with GGUF(path) as file:
        records = _from_keys(path, file) or _from_sidecar(path)
        if records is None:
            raise GGUFError(
                f"{path}: has no record of its sources, so nothing proves that its tensors can be taken over; make it "
                "with --record or --sidecar, or leave out --reuse"
            )
        version, found = records
        if version != __version__:
            raise GGUFError(
                f"{path}: was made by version {version}, this is {__version__}: nothing proves that its tensors are "
                "those that this one makes; leave out --reuse"
            )
        yield Old(path, {name: of_view(view) for name, view in file.tensors.items()}, found)


Records = tuple[str, dict[str, tuple[str, ...]]]


def _from_keys(path: Path, file: GGUF) -> Records | None:
    columns = [file.metadata.get(f"{OURS}record.{name}") for name in Recorded.FIELDS]
    if any(column is None for column in columns):
        return None
    rows = [[*column] if isinstance(column, Sequence) else [] for column in columns]
    if any(len(row) != len(file.tensors) for row in rows):
        raise GGUFError(f"{path}: its record is of another number of tensors; leave out --reuse")
    return str(file.metadata.get(VERSION)), dict(zip(file.tensors, zip(*rows)))


def _from_sidecar(path: Path) -> Records | None:
    beside = sidecar_path(path)
    if not beside.is_file():
        return None
    found = read_json(read_whole(beside, "a record of sources"), str(beside))
    tensors: Any = found.get("tensors")
    if found.get("schema") != SCHEMA or not isinstance(tensors, dict):
        raise GGUFError(f"{beside}: is no record of sources; remove it, or leave out --reuse")
    try:
        rows = {name: tuple(str(row[key]) for key in Recorded.FIELDS) for name, row in tensors.items()}
    except (TypeError, KeyError):
        raise GGUFError(f"{beside}: is no record of sources; remove it, or leave out --reuse") from None
    return str(found.get("version")), rows


def blank(n: int) -> tuple[str, ...]:
    """Digests that are yet to be filled in, of the same length as those that will be."""
    return ("0" * _HEX,) * n
