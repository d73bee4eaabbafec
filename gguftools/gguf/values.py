"""Metadata values: the thirteen types of the format, how each is encoded, and arrays that decode on demand.

Encoded, little-endian unless the file is big-endian: numbers as themselves, bool one byte 0 or 1, a string as uint64
length and UTF-8 bytes without terminator, an array as uint32 element type, uint64 count and its elements. Arrays of
arrays are not supported.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
from typing import Any

import numpy as np

from gguftools.errors import GGUFError


class ValueType(IntEnum):
    """The number that stands before a value in the file."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12

    def __str__(self) -> str:
        return self.name.lower()


#: numbers and bool -> their code in `struct` and numpy
CODES = {
    ValueType.UINT8: "B",
    ValueType.INT8: "b",
    ValueType.UINT16: "H",
    ValueType.INT16: "h",
    ValueType.UINT32: "I",
    ValueType.INT32: "i",
    ValueType.FLOAT32: "f",
    ValueType.BOOL: "?",
    ValueType.UINT64: "Q",
    ValueType.INT64: "q",
    ValueType.FLOAT64: "d",
}
DTYPES = {kind: np.dtype("<" + code) for kind, code in CODES.items()}
FLOATS = (ValueType.FLOAT32, ValueType.FLOAT64)
#: bytes that a value of each type takes at least (a string: its length; an array: element type and count)
MIN_SIZE = {kind: dtype.itemsize for kind, dtype in DTYPES.items()} | {ValueType.STRING: 8, ValueType.ARRAY: 12}

_LENGTH = struct.Struct("<Q")
_ARRAY_HEAD = struct.Struct("<IQ")
_CHUNK = 1 << 16  # strings that are counted at a time


def value_type(kind: ValueType | str) -> ValueType:
    """The type called `kind` (`uint32`, `STRING`). Raises GGUFError for an unknown name."""
    if isinstance(kind, ValueType):
        return kind
    try:
        return ValueType[kind.upper()]
    except KeyError:
        raise GGUFError(f"unknown value type '{kind}'; there are {', '.join(map(str, ValueType))}") from None


# --- decoding ---------------------------------------------------------------------------------------------------------


class Array(Sequence):
    """A metadata array over the file's bytes; nothing is decoded before it is asked for.

    Compares equal to any sequence of the same values; slices are lists; `tolist` is the fast way to all of them.
    """

    element_type: ValueType
    __hash__ = None  # type: ignore[assignment]

    def tolist(self) -> list:
        raise NotImplementedError

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.array(self.tolist(), dtype)

    def __iter__(self) -> Iterator:
        return iter(self.tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (str, bytes)) or not isinstance(other, (Sequence, np.ndarray)):
            return NotImplemented
        return len(self) == len(other) and self.tolist() == list(other)

    def __repr__(self) -> str:
        head = ", ".join(map(repr, self[:4]))
        return f"{self.element_type}[{len(self)}]({head}{', ...' if len(self) > 4 else ''})"


class Numbers(Array):
    """An array of numbers or bools; `numpy()` is a read-only view, without a copy."""

    def __init__(self, element_type: ValueType, data: np.ndarray) -> None:
        self.element_type = element_type
        self._data = data

    def numpy(self) -> np.ndarray:
        return self._data

    def tolist(self) -> list:
        return self._data.tolist()

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.array(self._data, dtype) if copy else np.asarray(self._data, dtype)

    def __len__(self) -> int:
        return self._data.size

    def __getitem__(self, i):
        return self._data[i].tolist()


class Strings(Array):
    """An array of strings: `buffer` holds them encoded, `starts` int64 [n + 1] where each begins and the last ends."""

    element_type = ValueType.STRING

    def __init__(self, buffer: memoryview, starts: np.ndarray) -> None:
        self._buffer = buffer
        self._starts = starts

    def tolist(self) -> list[str]:
        return self._decode(self._starts.tolist())

    def __len__(self) -> int:
        return self._starts.size - 1

    def __getitem__(self, i):
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        j = range(len(self))[i]
        return self._decode(self._starts[j : j + 2].tolist())[0]

    def _decode(self, starts: list[int]) -> list[str]:
        buffer = self._buffer
        return [str(buffer[a + 8 : b], "utf-8", "surrogateescape") for a, b in pairwise(starts)]


