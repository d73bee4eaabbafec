"""Reading GGUF: a file is data from strangers, so every count and size is checked against the bytes that are there,
in Python's unbounded integers, before anything is sized by it.

The layout, little-endian:

| part | content |
|---|---|
| header | `GGUF`, uint32 version (2 or 3), int64 number of tensors, int64 number of keys |
| keys | string key, uint32 type, value (`values.py`) |
| tensors | string name, uint32 rank, int64 ne[rank] (fastest first), uint32 type, uint64 offset within the data |
| data | from the next multiple of the alignment; every tensor padded to a multiple of it, the last one too |

The checks are those of ggml's loader, and some more: keys and names are UTF-8 without NUL, keys at most 65,535 bytes
(the specification's limit), bools 0 or 1, the alignment at most 65,536.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from gguftools.errors import GGUFError
from gguftools.files import map_file
from gguftools.gguf import keys
from gguftools.gguf.values import MIN_SIZE, Field, ValueType, string_starts
from quant.format import Format
from quant.formats import BY_TYPE

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEY = 65_535  # bytes
MAX_NAME = 63  # bytes; ggml keeps a terminator in 64
MAX_RANK = 4
MAX_SIZE = 1 << 60  # weights of a tensor; in any type less than 2^63 bytes
MAX_STRING = 1 << 30  # bytes
MAX_COUNT = 1 << 30  # elements of an array

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

#: types that ggml has removed, and those of the ik_llama.cpp fork
_REMOVED = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"}
_REMOVED |= {36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"}
_FORK = {133: "Q6_0", 134: "IQ1_BN", 135: "IQ2_BN", 137: "IQ2_K", 138: "IQ3_K", 139: "IQ4_K", 140: "IQ5_K"}
_FORK |= {141: "IQ6_K", 144: "IQ4_KS", 145: "IQ2_KS", 146: "IQ4_KSS", 152: "IQ5_KS", 153: "IQ2_KT", 154: "IQ3_KT"}
_FORK |= {155: "IQ4_KT", 156: "IQ3_KS", 157: "IQ2_KL", 158: "IQ1_KT"}


@dataclass(frozen=True, eq=False, slots=True)
class TensorView:
    """One tensor, over the file's memory map.

    ne: dimensions as in the file, fastest first; offset: bytes from the beginning of the data section
    (`GGUF.data_offset`); nbytes: without padding; data: uint8 [nbytes], read-only.
    """

    name: str
    ne: tuple[int, ...]
    format: Format
    offset: int
    nbytes: int
    data: np.ndarray

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
    order; version, alignment, data_offset (bytes from the file's beginning), size (bytes), path.

    A context manager: closing drops the file's own hold on the map, views that were handed out stay valid.

    Raises GGUFError for a file that is damaged, truncated, of another kind or version, or not there.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        data = map_file(self.path)
        self.size: int = data.size
        header = _Header(data, str(path))
        self.version = header.version
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


_Info = tuple[str, tuple[int, ...], Format, int]  # name, ne, format, offset


class _Header:
    """Everything before the data, parsed and checked against `data`, the whole file; `name` goes into messages."""

    def __init__(self, data: np.ndarray, name: str) -> None:
        self._data = data
        self._buffer: memoryview = data.data
        self._name = name
        self._at = 0
        self.version = self._read_version()
        n_tensors = self._count("tensors", _MIN_TENSOR)
        n_keys = self._count("keys", _MIN_KEY)
        self.fields: dict[str, Field] = {}
        for i in range(n_keys):
            self._read_field(i)
        self.alignment = self._read_alignment()
        infos = [self._read_tensor(i) for i in range(n_tensors)]
        self._check_names([info[0] for info in infos])
        self.data_offset = pad(self._at, self.alignment) if infos else self._at
        self._check_places(infos)
        self.tensors = {info[0]: self._locate(*info) for info in infos}

    # --- primitives ---

    def _error(self, message: str, at: int | None = None) -> GGUFError:
        return GGUFError(f"{self._name}: {message} (byte {self._at if at is None else at:,}); the file is damaged")

    def _truncated(self, what: str, end: int) -> GGUFError:
        size = len(self._buffer)
        return GGUFError(
            f"{self._name}: truncated: {what} ends at byte {end:,}, the file has {size:,}; download it again"
        )

    def _take(self, size: int, what: str) -> int:
        """Moves past `size` bytes and returns where they begin."""
        start, self._at = self._at, self._at + size
        if self._at > len(self._buffer):
            raise self._truncated(what, self._at)
        return start

    def _number(self, code: str, what: str) -> int:
        return struct.unpack_from("<" + code, self._buffer, self._take(struct.calcsize("<" + code), what))[0]

    def _text(self, what: str, limit: int) -> str:
        """A string that names something: short, UTF-8, without NUL."""
        start = self._at
        length = self._number("Q", what)
        if length > limit:
            raise self._error(f"{what} has {length:,} bytes, at most {limit:,} are allowed", start)
        at = self._take(length, what)
        try:
            text = str(self._buffer[at : at + length], "utf-8")
        except UnicodeDecodeError:
            raise self._error(f"{what} is not UTF-8", start) from None
        if "\0" in text:
            raise self._error(f"{what} holds a NUL", start)
        return text

    # --- parts ---

    def _read_version(self) -> int:
        start = bytes(self._buffer[:64])
        if start[:4] != MAGIC:
            for prefix, what in _OTHERS:
                if start.startswith(prefix):
                    raise GGUFError(f"{self._name}: this is {what}")
            if start[8:9] == b"{":
                raise GGUFError(
                    f"{self._name}: looks like safetensors, not GGUF; convert the model with `gguftools convert`"
                )
            raise GGUFError(f"{self._name}: not a GGUF file: it begins with {start[:4]!r} instead of {MAGIC!r}")
        self._at = 4
        version = self._number("I", "the header")
        if version and not version & 0xFFFF:
            raise GGUFError(
                f"{self._name}: a big-endian file (version bytes {start[4:8].hex(' ')}); "
                "get the little-endian one, or swap it with gguf_convert_endian"
            )
        if version == 1:
            raise GGUFError(f"{self._name}: GGUF version 1 is no longer read; convert the original model again")
        if version not in VERSIONS:
            raise GGUFError(f"{self._name}: GGUF version {version} is not known (2 and 3 are); update gguftools")
        return version

    def _count(self, what: str, least: int) -> int:
        """A number of things that take at least `least` bytes each."""
        count = self._number("q", "the header")
        if not 0 <= count <= (len(self._buffer) - self._at) // least:
            raise self._error(f"the header announces {count:,} {what}, more than the file can hold", self._at - 8)
        return count

    def _read_field(self, i: int) -> None:
        start = self._at
        key = self._text(f"key {i}", MAX_KEY)
        if not key:
            raise self._error(f"key {i} is empty", start)
        if key in self.fields:
            raise self._error(f"key '{key}' comes twice", start)
        kind = self._value_type(key)
        value = self._at
        if kind is not ValueType.ARRAY:
            self._skip_scalar(key, kind)
            self.fields[key] = Field(key, kind, None, self._buffer[value : self._at])
            return
        element = self._value_type(key)
        if element is ValueType.ARRAY:
            raise self._error(f"key '{key}' is an array of arrays", value)
        starts = self._skip_array(key, element)
        if starts is not None:
            starts -= value
        self.fields[key] = Field(key, kind, element, self._buffer[value : self._at], starts)

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
                raise self._error(f"key '{key}' is a bool of value {self._buffer[at]}", at)

    def _skip_array(self, key: str, element: ValueType) -> np.ndarray | None:
        """Moves past count and elements; for strings returns where they begin (and the last ends), int64 [n + 1]."""
        what = f"key '{key}'"
        count = self._number("Q", what)
        if count > MAX_COUNT:
            raise self._error(
                f"{what} is an array of {count:,} elements, at most {MAX_COUNT:,} are allowed", self._at - 8
            )
        first = self._take(count * MIN_SIZE[element], what)
        if element is ValueType.STRING:
            starts, fits = string_starts(self._buffer, first, count)
            if not fits:
                raise self._truncated(f"string {len(starts) - 2} of {what}", starts[-1])
            self._at = starts[-1]
            return np.array(starts, np.int64)
        if element is ValueType.BOOL:
            bad = np.flatnonzero(self._data[first : self._at] > 1)
            if bad.size:
                raise self._error(f"{what} holds a bool of value {self._data[first + bad[0]]}", first + int(bad[0]))
        return None

    def _read_alignment(self) -> int:
        field = self.fields.get(keys.ALIGNMENT)
        if field is None:
            return keys.DEFAULT_ALIGNMENT
        if field.type is not ValueType.UINT32:
            raise self._error(f"{keys.ALIGNMENT} is {field.type}, it must be uint32")
        return check_alignment(self._name, field.value)

    def _read_tensor(self, i: int) -> _Info:
        name = self._text(f"the name of tensor {i}", MAX_NAME)
        what = f"the description of tensor '{name}'"
        rank = self._number("I", what)
        if rank > MAX_RANK:
            raise self._error(f"tensor '{name}' has {rank:,} dimensions, at most {MAX_RANK} are allowed", self._at - 4)
        ne = tuple(self._number("q", what) for _ in range(rank))
        if any(n < 0 for n in ne):
            raise self._error(f"tensor '{name}' has a negative dimension: {list(ne)}")
        number = self._number("I", what)
        fmt = BY_TYPE.get(number)
        if fmt is None:
            raise GGUFError(f"{self._name}: tensor '{name}' {_unknown_type(number)}")
        n = ne[0] if ne else 1
        if n % fmt.block_size:
            raise self._error(f"tensor '{name}' has rows of {n:,}, no multiple of {fmt.block_size} ({fmt}'s block)")
        # NumPy must be able to shape empty tensors too, so a zero counts as one here
        if math.prod(max(n, 1) for n in ne) >= MAX_SIZE:
            raise self._error(f"tensor '{name}' is too large: {list(ne)}")
        return name, ne, fmt, self._number("Q", what)

    def _check_names(self, names: list[str]) -> None:
        seen = set()
        for name in names:
            if name in seen:
                raise self._error(f"tensor '{name}' comes twice")
            seen.add(name)

    def _check_places(self, infos: list[_Info]) -> None:
        """Tensors lie one after the other in the order of their descriptions, padded, and within the file."""
        expected = 0
        for name, ne, fmt, offset in infos:
            if offset != expected:
                raise self._error(
                    f"the data of tensor '{name}' begin at {offset:,} of the data section, expected {expected:,}"
                )
            size = tensor_bytes(ne, fmt)
            end = self.data_offset + offset + size
            if end > len(self._buffer):
                raise self._truncated(f"tensor '{name}'", end)
            expected = pad(offset + size, self.alignment)
        if infos and self.data_offset + expected > len(self._buffer):
            raise self._truncated(f"the padding of tensor '{infos[-1][0]}'", self.data_offset + expected)

    def _locate(self, name: str, ne: tuple[int, ...], fmt: Format, offset: int) -> TensorView:
        size = tensor_bytes(ne, fmt)
        start = self.data_offset + offset
        return TensorView(name, ne, fmt, offset, size, self._data[start : start + size])


def pad(size: int, alignment: int) -> int:
    """`size` rounded up to a multiple of `alignment`."""
    return -(-size // alignment) * alignment


def tensor_bytes(ne: tuple[int, ...], fmt: Format) -> int:
    """Bytes of a tensor without padding; its rows must be whole blocks."""
    return math.prod(ne) // fmt.block_size * fmt.type_size


def check_alignment(where: str, alignment: int) -> int:
    """The alignment itself. Raises GGUFError unless it is a power of two within the limit."""
    if not 0 < alignment <= keys.MAX_ALIGNMENT or alignment & (alignment - 1):
        raise GGUFError(
            f"{where}: {keys.ALIGNMENT} is {alignment:,}, it must be a power of two up to {keys.MAX_ALIGNMENT:,}"
        )
    return alignment


def _unknown_type(number: int) -> str:
    if number in _REMOVED:
        return f"has the type {_REMOVED[number]} ({number}), which ggml has removed; quantize the original model again"
    if number in _FORK:
        return (
            f"has the type {_FORK[number]} ({number}) of the ik_llama.cpp fork, which is not supported; use that fork"
        )
    return f"has the unknown type {number}; the file is damaged, or made by a newer or forked program"
