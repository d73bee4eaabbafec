"""`gguftools report`: one page about a model file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gguftools import report as out
from gguftools.commands.options import Batch, Context, Json, Threads
from gguftools.commands.running import running, warn
from gguftools.measure import N_BATCH, N_CTX
from gguftools.progress import progress

if TYPE_CHECKING:
    from engine.evaluate import Scores


def report_(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="GGUF file.", show_default=False)],
    output: Annotated[Path, typer.Option("-o", "--output", help="HTML file to write.")] = Path("report.html"),
    base: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="GGUF file that it was made of: errors are shown.", show_default=False),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option("-f", "--file", help="Text to measure the divergence from the base on.", show_default=False),
    ] = None,
    ctx_size: Context = N_CTX,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks of the text to run.")] = 32,
    batch_size: Batch = N_BATCH,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Write one self-contained HTML page: sizes, types, bits per weight, errors, KL divergence, metadata."""
    from gguftools import html_report, measure

    if text is not None and base is not None:
        warn(measure.overlaps([model], text))
    size = model.stat().st_size if model.is_file() and base is not None else 0
    with progress("comparing", size) as advance, running("divergence") as step:

        def on_chunk(done: int, total: int, scores: list[Scores]) -> None:
            step(done, total, scores[0].running_ppl())

        html_report.write(model, output, base, text, ctx_size, chunks, batch_size, threads, on_chunk, advance)
    if json:
        out.print_json({"output": str(output), "bytes": output.stat().st_size})
    else:
        out.write(str(output))
