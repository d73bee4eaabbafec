"""`gguftools perplexity`: how well a model predicts a text, how far it is from a base model, how many questions it gets
right."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gguftools import report
from gguftools.commands.options import Activations, Batch, Calibration, Chunks, Context, Json, Stride, Threads
from gguftools.commands.running import running, warn
from gguftools.errors import GGUFError
from gguftools.measure import N_BATCH, N_CTX

if TYPE_CHECKING:
    from engine.evaluate import Divergence, Estimate, Evaluation, Scores

#: fewer scores than these say little of tails
_FEW = 100


def perplexity(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="GGUF file or safetensors folder.", show_default=False)
    ],
    text: Annotated[
        Path | None, typer.Option("-f", "--file", help="Text file, UTF-8, or the tasks.", show_default=False)
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(
            "--kl-divergence",
            metavar="BASE",
            help="Also measure the divergence from this model, run side by side.",
            show_default=False,
        ),
    ] = None,
    base_logits: Annotated[
        Path | None,
        typer.Option(
            "--kl-divergence-base", metavar="FILE", help="The same, from logits that were saved.", show_default=False
        ),
    ] = None,
    save_logits: Annotated[
        Path | None, typer.Option("--save-all-logits", metavar="FILE", help="Save the logits.", show_default=False)
    ] = None,
    ctx_size: Context = N_CTX,
    chunks: Chunks = None,
    stride: Stride = 0,
    batch_size: Batch = N_BATCH,
    hellaswag: Annotated[
        bool, typer.Option("--hellaswag", help="The file holds HellaSwag tasks, of six lines each.")
    ] = False,
    hellaswag_tasks: Annotated[int, typer.Option(min=1, help="Tasks to do.")] = 400,
    winogrande: Annotated[bool, typer.Option("--winogrande", help="The file holds WinoGrande tasks, as CSV.")] = False,
    winogrande_tasks: Annotated[int, typer.Option(min=0, help="Tasks to do; 0: all.")] = 0,
    multiple_choice: Annotated[
        bool, typer.Option("--multiple-choice", help="The file holds tasks in binary form.")
    ] = False,
    multiple_choice_tasks: Annotated[int, typer.Option(min=0, help="Tasks to do; 0: all.")] = 0,
    imatrix: Calibration = None,
    activations: Activations = "f32",
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Measure perplexity; with a base model, KL divergence, both run side by side, nothing stored on disk."""
    from gguftools import measure

    suites = {"hellaswag": hellaswag, "winogrande": winogrande, "multiple-choice": multiple_choice}
    chosen = [name for name, wanted in suites.items() if wanted]
    if (
        sum(
            (
                base is not None,
                base_logits is not None,
                save_logits is not None,
                len(chosen),
                stride > 0 and base_logits is not None,
            )
        )
        > 1
    ):
        raise GGUFError("a base model, saved logits, saving logits and tasks exclude each other; choose one")
    if stride and save_logits is not None:
        raise GGUFError("the file of logits has no place for a stride; leave --ppl-stride out")
    if activations != "f32" and (base_logits is not None or save_logits is not None or chosen):
        raise GGUFError("--activations goes with perplexity and --kl-divergence only")
    if text is None and base_logits is None:
        raise GGUFError("which text? Name a file with -f")
    if chosen:
        assert text is not None
        counts = {
            "hellaswag": hellaswag_tasks,
            "winogrande": winogrande_tasks,
            "multiple-choice": multiple_choice_tasks,
        }
        _tasks(model, text, chosen[0], counts[chosen[0]], batch_size, threads, json)
        return
    if text is not None:
        warn(measure.overlaps([model], text, imatrix or ()))
    with running("perplexity") as step:

        def on_chunk(done: int, total: int, scores: list[Scores]) -> None:
            step(done, total, scores[0].running_ppl())

        if base_logits is not None:
            result = measure.against_logits(
                model, base_logits, chunks, batch_size, threads, on_chunk, text, partial=True
            )
        elif save_logits is not None:
            assert text is not None
            result = measure.save_logits(model, text, save_logits, ctx_size, chunks, batch_size, threads, on_chunk)
        else:
            assert text is not None
            result = measure.perplexity(
                model, text, ctx_size, chunks, base, batch_size, threads, on_chunk, stride, True, activations
            )
    if json:
        against = base or base_logits
        names = {"model": str(model), "text": text and str(text), "base": against and str(against)}
        report.print_json({**names, **asdict(result)})
    else:
        _print(result)
        if save_logits is not None:
            report.write(str(save_logits))
    if not result.complete:
        raise KeyboardInterrupt


