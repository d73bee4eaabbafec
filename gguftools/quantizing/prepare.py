"""From a source and a wish to a plan for each output: keys that are set, layers that are left out, types, and where
every byte will lie, before any is written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gguftools._version import __version__
from gguftools.errors import GGUFError
from gguftools.gguf import keys
from gguftools.gguf.reader import pad
from gguftools.gguf.values import Field, ValueType, encode
from gguftools.gguf.writer import Writer
from gguftools.quantizing.importance import Importance
from gguftools.quantizing.source import Model
from quant.mixes import Choice
from quant.recipes import Recipe, write_recipe
from quant.roles import file_order

QUANTIZATION_VERSION = 2  # of the block formats, as ggml counts them
OURS = "gguftools."
RECIPE = OURS + "recipe"
VERSION = OURS + "version"

# --- keys that a user sets --------------------------------------------------------------------------------------------

_BOOLS = {"true": True, "false": False}
_MAX_TEXT = 127  # bytes of a key or text, as the reference has room for


def read_override(text: str) -> Field:
    """`KEY=TYPE:VALUE`, type int, float, bool or str: whole numbers become uint32 (int32 if negative, 64 bits if they
    need them), numbers float32.

    >>> read_override("llama.context_length=int:4096").value
    4096

    Raises GGUFError for anything else.
    """
    key, equals, typed = text.partition("=")
    kind, colon, value = typed.partition(":")
    where = f"--override-kv {text}"
    if not (key and equals and colon) or kind not in ("int", "float", "bool", "str"):
        raise GGUFError(f"{where}: expected KEY=TYPE:VALUE with type int, float, bool or str")
    if len(key.encode()) > _MAX_TEXT or (kind == "str" and len(value.encode()) > _MAX_TEXT):
        raise GGUFError(f"{where}: keys and texts may have {_MAX_TEXT} bytes; set longer ones with `gguftools edit`")
    try:
        if kind == "str":
            return encode(key, value, ValueType.STRING)
        if kind == "bool":
            return encode(key, _BOOLS[value.lower()], ValueType.BOOL)
        if kind == "float":
            return encode(key, float(value), ValueType.FLOAT32)
        return encode(key, number := int(value), _integer(number))
    except (ValueError, KeyError, OverflowError):
        raise GGUFError(f"{where}: '{value}' is no {kind}") from None


def _integer(number: int) -> ValueType:
    small, large = (ValueType.INT32, ValueType.INT64) if number < 0 else (ValueType.UINT32, ValueType.UINT64)
    return small if -(1 << 31) <= number < 1 << 32 else large


def override(model: Model, overrides: Sequence[str]) -> Model:
    """The model with keys set; they count for the plan, too."""
    found = tuple(map(read_override, overrides))
    if any(field.key == keys.ALIGNMENT for field in found):
        raise GGUFError("--override-kv: offsets depend on the alignment, which stays as it is")
    return replace(model, fields=model.fields | {field.key: field for field in found}, overrides=found)


# --- layers that are left out -----------------------------------------------------------------------------------------


def prune(model: Model, layers: Iterable[int]) -> Model:
    """The model without some blocks; the others are numbered anew, and keys with a value per block follow.

    Raises GGUFError for a block that is not there, or if none is left.
    """
    dropped = set(layers)
    if not dropped:
        return model
    arch = model.metadata.get("general.architecture")
    blocks = sorted({file_order(name)[0] for name in model.tensors} - {-1})
    count = _count(model, f"{arch}.block_count", 1 + max(blocks, default=-1))
    absent = sorted(dropped - set(blocks))
    if absent:
        raise GGUFError(f"--prune-layers: there is no layer {absent[0]}; the model has 0 to {max(blocks, default=-1)}")
    if len(dropped) == count:
        raise GGUFError("--prune-layers: no layer would be left; leave some")
    kept = [i for i in range(count) if i not in dropped]
    number = {old: new for new, old in enumerate(kept)}
    tensors = {}
    for name, tensor in model.tensors.items():
        block = file_order(name)[0]
        if block in dropped:
            continue
        new = name if block < 0 else f"blk.{number[block]}." + name.split(".", 2)[2]
        tensors[new] = replace(tensor, name=new)
    blocks_key = f"{arch}.block_count"
    fields = dict(model.fields)
    fields[blocks_key] = encode(blocks_key, len(kept), ValueType.UINT32)
    for key, field in model.fields.items():
        value = field.value
        if key.startswith(f"{arch}.") and field.element_type is not None and len(value) == count:
            fields[key] = encode(key, [value[i] for i in kept], field.element_type)
    renamed = {t.origin: name for name, t in tensors.items()}
    shards = tuple(tuple(renamed[name] for name in names if name in renamed) for names in model.shards)
    return replace(model, fields=fields, tensors=tensors, shards=shards, pruned=(fields[blocks_key],))


def _count(model: Model, key: str, default: int) -> int:
    value = model.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not default <= value <= len(model.tensors):
        raise GGUFError(f"{model.path}: {key} is {value!r}, the tensors are of {default} blocks; the file is damaged")
    return value


# --- outputs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recorded:
    """SHA-256 per tensor of an output, in its order: of source, importance (zeros for none) and data (zeros until it
    is known)."""

    sources: tuple[str, ...]
    importances: tuple[str, ...]
    results: tuple[str, ...]

    FIELDS = ("source", "importance", "result")

    def fields(self) -> list[Field]:
        found = zip(self.FIELDS, (self.sources, self.importances, self.results))
        return [encode(f"{OURS}record.{name}", list(values), ValueType.STRING) for name, values in found]


@dataclass(frozen=True)
class File:
    """One file to be written. header: everything before the data; offsets: of the tensors, from the file's beginning;
    size: bytes."""

    path: Path
    choices: tuple[Choice, ...]
    header: bytes
    offsets: Mapping[str, int]
    size: int


def layout(path: Path, fields: Iterable[Field], choices: Sequence[Choice]) -> File:
    """A file of these keys (a later one replaces an earlier one of its name) and tensors."""
    writer = Writer(path)
    for field in fields:
        writer.add_field(field)
    for choice in choices:
        writer.declare(choice.name, choice.shape, choice.target)
    header = writer.header()
    offsets, at = {}, len(header)
    for choice in choices:
        offsets[choice.name] = at
        at += pad(choice.n_bytes, writer.alignment)
    return File(path, tuple(choices), header, offsets, at)


def output_fields(model: Model, recipe: Recipe, importance: Importance | None) -> list[Field]:
    """The keys of a quantized file, in the reference's order."""
    ftype = recipe.file_type if recipe.file_type is not None else model.metadata.get("general.file_type", 0)
    return [
        *model.fields.values(),
        encode("general.quantization_version", QUANTIZATION_VERSION, ValueType.UINT32),
        encode("general.file_type", ftype, ValueType.UINT32),
        *model.overrides,
        *(_importance_fields(importance) if importance is not None else ()),
        *model.pruned,
    ]


