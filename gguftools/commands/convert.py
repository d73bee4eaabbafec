"""`gguftools convert`: a Hugging Face folder to a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gguftools import report
from gguftools.commands.options import Json, Threads
from gguftools.progress import progress


def convert(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a Hugging Face model.", show_default=False)],
    outfile: Annotated[
        Path | None,
        typer.Option("-o", "--outfile", help="File or folder to write; {outtype} in the name is filled in."),
    ] = None,
    outtype: Annotated[
        str, typer.Option(help="f32, f16, bf16, q8_0, or auto: that of the source; or a preset such as Q4_K_M.")
    ] = "auto",
    imatrix: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Importance matrix, for presets.", show_default=False)
    ] = None,
    pre: Annotated[str | None, typer.Option(help="Pre-tokenizer to name, instead of the one found.")] = None,
    selftest: Annotated[
        bool, typer.Option("--self-test", help="Also write texts and their token ids, which `check` compares.")
    ] = False,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Convert a Hugging Face model (safetensors) to GGUF."""
    from gguftools.conversion.run import convert as run

    summary = run(folder, outfile, outtype, pre, threads, progress, selftest, imatrix).summary()
    if json:
        report.print_json(summary)
        return
    report.write(report.plain(summary["output"]))
    counts = f"{summary['tensors']:,} tensors, {summary['weights']:,} weights, {report.size(summary['bytes'])}"
    report.write(f"{summary['architecture']}, {summary['outtype']}: {counts}; pre-tokenizer {summary['pre']}")
