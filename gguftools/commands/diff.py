"""`gguftools diff`: two models side by side."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from gguftools import report
from gguftools.commands.options import Json, Threads
from gguftools.progress import progress


def diff(
    a: Annotated[
        Path, typer.Argument(metavar="A", help="GGUF or safetensors file, or model folder.", show_default=False)
    ],
    b: Annotated[Path, typer.Argument(metavar="B", help="The other one.", show_default=False)],
    header_only: Annotated[
        bool, typer.Option("--header-only", help="Compare keys, types and shapes, not weights.")
    ] = False,
    all_: Annotated[bool, typer.Option("--all", help="List identical tensors too.")] = False,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Compare keys, types and weights of two models, of any types and stores. Exit code 1 if they differ.

    Example: gguftools diff model.gguf q4.gguf
    """
    from gguftools.toolbox.diff import by_type
    from gguftools.toolbox.diff import diff as run

    with progress("comparing", 0, "weights") as advance:
        found = run(a, b, not header_only, threads, advance)
    if json:
        report.print_json(found.summary())
    else:
        if found.keys:
            columns = ("key", report.plain(str(a)), report.plain(str(b)))
            report.table(columns, [(k.key, _short(k.a), _short(k.b)) for k in found.keys])
            report.write()
        shown = [t for t in found.tensors if all_ or not (t.identical and t.a == t.b)]
        if shown:
            names = ("tensor", "a", "b", "rmse", "relative", "cosine", "largest", "")
            numbers = [(t.rmse, t.relative, t.cosine, t.largest) for t in shown]
            rows = [(t.name, t.a, t.b, *map(_number, four), _note(t)) for t, four in zip(shown, numbers)]
            report.table(names, rows)
            report.write()
        types = ", ".join(f"{n:,} {x} -> {y}" for (x, y), n in by_type(found.tensors).items())
        same = sum(t.identical for t in found.tensors)
        report.write(
            f"{len(found.keys):,} keys differ; {same:,} of {len(found.tensors):,} tensors are identical; {types}"
        )
    if not found.is_same:
        sys.stdout.flush()
        raise typer.Exit(1)


def _short(value: object) -> str | None:
    text = repr(value) if isinstance(value, str) else str(value)
    return None if value is None else text if len(text) <= 60 else text[:57] + "..."


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.6g}"


def _note(t) -> str:
    if t.note == "shapes differ":
        return f"shapes differ: {list(t.shape_a)} and {list(t.shape_b)}"
    return t.note or ("identical" if t.identical else "")
