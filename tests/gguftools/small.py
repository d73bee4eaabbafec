"""Models made up for tests: as small as a test wants them, or as large as no disk holds (sparse files)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gguftools.gguf import GGUF, Writer
from gguftools.gguf.values import encode
from gguftools.imatrix_file import write_imatrix
from gguftools.quantizing.prepare import layout
from quant.formats import FORMATS, get_format
from quant.imatrix import Entry, IMatrix
from quant.mixes import Choice
from quant.quantize import quantize

Shapes = Mapping[str, tuple[int, ...]]


def shapes(blocks: int = 2, n: int = 256, n_ff: int = 512, n_vocab: int = 64, output: bool = True) -> dict:
    """Names and shapes of a Llama-shaped model."""
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (n_vocab, n), "output_norm.weight": (n,)}
    if output:
        found["output.weight"] = n_vocab, n
    for i in range(blocks):
        b = f"blk.{i}."
        found |= {b + "attn_norm.weight": (n,), b + "ffn_norm.weight": (n,)}
        found |= {b + f"attn_{x}.weight": (n, n) for x in ("q", "k", "v", "output")}
        found |= {b + "ffn_gate.weight": (n_ff, n), b + "ffn_up.weight": (n_ff, n), b + "ffn_down.weight": (n, n_ff)}
    return found


def keys(blocks: int, arch: str = "llama", **more: Any) -> dict[str, Any]:
    """Metadata; `a__b` in a name stands for `a.b` below the architecture."""
    found = {"general.architecture": arch, f"{arch}.block_count": blocks, f"{arch}.attention.head_count": 4}
    found |= {f"{arch}.attention.head_count_kv": 2, "general.file_type": 1}
    return found | {f"{arch}.{key.replace('__', '.')}": value for key, value in more.items()}


def weights(wanted: Shapes, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) / 8 for name, shape in wanted.items()}


def write(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, Any], kind: str = "F16") -> Path:
    """A GGUF file: vectors F32, everything else in `kind`."""
    with Writer(path) as w:
        for key, value in metadata.items():
            w.add(key, value)
        kinds = {name: get_format(kind if x.ndim > 1 else "F32") for name, x in tensors.items()}
        for name, x in tensors.items():
            w.declare(name, x.shape, kinds[name])
        for name, x in tensors.items():
            fmt = kinds[name]
            rows = x.reshape(-1, x.shape[-1])
            # ours refuses values that are not finite; a test may want them
            plain = {"F32": lambda r: r, "F16": lambda r: r.astype("<f2"), "BF16": _bf16}.get(fmt.name)
            w.write(
                name, np.ascontiguousarray(plain(rows) if plain else quantize(rows, fmt)).view(np.uint8).reshape(-1)
            )
    return path


def _bf16(rows: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(rows, "<f4").view("<u4")
    rounded = np.where(np.isfinite(rows), bits + np.uint32(0x7FFF) + (bits >> 16 & 1), bits)
    return (rounded >> 16).astype("<u2")


def model(path: Path, blocks: int = 2, kind: str = "F16", seed: int = 0, **more: Any) -> Path:
    """A small Llama-shaped model of random weights."""
    return write(path, weights(shapes(blocks), seed), keys(blocks, **more), kind)


def sparse(path: Path, wanted: Shapes, metadata: Mapping[str, Any], kind: str = "F16") -> Path:
    """A file of zeros that takes no room: any sizes."""
    fields = [encode(key, value) for key, value in metadata.items()]
    choices = []
    for name, shape in wanted.items():
        fmt = FORMATS[kind if len(shape) > 1 else "F32"]
        choices.append(Choice(name, shape, fmt, fmt, "", fmt))
    file = layout(path, fields, choices)
    with path.open("wb") as out:
        out.write(file.header)
        out.truncate(file.size)
    return path


def importance(
    path: Path, wanted: Shapes, but: Sequence[str] = (), values: Mapping[str, np.ndarray] | None = None, seed: int = 1
) -> Path:
    """An importance matrix for all matrices of blocks whose names hold none of `but`; values: other means of squares,
    [matrices, columns], by name."""
    rng = np.random.default_rng(seed)
    matrix = IMatrix(datasets=["text.txt"], chunk_count=3)
    for name, shape in wanted.items():
        if len(shape) < 2 or not name.startswith("blk.") or any(re.search(part, name) for part in but):
            continue
        n_mat = int(np.prod(shape[:-2]))
        squares = rng.uniform(0.1, 4, (n_mat, shape[-1])).astype(np.float32).astype(np.float64)
        matrix.entries[name] = Entry(squares * 10, np.full(n_mat, 10), None)
    for name, means in (values or {}).items():
        matrix.entries[name] = Entry(np.float64(means) * 10, np.full(len(means), 10), None)
    write_imatrix(path, matrix)
    return path


def types(path: Path) -> dict[str, str]:
    with GGUF(path) as f:
        return {name: view.format.name for name, view in f.tensors.items()}


def data(path: Path) -> dict[str, bytes]:
    with GGUF(path) as f:
        return {name: bytes(view.data) for name, view in f.tensors.items()}
