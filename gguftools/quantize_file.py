"""A GGUF file in, a smaller one out: plan everything, refuse what cannot work, then stream tensor after tensor."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gguftools.errors import GGUFError, naming
from gguftools.gguf.reader import GGUF, TensorView
from gguftools.gguf.writer import Writer
from gguftools.imatrix_file import read_imatrix
from quant.format import Format
from quant.imatrix import IMatrix
from quant.mixes import Choice, PlanOptions, TensorInfo, check_plan, plan
from quant.presets import COPY, get_preset

SLAB = 1 << 23  # weights that are held as float32 at a time

QUANTIZATION_VERSION = 2  # of the block formats, as ggml counts them


@dataclass(frozen=True)
class Quantized:
    """What was done: a choice per tensor in file order, and the bytes of their data before and after."""

    output: Path
    preset: str
    choices: list[Choice]
    bytes_before: int
    bytes_after: int
    without_importance: tuple[str, ...] = ()

    @property
    def n_weights(self) -> int:
        return sum(int(np.prod(c.shape, dtype=object)) for c in self.choices)

    @property
    def bpw(self) -> float:
        """Bits per weight over all tensors."""
        return 8 * self.bytes_after / max(1, self.n_weights)

    @property
    def fallbacks(self) -> int:
        """Tensors whose rows forced another type."""
        return sum(c.fallback for c in self.choices)

    def rows(self) -> list[tuple]:
        """Per tensor: name, shape, type before and after, bytes after, the rule that decided."""
        return [(c.name, list(c.shape), c.source.name, c.target.name, c.n_bytes, c.rule) for c in self.choices]

    def summary(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        names = ("name", "shape", "from", "to", "bytes", "rule")
        return {
            "output": str(self.output),
            "preset": self.preset,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "bpw": self.bpw,
            "fallbacks": self.fallbacks,
            "without_importance": list(self.without_importance),
            "tensors": [dict(zip(names, row)) for row in self.rows()],
        }


def quantize(
    source: str | os.PathLike,
    output: str | os.PathLike,
    preset: str,
    imatrix: str | os.PathLike | None = None,
    options: PlanOptions | None = None,
    allow_requantize: bool = False,
    threads: int | None = None,
    progress: Callable[[int], None] | None = None,
    dry_run: bool = False,
) -> Quantized:
    """Quantize a GGUF file to a preset; the bytes are those that llama.cpp's quantize tool writes.

    preset: as `Q4_K_M`, in any case; imatrix: an importance matrix file; progress: called with the number of bytes of
    source data that are done; dry_run: plan and report, write nothing.

    >>> import gguftools, os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     out = os.path.join(folder, "tiny-q8.gguf")
    ...     result = gguftools.quantize(gguftools.demo_model(), out, "Q8_0")
    >>> round(result.bpw, 2)
    8.52

    Raises GGUFError and QuantError for everything that can be known before the first byte is written (a damaged
    source, an output that is the source, a missing importance matrix, too little space), and for weights that are not
    finite; then no file is left behind.
    """
    chosen = get_preset(preset)
    with GGUF(source) as f, naming(source):
        _check_model(f)
        importance = read_imatrix(imatrix) if imatrix is not None else None
        tensors = [TensorInfo(t.name, t.shape, t.format) for t in f.tensors.values()]
        choices = plan(tensors, f.metadata, chosen, importance is not None, options)
        if importance is not None:
            importance.fit({t.name: (math.prod(t.shape[:-2]), t.shape[-1]) for t in tensors if t.shape})
            _check_importance(imatrix, importance, choices)
        check_plan(choices, importance.entries if importance else None, allow_requantize)
        result = Quantized(
            output=Path(output),
            preset=chosen.name,
            choices=choices,
            bytes_before=sum(t.nbytes for t in f.tensors.values()),
            bytes_after=sum(c.n_bytes for c in choices),
            without_importance=_without(importance, choices),
        )
        if dry_run:
            return result
        with Writer(output, [source, *([imatrix] if imatrix is not None else [])]) as w:
            for field in f.fields.values():
                if not field.key.startswith("split."):
                    w.add_field(field)
            w.add("general.quantization_version", QUANTIZATION_VERSION, "uint32")
            ftype = f.metadata.get("general.file_type", 0) if chosen is COPY else chosen.ftype
            w.add("general.file_type", ftype, "uint32")
            if importance is not None:
                _describe_importance(w, Path(imatrix or ""), importance)
            for choice in choices:
                w.declare(choice.name, choice.shape, choice.target)
            for choice in choices:
                view = f.tensors[choice.name]
                w.write(choice.name, convert_tensor(view, choice.target, importance, threads, progress))
    return result


def convert_tensor(
    view: TensorView,
    target: Format,
    importance: IMatrix | None = None,
    threads: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Iterator[np.ndarray]:
    """The tensor's data in another format, in pieces of at most SLAB weights; never more than two pieces in memory."""
    from quant.quantize import dequantize_blocks, quantize_into

    if view.format is target:
        yield view.data
        if progress is not None:
            progress(view.nbytes)
        return
    n = view.shape[-1]
    rows = view.data.view(view.format.block).reshape(-1, n // view.format.block_size)
    weights = importance.importance(view.name) if importance is not None and view.name in importance.entries else None
    per_matrix = len(rows) // (1 if weights is None else len(weights))  # rows that share one vector of importance
    step = max(1, min(SLAB // n, per_matrix))
    for matrix in range(len(rows) // max(1, per_matrix)):
        for lo in range(matrix * per_matrix, (matrix + 1) * per_matrix, step):
            piece = rows[lo : min(lo + step, (matrix + 1) * per_matrix)]
            out = np.empty((len(piece), n // target.block_size), target.block)
            quantize_into(
                dequantize_blocks(piece, view.format, threads),
                target,
                out,
                None if weights is None else weights[matrix],
                threads,
                view.name,
                lo,
            )
            yield out
            if progress is not None:
                progress(piece.nbytes)


def _check_model(f: GGUF) -> None:
    """Refuse files whose quantized form nobody could use. Raises GGUFError."""
    if f.metadata.get("general.type") == "imatrix":
        raise GGUFError(f"{f.path}: is an importance matrix, not a model; give it with --imatrix")
    if not f.tensors:
        raise GGUFError(f"{f.path}: has no tensors, there is nothing to quantize; is it a vocabulary?")
    parts = f.metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise GGUFError(f"{f.path}: is one of {parts} parts of a model; merge them with llama-gguf-split first")


def _check_importance(path: object, importance: IMatrix, choices: list[Choice]) -> None:
    """Entries must fit the tensors that they are for. Raises GGUFError naming the first that does not."""
    fitting = 0
    for choice in choices:
        entry = importance.entries.get(choice.name)
        if entry is None:
            continue
        fitting += 1
        n_mat = 1
        for n in choice.shape[:-2]:
            n_mat *= n
        if entry.squares.shape != (n_mat, choice.shape[-1]):
            raise GGUFError(
                f"{path}: '{choice.name}' has {entry.squares.shape[0]} x {entry.squares.shape[1]} values, the tensor "
                f"needs {n_mat} x {choice.shape[-1]}: the importance matrix belongs to another model"
            )
    if not fitting:
        raise GGUFError(f"{path}: no entry fits a tensor of the model: the importance matrix belongs to another model")


def _without(importance: IMatrix | None, choices: list[Choice]) -> tuple[str, ...]:
    """Tensors of blocks that are quantized without importance although there is a matrix."""
    if importance is None:
        return ()
    return tuple(
        c.name
        for c in choices
        if not c.is_copy and c.target.is_quantized and c.name.startswith("blk.") and c.name not in importance.entries
    )


def _describe_importance(w: Writer, path: Path, importance: IMatrix) -> None:
    w.add("quantize.imatrix.file", _short(path.name), "string")
    if importance.datasets:
        w.add("quantize.imatrix.dataset", _short(importance.datasets[0]), "string")
    w.add("quantize.imatrix.entries_count", len(importance.entries), "uint32")
    if importance.chunk_count:
        w.add("quantize.imatrix.chunks_count", importance.chunk_count, "uint32")


def _short(text: str) -> str:
    """At most 127 bytes of UTF-8, as the reference's fields hold."""
    return text.encode(errors="replace")[:127].decode(errors="ignore")
