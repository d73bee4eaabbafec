"""`gguftools perplexity`: how well a model predicts a text, and how far it is from a base model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gguftools import report
from gguftools.commands.options import Batch, Chunks, Context, Json, Text, Threads
from gguftools.commands.running import running
from gguftools.measure import N_BATCH, N_CTX

if TYPE_CHECKING:
    from engine.evaluate import Divergence, Estimate, Evaluation, Scores


def perplexity(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="GGUF file.", show_default=False)],
    text: Text,
    base: Annotated[
        Path | None,
        typer.Option("--kl-divergence", metavar="BASE.gguf", help="Also measure the divergence from this model."),
    ] = None,
    ctx_size: Context = N_CTX,
    chunks: Chunks = None,
    batch_size: Batch = N_BATCH,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Measure perplexity; with a base model, KL divergence, both run side by side, nothing stored on disk."""
    from gguftools import measure

    with running("perplexity") as step:

        def on_chunk(done: int, total: int, scores: list[Scores]) -> None:
            step(done, total, scores[0].running_ppl())

        result = measure.perplexity(model, text, ctx_size, chunks, base, batch_size, threads, on_chunk)
    if json:
        report.print_json({"model": str(model), "text": str(text), "base": base and str(base), **asdict(result)})
        return
    _print(result)


def _print(result: Evaluation) -> None:
    report.write(f"Final estimate: PPL = {result.ppl.value:.4f} +/- {result.ppl.error:.5f}")
    report.write(f"{result.n_chunks:,} chunks of {result.n_ctx:,} tokens, {result.n_tokens:,} tokens scored")
    if result.divergence is not None:
        report.write()
        for name, value in _lines(result, result.divergence):
            report.write(f"{name:<20} {value}")


def _lines(result: Evaluation, d: Divergence) -> list[tuple[str, str]]:
    def plus_minus(e: Estimate, factor: float = 1, unit: str = "") -> str:
        return f"{e.value * factor:11.6f} ± {e.error * factor:.6f}{unit}"

    def value(v: float, factor: float = 1, unit: str = "") -> str:
        return f"{v * factor:11.6f}{unit}"

    lines: list[tuple[str, Any]] = [
        ("PPL", plus_minus(result.ppl)),
        ("PPL of the base", plus_minus(d.base_ppl)),
        ("ln(PPL / base)", plus_minus(d.ln_ppl_ratio)),
        ("mean KLD", plus_minus(d.mean_kld)),
        ("maximum KLD", value(d.max_kld)),
        *((f"{p:g} % KLD" if p != 50 else "median KLD", value(v)) for p, v in d.kld_percentiles.items()),
        ("minimum KLD", value(d.min_kld)),
        ("mean Δp", plus_minus(d.mean_dp, 100, " %")),
        *((f"{p:g} % Δp" if p != 50 else "median Δp", value(v, 100, " %")) for p, v in d.dp_percentiles.items()),
        ("RMS Δp", plus_minus(d.rms_dp, 100, " %")),
        ("same top token", plus_minus(d.same_top, 100, " %")),
    ]
    return lines
