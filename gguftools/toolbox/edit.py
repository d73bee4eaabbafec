"""Changing a model file: keys of any type, entries of arrays, tensors.

Three ways, the first that fits: nothing to do; in place, where the new header is as long as the old with its padding
and differs within one page of memory, so that it changes at once or not at all; else a copy, which is read again and
compared before it takes the file's name. `in_place=True` also changes longer stretches in place (a file of many
gigabytes need not be copied): the old bytes are kept in a journal beside the file until the new ones are on the disk,
and a file whose journal is there is not read until `edit` has restored it.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gguftools.errors import GGUFError
from gguftools.files import atomic_output, check_output, journal_path
from gguftools.gguf import GGUF, Field, ValueType, Writer, keys
from gguftools.gguf.values import Array, encode, value_type
from gguftools.toolbox.copying import Part, Progress, part, write
from quant.format import Format
from quant.formats import FORMATS, get_format

PAGE = 4096  # bytes that the kernel copies without a pause

IN_PLACE, JOURNALED, COPIED, UNCHANGED = "in place", "in place, with a journal", "as a copy", "nothing to do"


@dataclass(frozen=True)
class Edits:
    """What to do, in this order: keys renamed, deleted, set; entries of arrays; special tokens; tensors renamed,
    dropped, added.

    set: key -> value, or (value, type); entries: (key, index) -> value; special: name (`eos`) -> text of a token, whose
    id is set; drop_tensors: names or patterns (`blk.3.*`); add_tensors: name -> array, or (array, type).
    """

    rename: Mapping[str, str] = field(default_factory=dict)
    delete: Sequence[str] = ()
    set: Mapping[str, Any] = field(default_factory=dict)
    entries: Mapping[tuple[str, int], Any] = field(default_factory=dict)
    special: Mapping[str, str] = field(default_factory=dict)
    rename_tensors: Mapping[str, str] = field(default_factory=dict)
    drop_tensors: Sequence[str] = ()
    add_tensors: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Edited:
    """What was done, or would be. changes: one line each; way: how (one of four phrases)."""

    output: Path
    changes: tuple[str, ...]
    way: str

    def summary(self) -> dict[str, Any]:
        return {"output": str(self.output), "changes": list(self.changes), "way": self.way}


def edit(
    path: str | os.PathLike,
    edits: Edits,
    output: str | os.PathLike | None = None,
    in_place: bool = False,
    dry_run: bool = False,
    progress: Progress = None,
) -> Edited:
    """Change a file, or write the changed one to `output`.

    in_place: see above; without, and without `output`, only small changes are made in place. dry_run: say what would be
    done.

    >>> import gguftools, os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     out = os.path.join(folder, "named.gguf")
    ...     done = gguftools.edit(gguftools.demo_model(), Edits(set={"general.name": "Renamed"}), out)
    ...     with gguftools.open(out) as f:
    ...         f.metadata["general.name"]
    'Renamed'

    Raises GGUFError for keys, entries and tensors that are not there, values that their type cannot hold, names that
    are taken, and as the reader and writer do; then nothing has changed.
    """
    path = Path(path)
    if not dry_run:
        restore(path)
    with GGUF(path) as f:
        changes: list[str] = []
        fields = _edit_fields(f, edits, changes)
        parts, data_changed = _edit_tensors(f, edits, changes)
        target = Path(output) if output is not None else path
        if not changes and output is None:
            return Edited(target, (), UNCHANGED)
        header = _header(f, fields, parts)
        way = COPIED if output is not None or data_changed else _way(f, header, in_place)
        if way == COPIED and in_place:
            raise GGUFError(f"{path}: the change does not fit in place; leave out --in-place to write a copy")
        if not dry_run:
            _carry_out(f, way, header, fields, parts, target, [] if output is None else [path], progress)
    return Edited(target, tuple(changes), way)


# --- keys -------------------------------------------------------------------------------------------------------------


def _edit_fields(f: GGUF, edits: Edits, changes: list[str]) -> list[Field]:
    """The new keys; those that were there keep their places."""
    found = dict(f.fields)
    for old, new in edits.rename.items():
        _known(f, old, found)
        if new in found:
            raise GGUFError(f"{f.path}: key '{new}' is there already; delete it first")
        found = {new if key == old else key: _renamed(item, new) if key == old else item for key, item in found.items()}
        changes.append(f"rename key {old} to {new}")
    for key in edits.delete:
        _known(f, key, found)
        del found[key]
        changes.append(f"delete key {key}")
    for key, value in edits.set.items():
        value, kind = value if isinstance(value, tuple) else (value, None)
        _set(found, _encoded(key, value, kind, found.get(key)), changes)
    for key in dict.fromkeys(key for key, _ in edits.entries):
        _known(f, key, found)
        _set(found, _with_entries(f, found[key], edits.entries), changes)
    for name, text in edits.special.items():
        key = _special_key(name)
        _set(found, encode(key, _token_id(f, found, text), ValueType.UINT32), changes)
    return list(found.values())


def _renamed(item: Field, key: str) -> Field:
    return Field(key, item.type, item.element_type, item.raw, item.starts, item.order)


def _known(f: GGUF, key: str, found: Mapping[str, Field]) -> None:
    if key not in found:
        import difflib

        near = difflib.get_close_matches(key, found, 1)
        raise GGUFError(f"{f.path}: there is no key '{key}'" + (f"; did you mean '{near[0]}'?" if near else ""))


def _encoded(key: str, value: Any, kind: ValueType | str | None, old: Field | None) -> Field:
    """A value as a field; without a type it keeps that of the old one, or gets the key's usual one."""
    if isinstance(value, Field):
        return value
    if kind is not None:
        return encode(key, value, value_type(kind))
    if old is not None:
        same = (old.type is ValueType.ARRAY) == (
            not isinstance(value, (str, bytes)) and isinstance(value, (Sequence, np.ndarray))
        )
        if not same:
            what = f"an array of {old.element_type}" if old.type is ValueType.ARRAY else str(old.type)
            raise GGUFError(f"{key}: is {what}, the new value is not; name a type to change it")
        return encode(key, value, old.element_type if old.type is ValueType.ARRAY else old.type)
    return encode(key, value, keys.type_of(key))


