"""Reading safetensors checkpoints: one file, or a folder of them, memory-mapped and checked.

A file is a uint64 header length, a JSON object (name -> dtype, shape, [begin, end) within the data), and the data.
The checks are those of the reference implementation: the tensors cover the data in order without gaps or overlaps, and
each takes exactly the bytes of its shape. Headers are limited more tightly (32 MiB, 1.25 million values), so that the
time for any file stays below a second. Pickled checkpoints are never loaded: loading one runs code from the file.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeGuard

import numpy as np

from gguftools.errors import GGUFError
from gguftools.files import map_file

MAX_HEADER = 1 << 25  # bytes; 100,000 tensors take 10 MB
MAX_VALUES = 1_250_000  # in a header; 100,000 tensors have 1.1 million
MAX_RANK = 64  # NumPy's
MAX_SIZE = 1 << 60  # elements of a tensor: NumPy must be able to shape empty ones too

#: dtype -> bits per element, and the NumPy dtype of `array()`; None where it has no whole bytes
DTYPES: dict[str, tuple[int, str | None]] = {
    "BOOL": (8, "?"),
    "U8": (8, "<u1"),
    "I8": (8, "<i1"),
    "U16": (16, "<u2"),
    "I16": (16, "<i2"),
    "U32": (32, "<u4"),
    "I32": (32, "<i4"),
    "U64": (64, "<u8"),
    "I64": (64, "<i8"),
    "F16": (16, "<f2"),
    "BF16": (16, "<u2"),
    "F32": (32, "<f4"),
    "F64": (64, "<f8"),
    "C64": (64, "<c8"),
    "F8_E4M3": (8, "<u1"),
    "F8_E5M2": (8, "<u1"),
    "F8_E8M0": (8, "<u1"),
    "F8_E4M3FNUZ": (8, "<u1"),
    "F8_E5M2FNUZ": (8, "<u1"),
    "F6_E2M3": (6, None),
    "F6_E3M2": (6, None),
    "F4": (4, None),
}

ADAPTER = "adapter_model.safetensors"
_SHARD = re.compile(r"(?P<stem>.*-)(?P<no>\d{1,6})-of-(?P<count>\d{1,5})\.safetensors", re.DOTALL)
_PICKLES = ("*.bin", "*.pth", "*.pt", "*.ckpt")


@dataclass(frozen=True, eq=False, slots=True)
class SafetensorView:
    """One tensor over the file's memory map. data: uint8 [nbytes], read-only."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray
    path: Path

    @property
    def nbytes(self) -> int:
        return self.data.size

    def array(self) -> np.ndarray:
        """The elements without a copy, read-only, of `shape`. bfloat16 comes as uint16, 8-bit floats as uint8.

        Raises GGUFError for types that do not fill bytes (F4, F6).
        """
        kind = DTYPES[self.dtype][1]
        if kind is None:
            raise GGUFError(
                f"{self.path}: tensor '{self.name}' has elements of {DTYPES[self.dtype][0]} bits; use its bytes"
            )
        return self.data.view(kind).reshape(self.shape)


class SafetensorsFile:
    """One open file. tensors: name -> `SafetensorView`, in the order of the data; metadata: str -> str.

    A context manager; closing drops the file's own hold on the map, views that were handed out stay valid.
    Raises GGUFError for a file that is damaged, truncated, or not there.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        data = map_file(self.path)
        header, start = _read_header(data, self.path)
        self.metadata: Mapping[str, str] = MappingProxyType(_metadata(header.pop("__metadata__", {}), self.path))
        try:
            self.tensors: Mapping[str, SafetensorView] = MappingProxyType(
                _views(header, data[start:], start, self.path)
            )
        except _EntryError as error:
            at = bytes(data[8:start]).find(json.dumps(error.name, ensure_ascii=False).encode("utf-8", "replace"))
            raise GGUFError(str(error), 8 + max(0, at)) from None

    def close(self) -> None:
        self.tensors = MappingProxyType({})

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


def _read_header(data: np.ndarray, path: Path) -> tuple[dict[str, Any], int]:
    """The header's JSON object, and where the data begin."""
    if data.size < 8:
        raise GGUFError(
            f"{path}: truncated: the header length takes 8 bytes, the file has {data.size}; download it again",
            data.size,
        )
    start = bytes(data[:64])
    if start.startswith(b"version https://git-lfs"):
        raise GGUFError(f"{path}: this is a git-lfs pointer, not the weights; run `git lfs pull`", 0)
    length = int.from_bytes(start[:8], "little")
    if length > MAX_HEADER and not start[8:9] == b"{":
        raise GGUFError(f"{path}: not a safetensors file: it begins with {start[:8]!r}", 0)
    if length > MAX_HEADER:
        raise GGUFError(
            f"{path}: the header has {length:,} bytes, at most {MAX_HEADER:,} are allowed; the file is damaged", 0
        )
    if 8 + length > data.size:
        raise GGUFError(
            f"{path}: truncated: the header ends at byte {8 + length:,}, the file has {data.size:,}; download it again",
            data.size,
        )
    text = bytes(data[8 : 8 + length])
    # by the characters that separate them, before anything is built: five bytes can make an object of a hundred
    n_values = sum(map(text.count, (b",", b":", b"{", b"[")))
    if n_values > MAX_VALUES:
        raise GGUFError(
            f"{path}: the header holds about {n_values:,} values, {MAX_VALUES:,} are allowed; the file is damaged",
            8,
        )
    try:
        return read_json(text, f"{path}: the header"), 8 + length
    except GGUFError as error:
        raise GGUFError(str(error), 8 + (error.offset or 0)) from None