def string_starts(buffer: memoryview, at: int, count: int, order: str = "<") -> tuple[np.ndarray, bool]:
    """Where each of `count` encoded strings from byte `at` begins, then where the last one ends, int64 [count + 1]; and
    whether all of them lie within the buffer (if not, the array stops with the one that does not; its end is capped).

    The loop is all that opening a file with a large vocabulary costs, so it only reads lengths.
    """
    length = struct.Struct(order + "Q").unpack_from
    parts = []
    for first in range(0, count, _CHUNK):
        starts = []
        try:
            for _ in range(min(_CHUNK, count - first)):
                starts.append(at)
                at += 8 + length(buffer, at)[0]
        except (struct.error, OverflowError):  # no length here: the string before, or else this length, is cut
            if at > len(buffer) and len(starts) > 1:
                starts.pop()
            else:
                at += 8
            parts.append(np.array(starts, np.int64))
            break
        parts.append(np.array(starts, np.int64))
        if at > len(buffer):
            break
    parts.append(np.array([min(at, 2**63 - 1)], np.int64))
    return np.concatenate(parts), at <= len(buffer)


@dataclass(frozen=True)
class Field:
    """One key of the metadata.

    raw: the value as encoded in the file, after its type (for an array from the element type on), so that a copy is
    exact; element_type: of an array, else None; order: byte order of `raw`, "<" or ">"; offset: where `raw` lies in the
    file, None for a field that is not from one.
    """

    key: str
    type: ValueType
    element_type: ValueType | None
    raw: bytes | memoryview
    starts: np.ndarray | None = field(default=None, repr=False, compare=False)  # strings of an array, within `raw`
    order: str = field(default="<", repr=False)
    offset: int | None = field(default=None, repr=False, compare=False)

    @property
    def value(self) -> Any:
        """int, float, bool, str (bytes that are not UTF-8 become surrogate escapes), or an `Array`."""
        raw = memoryview(self.raw)
        if self.type is ValueType.STRING:
            return str(raw[8:], "utf-8", "surrogateescape")
        if self.type is not ValueType.ARRAY:
            return struct.unpack(self.order + CODES[self.type], raw)[0]
        count = self.count
        assert self.element_type is not None
        if self.element_type is not ValueType.STRING:
            dtype = DTYPES[self.element_type]
            found = np.frombuffer(raw, dtype, count, _ARRAY_HEAD.size)
            return Numbers(self.element_type, found if self.order == "<" else found.byteswap())
        return Strings(raw, self._starts())

    @property
    def count(self) -> int:
        """Elements of an array; 1 for anything else."""
        if self.type is not ValueType.ARRAY:
            return 1
        return struct.unpack_from(self.order + "IQ", self.raw)[1]

    def encoded(self, order: str = "<") -> bytes | memoryview:
        """`raw` in the given byte order."""
        if order == self.order:
            return self.raw
        raw = memoryview(self.raw)
        if self.type is ValueType.STRING:
            return raw[7::-1].tobytes() + raw[8:]
        if self.type is not ValueType.ARRAY:
            return raw[::-1].tobytes()
        assert self.element_type is not None
        head = struct.pack(order + "IQ", self.element_type, self.count)
        if self.element_type is not ValueType.STRING:
            dtype = DTYPES[self.element_type]
            return head + np.frombuffer(raw, dtype, self.count, _ARRAY_HEAD.size).byteswap().tobytes()
        data = np.frombuffer(raw, np.uint8, offset=_ARRAY_HEAD.size).copy()
        for start in (self._starts()[:-1] - _ARRAY_HEAD.size).tolist():
            data[start : start + 8] = data[start : start + 8][::-1]
        return head + data.tobytes()

    def _starts(self) -> np.ndarray:
        if self.starts is not None:
            return self.starts
        return string_starts(memoryview(self.raw), _ARRAY_HEAD.size, self.count, self.order)[0]


# --- encoding ---------------------------------------------------------------------------------------------------------


