"""A quantized model file as one of floats: the way back, for tools that cannot read blocks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gguftools.errors import GGUFError
from gguftools.gguf import TensorView, ValueType
from gguftools.gguf.values import encode
from gguftools.quantize_file import convert_tensor
from gguftools.toolbox.copying import Part, Progress, part, write
from gguftools.toolbox.shards import open_set
from quant.format import Format
from quant.formats import FORMATS, get_format

FLOATS = 1 << 22  # weights that are held as float32 at a time

#: target -> `general.file_type`
TARGETS = {"F32": 0, "F16": 1, "BF16": 32}


@dataclass(frozen=True)
class Dequantized:
    """What was done: tensors that became floats, all tensors, and bytes of data before and after."""

    output: Path
    type: str
    changed: int
    tensors: int
    bytes_before: int
    bytes_after: int

    def summary(self) -> dict[str, Any]:
        return asdict(self) | {"output": str(self.output)}


def dequantize_file(
    source: str | os.PathLike,
    output: str | os.PathLike,
    type: str = "F16",
    threads: int | None = None,
    progress: Progress = None,
) -> Dequantized:
    """Write the model with weights of type F32, F16 or BF16.

    Quantized tensors and other floats of rank 2 or more take the type; vectors stay as they are (F32 in most files, and
    in those of llama.cpp always). A scale that F16 cannot hold is refused, not rounded to infinity.

    >>> import gguftools, os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     out = os.path.join(folder, "f16.gguf")
    ...     result = gguftools.dequantize(gguftools.demo_model(), out, "F16")
    ...     with gguftools.open(out) as f:
    ...         f.tensors["token_embd.weight"].format.name
    'F16'

    Raises GGUFError for another type, QuantError for weights that are not finite or do not fit, and as the reader and
    writer do.
    """
    target = get_format(type)
    if target.name not in TARGETS:
        raise GGUFError(f"{target} is no type of plain floats; there are {', '.join(TARGETS)}")
    with open_set(source) as model:
        views = list(model.tensors.values())
        targets = [_target(view, target) for view in views]
        parts = [_part(view, fmt, threads) for view, fmt in zip(views, targets)]
        fields = [
            field
            for key, field in model.fields.items()
            if not key.startswith(("split.", "quantize.")) and key not in ("general.file_type",)
        ]
        fields.append(encode("general.file_type", TARGETS[target.name], ValueType.UINT32))
        write(output, model.paths, fields, parts, progress)
        return Dequantized(
            output=Path(output),
            type=target.name,
            changed=sum(view.format is not fmt for view, fmt in zip(views, targets)),
            tensors=len(views),
            bytes_before=sum(view.nbytes for view in views),
            bytes_after=sum(view.size * fmt.type_size // fmt.block_size for view, fmt in zip(views, targets)),
        )


def _target(view: TensorView, target: Format) -> Format:
    if view.format.is_quantized:
        return target
    is_float = view.format.name in TARGETS or view.format.name == "F64"
    return target if is_float and len(view.ne) > 1 else view.format


def _part(view: TensorView, fmt: Format, threads: int | None) -> Part:
    if view.format is fmt:
        return part(view)
    return Part(view.name, view.shape, fmt, _converted(view, fmt, threads))


def _converted(view: TensorView, fmt: Format, threads: int | None) -> Callable[[], Iterator[np.ndarray]]:
    if fmt is FORMATS["F32"]:
        return lambda: float_pieces(view, threads)
    return lambda: convert_tensor(view, fmt, threads=threads)


def float_pieces(view: TensorView, threads: int | None = None) -> Iterator[np.ndarray]:
    """The weights as float32 [rows, n], a piece of rows at a time; a vector is one row.

    Raises QuantError for a type that cannot be computed with.
    """
    from quant.quantize import dequantize_blocks

    n = view.ne[0] if view.ne else 1
    if not view.size:
        return
    blocks = view.data.view(view.format.block).reshape(-1, n // view.format.block_size)
    step = max(1, FLOATS // n)
    for lo in range(0, len(blocks), step):
        yield dequantize_blocks(blocks[lo : lo + step], view.format, threads)
