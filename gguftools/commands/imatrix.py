"""`gguftools imatrix`: collect an importance matrix, merge and convert such files, show what they say."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from gguftools import report
from gguftools.commands.options import Batch, Chunks, Context, Json, Plot, Threads
from gguftools.commands.running import running, warn
from gguftools.errors import GGUFError
from gguftools.measure import N_BATCH, N_CTX, OUTPUT_FREQUENCY

if TYPE_CHECKING:
    from quant.imatrix import IMatrix

Output = Annotated[Path, typer.Option("-o", "--output", help="File to write.")]
Inputs = Annotated[list[Path], typer.Argument(metavar="FILE...", help="Importance matrices.", show_default=False)]


class FileFormat(StrEnum):
    gguf = "gguf"
    dat = "dat"


ChunkSize = Annotated[
    int | None,
    typer.Option(
        "-c", "--ctx-size", min=1, help="Tokens of a chunk in older files, which do not say.", show_default=False
    ),
]
Format = Annotated[FileFormat, typer.Option("--output-format", help="Form of the file; dat is the older one.")]


class _Group(TyperGroup):
    """`imatrix MODEL ...` means `imatrix collect MODEL ...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["show" if "--show-statistics" in args else "collect", *args]
        return super().parse_args(ctx, args)


imatrix_app = typer.Typer(
    name="imatrix",
    cls=_Group,
    no_args_is_help=True,
    help="Run a calibration text through a model and note which columns of its weights matter. `gguftools imatrix "
    "MODEL -f TEXT` collects; its options: `gguftools imatrix collect --help`.",
)


@imatrix_app.command("collect")
def collect(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="GGUF file or safetensors folder.", show_default=False)
    ],
    text: Annotated[
        list[str],
        typer.Option(
            "-f",
            "--file",
            metavar="FILE[:WEIGHT]",
            help="Text, or JSON lines with texts or conversations; may be given again.",
            show_default=False,
        ),
    ],
    output: Output = Path("imatrix.gguf"),
    output_format: Format = FileFormat.gguf,
    ctx_size: Context = N_CTX,
    chunks: Chunks = None,
    from_chunk: Annotated[int, typer.Option("--from-chunk", "--chunk", min=0, help="Chunks to leave out first.")] = 0,
    process_output: Annotated[bool, typer.Option(help="Also watch the output matrix.")] = False,
    all_experts: Annotated[
        bool,
        typer.Option(
            "--all-experts",
            help="Count every token for every expert of its layer, so that none stays without importance. The model "
            "computes with the experts that its router chooses, as ever; it takes the time of all of them.",
        ),
    ] = False,
    parse_special: Annotated[bool, typer.Option(help="Recognise control tokens in the text.")] = False,
    no_ppl: Annotated[bool, typer.Option("--no-ppl", help="Do not compute the perplexity on the way.")] = False,
    output_frequency: Annotated[
        int, typer.Option(min=0, help="Save every so many chunks; 0: at the end.")
    ] = OUTPUT_FREQUENCY,
    save_frequency: Annotated[int, typer.Option(min=0, help="Keep a copy every so many chunks; 0: none.")] = 0,
    restart: Annotated[bool, typer.Option("--restart", help="Begin anew where a run was interrupted.")] = False,
    in_file: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Importance matrices that are added to the result.", show_default=False),
    ] = None,
    batch_size: Batch = N_BATCH,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Collect an importance matrix. An interrupted run is saved, and the same command continues it."""
    from gguftools import measure
    from gguftools.imatrix_file import read_imatrix, read_run

    added = [read_imatrix(path) for path in in_file or ()]
    if output_format is FileFormat.gguf and output.suffix != ".gguf":
        warn([f"{output} will hold GGUF; for the older form use --output-format dat"])
    try:
        with running("imatrix") as step:
            matrix = measure.imatrix(
                model,
                text,
                output,
                ctx_size,
                chunks,
                process_output,
                parse_special,
                not no_ppl,
                batch_size,
                threads,
                step,
                from_chunk,
                output_frequency,
                save_frequency,
                output_format.value,
                not restart,
                all_experts,
            )
    except KeyboardInterrupt:
        if read_run(output) is not None:
            matrix = read_imatrix(output)
            report.write(f"{output}: {matrix.chunk_count:,} chunks are saved; the same command continues from there")
        raise
    if added:
        from gguftools.imatrix_file import write_imatrix

        for other in added:
            matrix.merge(other)
        write_imatrix(output, matrix, [model, *(in_file or ())], output_format.value)
    _tell(matrix, output, json)


@imatrix_app.command("merge")
def merge(
    inputs: Inputs,
    output: Output,
    output_format: Format = FileFormat.gguf,
    ctx_size: ChunkSize = None,
    json: Json = False,
) -> None:
    """Merge importance matrices, as if their texts had been read together."""
    from gguftools import measure

    if len(inputs) < 2:
        raise GGUFError(
            "merging takes two importance matrices or more; to change the form of one use `imatrix convert`"
        )
    _tell(measure.merge(inputs, output, output_format.value, ctx_size), output, json)


@imatrix_app.command("convert")
def convert(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="Importance matrix.", show_default=False)],
    output: Output,
    output_format: Format = FileFormat.gguf,
    ctx_size: ChunkSize = None,
    json: Json = False,
) -> None:
    """Write an importance matrix in the other form. The older form knows no plain sums and no exact counts."""
    from gguftools import measure

    _tell(measure.merge([source], output, output_format.value, ctx_size), output, json)


@imatrix_app.command("show")
def show(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="Importance matrix.", show_default=False)
    ] = None,
    in_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The same, as an option.", show_default=False)
    ] = None,
    show_statistics: Annotated[bool, typer.Option("--show-statistics", hidden=True)] = True,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Show statistics of an importance matrix: `gguftools imatrix FILE --show-statistics` does the same."""
    from gguftools.imatrix_file import read_imatrix
    from gguftools.picture import check_picture
    from quant.imatrix_statistics import block_statistics, weight_statistics

    path = file or in_file
    if path is None:
        raise GGUFError("which importance matrix? Name its file")
    if plot is not None:
        check_picture(plot)
    matrix = read_imatrix(path)
    weights = weight_statistics(matrix)
    blocks = block_statistics(weights)
    if plot is not None:
        _heat_map(path, weights).save(plot)
    if json:
        plain = [{k: v for k, v in asdict(s).items() if k != "pair"} for s in weights]
        report.print_json(
            {
                "file": str(path),
                "datasets": matrix.datasets,
                "sha256": matrix.hashes,
                "weights": matrix.weights,
                "chunks": matrix.chunk_count,
                "chunk_size": matrix.chunk_size,
                "tensors": plain,
                "blocks": [asdict(b) for b in blocks],
                "unreached": matrix.unreached(),
            }
        )
        return
    columns = ("block", "tensor", "mean", "deviation", "skewness", "kurtosis", "evenness", "energy", "gain", "distance")
    report.table(
        (*columns, "pearson", "covariance"),
        [(_label(s.block), s.role, *_numbers(s, (*columns[2:], "pearson", "covariance"))) for s in weights],
        f"{path}: {len(weights)} tensors, {matrix.chunk_count:,} chunks of {matrix.chunk_size:,} tokens",
    )
    report.write()
    if blocks:
        names = ("energy", "gain", "distance", "cosine", "pearson", "covariance")
        report.table(("block", *names), [(str(b.block), *_numbers(b, names)) for b in blocks])
    else:
        report.write("the blocks have gaps: there are no statistics of blocks")
    _coverage(matrix)