def _tasks(model: Path, text: Path, suite: str, n: int, batch: int, threads: int | None, json: bool) -> None:
    from gguftools import tasks

    with running(suite, "accuracy", "tasks") as step:
        result = tasks.run(model, text, suite, n, batch, threads, step)
    if json:
        report.print_json({"model": str(model), "text": str(text), **asdict(result)})
    else:
        low, high = result.interval
        report.write(f"{suite}: {result.correct:,} of {result.n:,} tasks right")
        report.write(f"accuracy     {100 * result.accuracy.value:8.4f} ± {100 * result.accuracy.error:.4f} %")
        report.write(f"95 % between {100 * low:8.4f} and {100 * high:.4f} %")
        report.write(f"by chance    {100 * result.chance:8.4f} %")
    if not result.complete:
        raise KeyboardInterrupt


def _print(result: Evaluation) -> None:
    report.write(f"Final estimate: PPL = {result.ppl.value:.4f} +/- {result.ppl.error:.5f}")
    if result.bits_per_byte is not None:
        report.write(f"bits per byte: {result.bits_per_byte:.4f}")
    how = f", every {result.stride:,}" if result.stride else ""
    report.write(f"{result.n_chunks:,} chunks of {result.n_ctx:,} tokens{how}, {result.n_tokens:,} tokens scored")
    if not result.complete:
        report.write("interrupted: these are the figures of the chunks that were done")
    if result.divergence is not None:
        report.write()
        for name, value in _lines(result, result.divergence):
            report.write(f"{name:<20} {value}")
        if result.n_tokens < _FEW:
            report.write(f"only {result.n_tokens} tokens: percentiles say little")


def _lines(result: Evaluation, d: Divergence) -> list[tuple[str, str]]:
    def plus_minus(e: Estimate, factor: float = 1, unit: str = "") -> str:
        return f"{e.value * factor:11.6f} ± {e.error * factor:.6f}{unit}"

    def value(v: float, factor: float = 1, unit: str = "") -> str:
        return f"{v * factor:11.6f}{unit}"

    low, high = d.same_top_interval
    lines: list[tuple[str, Any]] = [
        ("PPL", plus_minus(result.ppl)),
        ("PPL of the base", plus_minus(d.base_ppl)),
        ("correlation of ln", "" if d.correlation is None else value(d.correlation, 100, " %")),
        ("ln(PPL / base)", plus_minus(d.ln_ppl_ratio)),
        ("PPL / base", plus_minus(d.ppl_ratio)),
        ("PPL - base", plus_minus(d.ppl_difference)),
        ("mean KLD", plus_minus(d.mean_kld)),
        ("maximum KLD", value(d.max_kld)),
        *((f"{p:g} % KLD" if p != 50 else "median KLD", value(v)) for p, v in d.kld_percentiles.items()),
        ("minimum KLD", value(d.min_kld)),
        ("mean Δp", plus_minus(d.mean_dp, 100, " %")),
        ("maximum Δp", value(d.max_dp, 100, " %")),
        *((f"{p:g} % Δp" if p != 50 else "median Δp", value(v, 100, " %")) for p, v in d.dp_percentiles.items()),
        ("minimum Δp", value(d.min_dp, 100, " %")),
        ("RMS Δp", plus_minus(d.rms_dp, 100, " %")),
        ("same top token", plus_minus(d.same_top, 100, " %") + f" (95 %: {100 * low:.3f} to {100 * high:.3f} %)"),
    ]
    return lines
