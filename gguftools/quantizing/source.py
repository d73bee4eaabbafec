"""Models to be quantized, wherever they come from: keys, and tensors as rows that are read piece by piece.

A GGUF file (or a set of shards) gives its tensors as they are. A Hugging Face folder gives those of its conversion with
`--outtype auto`, so that quantizing it directly equals converting first.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gguftools.errors import GGUFError, naming
from gguftools.gguf.endian import LITTLE, swapped
from gguftools.gguf.reader import TensorView
from gguftools.gguf.values import Field
from quant.format import Format

if TYPE_CHECKING:
    from gguftools.conversion.options import Options

PIECE = 1 << 18  # weights that a thread holds as float32 at a time: 1 MiB


@dataclass(frozen=True)
class SourceTensor:
    """A tensor as rows.

    name: in the output; origin: in the source, which importance goes by; where: for messages; shape: NumPy's order;
    format: that it is to be quantized from; fetch: rows lo to hi, either their bytes in `format`, uint8
    [hi - lo, row_size], or (`as_float`) their weights, float32 [hi - lo, n], which `format` is yet to round;
    zero: whether values that are not finite become 0.
    """

    name: str
    origin: str
    where: str
    shape: tuple[int, ...]
    format: Format
    fetch: Callable[[int, int], np.ndarray]
    as_float: bool = False
    zero: bool = False

    @property
    def n(self) -> int:
        """Length of a row."""
        return self.shape[-1] if self.shape else 1

    @property
    def n_rows(self) -> int:
        return math.prod(self.shape[:-1]) if self.n else 0

    @property
    def n_bytes(self) -> int:
        return self.n_rows * self.format.row_size(self.n)

    def spans(self, by_matrix: bool = False) -> Iterator[tuple[int, int]]:
        """First row and last row + 1 of pieces of about PIECE weights; by_matrix: that lie in one matrix each."""
        together = self.shape[-2] if by_matrix and len(self.shape) > 1 else self.n_rows
        step = max(1, PIECE // max(1, self.n))
        for first in range(0, self.n_rows, max(1, together)):
            for lo in range(first, first + together, step):
                yield lo, min(lo + step, first + together)

    def raw(self, lo: int, hi: int) -> np.ndarray:
        """Rows in `format`, uint8 [hi - lo, row_size]."""
        if self.as_float:
            return self._rounded(self._floats(lo, hi), lo)
        found = self.fetch(lo, hi)
        if self.zero and (bad := self._bad(found)).any():
            found = found.copy()
            found.view(self.format.block).view(np.uint8).reshape(*bad.shape, -1)[bad] = 0
        return found

    def read(self, lo: int, hi: int) -> np.ndarray:
        """Weights, float32 [hi - lo, n]."""
        from quant.quantize import dequantize_blocks

        if self.as_float and self.format.name == "F32":
            return self._floats(lo, hi)
        blocks = np.require(self.raw(lo, hi), requirements=["A", "C"]).view(self.format.block)
        return dequantize_blocks(blocks, self.format, 1)

    def not_finite(self, lo: int, hi: int) -> np.ndarray:
        """Which blocks (single values for plain types) of the source are not finite, bool [hi - lo, ...]."""
        found = self.fetch(lo, hi)
        return ~np.isfinite(found) if self.as_float else self._bad(found)

    def value(self, row: int, block: int) -> str:
        """One value of the source, for messages."""
        found = self.fetch(row, row + 1)
        if self.as_float:
            return str(found[0, block])
        if self.format.is_quantized:
            return f"in a block of {self.format} whose scale is not finite"
        from quant.quantize import dequantize_blocks

        one = np.require(found, requirements=["A", "C"]).view(self.format.block)[:, block : block + 1]
        return str(dequantize_blocks(np.ascontiguousarray(one), self.format, 1)[0, 0])

    def _floats(self, lo: int, hi: int) -> np.ndarray:
        found = self.fetch(lo, hi)
        if self.zero:
            found[~np.isfinite(found)] = 0
        return found

    def _rounded(self, rows: np.ndarray, lo: int) -> np.ndarray:
        from quant.quantize import quantize_into

        blocks = np.empty((len(rows), rows.shape[1] // self.format.block_size), self.format.block)
        quantize_into(rows, self.format, blocks, threads=1, name=self.where, first_row=lo)
        return blocks.view(np.uint8).reshape(len(rows), -1)

    def _bad(self, found: np.ndarray) -> np.ndarray:
        from quant.validate import bad_blocks

        if self.format.module is None:
            return np.zeros((len(found), 1), bool)
        blocks = np.require(found, requirements=["A", "C"]).view(self.format.block)
        return bad_blocks(blocks, self.format)


@dataclass(frozen=True)
class Model:
    """What is to be quantized.

    path: as the user named it; files: what it is read from; fields: keys, without those of splitting; tensors: by name,
    in file order; shards: names per file of a split model, () for a single file; overrides, pruned: fields that were
    set, and that pruning layers changed; is_hf: from a Hugging Face folder; name: a file name for an output of a type.
    """

    path: Path
    files: tuple[Path, ...]
    fields: dict[str, Field]
    tensors: dict[str, SourceTensor]
    shards: tuple[tuple[str, ...], ...] = ()
    overrides: tuple[Field, ...] = ()
    pruned: tuple[Field, ...] = ()
    is_hf: bool = False
    name: Callable[[str], str] = field(default=lambda preset: f"ggml-model-{preset}.gguf")

    @property
    def metadata(self) -> dict[str, Any]:
        return {key: f.value for key, f in self.fields.items()}

    @property
    def folder(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent


@contextmanager
def open_model(path: str | os.PathLike, options: Options | None = None) -> Iterator[Model]:
    """The model at `path`, a GGUF file, any shard of a set, or a Hugging Face folder; options: of the
    conversion of a folder.

    Raises GGUFError and EngineError for what cannot be read or is no model. Errors of the block name the path.
    """
    path = Path(path)
    if path.is_dir():
        with naming(path):
            yield _folder(path, options)
        return
    from gguftools.toolbox.shards import open_set

    with open_set(path) as found, naming(path):
        if found.metadata.get("general.type") == "imatrix":
            raise GGUFError(f"{path}: is an importance matrix, not a model; give it with --imatrix")
        if not found.tensors:
            raise GGUFError(f"{path}: has no tensors, there is nothing to quantize; is it a vocabulary?")
        shards = tuple(tuple(file.tensors) for file in found.files) if len(found.files) > 1 else ()
        tensors = {name: of_view(view) for name, view in found.tensors.items()}
        yield Model(path, tuple(found.paths), dict(found.fields), tensors, shards)


def of_view(view: TensorView) -> SourceTensor:
    """A tensor of a GGUF file."""
    size = view.format.row_size(view.shape[-1] if view.shape else 1)

    def fetch(lo: int, hi: int) -> np.ndarray:
        found = view.raw[lo * size : hi * size]
        found = found if view.order == LITTLE else swapped(found, view.format)
        return found.reshape(hi - lo, size)

    return SourceTensor(view.name, view.name, view.name, view.shape, view.format, fetch)


def _folder(path: Path, options: Options | None) -> Model:
    from gguftools.conversion.names import file_name
    from gguftools.conversion.run import plan
    from gguftools.gguf import keys
    from gguftools.gguf.values import encode

    conversion = plan(path, None, "auto", options=options)
    fields = {key: encode(key, value, keys.type_of(key)) for key, value in conversion.keys}
    tensors = {item.name: of_item(item) for item in conversion.items}
    return Model(
        path,
        tuple(conversion.inputs),
        fields,
        tensors,
        is_hf=True,
        name=lambda preset: file_name(conversion.model_name, preset),
    )


def of_item(item: Any) -> SourceTensor:
    """A tensor of a conversion (`conversion.run.Item`)."""
    rows = item.rows
    is_vector = len(rows.shape) < 2
    where = f"{item.name} (from {rows.name})" if rows.name else item.name

    def floats(lo: int, hi: int) -> np.ndarray:
        if is_vector:  # rows of one element there, one row here
            return rows.read(0, rows.n_rows, 1).reshape(1, -1)[lo:hi]
        return rows.read(lo, hi, 1)

    def as_it_is(lo: int, hi: int) -> np.ndarray:
        return np.require(rows.fetch(lo, hi), requirements=["A", "C"]).view(np.uint8).reshape(hi - lo, -1)

    same = rows.dtype == item.format.name and not is_vector
    fetch = as_it_is if same else floats
    return SourceTensor(item.name, item.name, where, rows.shape, item.format, fetch, as_float=not same)
