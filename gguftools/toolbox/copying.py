"""Writing a model file out of the parts of others, piece by piece: what editing, splitting, merging and converting
share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from gguftools.gguf import Field, TensorView, Writer
from gguftools.gguf.endian import LITTLE
from quant.format import Format

PIECE = 1 << 24  # bytes that are in memory at a time

Progress = Callable[[int], None] | None


@dataclass(frozen=True)
class Part:
    """One tensor to be written: its name and shape (NumPy order), its format, and a function that gives its blocks."""

    name: str
    shape: tuple[int, ...]
    format: Format
    pieces: Callable[[], Iterator[np.ndarray]]


def part(view: TensorView, name: str | None = None) -> Part:
    """A tensor as it is, perhaps under another name."""
    return Part(name or view.name, view.shape, view.format, lambda: pieces(view))


def pieces(view: TensorView) -> Iterator[np.ndarray]:
    """The bytes of a tensor, little-endian, in pieces of whole blocks."""
    from gguftools.gguf.endian import swapped

    step = max(1, PIECE // view.format.type_size) * view.format.type_size
    for start in range(0, view.nbytes, step):
        raw = view.raw[start : start + step]
        yield raw if view.order == LITTLE else swapped(raw, view.format)


def write(
    output: str | os.PathLike,
    inputs: Iterable[str | os.PathLike],
    fields: Iterable[Field],
    parts: Iterable[Part],
    progress: Progress = None,
    byte_order: str = LITTLE,
    overwrite: bool = True,
    version: int = 3,
) -> None:
    """Write a GGUF file and read it again before it takes its name. progress: called with bytes of data written.

    Raises GGUFError as `Writer` does.
    """
    parts = list(parts)
    with Writer(output, inputs, byte_order, version, overwrite, verify=True) as w:
        for field in fields:
            w.add_field(field)
        for p in parts:
            w.declare(p.name, p.shape, p.format)
        for p in parts:
            w.write(p.name, _counted(p.pieces(), progress))


def _counted(found: Iterator[np.ndarray], progress: Progress) -> Iterator[np.ndarray]:
    for piece in found:
        yield piece
        if progress is not None:
            progress(piece.nbytes)
