"""`gguftools export`: a GGUF file to a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gguftools import report
from gguftools.commands.options import Json, Threads
from gguftools.progress import progress


def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="GGUF model, or a shard of one.", show_default=False)],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write; new or empty.", show_default=False)],
    outtype: Annotated[str, typer.Option(help="f32, f16, bf16, or auto: that of the file, f16 if quantized.")] = "auto",
    max_shard_size: Annotated[str, typer.Option(help="Size of a file of weights, as 500M or 5G.")] = "5G",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Plan and report, write nothing.")] = False,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Write a GGUF model as a Hugging Face folder (safetensors)."""
    from gguftools.exporting import run
    from gguftools.toolbox.split import parse_size

    size = parse_size(max_shard_size)
    planned = run.export(file, folder, outtype, size, threads, dry_run=True)
    if not dry_run:
        with progress("exporting", planned.n_bytes) as advance:
            planned = run.export(file, folder, outtype, size, threads, advance)
    summary = planned.summary()
    if json:
        report.print_json(summary)
        return
    report.write(report.plain(summary["output"]))
    counts = f"{summary['tensors']:,} tensors, {report.size(summary['bytes'])}, {summary['dtype']}"
    report.write(f"{summary['class']}: {counts}")
