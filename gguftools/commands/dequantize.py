"""`gguftools dequantize`: a quantized model as one of floats."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gguftools import report
from gguftools.commands.options import Json, Threads
from gguftools.progress import progress


def dequantize(
    source: Annotated[Path, typer.Argument(metavar="IN", help="GGUF file, or a shard of a set.", show_default=False)],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="GGUF file to write.", show_default=False)],
    kind: Annotated[str, typer.Option("--type", metavar="TYPE", help="F16, BF16 or F32.")] = "F16",
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Write a model with F16, BF16 or F32 weights. What quantization lost does not come back.

    Example: gguftools dequantize q4.gguf f16.gguf --type F16
    """
    from gguftools.toolbox.dequantize import dequantize_file

    with progress("dequantizing", 0) as advance:
        result = dequantize_file(source, output, kind, threads, advance)
    if json:
        report.print_json(result.summary())
        return
    report.write(
        f"{report.plain(str(output))}: {result.changed:,} of {result.tensors:,} tensors became {result.type}, "
        f"{report.size(result.bytes_before)} -> {report.size(result.bytes_after)} of weights"
    )
