"""LoRA adapters into a model: W + scale * alpha / rank * (B A), computed row by row as the file is written."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gguftools.errors import GGUFError
from gguftools.lora_file import Lora, read_lora
from gguftools.quantizing.assemble import Progress, assemble, silent
from gguftools.quantizing.pipeline import Job, Place
from gguftools.quantizing.prepare import layout
from gguftools.quantizing.scan import refuse, scan
from gguftools.quantizing.source import SourceTensor, open_model
from quant.mixes import Choice


@dataclass(frozen=True)
class Merged:
    """What was done: the file, the adapters with their scales, and the tensors that changed."""

    output: Path
    adapters: tuple[tuple[str, float], ...]
    changed: tuple[str, ...]

    def summary(self) -> dict[str, Any]:
        return {
            "output": str(self.output),
            "adapters": [{"file": path, "scale": scale} for path, scale in self.adapters],
            "changed": list(self.changed),
        }


def merge_lora(
    base: str | os.PathLike,
    adapters: Sequence[str | os.PathLike | tuple[str | os.PathLike, float]],
    output: str | os.PathLike,
    threads: int | None = None,
    progress: Progress = silent,
) -> Merged:
    """Write a model with adapters merged in; several add up. Tensors keep their types; quantized ones are quantized
    anew, so a base of 16 bits is better.

    base: a GGUF model, or a Hugging Face folder; adapters: GGUF files, with a scale each, or 1.

    >>> import gguftools, os, tempfile
    >>> from gguftools.gguf import Writer
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     lora, out = os.path.join(folder, "lora.gguf"), os.path.join(folder, "out.gguf")
    ...     with Writer(lora) as w:
    ...         for key, value in (("general.type", "adapter"), ("adapter.type", "lora"), ("adapter.lora.alpha", 2.0)):
    ...             w.add(key, value)
    ...         w.add("general.architecture", "llama")
    ...         for half, shape in (("lora_a", (1, 256)), ("lora_b", (512, 1))):
    ...             w.declare(f"blk.0.ffn_up.weight.{half}", shape, "F32")
    ...         for half, n in (("lora_a", 256), ("lora_b", 512)):
    ...             w.write(f"blk.0.ffn_up.weight.{half}", np.ones(n, np.float32))
    ...     gguftools.merge_lora(gguftools.demo_model(), [(lora, 0.5)], out).changed
    ('blk.0.ffn_up.weight',)

    Raises GGUFError for adapters of another family or shape, and as writing a model does.
    """
    wanted = [entry if isinstance(entry, tuple) else (entry, 1.0) for entry in adapters]
    if not wanted:
        raise GGUFError("name an adapter to merge")
    if not all(np.isfinite(scale) for _, scale in wanted):
        raise GGUFError("the scale of an adapter must be a finite number")
    found = [(read_lora(path), float(scale)) for path, scale in wanted]
    with open_model(base) as model:
        arch = model.metadata.get("general.architecture")
        for (path, _), (lora, _) in zip(wanted, found):
            _check(path, lora, arch, model.tensors)
        tensors = {
            name: _adapted(t, [(x, s) for x, s in found if name in x.tensors]) for name, t in model.tensors.items()
        }
        with progress("scanning", sum(t.n_bytes for t in tensors.values())) as advance:
            refuse(tensors, scan(tensors.values(), False, threads, advance))
        choices = [Choice(t.name, t.shape, t.format, t.format, "", t.format) for t in tensors.values()]
        file = layout(Path(output), model.fields.values(), choices)
        jobs = [Job(t, (Place(0, t.format, file.offsets[t.name]),)) for t in tensors.values()]
        about = ["merge-lora", [scale for _, scale in wanted]]
        inputs = [*model.files, *(Path(path) for path, _ in wanted)]
        assemble([file], jobs, inputs, about, threads=threads, progress=progress, verb="merging")
    changed = tuple(name for name in tensors if any(name in lora.tensors for lora, _ in found))
    return Merged(Path(output), tuple((os.fspath(path), scale) for path, scale in wanted), changed)


def _check(path: object, lora: Lora, arch: object, tensors: Mapping[str, SourceTensor]) -> None:
    if lora.architecture != arch:
        raise GGUFError(f"{path}: is for a model of '{lora.architecture}', the base is of '{arch}'")
    for name, (a, b) in lora.tensors.items():
        if name not in tensors:
            raise GGUFError(f"{path}: the base has no tensor '{name}'; the adapter belongs to another model")
        if tensors[name].shape != (len(b), a.shape[1]):
            shape = list(tensors[name].shape)
            raise GGUFError(f"{path}: '{name}' is {[len(b), a.shape[1]]}, the base has {shape}: it is of another model")


def _adapted(tensor: SourceTensor, loras: list[tuple[Lora, float]]) -> SourceTensor:
    """The tensor plus what the adapters add."""
    loras = [(lora, scale) for lora, scale in loras if tensor.name in lora.tensors]
    if not loras:
        return tensor
    parts = [(lora.tensors[tensor.name], np.float32(lora.factor(tensor.name, scale))) for lora, scale in loras]

    def fetch(lo: int, hi: int) -> np.ndarray:
        rows = tensor.read(lo, hi)
        for (a, b), factor in parts:
            rows += factor * (b[lo:hi] @ a)
        return rows

    return replace(tensor, fetch=fetch, as_float=True)
