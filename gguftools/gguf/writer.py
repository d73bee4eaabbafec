"""Writing GGUF as a stream: declare everything, then write tensor after tensor; nothing is held in memory.

The layout is `reader.py`'s, version 3, byte for byte as gguf-py and ggml write it. The file appears under its name
only when it is complete (`files.atomic_output`).
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable
from contextlib import ExitStack
from operator import index
from pathlib import Path
from typing import IO, Any

import numpy as np

from gguftools.errors import GGUFError
from gguftools.files import atomic_output, check_space
from gguftools.gguf import keys
from gguftools.gguf.reader import MAGIC, MAX_KEY, MAX_NAME, MAX_RANK, MAX_SIZE, check_alignment, pad, tensor_bytes
from gguftools.gguf.values import Field, ValueType, encode, value_type
from quant.errors import QuantError
from quant.format import Format
from quant.formats import get_format

VERSION = 3


class Writer:
    """A GGUF file in the making.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Writer(Path(folder, "model.gguf"), inputs=["source.gguf"]) as w:
    ...         w.add("general.architecture", "llama")
    ...         w.declare("output_norm.weight", (64,), "F32")
    ...         w.write("output_norm.weight", np.ones(64, np.float32))
    ...     Path(folder, "model.gguf").stat().st_size == w.size
    True

    inputs: files that must not be overwritten. Keys and declarations come first, the first `write` ends them. If the
    block fails, or not everything declared was written, no file appears.
    """

    def __init__(self, path: str | os.PathLike, inputs: Iterable[str | os.PathLike] = ()) -> None:
        self.path = Path(path)
        self._inputs = tuple(inputs)
        self._fields: dict[str, Field] = {}
        self._tensors: dict[str, tuple[tuple[int, ...], Format]] = {}  # name -> ne, format
        self._pending: list[str] | None = None  # names yet to be written, the next one last; None before the header
        self._stack = ExitStack()
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Writer:
        self._file = self._stack.enter_context(atomic_output(self.path, self._inputs))
        self._stack.push(self._finish)
        return self

    def __exit__(self, *failure: Any) -> bool | None:
        return self._stack.__exit__(*failure)

    # --- keys and declarations ---

    def add(self, key: str, value: Any, type: ValueType | str | None = None) -> None:
        """Set a key; one that exists is replaced and moves to the end, as in ggml.

        type: the value's type, for a sequence that of its elements (`ValueType.UINT32`, "uint32"); None takes the
        key's usual one (`keys.type_of`), else the value's (`values.encode`).

        Raises GGUFError for a key or value that cannot be written.
        """
        kind = value_type(type) if type is not None else keys.type_of(key)
        self.add_field(encode(key, value, kind))

    def add_field(self, field: Field) -> None:
        """Set a key to a field of another file, bytes unchanged. Raises GGUFError for a key that cannot be written."""
        self._check_open()
        self._check_text("key", field.key, MAX_KEY)
        if not field.key:
            raise GGUFError(f"{self.path}: a key may not be empty")
        if field.key == keys.ALIGNMENT:
            if field.type is not ValueType.UINT32:
                raise GGUFError(f"{self.path}: {keys.ALIGNMENT} must be uint32, not {field.type}")
            check_alignment(str(self.path), field.value)
        self._fields.pop(field.key, None)
        self._fields[field.key] = field

    def remove(self, key: str) -> None:
        """Drop a key, if it is there."""
        self._check_open()
        self._fields.pop(key, None)

    def declare(self, name: str, shape: Iterable[int], format: str | Format) -> None:
        """Announce a tensor: shape in NumPy's order.

        Raises GGUFError for a name that is taken or has 64 bytes or more, more than four dimensions, or rows that are
        no multiple of the block.
        """
        self._check_open()
        self._check_text("tensor name", name, MAX_NAME)
        fmt, ne = get_format(format), tuple(index(n) for n in shape)[::-1]
        if name in self._tensors:
            raise GGUFError(f"{self.path}: tensor '{name}' is declared twice")
        if len(ne) > MAX_RANK or any(n < 0 for n in ne):
            raise GGUFError(f"{self.path}: tensor '{name}' has shape {ne[::-1]}; GGUF has up to {MAX_RANK} dimensions")
        try:
            fmt.row_size(ne[0] if ne else 1)
        except QuantError as error:
            raise GGUFError(f"{self.path}: tensor '{name}': {error}; choose another type") from None
        if math.prod(max(n, 1) for n in ne) >= MAX_SIZE:
            raise GGUFError(f"{self.path}: tensor '{name}' is too large: {ne[::-1]}")
        self._tensors[name] = ne, fmt

    # --- sizes ---

    @property
    def alignment(self) -> int:
        return self._fields[keys.ALIGNMENT].value if keys.ALIGNMENT in self._fields else keys.DEFAULT_ALIGNMENT

    @property
    def size(self) -> int:
        """Bytes of the finished file, as declared so far."""
        return len(self._header()) + sum(
            pad(tensor_bytes(ne, fmt), self.alignment) for ne, fmt in self._tensors.values()
        )

    def _header(self) -> bytes:
        parts = [MAGIC, struct.pack("<IQQ", VERSION, len(self._tensors), len(self._fields))]
        for field in self._fields.values():
            parts += [_text(field.key), struct.pack("<I", field.type), bytes(field.raw)]
        offset = 0
        for name, (ne, fmt) in self._tensors.items():
            parts += [_text(name), struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, fmt.ggml_type, offset)]
            offset += pad(tensor_bytes(ne, fmt), self.alignment)
        header = b"".join(parts)
        # a file without tensors (a vocabulary) ends with its keys
        return header.ljust(pad(len(header), self.alignment), b"\0") if self._tensors else header

    # --- data ---

    def write(self, name: str, chunks: Iterable[Any]) -> None:
        """The data of the next declared tensor: an array or bytes, or an iterable of them (chunks in order).

        Arrays are written as they lie in memory, in C order, little-endian: float32 for F32, blocks or their bytes
        for quantized types. Raises GGUFError if it is another tensor's turn or the size is not the declared one.
        """
        if self._pending is None:
            self._start()
        assert self._file is not None
        assert self._pending is not None
        if not self._pending or self._pending[-1] != name:
            turn = f"it is the turn of '{self._pending[-1]}'" if self._pending else "all tensors are written"
            raise GGUFError(f"{self.path}: cannot write tensor '{name}': {turn}")
        size, written = tensor_bytes(*self._tensors[name]), 0
        for chunk in (chunks,) if isinstance(chunks, (np.ndarray, bytes, bytearray, memoryview)) else chunks:
            data = _bytes_of(chunk)
            written += len(data)
            if written > size:
                break
            self._file.write(data)
        if written != size:
            got = f"more than {size:,}" if written > size else f"{written:,}"
            raise GGUFError(f"{self.path}: tensor '{name}' has {size:,} bytes as declared, got {got}")
        self._file.write(bytes(pad(size, self.alignment) - size))
        self._pending.pop()

    def _start(self) -> None:
        if self._file is None:
            raise GGUFError(f"{self.path}: the writer is not open; use it in a with statement")
        check_space(self.path, self.size)
        self._file.write(self._header())
        self._pending = list(self._tensors)[::-1]

    def _finish(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return
        if self._pending is None:
            self._start()
        if self._pending:
            count = len(self._pending)
            raise GGUFError(
                f"{self.path}: {count} declared tensors were not written, the first is '{self._pending[-1]}'"
            )

    # --- checks ---

    def _check_open(self) -> None:
        if self._pending is not None:
            raise GGUFError(f"{self.path}: the header is written; add keys and declare tensors before the first write")

    def _check_text(self, what: str, text: str, limit: int) -> None:
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise GGUFError(f"{self.path}: {what} {text!r} has no UTF-8 form") from None
        if size > limit or "\0" in text:
            raise GGUFError(f"{self.path}: {what} {text!r} has {size} bytes; at most {limit}, without NUL, are allowed")


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _bytes_of(chunk: Any) -> memoryview:
    """The bytes of an array (C order, little-endian) or a bytes-like object."""
    if isinstance(chunk, np.ndarray):
        little = np.ascontiguousarray(chunk).astype(chunk.dtype.newbyteorder("<"), copy=False)
        return little.reshape(-1).view(np.uint8).data
    return memoryview(chunk).cast("B")