def encode(key: str, value: Any, kind: ValueType | None = None) -> Field:
    """A Python value as a field.

    kind: the type, for a sequence that of its elements; None takes it from the value: bool, float32, string; an int is
    uint32 where it fits, in arrays int32; numpy values keep their type; bytes are an array of uint8.

    Raises GGUFError for a value that the type cannot hold exactly in kind (a bool is no number, nor a float an int)
    and for elements of mixed types.
    """
    if isinstance(value, (bytes, bytearray)):
        if kind is ValueType.STRING:
            return Field(key, kind, None, _string(key, value))
        value = np.frombuffer(value, np.uint8)
    if isinstance(value, (np.generic, np.ndarray, Numbers)):
        if np.ndim(value) > 1:
            raise GGUFError(f"{key}: metadata arrays have one dimension, not {np.ndim(value)}")
        if kind is None:  # note that UINT8 is 0
            kind = value.element_type if isinstance(value, Numbers) else _numpy_type(key, value.dtype)
        value = value.tolist()
    if isinstance(value, str) or not isinstance(value, Sequence):
        kind = _scalar_type(key, value) if kind is None else kind
        return Field(key, kind, None, _elements(key, [value], kind))
    values = [v.item() if isinstance(v, np.generic) else v for v in value]
    kind = _element_type(key, values) if kind is None else kind
    return Field(key, ValueType.ARRAY, kind, _ARRAY_HEAD.pack(kind, len(values)) + _elements(key, values, kind))


def _elements(key: str, values: list, kind: ValueType) -> bytes:
    if kind is ValueType.ARRAY:
        raise GGUFError(f"{key}: arrays of arrays are not supported")
    accepted: tuple[type, ...] = (int,)
    if kind is ValueType.STRING:
        accepted = (str, bytes, bytearray)
    elif kind is ValueType.BOOL:
        accepted = (bool,)
    elif kind in FLOATS:
        accepted = (float, int)
    for found in set(map(type, values)):
        if not issubclass(found, accepted) or (found is bool and kind is not ValueType.BOOL):
            raise GGUFError(f"{key}: a value of type {found.__name__} cannot be written as {kind}")
    if kind is ValueType.STRING:
        return b"".join(_string(key, v) for v in values)
    try:
        with np.errstate(over="ignore"):
            data = np.array(values, DTYPES[kind])
    except OverflowError:
        raise GGUFError(f"{key}: a number is out of the range of {kind}") from None
    if kind is ValueType.FLOAT32 and np.any(np.isinf(data) & ~np.isinf(np.array(values, np.float64))):
        raise GGUFError(f"{key}: a number is out of the range of {kind}")
    return data.tobytes()


def _string(key: str, text: str | bytes | bytearray) -> bytes:
    try:
        data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else bytes(text)
    except UnicodeEncodeError:
        raise GGUFError(f"{key}: the string holds half of a surrogate pair, which has no UTF-8 form") from None
    return _LENGTH.pack(len(data)) + data


def _integer_type(key: str, values: Sequence[int], kinds: Sequence[ValueType]) -> ValueType:
    """The first of `kinds` that holds all values."""
    low, high = min(values, default=0), max(values, default=0)
    for kind in kinds:
        limits = np.iinfo(DTYPES[kind])
        if limits.min <= low and high <= limits.max:
            return kind
    raise GGUFError(f"{key}: an integer does not fit in 64 bits")


def _scalar_type(key: str, value: Any) -> ValueType:
    if isinstance(value, int) and not isinstance(value, bool):
        kinds = (ValueType.UINT32, ValueType.INT32, ValueType.UINT64, ValueType.INT64)
        return _integer_type(key, [value], kinds)
    return _element_type(key, [value])


def _element_type(key: str, values: Sequence) -> ValueType:
    if not values:
        raise GGUFError(f"{key}: an empty array needs an element type")
    found = set(map(type, values))
    if found == {bool}:
        return ValueType.BOOL
    if all(issubclass(t, (str, bytes, bytearray)) for t in found):
        return ValueType.STRING
    if bool not in found and all(issubclass(t, int) for t in found):
        return _integer_type(key, values, (ValueType.INT32, ValueType.INT64, ValueType.UINT64))
    if bool not in found and all(issubclass(t, (int, float)) for t in found):
        return ValueType.FLOAT32
    names = ", ".join(sorted(t.__name__ for t in found))
    raise GGUFError(f"{key}: metadata holds numbers, bools, strings, and arrays of one kind of these, not {names}")


def _numpy_type(key: str, dtype: np.dtype) -> ValueType:
    little = dtype.newbyteorder("<")
    for kind, ours in DTYPES.items():
        if little == ours:
            return kind
    if dtype == np.float16:
        return ValueType.FLOAT32
    if dtype.kind == "U":
        return ValueType.STRING
    raise GGUFError(f"{key}: numpy values of type {dtype} have no metadata type")
