"""Writing safetensors files as a stream: one file, or shards with an index."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gguftools.conversion.transforms import Rows
from gguftools.files import atomic_output, check_space

PIECE = 1 << 20  # weights that are held as float32 at a time
#: our name of a type -> safetensors', bytes of an element
STORED = {"F32": ("F32", 4), "F16": ("F16", 2), "BF16": ("BF16", 2)}


@dataclass(frozen=True)
class Item:
    """A tensor of the checkpoint: its name there, its rows, and the type that it is stored in."""

    name: str
    rows: Rows
    dtype: str

    @property
    def n_bytes(self) -> int:
        return math.prod(self.rows.shape) * STORED[self.dtype][1]


def write_checkpoint(
    folder: Path, items: Sequence[Item], max_bytes: int, threads: int | None, progress: Callable[[int], None] | None
) -> list[str]:
    """Write `model.safetensors`, or shards of at most `max_bytes` with an index. Returns the names of the files.

    Raises GGUFError if there is no room, QuantError for weights that do not fit the type.
    """
    check_space(folder / "model.safetensors", sum(item.n_bytes for item in items))
    groups = _groups(items, max_bytes)
    width = f"-of-{len(groups):05d}"
    names = [f"model-{i:05d}{width}.safetensors" for i in range(1, 1 + len(groups))]
    names = names if len(groups) > 1 else ["model.safetensors"]
    for name, group in zip(names, groups):
        with atomic_output(folder / name) as file:
            file.write(header(group))
            for item in group:
                for piece in _pieces(item, threads):
                    file.write(piece.data)
                    if progress is not None:
                        progress(piece.nbytes)
    if len(groups) > 1:
        total = sum(item.n_bytes for item in items)
        place = {item.name: name for name, group in zip(names, groups) for item in group}
        index = {"metadata": {"total_size": total}, "weight_map": place}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", "utf-8")
        names.append("model.safetensors.index.json")
    return names


def header(items: Sequence[Item]) -> bytes:
    """The beginning of a safetensors file of these tensors: length and JSON, padded to eight bytes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for item in items:
        entries[item.name] = {
            "dtype": STORED[item.dtype][0],
            "shape": list(item.rows.shape),
            "data_offsets": [at, at + item.n_bytes],
        }
        at += item.n_bytes
    text = json.dumps(entries, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _groups(items: Sequence[Item], max_bytes: int) -> list[list[Item]]:
    groups: list[list[Item]] = [[]]
    size = 0
    for item in items:
        if groups[-1] and size + item.n_bytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += item.n_bytes
    return groups


def _pieces(item: Item, threads: int | None) -> Iterator[np.ndarray]:
    """A tensor's bytes, a piece of rows at a time."""
    from quant.formats import FORMATS
    from quant.quantize import quantize_into

    rows, fmt = item.rows, FORMATS[item.dtype]
    step = max(1, PIECE // max(1, rows.n))
    for lo in range(0, rows.n_rows, step):
        hi = min(lo + step, rows.n_rows)
        if rows.dtype == item.dtype:
            yield np.ascontiguousarray(rows.fetch(lo, hi)).view(np.uint8).reshape(-1)
            continue
        blocks = np.empty((hi - lo, rows.n), fmt.block)
        quantize_into(rows.read(lo, hi, threads), fmt, blocks, threads=threads, name=item.name, first_row=lo)
        yield blocks.view(np.uint8).reshape(-1)