def _label(block: int | None) -> str:
    return "-" if block is None else str(block)


def _numbers(row: object, names: tuple[str, ...]) -> list[str]:
    return [f"{getattr(row, name):.4f}" + (" %" if name == "evenness" else "") for name in names]


def _heat_map(path: Path, weights: list) -> Any:
    """Root mean square of what comes into each weight, per block and role."""
    from gguftools.picture import heat_map

    roles = sorted({s.role for s in weights if s.block is not None})
    blocks = sorted({s.block for s in weights if s.block is not None})
    found = {(s.block, s.role): (s.energy / s.elements) ** 0.5 for s in weights}
    values = [[found.get((b, r)) for r in roles] for b in blocks]
    tips = [
        [f"blk.{b}.{r}: {v:.4g}" if v is not None else "" for r, v in zip(roles, row)] for b, row in zip(blocks, values)
    ]
    title = f"{path.name}: root mean square of inputs"
    return heat_map(title, [f"blk.{b}" for b in blocks], roles, values, tips, log=True)


def _coverage(matrix: IMatrix) -> None:
    missing = matrix.unreached()
    if not missing:
        return
    report.write()
    report.table(
        ("tensor", "experts", "reached", "not reached"),
        [
            (name, n := len(matrix.entries[name].counts), n - len(experts), ", ".join(map(str, experts)))
            for name, experts in missing.items()
        ],
        "experts that no token reached; their weights count alike when they are quantized",
    )


def _tell(matrix: IMatrix, output: Path, json: bool) -> None:
    if json:
        report.print_json(
            {
                "output": str(output),
                "entries": len(matrix.entries),
                "chunks": matrix.chunk_count,
                "chunk_size": matrix.chunk_size,
                "dataset": matrix.datasets[0] if matrix.datasets else None,
                "datasets": matrix.datasets,
                "sha256": matrix.hashes,
                "unreached": matrix.unreached(),
            }
        )
        return
    report.write(str(output))
    report.write(
        f"{len(matrix.entries):,} entries from {matrix.chunk_count:,} chunks of {matrix.chunk_size:,} tokens"
        + (f" of {', '.join(map(report.plain, matrix.datasets))}" if matrix.datasets else "")
    )
    _coverage(matrix)
