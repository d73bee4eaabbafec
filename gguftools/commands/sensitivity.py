"""`gguftools sensitivity`: what quantizing each tensor costs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from gguftools import report
from gguftools.commands.options import Batch, Context, Json, Plot, Text, Threads
from gguftools.commands.running import running
from gguftools.measure import N_BATCH, N_CTX


class Grouping(StrEnum):
    tensor = "tensor"
    kind = "class"
    block = "block"


def sensitivity(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="GGUF file, F32, F16 or BF16.", show_default=False)],
    text: Text,
    types: Annotated[str, typer.Option(help="Types of tensors, separated by commas.")] = "Q2_K,Q4_K,Q6_K",
    by: Annotated[
        Grouping, typer.Option(help="What is swapped at a time: each tensor, class (role), or block.")
    ] = Grouping.tensor,
    only: Annotated[
        str, typer.Option(metavar="REGEX", help="Only tensors whose name has this in it.", show_default=False)
    ] = "",
    imatrix: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Importance matrix to quantize with.", show_default=False)
    ] = None,
    ctx_size: Context = N_CTX,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks of the text to run.")] = 8,
    batch_size: Batch = N_BATCH,
    plot: Plot = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Quantize one tensor (or class, or block) at a time and measure the KL divergence that it costs."""
    from gguftools import sensitivity as tool
    from gguftools.picture import check_picture

    if plot is not None:
        check_picture(plot)
    wanted = [name.strip() for name in types.split(",") if name.strip()]
    costs: list[tool.Cost] = []
    interrupted = False
    try:
        with running("sensitivity", "KLD", "passes") as step:
            tool.run(model, wanted, text, by.value, imatrix, ctx_size, chunks, batch_size, threads, only, step, costs)
    except KeyboardInterrupt:
        if not costs:
            raise
        interrupted = True
    if plot is not None:
        tool.picture(costs, str(model)).save(plot)
    if json:
        report.print_json(tool.summary(costs, str(model), str(text), ctx_size))
    else:
        report.table(
            (
                "part",
                "type",
                "weights",
                "saved",
                "bits/weight saved",
                "mean KLD",
                "± error",
                "99 %",
                "KLD per bit/weight",
            ),
            [
                (
                    c.group,
                    c.type,
                    c.weights,
                    f"{c.saved_bits / 8 / 1024:,.0f} KiB",
                    f"{c.saved_bpw:.4f}",
                    f"{c.mean_kld:.6f}",
                    f"{c.error:.6f}",
                    f"{c.kld_99:.6f}",
                    f"{c.kld_per_bpw:.6f}",
                )
                for c in sorted(costs, key=lambda c: -c.kld_per_bpw)
            ],
        )
    if interrupted:
        raise KeyboardInterrupt
