"""`gguftools compare`: several models against one base, in one table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gguftools import report
from gguftools.commands.options import Batch, Calibration, Chunks, Context, Json, Plot, Stride, Threads
from gguftools.commands.running import running, warn
from gguftools.errors import GGUFError
from gguftools.measure import N_BATCH, N_CTX

if TYPE_CHECKING:
    from engine.evaluate import Scores


def compare(
    models: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[BASE] [MODEL...]", help="GGUF files or safetensors folders, the base first.", show_default=False
        ),
    ] = None,
    text: Annotated[Path | None, typer.Option("-f", "--file", help="Text file, UTF-8.", show_default=False)] = None,
    records: Annotated[
        list[Path] | None,
        typer.Option(
            "--records", metavar="FILE.json", help="Results of earlier runs, for the same table.", show_default=False
        ),
    ] = None,
    ctx_size: Context = N_CTX,
    chunks: Chunks = None,
    stride: Stride = 0,
    batch_size: Batch = N_BATCH,
    plot: Plot = None,
    imatrix: Calibration = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Measure several models against a base, which runs once: size, PPL, KL divergence, same top token."""
    from gguftools import comparison, measure
    from gguftools.picture import check_picture

    if plot is not None:
        check_picture(plot)
    found, names = [comparison.read_record(path) for path in records or ()], [str(path) for path in records or ()]
    if found:
        comparison.join(found, names)  # before the long part
    if models:
        if text is None:
            raise GGUFError("which text? Name a file with -f")
        if found and not models[0].is_dir():  # a folder is converted first, and known then
            this = comparison.announced(models[0], text, ctx_size, chunks, stride)
            comparison.join([*found, this], [*names, "this run"])
        warn(measure.overlaps(models, text, imatrix or ()))
        with running("compare") as step:

            def on_chunk(done: int, total: int, scores: list[Scores]) -> None:
                step(done, total, scores[0].running_ppl())

            found.append(
                comparison.run(models[0], models[1:], text, ctx_size, chunks, stride, batch_size, threads, on_chunk)
            )
        names.append("this run")
    if not found:
        raise GGUFError("nothing to compare: name a base, models and a text, or records of earlier runs")
    whole = comparison.join(found, names)
    if plot is not None:
        comparison.picture(whole).save(plot)
    if json:
        report.print_json(whole)
    else:
        _print(comparison.rows(whole))
        p = whole["protocol"]
        report.write()
        report.write(
            f"{p['n_tokens']:,} tokens of {report.plain(str(p['text']))}, {p['n_chunks']:,} chunks of {p['n_ctx']:,}; "
            "± is the standard error, the interval covers 95 %"
        )
        if not whole["complete"]:
            report.write("interrupted: these are the figures of the chunks that were done")
    if not whole["complete"]:
        raise KeyboardInterrupt


def _print(rows: list[tuple]) -> None:
    columns = (
        "model",
        "size",
        "bits/weight",
        "PPL",
        "± error",
        "mean KLD",
        "median",
        "99 %",
        "99.9 %",
        "same top",
        "interval",
    )
    report.table(
        columns,
        [
            (
                Path(name).name,
                report.size(size),
                f"{bpw:.3f}",
                f"{ppl:.4f}",
                f"{error:.4f}",
                *(f"{k:.6f}" for k in kld),
                f"{same:.2f} %",
                f"{low:.2f}-{high:.2f}",
            )
            for name, size, bpw, ppl, error, *kld, same, low, high in rows
        ],
    )