def _importance_fields(importance: Importance) -> list[Field]:
    matrix = importance.matrix
    found = [encode("quantize.imatrix.file", _short(importance.path.name), ValueType.STRING)]
    if matrix.datasets:
        found.append(encode("quantize.imatrix.dataset", _short(matrix.datasets[0]), ValueType.STRING))
    found.append(encode("quantize.imatrix.entries_count", len(matrix.entries), ValueType.UINT32))
    if matrix.chunk_count:
        found.append(encode("quantize.imatrix.chunks_count", matrix.chunk_count, ValueType.UINT32))
    return found


def origin_fields(recipe: Recipe) -> list[Field]:
    """Keys that tell how a file was made."""
    texts = ((VERSION, __version__), (RECIPE, write_recipe(recipe)))
    return [encode(key, text, ValueType.STRING) for key, text in texts]


def split_fields(i: int, n: int, n_tensors: int) -> list[Field]:
    """Keys of one shard of several."""
    return [
        encode(keys.SPLIT_NO, i, ValueType.UINT16),
        encode(keys.SPLIT_COUNT, n, ValueType.UINT16),
        encode(keys.SPLIT_TENSORS, n_tensors, ValueType.INT32),
    ]


def _short(text: str) -> str:
    """At most 127 bytes of UTF-8, as the reference's fields hold."""
    return text.encode(errors="replace")[:_MAX_TEXT].decode(errors="ignore")


def layer_numbers(text: str) -> list[int]:
    """`2,5-7` as numbers.

    >>> layer_numbers("2, 5-7")
    [2, 5, 6, 7]

    Raises GGUFError for anything else.
    """
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise GGUFError(f"--prune-layers: '{text}' is no list of layers; write such as 2,5-7")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return found
