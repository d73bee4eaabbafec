"""Reading GGUF: a file is data from strangers, so every count and size is checked against the bytes that are there,
in Python's unbounded integers, before anything is sized by it.

The layout, little-endian (version 3 may be big-endian throughout, which shows in the bytes of the version):

| part | content |
|---|---|
| header | `GGUF`, uint32 version (2 or 3), int64 number of tensors, int64 number of keys |
| keys | string key, uint32 type, value (`values.py`) |
| tensors | string name, uint32 rank, int64 ne[rank] (fastest first), uint32 type, uint64 offset within the data |
| data | from the next multiple of the alignment; every tensor padded to a multiple of it, the last one too |

The checks are those of ggml's loader, and some more: keys and names are UTF-8 without NUL, keys at most 65,535 bytes
(the specification's limit), bools 0 or 1, the alignment at most 65,536, and the limits of `keys.py` on numbers of keys,
tensors and strings, which keep the time for any file below a second.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from gguftools.errors import GGUFError
from gguftools.files import journal_path, map_file
from gguftools.gguf import keys
from gguftools.gguf.endian import BIG, LITTLE, swapped
from gguftools.gguf.faults import AGAIN, DAMAGED, Fault
from gguftools.gguf.values import MIN_SIZE, Field, ValueType, string_starts
from quant.format import Format
from quant.formats import BY_TYPE, IK_LLAMA, REMOVED

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEY = 65_535  # bytes
MAX_NAME = 63  # bytes; ggml keeps a terminator in 64
MAX_RANK = 4
MAX_SIZE = 1 << 60  # weights of a tensor; in any type less than 2^63 bytes
MAX_STRING = 1 << 30  # bytes
MAX_COUNT = 1 << 30  # elements of an array

_PIECE = 1 << 20  # bytes that are checked at a time
_MIN_KEY = 8 + 1 + 4 + 1  # bytes: shortest key and value
_MIN_TENSOR = 8 + 4 + 4 + 8  # bytes: nameless scalar

#: first bytes -> what a file that is no GGUF is, and what to do about it
_OTHERS = (
    (b"version https://git-lfs", "a git-lfs pointer, not the model; run `git lfs pull`"),
    (b"ggjt", "a GGML file older than GGUF; convert the original model again"),
    (b"tjgg", "a GGML file older than GGUF; convert the original model again"),
    (b"fmgg", "a GGML file older than GGUF; convert the original model again"),
    (b"lmgg", "a GGML file older than GGUF; convert the original model again"),
    (b"algg", "a GGML adapter older than GGUF; convert the original adapter again"),
    (b"PK\x03\x04", "a zip archive (PyTorch checkpoints are), not a GGUF file"),
    (b"<!", "a web page, not a GGUF file; check the download address"),
    (b"<html", "a web page, not a GGUF file; check the download address"),
)


@dataclass(frozen=True, eq=False, slots=True)
class TensorView:
    """One tensor, over the file's memory map.

    ne: dimensions as in the file, fastest first; offset: bytes from the beginning of the data section
    (`GGUF.data_offset`); nbytes: without padding; raw: uint8 [nbytes] as they lie in the file, read-only; order: byte
    order of the file, "<" or ">".
    """

    name: str
    ne: tuple[int, ...]
    format: Format
    offset: int
    nbytes: int
    raw: np.ndarray
    order: str = LITTLE

    @property
    def data(self) -> np.ndarray:
        """The data little-endian, uint8 [nbytes], read-only: a view of the file, or for a big-endian one a new
        array."""
        if self.order == LITTLE:
            return self.raw
        data = swapped(self.raw, self.format)
        data.flags.writeable = False
        return data

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions in NumPy's order: the last axis is contiguous."""
        return self.ne[::-1]

    @property
    def size(self) -> int:
        """Number of weights."""
        return math.prod(self.ne)

    @property
    def blocks(self) -> np.ndarray:
        """The blocks, read-only: dtype `format.block`, shape (*shape[:-1], shape[-1] / block_size).

        Raises QuantError for a type that we can list and copy only.
        """
        shape = (*self.shape[:-1], self.shape[-1] // self.format.block_size) if self.ne else ()
        return self.data.view(self.format.block).reshape(shape)

    def dequantize(self, threads: int | None = None) -> np.ndarray:
        """The weights, float32 of `shape`; a new array. threads: None means all cores.

        Raises QuantError for a type that we can list and copy only.
        """
        from quant.quantize import dequantize_blocks

        n = self.ne[0] if self.ne else 1
        rows = self.data.view(self.format.block).reshape(math.prod(self.ne[1:]), n // self.format.block_size)
        return dequantize_blocks(rows, self.format, threads).reshape(self.shape)

    def __repr__(self) -> str:
        return f"<TensorView {self.name!r} {self.shape} {self.format}>"


class Metadata(Mapping[str, Any]):
    """Key -> value of a file's fields, decoded on access."""

    def __init__(self, fields: Mapping[str, Field]) -> None:
        self._fields = fields

    def __getitem__(self, key: str) -> Any:
        return self._fields[key].value

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


class GGUF:
    """An open file; nothing but the header is read before it is asked for.

    metadata: key -> value; fields: key -> `Field`, with type and encoded bytes; tensors: name -> `TensorView`, in file
    order; version, alignment, byte_order ("<" or ">"), data_offset (bytes from the file's beginning), size (bytes),
    data_end (where the last tensor and its padding end), path. Values and weights of a big-endian file are swapped as
    they are read.

    A context manager: closing drops the file's own hold on the map, views that were handed out stay valid.

    on_fault: None, or a function that is called with every `Fault` that can be stepped over, instead of refusing the
    file at the first; tensors that cannot be located are then left out.

    Raises GGUFError for a file that is damaged, truncated, of another kind or version, or not there.
    """

    def __init__(self, path: str | os.PathLike, on_fault: Callable[[Fault], None] | None = None) -> None:
        self.path = Path(path)
        data = map_file(self.path)
        if os.path.exists(journal_path(Path(os.path.realpath(self.path)))):  # noqa: PTH110 (long names raise there)
            raise GGUFError(f"{path}: an edit was interrupted; `gguftools edit` restores the file")
        self.size: int = data.size
        header = _Header(data, str(path), on_fault)
        self.version = header.version
        self.byte_order = header.order
        self.data_end = header.data_end
        self.alignment = header.alignment
        self.data_offset = header.data_offset
        self._fields: Mapping[str, Field] | None = MappingProxyType(header.fields)
        self._tensors: Mapping[str, TensorView] | None = MappingProxyType(header.tensors)

    @property
    def fields(self) -> Mapping[str, Field]:
        return self._open(self._fields)

    @property
    def metadata(self) -> Mapping[str, Any]:
        return Metadata(self.fields)

    @property
    def tensors(self) -> Mapping[str, TensorView]:
        return self._open(self._tensors)

    def close(self) -> None:
        self._fields = self._tensors = None

    def __enter__(self) -> GGUF:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<GGUF {str(self.path)!r}>"

    def _open(self, mapping):
        if mapping is None:
            raise GGUFError(f"{self.path}: the file has been closed; open it again")
        return mapping


@dataclass(frozen=True)
class _Info:
    """The description of one tensor; format None: its place cannot be told; at: byte where the description begins."""

    name: str
    ne: tuple[int, ...]
    format: Format | None
    offset: int
    at: int


class _Header:
    """Everything before the data, parsed and checked against `data`, the whole file; `name` goes into messages.

    A fault that leaves the rest readable goes to `on_fault`, if there is one; any other is raised.
    """

    def __init__(self, data: np.ndarray, name: str, on_fault: Callable[[Fault], None] | None = None) -> None:
        self._data = data
        self._buffer: memoryview = data.data
        self._name = name
        self._on_fault = on_fault
        self._at = 0
        self._strings_left = keys.MAX_STRINGS
        self.order = LITTLE
        self.version = self._read_version()
        n_tensors = self._count("tensors", _MIN_TENSOR, keys.MAX_TENSORS)
        n_keys = self._count("keys", _MIN_KEY, keys.MAX_KEYS)
        self.fields: dict[str, Field] = {}
        for i in range(n_keys):
            self._read_field(i)
        self.alignment = self._read_alignment()
        infos = [self._read_tensor(i) for i in range(n_tensors)]
        infos = self._without_repeated(infos)
        self.data_offset = pad(self._at, self.alignment) if infos else self._at
        self.data_end = self._check_places(infos)
        self.tensors = {info.name: self._locate(info) for info in infos if self._is_inside(info)}

    # --- faults ---

    def _fault(self, code: str, message: str, at: int | None = None, remedy: str = DAMAGED, where: str = "") -> None:
        fault = Fault(code, message, remedy, self._at if at is None else at, where)
        if self._on_fault is None:
            raise GGUFError(fault.line(self._name), fault.offset)
        self._on_fault(fault)

    def _error(self, message: str, at: int | None = None, remedy: str = DAMAGED) -> GGUFError:
        """For faults after which nothing can be read."""
        offset = self._at if at is None else at
        return GGUFError(Fault("", message, remedy, offset).line(self._name), offset)

    def _truncated(self, what: str, end: int) -> GGUFError:
        size = len(self._buffer)
        return GGUFError(
            f"{self._name}: truncated: {what} ends at byte {end:,}, the file has {size:,}; {AGAIN}", min(end, size)
        )

    # --- primitives ---

    def _take(self, size: int, what: str) -> int:
        """Moves past `size` bytes and returns where they begin."""
        start, self._at = self._at, self._at + size
        if self._at > len(self._buffer):
            raise self._truncated(what, self._at)
        return start

    def _number(self, code: str, what: str) -> int:
        code = self.order + code
        return struct.unpack_from(code, self._buffer, self._take(struct.calcsize(code), what))[0]

    def _text(self, what: str, limit: int) -> str:
        """A string that names something: short, UTF-8, without NUL."""
        start = self._at
        length = self._number("Q", what)
        if length > limit:
            if length > MAX_KEY:
                raise self._error(f"{what} has {length:,} bytes, at most {limit:,} are allowed", start)
            self._fault("name-length", f"{what} has {length:,} bytes, at most {limit:,} are allowed", start)
        at = self._take(length, what)
        try:
            text = str(self._buffer[at : at + length], "utf-8")
        except UnicodeDecodeError:
            self._fault("name-encoding", f"{what} is not UTF-8", start)
            text = str(self._buffer[at : at + length], "utf-8", "surrogateescape")
        if "\0" in text:
            self._fault("name-encoding", f"{what} holds a NUL", start)
        return text

    # --- parts ---

    def _read_version(self) -> int:
        start = bytes(self._buffer[:64])
        if start[:4] != MAGIC:
            for prefix, what in _OTHERS:
                if start.startswith(prefix):
                    raise GGUFError(f"{self._name}: this is {what}", 0)
            if start[8:9] == b"{":
                raise GGUFError(
                    f"{self._name}: looks like safetensors, not GGUF; convert the model with `gguftools convert`", 0
                )
            raise GGUFError(f"{self._name}: not a GGUF file: it begins with {start[:4]!r} instead of {MAGIC!r}", 0)
        self._at = 4
        version = self._number("I", "the header")
        if version and not version & 0xFFFF:
            self.order = BIG
            version = int.from_bytes(start[4:8], "big")
        if version == 1:
            raise GGUFError(f"{self._name}: GGUF version 1 is no longer read; convert the original model again", 4)
        if version not in VERSIONS:
            raise GGUFError(f"{self._name}: GGUF version {version} is not known (2 and 3 are); update gguftools", 4)
        return version

    def _count(self, what: str, least: int, limit: int) -> int:
        """A number of things that take at least `least` bytes each."""
        count = self._number("q", "the header")
        if not 0 <= count <= (len(self._buffer) - self._at) // least:
            raise self._error(f"the header announces {count:,} {what}, more than the file can hold", self._at - 8)
        if count > limit:
            raise self._error(f"the header announces {count:,} {what}, at most {limit:,} are allowed", self._at - 8)
        return count

    def _read_field(self, i: int) -> None:
        start = self._at
        key = self._text(f"key {i}", MAX_KEY)
        if not key:
            self._fault("empty-key", f"key {i} is empty", start)
        if key in self.fields:
            self._fault("repeated-key", f"key '{key}' comes twice", start, where=key)
        kind = self._value_type(key)
        value = self._at
        element = starts = None
        if kind is ValueType.ARRAY:
            element = self._value_type(key)
            if element is ValueType.ARRAY:
                raise self._error(f"key '{key}' is an array of arrays", value)
            starts = self._skip_array(key, element)
            if starts is not None:
                starts -= value
        else:
            self._skip_scalar(key, kind)
        raw = self._buffer[value : self._at]
        self.fields.setdefault(key, Field(key, kind, element, raw, starts, self.order, value))

    def _value_type(self, key: str) -> ValueType:
        number = self._number("I", f"key '{key}'")
        try:
            return ValueType(number)
        except ValueError:
            raise self._error(f"key '{key}' has the unknown value type {number}", self._at - 4) from None

    def _skip_scalar(self, key: str, kind: ValueType) -> None:
        if kind is ValueType.STRING:
            length = self._number("Q", f"key '{key}'")
            if length > MAX_STRING:
                raise self._error(f"key '{key}' is a string of {length:,} bytes, at most {MAX_STRING:,} are allowed")
            self._take(length, f"key '{key}'")
        else:
            at = self._take(MIN_SIZE[kind], f"key '{key}'")
            if kind is ValueType.BOOL and self._buffer[at] > 1:
                self._fault("bool", f"key '{key}' is a bool of value {self._buffer[at]}", at, where=key)

    def _skip_array(self, key: str, element: ValueType) -> np.ndarray | None:
        """Moves past count and elements; for strings returns where they begin (and the last ends), int64 [n + 1]."""
        what = f"key '{key}'"
        count = self._number("Q", what)
        limit = keys.MAX_BOOLS if element is ValueType.BOOL else MAX_COUNT
        if count > limit:
            message = f"{what} is an array of {count:,} elements, at most {limit:,} are allowed"
            raise self._error(message, self._at - 8)
        first = self._take(count * MIN_SIZE[element], what)
        if element is ValueType.STRING:
            if count > self._strings_left:
                raise self._error(
                    f"{what} is an array of {count:,} strings, at most {keys.MAX_STRINGS:,} are allowed in a file",
                    first - 8,
                )
            self._strings_left -= count
            starts, fits = string_starts(self._buffer, first, count, self.order)
            if not fits:
                raise self._truncated(f"string {len(starts) - 2} of {what}", int(starts[-1]))
            self._at = int(starts[-1])
            return starts
        if element is ValueType.BOOL:
            at = first_bad_bool(self._data[first : self._at])
            if at is not None:
                found = self._data[first + at]
                self._fault("bool", f"{what} holds a bool of value {found}", first + at, where=key)
        return None

    def _read_alignment(self) -> int:
        field = self.fields.get(keys.ALIGNMENT)
        if field is None:
            return keys.DEFAULT_ALIGNMENT
        if field.type is not ValueType.UINT32:
            self._fault("alignment", f"{keys.ALIGNMENT} is {field.type}, it must be uint32", field.offset)
            return keys.DEFAULT_ALIGNMENT
        if not is_alignment(field.value):
            message = f"{keys.ALIGNMENT} is {field.value:,}, it must be a power of two up to {keys.MAX_ALIGNMENT:,}"
            self._fault("alignment", message, field.offset, where=keys.ALIGNMENT)
            return keys.DEFAULT_ALIGNMENT
        return field.value

    def _read_tensor(self, i: int) -> _Info:
        start = self._at
        name = self._text(f"the name of tensor {i}", MAX_NAME)
        what = f"the description of tensor '{name}'"
        rank = self._number("I", what)
        if rank > MAX_RANK:
            raise self._error(f"tensor '{name}' has {rank:,} dimensions, at most {MAX_RANK} are allowed", self._at - 4)
        ne = tuple(self._number("q", what) for _ in range(rank))
        number = self._number("I", what)
        offset = self._number("Q", what)
        fmt = BY_TYPE.get(number)
        if any(n < 0 for n in ne):
            self._fault("shape", f"tensor '{name}' has a negative dimension: {list(ne)}", where=name)
            fmt = None
        # NumPy must be able to shape empty tensors too, so a zero counts as one here
        elif math.prod(max(n, 1) for n in ne) >= MAX_SIZE:
            self._fault("shape", f"tensor '{name}' is too large: {list(ne)}", where=name)
            fmt = None
        elif fmt is None:
            message, remedy = _unknown_type(number)
            self._fault("type", f"tensor '{name}' {message}", self._at - 12, remedy, name)
        elif (ne[0] if ne else 1) % fmt.block_size:
            n = ne[0] if ne else 1
            message = f"tensor '{name}' has rows of {n:,}, no multiple of {fmt.block_size} ({fmt}'s block)"
            self._fault("shape", message, where=name)
            fmt = None
        return _Info(name, ne, fmt, offset, start)

    def _without_repeated(self, infos: list[_Info]) -> list[_Info]:
        """The first of each name."""
        found: dict[str, _Info] = {}
        for info in infos:
            if info.name in found:
                self._fault("repeated-tensor", f"tensor '{info.name}' comes twice", info.at, where=info.name)
            found.setdefault(info.name, info)
        return list(found.values())

    def _check_places(self, infos: list[_Info]) -> int:
        """Tensors lie one after the other in the order of their descriptions, padded, and within the file.

        Returns where their data end, in bytes of the file.
        """
        size, expected, last = len(self._buffer), 0, ""
        after_gap = False  # where the size of a tensor is not known, the next one's offset is taken as it is
        for info in infos:
            if info.offset != expected and not after_gap:
                message = f"the data of tensor '{info.name}' begin at {info.offset:,} of the data section"
                self._fault("offset", f"{message}, expected {expected:,}", info.at, where=info.name)
            after_gap = info.format is None
            if info.format is None:
                continue
            n_bytes = tensor_bytes(info.ne, info.format)
            end = self.data_offset + info.offset + n_bytes
            if end > size:
                self._cut(f"tensor '{info.name}'", end, info.name)
            expected, last = pad(info.offset + n_bytes, self.alignment), info.name
        if last and size < self.data_offset + expected and (not self._on_fault or end <= size):
            self._cut(f"the padding of tensor '{last}'", self.data_offset + expected, last)
        return self.data_offset + expected if infos else self._at

    def _cut(self, what: str, end: int, where: str) -> None:
        size = len(self._buffer)
        if self._on_fault is None:
            raise self._truncated(what, end)
        message = f"truncated: {what} ends at byte {end:,}, the file has {size:,}"
        self._on_fault(Fault("truncated", message, AGAIN, size, where))

    def _is_inside(self, info: _Info) -> bool:
        if info.format is None:
            return False
        return self.data_offset + info.offset + tensor_bytes(info.ne, info.format) <= len(self._buffer)

    def _locate(self, info: _Info) -> TensorView:
        assert info.format is not None
        size = tensor_bytes(info.ne, info.format)
        start = self.data_offset + info.offset
        raw = self._data[start : start + size]
        return TensorView(info.name, info.ne, info.format, info.offset, size, raw, self.order)


def pad(size: int, alignment: int) -> int:
    """`size` rounded up to a multiple of `alignment`."""
    return -(-size // alignment) * alignment


def tensor_bytes(ne: tuple[int, ...], fmt: Format) -> int:
    """Bytes of a tensor without padding; its rows must be whole blocks."""
    return math.prod(ne) // fmt.block_size * fmt.type_size


def is_alignment(alignment: int) -> bool:
    """Whether it is a power of two within the limit."""
    return 0 < alignment <= keys.MAX_ALIGNMENT and not alignment & (alignment - 1)


def check_alignment(where: str, alignment: int) -> int:
    """The alignment itself. Raises GGUFError unless it is a power of two within the limit."""
    if not is_alignment(alignment):
        raise GGUFError(
            f"{where}: {keys.ALIGNMENT} is {alignment:,}, it must be a power of two up to {keys.MAX_ALIGNMENT:,}"
        )
    return alignment


def first_bad_bool(data: np.ndarray) -> int | None:
    """Index of the first byte above 1, read piece by piece: an array of bools may be as large as the file."""
    for start in range(0, data.size, _PIECE):
        piece = data[start : start + _PIECE]
        if piece.max() > 1:
            return start + int((piece > 1).argmax())
    return None


def _unknown_type(number: int) -> tuple[str, str]:
    """What is said of a tensor type that is not in the table, and what to do."""
    if number in REMOVED:
        return f"has the type {REMOVED[number]} ({number}), which ggml has removed", "quantize the original model again"
    if number in IK_LLAMA:
        found = f"has the type {IK_LLAMA[number]} ({number}) of the ik_llama.cpp fork, which is not supported"
        return found, "use that fork"
    return f"has the unknown type {number}", "the file is damaged, or made by a newer or forked program"
