"""`gguftools quantize`: a GGUF file in another type."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from gguftools import report
from gguftools.commands.options import Json, Threads
from gguftools.progress import progress


def quantize(
    source: Annotated[Path, typer.Argument(metavar="IN", help="GGUF file, F32, F16 or BF16.", show_default=False)],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="GGUF file to write.", show_default=False)],
    preset: Annotated[
        str,
        typer.Argument(metavar="TYPE", help="Preset such as Q4_K_M, in any case, or its number.", show_default=False),
    ],
    imatrix: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Importance matrix (see `gguftools imatrix`).", show_default=False),
    ] = None,
    allow_requantize: Annotated[
        bool, typer.Option(help="Accept tensors that are already quantized; they lose twice.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done, and the size; write nothing.")
    ] = False,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Quantize a GGUF file; the bytes are those that llama.cpp's quantize tool writes."""
    from gguftools.quantize_file import quantize as run

    if dry_run:
        result = run(source, output, preset, imatrix, None, allow_requantize, threads, dry_run=True)
    else:
        with progress("quantizing", source.stat().st_size if source.is_file() else 0) as advance:
            result = run(source, output, preset, imatrix, None, allow_requantize, threads, advance)
    if result.without_importance:
        sys.stderr.write(
            f"warning: {len(result.without_importance)} tensors have no entry in the importance matrix and are "
            f"quantized without, the first is {result.without_importance[0]}\n"
        )
    if json:
        report.print_json(result.summary())
        return
    if dry_run:
        report.table(("tensor", "shape", "from", "to", "bytes", "rule"), result.rows())
        report.write()
    report.write(str(output))
    report.write(
        f"{result.preset}: {report.size(result.bytes_before)} -> {report.size(result.bytes_after)} of weights, "
        f"{result.bpw:.3f} bits per weight"
    )
    if result.fallbacks:
        report.write(f"{result.fallbacks} tensors took another type, because their rows are not whole blocks")
