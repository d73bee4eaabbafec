"""What is in model files: GGUF (single or split), safetensors, and folders of either. Reads headers only, and needs no
kernels."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gguftools import report
from gguftools.errors import GGUFError
from gguftools.gguf import GGUF, Field, TensorView, ValueType
from gguftools.gguf.endian import NAMES
from gguftools.gguf.values import Array
from gguftools.toolbox.shards import open_set, siblings
from gguftools.toolbox.weights import is_safetensors
from quant.formats import get_format

MAX_ELEMENTS = 16  # of an array in `describe`
MAX_LAYERS = 1024  # numbers in an array that is kept whole


def describe(path: str | Path, elements: int | None = MAX_ELEMENTS) -> dict[str, Any]:
    """What is in a model, as JSON can hold it: a GGUF file, a shard (then the whole set), a safetensors file, or a
    folder with a safetensors checkpoint.

    metadata: key -> type, value, and for arrays element_type and count, with at most `elements` of them as value (None:
    all; short arrays of numbers are always whole); tensors in file order, with shape in NumPy's order, ne in ggml's,
    offset from the beginning of the data; types: totals by type, largest first, share of the bytes of all tensors; bpw:
    bits per weight over all tensors, None without any.

    >>> describe(__import__("gguftools").demo_model())["n_tensors"]
    56

    Raises GGUFError for a file that cannot be read.
    """
    path = Path(path)
    if path.is_dir() or is_safetensors(path):
        return _safetensors(path)
    with open_set(path) as model:
        first = model.files[0]
        found = {
            "file": str(path),
            "kind": "GGUF",
            "size": model.size,
            "version": first.version,
            "byte_order": NAMES[first.byte_order],
            "alignment": first.alignment,
            "data_offset": first.data_offset,
            "n_keys": len(model.fields),
        }
        if len(model.files) > 1:
            found["shards"] = [_shard(file) for file in model.files]
        metadata = {key: _describe_field(field, elements) for key, field in model.fields.items()}
        return found | _totalled([_describe_tensor(t) for t in model.tensors.values()], metadata)


def _shard(file: GGUF) -> dict[str, Any]:
    return {"file": file.path.name, "size": file.size, "tensors": len(file.tensors)}


def _totalled(tensors: list[dict[str, Any]], metadata: dict[str, Any]) -> dict[str, Any]:
    weights = sum(t["weights"] for t in tensors)
    data = sum(t["bytes"] for t in tensors)
    return {
        "n_tensors": len(tensors),
        "weights": weights,
        "tensor_bytes": data,
        "bpw": report.bpw(data, weights),
        "metadata": metadata,
        "tensors": tensors,
        "types": _totals(tensors),
    }


def _describe_field(field: Field, elements: int | None) -> dict[str, Any]:
    value = field.value
    if isinstance(value, Array):
        # numbers of layers and the like are kept whole
        whole = field.element_type is not ValueType.STRING and len(value) <= MAX_LAYERS
        head = value[: None if whole else elements]
        return {"type": "array", "element_type": str(field.element_type), "count": len(value), "value": head}
    return {"type": str(field.type), "value": value}


def _describe_tensor(t: TensorView) -> dict[str, Any]:
    return {
        "name": t.name,
        "shape": list(t.shape),
        "ne": list(t.ne),
        "type": t.format.name,
        "weights": t.size,
        "bytes": t.nbytes,
        "offset": t.offset,
    }


def _totals(tensors: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    totals: dict[str, dict[str, Any]] = {}
    for t in tensors:
        total = totals.setdefault(t["type"], {"type": t["type"], "tensors": 0, "weights": 0, "bytes": 0})
        total["tensors"] += 1
        total["weights"] += t["weights"]
        total["bytes"] += t["bytes"]
    data = sum(total["bytes"] for total in totals.values())
    for total in totals.values():
        total["share"] = total["bytes"] / data if data else 0.0
    return sorted(totals.values(), key=lambda total: -total["bytes"])


def _safetensors(path: Path) -> dict[str, Any]:
    import math

    from gguftools.safetensors import SafetensorsFile, open_checkpoint

    with open_checkpoint(path) as checkpoint:
        tensors = []
        for view in checkpoint.values():
            sizes = {"weights": math.prod(view.shape), "bytes": view.nbytes}
            tensors.append({"name": view.name, "shape": list(view.shape), "type": view.dtype} | sizes)
        metadata: dict[str, Any] = {}
        for file in checkpoint.files:
            with SafetensorsFile(file) as f:
                metadata |= {key: {"type": "string", "value": value} for key, value in f.metadata.items()}
        found: dict[str, Any] = {
            "file": str(path),
            "kind": "safetensors",
            "size": sum(file.stat().st_size for file in checkpoint.files),
            "n_keys": len(metadata),
        }
        if len(checkpoint.files) > 1:
            found["shards"] = [{"file": file.name, "size": file.stat().st_size} for file in checkpoint.files]
        return found | _totalled(tensors, metadata)


# --- folders ----------------------------------------------------------------------------------------------------------


def models_in(folder: Path) -> list[Path]:
    """Models of a folder: its GGUF files, of a split set the first; or the folder itself if it is a checkpoint.

    Raises GGUFError if there is none.
    """
    files = sorted(folder.glob("*.gguf"))
    found = [file for file in files if (names := siblings(file)) is None or names[0] == file or names[0] not in files]
    if any(folder.glob("*.safetensors")):
        found.append(folder)
    if not found:
        raise GGUFError(f"{folder}: holds neither *.gguf nor *.safetensors files")
    return found


# --- folding ----------------------------------------------------------------------------------------------------------

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def fold(tensors: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Repeated layers as one row each: name with `[N]` for the layer, shape and type that they share, count, weights
    and bytes of all, and `layers`, the numbers as ranges.

    >>> rows = fold({"name": f"blk.{i}.a", "shape": [2], "type": "F32", "weights": 2, "bytes": 8} for i in (0, 1, 3))
    >>> rows[0]["name"], rows[0]["count"], rows[0]["layers"], rows[0]["bytes"]
    ('blk.[N].a', 3, '0-1,3', 24)
    """
    groups: dict[tuple, list[Mapping[str, Any]]] = {}
    for t in tensors:
        pattern = _NUMBER.sub("[N]", t["name"], count=1)
        groups.setdefault((pattern, tuple(t["shape"]), t["type"]), []).append(t)
    rows = []
    for (pattern, shape, kind), members in groups.items():
        single = len(members) == 1
        numbers = [] if single else [int(_NUMBER.search(t["name"])[0]) for t in members]  # type: ignore[index]
        rows.append(
            {
                "name": members[0]["name"] if single else pattern,
                "count": len(members),
                "layers": ranges(numbers),
                "shape": list(shape),
                "type": kind,
                "weights": sum(t["weights"] for t in members),
                "bytes": sum(t["bytes"] for t in members),
            }
        )
    return rows


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as ranges.

    >>> ranges([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    found: list[list[int]] = []
    for n in sorted(set(numbers)):
        if found and n == found[-1][1] + 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    return ",".join(f"{a}-{b}" if a != b else str(a) for a, b in found)


def tree(tensors: Iterable[Mapping[str, Any]]) -> list[tuple[str, int, int]]:
    """Tensors by the parts of their names: (indented line, tensors below it, their bytes); layers are folded."""
    root: dict[str, Any] = {}
    for row in fold(tensors):
        node = root
        *parents, leaf = row["name"].split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):  # a tensor has the name of a branch
                break
        if isinstance(node, dict):
            shape = " x ".join(map(str, row["shape"]))
            label = f"{leaf}  {row['type']}  [{shape}]" + (f"  layers {row['layers']}" if row["layers"] else "")
            node.setdefault(label, (row["count"], row["bytes"]))
    return [line for key, child in root.items() for line in _branch(key, child, 0)]


def _branch(name: str, node: Any, depth: int) -> list[tuple[str, int, int]]:
    indent = "  " * depth
    if not isinstance(node, dict):
        return [(indent + name, *node)]
    below = [line for key, child in node.items() for line in _branch(key, child, depth + 1)]
    leaves = [(n, size) for key, child in node.items() for n, size in _leaves(child)]
    return [(indent + name, sum(n for n, _ in leaves), sum(size for _, size in leaves)), *below]


def _leaves(node: Any) -> list[tuple[int, int]]:
    if not isinstance(node, dict):
        return [node]
    return [leaf for child in node.values() for leaf in _leaves(child)]


# --- memory -----------------------------------------------------------------------------------------------------------


def memory(found: Mapping[str, Any], n_ctx: int, type_k: str = "F16", type_v: str = "F16") -> dict[str, Any]:
    """Bytes that running the model takes: its weights, the keys and values of `n_ctx` tokens (of all layers, as if none
    had a window), and both together; activations come on top and are small beside them.

    found: as `describe` gives it. Raises GGUFError where the keys do not say enough, QuantError for an unknown type.
    """
    n_layer = _layers(_number(found, "block_count"), found["file"])
    latent = _number(found, "attention.kv_lora_rank", 0)
    if latent:  # latent attention keeps one compressed vector and the rotated part
        heads, width_k, width_v = [1] * n_layer, latent + _number(found, "rope.dimension_count", 0), 0
    else:
        n_head = _per_layer(found, "attention.head_count", n_layer)
        heads = _per_layer(found, "attention.head_count_kv", n_layer, n_head)
        width_k = _number(found, "attention.key_length", 0)
        if not width_k:
            width_k = _number(found, "embedding_length") // max(1, *n_head)
        width_v = _number(found, "attention.value_length", 0) or width_k
    cache = n_ctx * sum(_row(type_k, n * width_k) + _row(type_v, n * width_v) for n in heads)
    return {
        "n_ctx": n_ctx,
        "type_k": get_format(type_k).name,
        "type_v": get_format(type_v).name,
        "weights": found["tensor_bytes"],
        "cache": cache,
        "total": found["tensor_bytes"] + cache,
    }


def _layers(n: int, where: str) -> int:
    if not 0 < n <= 10_000:
        raise GGUFError(f"{where}: has {n:,} layers; the file is damaged")
    return n


def _value(found: Mapping[str, Any], name: str) -> Any:
    arch = found["metadata"].get("general.architecture", {}).get("value")
    return found["metadata"].get(f"{arch}.{name}", {}).get("value")


def _number(found: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A size of the family. Raises GGUFError if it is missing without a default, or none."""
    value = _value(found, name)
    value = default if value is None else value
    if value is None:
        raise GGUFError(f"{found['file']}: does not say '{name}', so the cache cannot be sized")
    return _checked(found["file"], name, value)


def _per_layer(found: Mapping[str, Any], name: str, n_layer: int, default: list[int] | None = None) -> list[int]:
    """A size that may differ by layer. Raises GGUFError as `_number` does, and for too short a list."""
    value = _value(found, name)
    if value is None and default is not None:
        return default
    if not isinstance(value, list):
        return [_number(found, name)] * n_layer
    if len(value) < n_layer:
        raise GGUFError(f"{found['file']}: '{name}' has {len(value)} entries for {n_layer} layers; the file is damaged")
    return [_checked(found["file"], name, n) for n in value[:n_layer]]


def _checked(where: str, name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 32:
        raise GGUFError(f"{where}: '{name}' is {value!r}; the file is damaged")
    return value


def _row(kind: str, n: int) -> int:
    fmt = get_format(kind)
    return -(-n // fmt.block_size) * fmt.type_size


def inspected(path: Path) -> list[Path]:
    """A folder as its models, a file as itself."""
    return models_in(path) if path.is_dir() else [Path(os.fspath(path))]
