"""`gguftools verify`: does a quantized file derive from a base?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gguftools import report
from gguftools.commands.options import Json, Threads
from gguftools.progress import progress

_SAID = {
    "identical": "derives from {base} to the byte",
    "close": "is near {base}: other bytes, but every block is about as far from it as ours (at most {ratio:.2f} times)",
    "different": "does not derive from {base}",
}


def verify(
    file: Annotated[Path, typer.Argument(metavar="QUANT", help="Quantized GGUF file.", show_default=False)],
    base: Annotated[Path, typer.Option(metavar="FILE", help="What it is said to be made from.", show_default=False)],
    imatrix: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Importance matrix that was used.", show_default=False)
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Recipe or preset that must give the types; by default the one that the file holds, if it does.",
            show_default=False,
        ),
    ] = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Quantize the base again and compare, byte by byte; where bytes differ, bound each block's distance.

    Exit code 0: identical; 1: not.

    Example: gguftools verify q4.gguf --base model.gguf --imatrix imatrix.gguf
    """
    from gguftools.toolbox.verify import verify as run

    with progress("verifying", file.stat().st_size if file.is_file() else 0) as advance:
        found = run(file, base, imatrix, threads, advance, recipe)
    if json:
        report.print_json(found.summary())
    else:
        rows = [
            (
                t.name,
                f"{t.type}, not {t.wanted}" if t.wanted else t.type,
                t.verdict,
                t.differing,
                t.blocks,
                f"{t.distance:.4g}",
                f"{t.ours:.4g}",
                f"{t.ratio:.3g}",
                t.block,
            )
            for t in found.tensors
            if t.verdict != "identical"
        ]
        if rows:
            columns = ("tensor", "type", "verdict", "differing", "blocks", "distance", "ours", "ratio", "worst block")
            report.table(columns, rows)
            report.write()
        if found.lost:
            report.write(
                f"{len(found.lost):,} tensors of the base are missing, the first is {report.plain(found.lost[0])}"
            )
        if found.keys:
            report.write(f"{len(found.keys):,} keys differ: {report.plain(', '.join(found.keys[:6]))}")
        if found.recipe:
            odd = sum(bool(t.wanted) for t in found.tensors)
            said = f"{odd:,} tensors have another type than the recipe" if odd else "types are those of the recipe"
            report.write(f"{said} {report.plain(found.recipe)}")
        ratio = max((t.ratio for t in found.tensors), default=0.0)
        said = _SAID[found.verdict].format(base=report.plain(str(base)), ratio=ratio)
        report.write(f"{report.plain(str(file))} {said}")
    if found.verdict != "identical":
        raise typer.Exit(1)
