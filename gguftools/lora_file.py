"""LoRA adapters as GGUF files: for a weight W of the base, `W.lora_a` (A) and `W.lora_b` (B), and one alpha.

The adapted weight is W + scale * alpha / rank * (B A), rank being the number of rows of A. This is the layout of
llama.cpp's converter: `general.type` is "adapter", `adapter.type` is "lora", `adapter.lora.alpha` is alpha.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gguftools.errors import GGUFError
from gguftools.gguf import GGUF

A, B = ".lora_a", ".lora_b"
MAX_WEIGHTS = 1 << 31  # of all matrices together


@dataclass(frozen=True)
class Lora:
    """architecture: of the base; alpha: 0 if scales are to be taken as they are; tensors: name of the base's tensor ->
    A [rank, n], B [rows, rank], float32."""

    architecture: str
    alpha: float
    tensors: Mapping[str, tuple[np.ndarray, np.ndarray]]

    def factor(self, name: str, scale: float = 1.0) -> float:
        """What B A is multiplied by for one tensor."""
        rank = len(self.tensors[name][0])
        return scale * self.alpha / rank if self.alpha else scale


def read_lora(path: str | os.PathLike) -> Lora:
    """An adapter. Raises GGUFError for a file that is none, or is damaged."""
    with GGUF(path) as f:
        kind, method = f.metadata.get("general.type"), f.metadata.get("adapter.type")
        if kind != "adapter" or method != "lora":
            raise GGUFError(f"{path}: is no LoRA adapter (general.type {kind!r}, adapter.type {method!r})")
        alpha, arch = f.metadata.get("adapter.lora.alpha", 0.0), f.metadata.get("general.architecture")
        if not isinstance(alpha, (int, float)) or not np.isfinite(alpha) or not isinstance(arch, str):
            raise GGUFError(f"{path}: 'adapter.lora.alpha' is {alpha!r} for {arch!r}; the file is damaged")
        if sum(t.size for t in f.tensors.values()) > MAX_WEIGHTS:
            raise GGUFError(f"{path}: has more than {MAX_WEIGHTS:,} weights; this is no adapter")
        tensors = {}
        for name, t in f.tensors.items():
            stem = name.removesuffix(A).removesuffix(B)
            if stem == name or stem + A not in f.tensors or stem + B not in f.tensors:
                raise GGUFError(f"{path}: tensor '{name}' is no half of a pair ending in {A} and {B}")
            if name.endswith(B):
                continue
            other = f.tensors[stem + B]
            if len(t.shape) != 2 or len(other.shape) != 2 or other.shape[1] != t.shape[0] or not t.size:
                raise GGUFError(f"{path}: '{stem}' has A {list(t.shape)} and B {list(other.shape)}: they do not fit")
            tensors[stem] = t.dequantize(), other.dequantize()
        if not tensors:
            raise GGUFError(f"{path}: holds no matrices")
        return Lora(arch, float(alpha), tensors)
