"""`gguftools check`: everything that is wrong with a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gguftools import report
from gguftools.commands.options import Json


def check(
    files: Annotated[list[Path], typer.Argument(help="GGUF or safetensors files.", show_default=False)],
    header_only: Annotated[bool, typer.Option("--header-only", help="Do not read the weights.")] = False,
    sarif: Annotated[bool, typer.Option("--sarif", help="Print SARIF 2.1.0.")] = False,
    json: Json = False,
) -> None:
    """List all faults of files: structure, weights, vocabulary, rope, chat template, stop tokens, tokenizer.

    Exit code 0: clean (notes are allowed); 1: findings, or unreadable. Chat templates are read, never run.

    Example: gguftools check model.gguf
    """
    from gguftools.toolbox.check import check as run
    from gguftools.toolbox.check import sarif as as_sarif

    results = [run(path, not header_only) for path in files]
    if sarif:
        report.print_json(as_sarif(results))
    elif json:
        report.print_json(results[0].summary() if len(results) == 1 else [result.summary() for result in results])
    else:
        for result in results:
            name = report.plain(str(result.path))
            rows = [(f.offset, str(f.severity), f.code, f.message, f.remedy) for f in result.faults]
            if rows:
                report.table(("byte", "severity", "code", "finding", "remedy"), rows, title=name)
            counts = ", ".join(f"{n} {kind}{'s' * (n > 1)}" for kind, n in result.counts().items() if n)
            report.write(f"{name}: {'clean' if result.is_clean else 'not clean'}" + (f" ({counts})" if counts else ""))
    if not all(result.is_clean for result in results):
        raise typer.Exit(1)