def _set(found: dict[str, Field], item: Field, changes: list[str]) -> None:
    old = found.get(item.key)
    new_raw = bytes(item.raw)
    if old is not None and (old.type, bytes(old.encoded())) == (item.type, new_raw):
        return
    before = "" if old is None else f" (was {short(old)})"
    changes.append(f"set key {item.key} to {short(item)}{before}")
    found[item.key] = item


def short(item: Field) -> str:
    """A value in a few words."""
    value = item.value
    if isinstance(value, Array):
        return f"{item.element_type}[{len(value)}]"
    text = repr(value)
    return f"{item.type} {text if len(text) <= 60 else text[:57] + '...'}"


def _with_entries(f: GGUF, item: Field, entries: Mapping[tuple[str, int], Any]) -> Field:
    if item.type is not ValueType.ARRAY:
        raise GGUFError(f"{f.path}: key '{item.key}' is {item.type}, not an array; it has no entries")
    values = item.value.tolist()
    for (key, i), value in entries.items():
        if key != item.key:
            continue
        if not -len(values) <= i <= len(values):
            raise GGUFError(f"{f.path}: key '{key}' has {len(values):,} entries, there is no entry {i}")
        if i == len(values):
            values.append(value)
        else:
            values[i] = value
    return encode(item.key, values, item.element_type)


def _special_key(name: str) -> str:
    from engine.tokenizer.vocab import SPECIAL_KEYS

    if name not in SPECIAL_KEYS:
        raise GGUFError(f"unknown special token '{name}'; there are {', '.join(SPECIAL_KEYS)}")
    return SPECIAL_KEYS[name]


def _token_id(f: GGUF, found: Mapping[str, Field], text: str) -> int:
    _known(f, "tokenizer.ggml.tokens", found)
    tokens = found["tokenizer.ggml.tokens"].value
    try:
        return list(tokens).index(text)
    except ValueError:
        raise GGUFError(f"{f.path}: {text!r} is no token of the vocabulary") from None


# --- tensors ----------------------------------------------------------------------------------------------------------


def _edit_tensors(f: GGUF, edits: Edits, changes: list[str]) -> tuple[list[Part], bool]:
    """The new tensors, and whether the data section changes."""
    parts = {name: part(view) for name, view in f.tensors.items()}
    for old, new in edits.rename_tensors.items():
        if old not in parts:
            raise GGUFError(f"{f.path}: there is no tensor '{old}'")
        if new in parts:
            raise GGUFError(f"{f.path}: tensor '{new}' is there already; drop it first")
        parts = {new if name == old else name: _named(p, new) if name == old else p for name, p in parts.items()}
        changes.append(f"rename tensor {old} to {new}")
    for pattern in edits.drop_tensors:
        dropped = fnmatch.filter(parts, pattern)
        if not dropped:
            raise GGUFError(f"{f.path}: no tensor is called '{pattern}'")
        for name in dropped:
            del parts[name]
            changes.append(f"drop tensor {name}")
    for name, value in edits.add_tensors.items():
        if name in parts:
            raise GGUFError(f"{f.path}: tensor '{name}' is there already; drop it first")
        values, kind = value if isinstance(value, tuple) else (value, None)
        parts[name] = new_part(name, values, kind)
        changes.append(f"add tensor {name}: {parts[name].format} {list(parts[name].shape)}")
    return list(parts.values()), bool(edits.drop_tensors or edits.add_tensors)


