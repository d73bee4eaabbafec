"""`gguftools demo`: the whole job on one model, ending in one table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from gguftools import report
from gguftools.commands.options import Json, Threads


def demo(
    model: Annotated[
        Path | None, typer.Option(metavar="DIR_OR_GGUF", help="Model; by default the small one that is built in.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text to measure on; by default a built-in one.")
    ] = None,
    types: Annotated[str, typer.Option(help="Presets, separated by commas.")] = "",
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep the files here.")] = None,
    ctx_size: Annotated[
        int | None,
        typer.Option("-c", "--ctx-size", min=4, help="Tokens of one chunk; what suits the model by default."),
    ] = None,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks of text to run, at most.")] = 64,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Convert, collect importance, quantize to a ladder of types, measure each against the source."""
    from gguftools.demonstration import TYPES
    from gguftools.demonstration import demo as run

    wanted = [name.strip() for name in types.split(",") if name.strip()] or TYPES
    with _bars() as on_step:
        rungs = run(model, text, wanted, out, ctx_size, chunks, threads, on_step)
    if json:
        report.print_json([rung.record() for rung in rungs])
        return
    report.table(
        ("type", "size", "bits/weight", "PPL", "± error", "mean KLD", "same top token"),
        [
            (
                rung.type,
                report.size(rung.bytes),
                f"{rung.bpw:.3f}",
                f"{rung.result.ppl.value:.4f}",
                f"{rung.result.ppl.error:.4f}",
                f"{d.mean_kld.value:.6f}",
                f"{100 * d.same_top.value:.2f} %",
            )
            for rung in rungs
            if (d := rung.result.divergence) is not None
        ],
    )
    first = rungs[0].result
    sys.stderr.write(f"measured on {first.n_tokens:,} tokens, {first.n_chunks} chunks of {first.n_ctx}\n")
    if out is not None:
        sys.stderr.write(f"files are in {out}\n")


class _bars:
    """One progress bar a step, on stderr; where nobody watches, a line when it begins."""

    def __enter__(self):
        self._what, self._bar = "", None
        return self._step

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def _step(self, what: str, done: int, total: int, value: float | None) -> None:
        from tqdm import tqdm

        step = what.split()[0]
        if not sys.stderr.isatty():
            if step != self._what:
                sys.stderr.write(f"{step}\n")
            self._what = step
            return
        if step != self._what:
            if self._bar is not None:
                self._bar.close()
            self._what = step
            self._bar = tqdm(total=total, desc=f"{step:>9}", file=sys.stderr, dynamic_ncols=True)
        assert self._bar is not None
        self._bar.set_description(f"{what:>9}", refresh=False)
        if value is not None:
            self._bar.set_postfix_str(f"PPL {value:.3f}", refresh=False)
        self._bar.update(done - self._bar.n)
