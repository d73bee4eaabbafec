"""One model into several files and back, with the names, keys and cuts of llama.cpp's split tool.

Existing files are never replaced. Shards are written into a hidden folder beside their place and move out of it when
all of them are complete, so an interrupted run leaves none under its name.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguftools.errors import GGUFError
from gguftools.files import check_output, check_space, same_file
from gguftools.gguf import Field, TensorView, ValueType, keys
from gguftools.gguf.reader import pad
from gguftools.gguf.values import encode
from gguftools.toolbox.copying import Progress, part, write
from gguftools.toolbox.shards import Model, open_set, shard_path, siblings

MAX_TENSORS = 128  # of a shard, unless told otherwise
MAX_SHARDS = 65_535
_UNITS = {"K": 10**3, "M": 10**6, "G": 10**9}


@dataclass(frozen=True)
class Shard:
    """One output: its path, the names of its tensors, and their bytes with padding."""

    path: Path
    tensors: tuple[str, ...]
    n_bytes: int


@dataclass(frozen=True)
class Split:
    """What was done, or would be."""

    source: Path
    shards: tuple[Shard, ...]

    def summary(self) -> dict[str, Any]:
        shards = [{"file": str(s.path), "tensors": len(s.tensors), "bytes": s.n_bytes} for s in self.shards]
        return {"source": str(self.source), "shards": shards}


def parse_size(text: str) -> int:
    """Bytes of `300M` or `2G`, in powers of ten as the reference has them.

    >>> parse_size("2G")
    2000000000

    Raises GGUFError for anything else.
    """
    found = re.fullmatch(r"(\d{1,12})([KMG])", text.strip().upper())
    if not found or int(found[1]) == 0:
        raise GGUFError(f"'{text}' is no size; write it as 300M or 2G")
    return int(found[1]) * _UNITS[found[2]]


def split(
    source: str | os.PathLike,
    prefix: str | os.PathLike,
    max_tensors: int | None = None,
    max_size: int | None = None,
    no_tensor_first: bool = False,
    dry_run: bool = False,
    progress: Progress = None,
) -> Split:
    """Write a model as `PREFIX-00001-of-0000N.gguf` and so on.

    max_tensors: tensors of a shard (128 if neither limit is given); max_size: bytes of its tensors, one larger tensor
    gets a shard of its own; no_tensor_first: the first shard has keys only; dry_run: plan only.

    >>> import gguftools
    >>> len(gguftools.split(gguftools.demo_model(), "model", max_tensors=20, dry_run=True).shards)
    3

    Raises GGUFError if a shard is there already, for limits that make too many shards, and as `open_set` and `Writer`
    do.
    """
    if max_tensors is not None and max_size is not None:
        raise GGUFError("give a number of tensors or a size, not both")
    if (max_tensors is not None and max_tensors < 1) or (max_size is not None and max_size < 1):
        raise GGUFError("the limit of a shard must be 1 or more")
    with open_set(source) as model:
        groups = _groups(list(model.tensors.values()), max_tensors or (None if max_size else MAX_TENSORS), max_size)
        if no_tensor_first:
            groups.insert(0, [])
        if len(groups) > MAX_SHARDS:
            raise GGUFError(f"{source}: {len(groups):,} shards are too many (at most {MAX_SHARDS:,}); raise the limit")
        plan = Split(
            Path(source),
            tuple(
                Shard(shard_path(prefix, i, len(groups)), tuple(t.name for t in group), sum(map(_padded, group)))
                for i, group in enumerate(groups)
            ),
        )
        for shard in plan.shards:
            check_output(shard.path, model.paths, overwrite=False)
        if not dry_run:
            _write(model, plan, progress)
    return plan


def _padded(t: TensorView) -> int:
    return pad(t.nbytes, keys.DEFAULT_ALIGNMENT)


def _groups(tensors: list[TensorView], max_tensors: int | None, max_size: int | None) -> list[list[TensorView]]:
    """Consecutive tensors of each shard; at least one shard."""
    groups: list[list[TensorView]] = [[]]
    size = 0
    for t in tensors:
        full = len(groups[-1]) == max_tensors or (max_size is not None and size + _padded(t) > max_size)
        if full and groups[-1]:
            groups.append([])
            size = 0
        groups[-1].append(t)
        size += _padded(t)
    return groups


def _write(model: Model, plan: Split, progress: Progress) -> None:
    folder = plan.shards[0].path.parent
    check_space(plan.shards[0].path, sum(shard.n_bytes for shard in plan.shards))
    scratch = Path(tempfile.mkdtemp(prefix=f".{plan.shards[0].path.name}.", suffix=".partial", dir=folder))
    placed: list[Path] = []
    try:
        for i, shard in enumerate(plan.shards):
            parts = [part(model.tensors[name]) for name in shard.tensors]
            fields = _fields(model, i, len(plan.shards))
            order = model.files[0].byte_order
            write(
                scratch / shard.path.name, model.paths, fields, parts, progress, order, version=model.files[0].version
            )
        for shard in plan.shards:
            check_output(shard.path, overwrite=False)
            (scratch / shard.path.name).rename(shard.path)
            placed.append(shard.path)
    except BaseException:
        for path in placed:
            with suppress(OSError):
                path.unlink()
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _fields(model: Model, i: int, count: int) -> list[Field]:
    """All keys in the first shard; in the others only those of splitting, and the alignment, which readers need."""
    kept = [f for f in model.fields.values() if (i == 0 or f.key == keys.ALIGNMENT) and not f.key.startswith("split.")]
    return [
        *kept,
        encode(keys.SPLIT_NO, i, ValueType.UINT16),
        encode(keys.SPLIT_TENSORS, len(model.tensors), ValueType.INT32),
        encode(keys.SPLIT_COUNT, count, ValueType.UINT16),
    ]


def merge(
    shards: Sequence[str | os.PathLike],
    output: str | os.PathLike,
    dry_run: bool = False,
    delete: bool = False,
    progress: Progress = None,
) -> Model:
    """Write the shards of one set as one file.

    shards: one of the set, or all of them in any order; delete: remove them when the output is complete and verified;
    returns the model as it was before (its files closed).

    >>> import gguftools, os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     parts = gguftools.split(gguftools.demo_model(), os.path.join(folder, "m"), max_tensors=20)
    ...     whole = gguftools.merge([parts.shards[0].path], os.path.join(folder, "m.gguf"))
    ...     sorted(os.listdir(folder))
    ['m-00001-of-00003.gguf', 'm-00002-of-00003.gguf', 'm-00003-of-00003.gguf', 'm.gguf']

    Raises GGUFError if the output is there already, the shards are not of one set, and as `open_set` does.
    """
    if not shards:
        raise GGUFError("name a shard and the output")
    check_output(Path(output), [Path(shard) for shard in shards], overwrite=False)
    with open_set(shards[0]) as model:
        for shard in shards[1:]:
            if not any(same_file(Path(shard), path) for path in model.paths):
                raise GGUFError(f"{shard}: is not of the set of {shards[0]}; merge one set at a time")
        if len(model.files) == 1 and siblings(Path(shards[0])) is None:
            raise GGUFError(f"{shards[0]}: is not split; there is nothing to merge")
        if dry_run:
            return model
        first = model.files[0]
        fields = [field for key, field in first.fields.items() if key != keys.SPLIT_COUNT]
        fields.append(encode(keys.SPLIT_COUNT, 0, ValueType.UINT16))
        parts = [part(t) for t in model.tensors.values()]
        write(output, model.paths, fields, parts, progress, first.byte_order, overwrite=False, version=first.version)
    if delete:
        for path in model.paths:
            path.unlink()
    return model
