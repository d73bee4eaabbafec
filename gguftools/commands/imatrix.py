"""`gguftools imatrix`: collect an importance matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gguftools import report
from gguftools.commands.options import Batch, Chunks, Context, Json, Text, Threads
from gguftools.commands.running import running
from gguftools.measure import N_BATCH, N_CTX


def imatrix(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="GGUF file.", show_default=False)],
    text: Text,
    output: Annotated[Path, typer.Option("-o", "--output", help="GGUF file to write.")] = Path("imatrix.gguf"),
    ctx_size: Context = N_CTX,
    chunks: Chunks = None,
    process_output: Annotated[bool, typer.Option(help="Also watch the output matrix.")] = False,
    parse_special: Annotated[bool, typer.Option(help="Recognise control tokens in the text.")] = False,
    no_ppl: Annotated[bool, typer.Option("--no-ppl", help="Do not compute the perplexity on the way.")] = False,
    batch_size: Batch = N_BATCH,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Run a calibration text through a model and note which columns of its weights matter."""
    from gguftools import measure

    with running("imatrix") as step:
        matrix = measure.imatrix(
            model, text, output, ctx_size, chunks, process_output, parse_special, not no_ppl, batch_size, threads, step
        )
    summary = {
        "output": str(output),
        "entries": len(matrix.entries),
        "chunks": matrix.chunk_count,
        "chunk_size": matrix.chunk_size,
        "dataset": matrix.datasets[0],
    }
    if json:
        report.print_json(summary)
        return
    report.write(str(output))
    report.write(
        f"{summary['entries']:,} entries from {summary['chunks']:,} chunks of {summary['chunk_size']:,} tokens"
    )
