"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Threads = Annotated[
    int | None,
    typer.Option("-t", "--threads", min=1, max=512, help="Threads; all cores by default.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Text = Annotated[Path, typer.Option("-f", "--file", help="Text file, UTF-8.", show_default=False)]
Context = Annotated[int, typer.Option("-c", "--ctx-size", min=4, help="Tokens of one chunk.")]
Chunks = Annotated[
    int | None, typer.Option("--chunks", min=1, help="Chunks to run; the whole text by default.", show_default=False)
]
Batch = Annotated[int, typer.Option("-b", "--batch-size", min=1, help="Tokens that run at once, at least one chunk.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done; write nothing.")]
Activations = Annotated[
    str,
    typer.Option(
        "--activations", help="f32, or q8: rounded to 8 bits before they meet quantized weights, as llama.cpp does."
    ),
]
Stride = Annotated[
    int,
    typer.Option(
        "--ppl-stride",
        min=0,
        help="Windows of -c plus half of it, every so many tokens, scored at their ends; 0: chunks.",
    ),
]
Calibration = Annotated[
    list[Path] | None,
    typer.Option(
        "--imatrix", metavar="FILE", help="Warn if the text was used for this importance matrix.", show_default=False
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Draw a picture: .svg, or .png with matplotlib.", show_default=False),
]
