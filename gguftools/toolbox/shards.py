"""Models that lie in several files: `NAME-00001-of-00003.gguf` and its siblings, as llama.cpp's split tool writes them.

The first shard has all keys. Every shard has `split.no` (from 0), `split.count`, and `split.tensors.count` (of all).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gguftools.errors import GGUFError
from gguftools.gguf import GGUF, Field, TensorView, keys
from gguftools.gguf.reader import Metadata

_NAME = re.compile(r"(?P<prefix>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def shard_path(prefix: str | os.PathLike, i: int, n: int) -> Path:
    """Path of shard i of n, i from 0.

    >>> shard_path("model", 0, 3).name
    'model-00001-of-00003.gguf'
    """
    return Path(f"{os.fspath(prefix)}-{i + 1:05d}-of-{n:05d}.gguf")


def siblings(path: Path) -> list[Path] | None:
    """Paths of all shards of the set that `path` is named to be of, in order; None for another name."""
    found = _NAME.fullmatch(path.name)
    if found is None:
        return None
    n = int(found["count"])
    return [shard_path(path.with_name(found["prefix"]), i, n) for i in range(n)]


class Model:
    """One model: a file, or all shards of a set, whichever of them is named.

    path; files: the open `GGUF`s in order; fields: those of the first, without the keys of splitting where there are
    several files; metadata; tensors: name -> `TensorView`, of all files in order; size: bytes.

    A context manager, as `GGUF` is.
    """

    def __init__(self, path: Path, files: list[GGUF]) -> None:
        self.path = path
        self.files = files
        first = files[0]
        self.fields: Mapping[str, Field] = MappingProxyType(
            {key: field for key, field in first.fields.items() if len(files) == 1 or key not in SPLIT_KEYS}
        )
        self.metadata: Mapping[str, Any] = Metadata(self.fields)
        tensors: dict[str, TensorView] = {}
        for file in files:
            for name, view in file.tensors.items():
                if name in tensors:
                    raise GGUFError(f"{file.path}: tensor '{name}' is in another shard too; the set is mixed up")
                tensors[name] = view
        self.tensors: Mapping[str, TensorView] = MappingProxyType(tensors)
        self.size = sum(file.size for file in files)

    @property
    def paths(self) -> list[Path]:
        return [file.path for file in self.files]

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *failure: object) -> None:
        for file in self.files:
            file.close()


SPLIT_KEYS = (keys.SPLIT_NO, keys.SPLIT_COUNT, keys.SPLIT_TENSORS)


def open_set(path: str | os.PathLike) -> Model:
    """Open a model from its only file or from any of its shards.

    Raises GGUFError for files that cannot be read, shards that are missing, named against their `split.no`, or that
    disagree on numbers of shards and tensors.
    """
    path = Path(path)
    first = GGUF(path)
    count = _whole(first, keys.SPLIT_COUNT)
    if not count:
        return Model(path, [first])
    names = siblings(path)
    if names is None or len(names) != count:
        wanted = shard_path("NAME", _whole(first, keys.SPLIT_NO), count).name
        raise GGUFError(f"{path}: is one of {count} shards, but not named as one; rename it to {wanted}")
    missing = [name.name for name in names if not name.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise GGUFError(f"{path}: shard {missing[0]}{more} is missing; put all shards into one folder")
    with ExitStack() as stack:
        files = [stack.enter_context(GGUF(name)) for name in names]
        for i, file in enumerate(files):
            _check_shard(file, i, count)
        model = Model(path, files)
        total = _whole(files[0], keys.SPLIT_TENSORS)
        if total != len(model.tensors):
            raise GGUFError(
                f"{path}: the shards have {len(model.tensors):,} tensors, {total:,} are announced; get all again"
            )
        stack.pop_all()
        return model


def _check_shard(file: GGUF, i: int, count: int) -> None:
    found, no = _whole(file, keys.SPLIT_COUNT), _whole(file, keys.SPLIT_NO)
    if found != count:
        raise GGUFError(f"{file.path}: says it is one of {found} shards, others say {count}; the set is mixed up")
    if no != i:
        raise GGUFError(f"{file.path}: says it is shard {no + 1}, its name says {i + 1}; rename it")


def _whole(file: GGUF, key: str) -> int:
    """A count in the metadata, 0 where it is missing. Raises GGUFError for something else."""
    value = file.metadata.get(key, 0)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
        raise GGUFError(f"{file.path}: key '{key}' is {value!r}, expected a whole number; the file is damaged")
    return value
