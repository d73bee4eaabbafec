"""`gguftools merge-lora`: adapters into a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gguftools import report
from gguftools.commands.options import Json, Threads
from gguftools.progress import progress


def merge_lora(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="GGUF model, or model folder.", show_default=False)],
    adapters: Annotated[
        list[str],
        typer.Argument(metavar="ADAPTER[=SCALE]...", help="LoRA adapters in GGUF; they add up.", show_default=False),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write.", show_default=False)],
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Merge LoRA adapters into a model; tensors keep their types."""
    from gguftools.lora_merge import merge_lora as run

    done = run(base, [_scaled(text) for text in adapters], output, threads, progress)
    if json:
        report.print_json(done.summary())
        return
    report.write(report.plain(str(done.output)))
    report.write(f"{len(done.changed):,} tensors changed by {len(done.adapters)} adapters")


def _scaled(text: str) -> tuple[str, float]:
    path, equals, scale = text.rpartition("=")
    if not equals or Path(text).exists():
        return text, 1.0
    try:
        return path, float(scale)
    except ValueError:
        raise typer.BadParameter(f"'{scale}' is no number", param_hint="ADAPTER=SCALE") from None