def read_json(text: bytes, where: str) -> dict[str, Any]:
    """A JSON object from a stranger. Raises GGUFError, with `where`, if it is none or a key comes twice in it."""
    repeated: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            repeated.extend(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        return found

    try:
        found = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise GGUFError(
            f"{where} is not valid JSON ({type(error).__name__}: {error}); download the file again",
            getattr(error, "pos", getattr(error, "start", None)),
        ) from None
    if not isinstance(found, dict):
        raise GGUFError(f"{where} is not a JSON object; download the file again")
    if repeated:
        raise GGUFError(f"{where} names '{repeated[0]}' twice; the file is damaged")
    return found


def _metadata(found: Any, path: Path) -> dict[str, str]:
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise GGUFError(f"{path}: __metadata__ is not a map of strings; the file is damaged", 8)
    return found


class _EntryError(GGUFError):
    """A fault of one entry; where it stands in the header is looked up by whoever has the header."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


def _views(header: dict[str, Any], data: np.ndarray, start: int, path: Path) -> dict[str, SafetensorView]:
    entries = sorted((_entry(name, entry, path) for name, entry in header.items()), key=lambda e: (e[3], e[4]))
    views: dict[str, SafetensorView] = {}
    at = 0
    for name, dtype, shape, begin, end in entries:
        if begin != at:
            what = "overlaps the tensor before it" if begin < at else "leaves a gap before it"
            raise _EntryError(
                name, f"{path}: tensor '{name}' at bytes {begin:,} to {end:,} {what}; the file is damaged"
            )
        if end > data.size:
            raise _EntryError(
                name,
                f"{path}: truncated: tensor '{name}' ends at byte {end:,} of the data, there are {data.size:,}; "
                "download it again",
            )
        views[name] = SafetensorView(name, dtype, shape, data[begin:end], path)
        at = end
    if at != data.size:
        raise GGUFError(f"{path}: {data.size - at:,} bytes after the last tensor; the file is damaged", start + at)
    return views


def _entry(name: str, entry: Any, path: Path) -> tuple[str, str, tuple[int, ...], int, int]:
    """One header entry, checked by itself: name, dtype, shape, begin, end."""
    where = f"{path}: tensor '{name}'"
    if not isinstance(entry, dict):
        raise _EntryError(name, f"{where} has no description; the file is damaged")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _EntryError(name, f"{where} has the unknown type {dtype!r}; there are {', '.join(DTYPES)}")
    if not _is_sizes(shape) or len(shape) > MAX_RANK or math.prod(max(n, 1) for n in shape) >= MAX_SIZE:
        raise _EntryError(name, f"{where} has no valid shape: {str(shape)[:60]}; the file is damaged")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _EntryError(name, f"{where} has no valid place: {str(offsets)[:60]}; the file is damaged")
    begin, end = offsets
    bits = math.prod(shape) * DTYPES[dtype][0]
    if bits != 8 * (end - begin):
        raise _EntryError(
            name,
            f"{where} of shape {shape} and type {dtype} takes {bits / 8:,.0f} bytes, it has {end - begin:,}; "
            "the file is damaged",
        )
    return name, dtype, tuple(shape), begin, end


def _is_sizes(found: Any) -> TypeGuard[list[int]]:
    return isinstance(found, list) and all(type(n) is int and 0 <= n < MAX_SIZE for n in found)


# --- folders ----------------------------------------------------------------------------------------------------------


class Checkpoint(Mapping[str, SafetensorView]):
    """The tensors of several files under one roof: name -> `SafetensorView`. files: the paths, in order.

    A context manager; closing drops its hold on the maps, views that were handed out stay valid.
    """

    def __init__(self, path: Path, parts: list[SafetensorsFile]) -> None:
        self.path = path
        self.files = [part.path for part in parts]
        self._tensors: dict[str, SafetensorView] = {}
        for part in parts:
            for name, view in part.tensors.items():
                if name in self._tensors:
                    raise GGUFError(
                        f"{path}: tensor '{name}' is both in {self._tensors[name].path.name} and in {part.path.name}; "
                        "remove one of them"
                    )
                self._tensors[name] = view

    def __getitem__(self, name: str) -> SafetensorView:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def close(self) -> None:
        self._tensors = {}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


def open_checkpoint(folder: str | os.PathLike) -> Checkpoint:
    """The tensors of a folder, or of a single file.

    Where there is a `*.safetensors.index.json`, it decides: its files are read and must hold exactly the tensors that
    it names; others are left aside. Else all files are read but adapters, and
    `consolidated*.safetensors` beside `model*.safetensors`, which are the same weights once more.

    Raises GGUFError if nothing is there, a part is missing or damaged, two files hold one tensor, or index and parts
    differ. All headers are read and checked before this returns.
    """
    folder = Path(folder)
    if folder.is_file():
        return Checkpoint(folder, [SafetensorsFile(folder)])
    if not folder.is_dir():
        raise GGUFError(f"{folder}: no such folder")
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if len(indexes) > 1:
        names = " and ".join(index.name for index in indexes)
        raise GGUFError(f"{folder}: there are several checkpoints, {names}; remove all but one")
    if indexes:
        return _open_indexed(folder, indexes[0])
    files = _without_index(folder)
    if not files:
        raise GGUFError(_nothing_found(folder))
    _check_numbers(folder, files)
    return Checkpoint(folder, [SafetensorsFile(file) for file in files])


def _without_index(folder: Path) -> list[Path]:
    files = [file for file in sorted(folder.glob("*.safetensors")) if file.name != ADAPTER]
    plain = [file for file in files if not file.name.startswith("consolidated")]
    return plain if any(file.name.startswith("model") for file in plain) else files


def _check_numbers(folder: Path, files: list[Path]) -> None:
    """Raises GGUFError for shards that their names speak of, but that are missing."""
    names = {file.name for file in files}
    for found in filter(None, (_SHARD.fullmatch(name) for name in sorted(names))):
        count = int(found["count"])
        shards = [
            f"{found['stem']}{i:0{len(found['no'])}}-of-{found['count']}.safetensors" for i in range(1, 1 + count)
        ]
        missing = [name for name in shards if name not in names]
        if missing:
            raise GGUFError(f"{folder}: shards are missing: {_some(missing)}; download them")


def _open_indexed(folder: Path, index: Path) -> Checkpoint:
    places = _weight_map(index)
    names = sorted(set(places.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise GGUFError(f"{folder}: {index.name} lists files that are missing: {_some(missing)}; download them")
    checkpoint = Checkpoint(folder, [SafetensorsFile(folder / name) for name in names])
    absent = [f"'{name}' (in {place})" for name, place in places.items() if not _holds(checkpoint, name, place)]
    if absent:
        raise GGUFError(
            f"{folder}: {index.name} lists tensors that the files lack: {_some(absent)}; download them again"
        )
    extra = [f"'{name}' (in {view.path.name})" for name, view in checkpoint.items() if name not in places]
    if extra:
        raise GGUFError(f"{folder}: the files hold tensors that {index.name} lacks: {_some(extra)}; download it again")
    return checkpoint


def _holds(checkpoint: Checkpoint, name: str, place: str) -> bool:
    return name in checkpoint and checkpoint[name].path.name == place


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name in the index's folder."""
    data = map_file(index)
    if data.size > MAX_HEADER:
        raise GGUFError(f"{index}: has {data.size:,} bytes, at most {MAX_HEADER:,} are allowed")
    places = read_json(bytes(data), str(index)).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(place, str) for place in places.values()):
        raise GGUFError(f"{index}: has no weight_map of tensor names to file names; download it again")
    for place in set(places.values()):
        # plain names only: an index must not lead out of its folder
        if not place.endswith(".safetensors") or any(c in place for c in "/\\:\0"):
            raise GGUFError(f"{index}: {place!r} is not the name of a safetensors file in the same folder")
    return places


def _nothing_found(folder: Path) -> str:
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if not pickles:
        return f"{folder}: holds no *.safetensors files"
    return (
        f"{folder}: holds only pickled weights ({_some(pickles)}), which are never loaded: they can run code; "
        "convert them if you trust them: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
    )


def _some(names: list[str]) -> str:
    rest = len(names) - 3
    return ", ".join(names[:3]) + (f" and {rest:,} more" if rest > 0 else "")
