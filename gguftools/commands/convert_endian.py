"""`gguftools convert-endian`: a model file in the other byte order."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gguftools import report
from gguftools.commands.options import Json
from gguftools.progress import progress


def convert_endian(
    source: Annotated[Path, typer.Argument(metavar="IN", help="GGUF file.", show_default=False)],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="GGUF file to write.", show_default=False)],
    order: Annotated[str, typer.Argument(help="big, little or native.", show_default=False)],
    json: Json = False,
) -> None:
    """Convert a file to big-endian or back: keys, sizes, and the numbers inside the blocks of every type.

    Example: gguftools convert-endian model.gguf model-be.gguf big
    """
    from gguftools.toolbox.byte_order import convert_endian as run

    with progress("converting", source.stat().st_size if source.is_file() else 0) as advance:
        before, after = run(source, output, order, advance)
    if json:
        report.print_json({"output": str(output), "from": before, "to": after})
        return
    report.write(f"{report.plain(str(output))}: {before}-endian -> {after}-endian")
