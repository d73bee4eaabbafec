"""`gguftools hash`: fingerprints of the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gguftools import report
from gguftools.commands.options import Json
from gguftools.progress import progress


def hash_(
    file: Annotated[Path, typer.Argument(help="GGUF file, or a shard of a set.", show_default=False)],
    sha256: Annotated[bool, typer.Option("--sha256", help="SHA-256 (the default).")] = False,
    sha1: Annotated[bool, typer.Option("--sha1", help="SHA-1.")] = False,
    xxh64: Annotated[bool, typer.Option("--xxh64", help="xxh64; needs the package xxhash.")] = False,
    uuid: Annotated[bool, typer.Option("--uuid", help="UUID of the whole, version 5.")] = False,
    no_layer: Annotated[bool, typer.Option("--no-layer", help="Only the whole, not each tensor.")] = False,
    any_order: Annotated[
        bool, typer.Option("--any-order", help="Total that does not depend on the order of tensors.")
    ] = False,
    check: Annotated[
        Path | None,
        typer.Option("-c", "--check", metavar="MANIFEST", help="Compare with a manifest.", show_default=False),
    ] = None,
    json: Json = False,
) -> None:
    """Hash the weights, tensor by tensor and in total, in the manifest of llama.cpp's gguf-hash; or check one.

    Keys do not count, so an edited file keeps its hashes. Exit code 1 if a hash is not the manifest's.

    Example: gguftools hash model.gguf > model.manifest
    """
    from gguftools.toolbox.hashes import compare_manifest, hash_file

    chosen = [name for name, on in (("sha256", sha256), ("sha1", sha1), ("xxh64", xxh64), ("uuid", uuid)) if on]
    with progress("hashing", file.stat().st_size if file.is_file() else 0) as advance:
        if check is None:
            found = hash_file(file, chosen or ["sha256"], not no_layer, any_order, advance)
            compared = []
        else:
            compared = compare_manifest(file, check, chosen, any_order, advance)
            found = [line.hash for line in compared]
    name = report.plain(str(file))
    verdicts = [line.verdict for line in compared]
    if json:
        rows = [{"algorithm": h.algorithm, "digest": h.digest, "tensor": h.tensor or None} for h in found]
        if compared:
            rows = [row | {"verdict": verdict} for row, verdict in zip(rows, verdicts)]
        report.print_json({"file": str(file), "hashes": rows})
    else:
        for i, h in enumerate(found):
            report.write(report.plain(h.line(name)) + (f"  -  {verdicts[i]}" if compared else ""))
        if compared:
            good = all(verdict == "Ok" for verdict in verdicts)
            report.write(f"\nVerification results for {report.plain(str(check))} - {'Success' if good else 'Failure'}")
    if any(verdict != "Ok" for verdict in verdicts):
        raise typer.Exit(1)
