"""What else a conversion can be asked for, beside a type: other metadata, several files, the vocabulary alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from gguftools.conversion.card import ORDER, ORIGINS, Pair, origins
from gguftools.conversion.hf import load_json
from gguftools.conversion.names import ModelName
from gguftools.errors import GGUFError

ON_OVERFLOW = ("error", "clip", "bf16")
_LISTS = ("general.tags", "general.languages")


@dataclass(frozen=True)
class Split:
    """Limits of one file of several. max_size: bytes of its tensors; max_tensors: their number; 0 for no limit;
    no_tensor_first: the first file has keys only."""

    max_size: int = 0
    max_tensors: int = 0
    no_tensor_first: bool = False

    def groups(self, tensors: Sequence[tuple[str, int]]) -> list[list[str]]:
        """Names of each file's tensors, from names and bytes in order.

        >>> Split(max_tensors=2, no_tensor_first=True).groups([("a", 8), ("b", 8), ("c", 8)])
        [[], ['a', 'b'], ['c']]
        """
        groups: list[list[str]] = [[]]
        size = 0
        for name, n in tensors:
            full = bool(self.max_tensors) and len(groups[-1]) >= self.max_tensors
            if groups[-1] and (full or (self.max_size and size + n > self.max_size)):
                groups.append([])
                size = 0
            groups[-1].append(name)
            size += n
        return [[], *groups] if self.no_tensor_first else groups


@dataclass(frozen=True)
class Options:
    """pre: name of the pre-tokenizer; selftest: also write texts with their ids; metadata: a JSON file of `general.*`
    keys that beat what the folder says; model_name: beats those; vocab_only: no tensors; bigendian: byte order of the
    file; split: several files; on_overflow: what becomes of weights beyond F16: an error with their number, the
    largest F16, or BF16 for their tensor."""

    pre: str | None = None
    selftest: bool = False
    metadata: Path | None = None
    model_name: str | None = None
    vocab_only: bool = False
    bigendian: bool = False
    split: Split | None = None
    on_overflow: str = "error"

    def __post_init__(self) -> None:
        if self.on_overflow not in ON_OVERFLOW:
            raise GGUFError(f"unknown way with overflow '{self.on_overflow}'; there are {', '.join(ON_OVERFLOW)}")
        if self.split is not None and (self.vocab_only or min(self.split.max_size, self.split.max_tensors) < 0):
            raise GGUFError("a vocabulary alone is not split" if self.vocab_only else "limits of files are 1 or more")


def described(name: ModelName, pairs: Sequence[Pair], options: Options) -> tuple[ModelName, list[Pair]]:
    """Names and `general.*` keys with what the user says about the model.

    Raises GGUFError for keys that are none of a model's description, and values of a wrong kind.
    """
    wanted = {} if options.metadata is None else dict(load_json(options.metadata))
    for key, value in wanted.items():
        _check(str(options.metadata), key, value)
    if options.model_name is not None:
        wanted["general.name"] = options.model_name
    lists = {f"{key}s": key for key, _ in ORIGINS}
    found = {k: v for k, v in pairs if not any(q in wanted and k.startswith(f"{p}.") for q, p in lists.items())}
    for key, value in wanted.items():
        if key in lists:
            found |= dict(origins(lists[key], value, 0))
        else:
            found[key] = value
    parts = {f.name: wanted[key] for f in fields(ModelName) if (key := f"general.{f.name}") in wanted}
    places = {key: n for n, key in enumerate((*ORDER, *(key for key, _ in ORIGINS), *_LISTS))}

    def place(key: str) -> int:
        return places.get(key, places.get(".".join(key.split(".")[:2]), len(places)))

    return replace(name, **parts), sorted(found.items(), key=lambda pair: place(pair[0]))


def _check(path: str, key: str, value: Any) -> None:
    lists = [f"{name}s" for name, _ in ORIGINS]
    if key in lists:
        fits = isinstance(value, list) and all(isinstance(entry, Mapping) for entry in value)
    elif key in _LISTS:
        fits = isinstance(value, list) and bool(value) and all(isinstance(entry, str) for entry in value)
    elif key in ORDER:
        fits = isinstance(value, str)
    else:
        raise GGUFError(f"{path}: '{key}' does not describe a model; there are {', '.join((*ORDER, *lists, *_LISTS))}")
    if not fits:
        kind = "a list of objects" if key in lists else "a list of texts" if key in _LISTS else "a text"
        raise GGUFError(f"{path}: '{key}' is {str(value)[:60]!r}, expected {kind}")