def _named(p: Part, name: str) -> Part:
    return Part(name, p.shape, p.format, p.pieces)


_PLAIN = {
    "float32": "F32",
    "float16": "F16",
    "float64": "F64",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
}


def new_part(name: str, values: np.ndarray, kind: str | Format | None = None) -> Part:
    """An array as a tensor; kind: None for the array's own type, else it is converted from float32.

    Raises GGUFError and QuantError for arrays that the type cannot hold.
    """
    values = np.asarray(values)
    own = _PLAIN.get(values.dtype.name)
    fmt = get_format(kind) if kind is not None else FORMATS.get(own or "")
    if fmt is None:
        raise GGUFError(f"tensor '{name}': arrays of {values.dtype} have no tensor type; convert them to float32")
    if fmt.name == own:
        return Part(name, values.shape, fmt, lambda: iter([np.ascontiguousarray(values)]))
    from quant.quantize import quantize

    rows = np.asarray(values, np.float32).reshape(-1, values.shape[-1] if values.ndim else 1)
    blocks = quantize(rows, fmt)
    return Part(name, values.shape, fmt, lambda: iter([blocks]))


# --- writing ----------------------------------------------------------------------------------------------------------


def _header(f: GGUF, fields: list[Field], parts: list[Part]) -> bytes:
    w = Writer(f.path, byte_order=f.byte_order, version=f.version)
    for item in fields:
        w.add_field(item)
    for p in parts:
        w.declare(p.name, p.shape, p.format)
    return w.header()


def _way(f: GGUF, header: bytes, in_place: bool) -> str:
    if not f.tensors or len(header) != f.data_offset:
        return COPIED
    old = _old_header(f)
    if header == old:
        return UNCHANGED
    first, end = _span(old, header)
    return IN_PLACE if first // PAGE == (end - 1) // PAGE else JOURNALED if in_place else COPIED


def _old_header(f: GGUF) -> bytes:
    with f.path.open("rb") as file:
        return file.read(f.data_offset)


def _span(old: bytes, new: bytes) -> tuple[int, int]:
    """First differing byte, and the one after the last."""
    differs = np.flatnonzero(np.frombuffer(old, np.uint8) != np.frombuffer(new, np.uint8))
    return int(differs[0]), int(differs[-1]) + 1


def _carry_out(
    f: GGUF,
    way: str,
    header: bytes,
    fields: list[Field],
    parts: list[Part],
    target: Path,
    inputs: list[Path],
    progress: Progress,
) -> None:
    if way == COPIED:
        if not inputs and not os.access(target, os.W_OK):
            raise GGUFError(f"{target}: is write-protected; change that, or write to another file with -o")
        write(target, inputs, fields, parts, progress, f.byte_order, version=f.version)
    elif way in (IN_PLACE, JOURNALED):
        _overwrite(f, header, way == JOURNALED)


def _overwrite(f: GGUF, header: bytes, journaled: bool) -> None:
    old = _old_header(f)
    first, end = _span(old, header)
    real = check_output(f.path)
    if journaled:
        body = struct.pack("<QQ", first, end - first) + old[first:end]
        with atomic_output(journal_path(real)) as journal:
            journal.write(hashlib.sha256(body).digest() + body)
    try:
        _put(real, first, header[first:end])
    except OSError as error:
        raise GGUFError(f"{f.path}: cannot be written: {error.strerror}") from None
    if journaled:
        journal_path(real).unlink()
    if _old_header(f) != header:
        raise GGUFError(f"{f.path}: the header reads differently from what was written; check the disk")


def _put(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b", buffering=0) as file:
        file.seek(at)
        file.write(data)
        os.fsync(file.fileno())


def restore(path: str | os.PathLike) -> bool:
    """Put back what an interrupted edit in place has overwritten; whether there was such a thing.

    Raises GGUFError if the journal is damaged.
    """
    real = Path(os.path.realpath(path))
    journal = journal_path(real)
    if not journal.exists():
        return False
    data = journal.read_bytes()
    digest, body = data[:32], data[32:]
    if hashlib.sha256(body).digest() != digest:
        raise GGUFError(f"{journal}: the journal is damaged; remove it if {path} is sound, else get the file again")
    at, size = struct.unpack_from("<QQ", body)
    _put(real, at, body[16 : 16 + size])
    journal.unlink()
    return True
