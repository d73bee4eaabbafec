"""`gguftools split` and `gguftools merge`: one model in several files, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gguftools import report
from gguftools.commands.options import DryRun, Json
from gguftools.errors import GGUFError
from gguftools.progress import progress


def split(
    source: Annotated[Path, typer.Argument(metavar="IN", help="GGUF file.", show_default=False)],
    prefix: Annotated[
        Path, typer.Argument(metavar="PREFIX", help="Shards become PREFIX-00001-of-0000N.gguf.", show_default=False)
    ],
    split_max_tensors: Annotated[
        int | None, typer.Option(min=1, help="Tensors of a shard; 128 without any limit.", show_default=False)
    ] = None,
    split_max_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Bytes of a shard, as 300M or 2G (powers of ten).", show_default=False),
    ] = None,
    no_tensor_first_split: Annotated[
        bool, typer.Option("--no-tensor-first-split", help="Only keys in the first.")
    ] = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Split a model, by number or size, with llama.cpp's names and keys. Existing files are not replaced.

    Example: gguftools split model.gguf model --split-max-size 2G
    """
    from gguftools.toolbox.split import parse_size
    from gguftools.toolbox.split import split as run

    size = None if split_max_size is None else parse_size(split_max_size)
    with progress("splitting", source.stat().st_size if source.is_file() else 0) as advance:
        result = run(source, prefix, split_max_tensors, size, no_tensor_first_split, dry_run, advance)
    if json:
        report.print_json(result.summary())
        return
    report.table(("shard", "tensors", "bytes"), [(str(s.path), len(s.tensors), s.n_bytes) for s in result.shards])
    if dry_run:
        report.write("nothing was written")


def merge(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="SHARD... OUT", help="One shard of a set or all, then the file to write.", show_default=False
        ),
    ],
    delete_splits: Annotated[
        bool, typer.Option("--delete-splits", help="Remove the shards when OUT is verified.")
    ] = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Merge the shards of a set. OUT must not exist.

    Example: gguftools merge model-00001-of-00003.gguf model.gguf
    """
    from gguftools.toolbox.split import merge as run

    if len(files) < 2:
        raise GGUFError("name a shard and the file to write")
    *shards, output = files
    with progress("merging", sum(path.stat().st_size for path in shards if path.is_file())) as advance:
        model = run(shards, output, dry_run, delete_splits, advance)
    if json:
        found = {"output": str(output), "shards": list(map(str, model.paths)), "tensors": len(model.tensors)}
        report.print_json(found | {"dry_run": dry_run})
        return
    what = "would be merged" if dry_run else "merged"
    report.write(f"{report.plain(str(output))}: {len(model.tensors):,} tensors of {len(model.files)} shards {what}")
