"""A LoRA adapter as PEFT saves it (adapter_config.json, adapter_model.safetensors) to GGUF.

Names and orders of rows are those of the base model's family; the parameters come from the base's config.json. The rows
of B are put in another order as those of the base's weight are; a weight of the checkpoint that becomes several tensors
splits B, and A goes to each.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.models import arch_of_config
from engine.models.arch import Arch, Hparams
from engine.models.steps import Take
from gguftools.conversion.card import is_number
from gguftools.conversion.hf import load_json, normalize, read_hparams
from gguftools.conversion.layouts import text_class
from gguftools.conversion.names import parse_name, title
from gguftools.errors import GGUFError
from gguftools.gguf.writer import Writer
from gguftools.lora_file import A, B
from gguftools.safetensors import ADAPTER, SafetensorView, open_checkpoint
from quant.formats import FORMATS
from quant.quantize import quantize_into

_NAME = re.compile(r"(?:base_model\.model\.)?(?P<weight>.+)\.lora_(?P<half>[AB])(?:\.default)?\.weight")
_REFUSED = (
    ("use_dora", "DoRA"),
    ("fan_in_fan_out", "transposed weights"),
    ("trainable_token_indices", "trained tokens"),
)
_OUTTYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "auto": "F16"}


@dataclass(frozen=True)
class Adapter:
    """What was written: the file, the base's family, alpha, and the matrices by name: A, B."""

    output: Path
    architecture: str
    alpha: float
    tensors: Mapping[str, tuple[np.ndarray, np.ndarray]]

    def summary(self) -> dict[str, Any]:
        ranks = sorted({len(a) for a, _ in self.tensors.values()})
        return {
            "output": str(self.output),
            "architecture": self.architecture,
            "alpha": self.alpha,
            "rank": ranks[0] if len(ranks) == 1 else ranks,
            "matrices": len(self.tensors),
        }


def convert_lora(
    folder: str | os.PathLike,
    output: str | os.PathLike | None = None,
    base: str | os.PathLike | None = None,
    outtype: str = "auto",
    dry_run: bool = False,
) -> Adapter:
    """Convert an adapter's folder to GGUF.

    output: a file or folder, None for the adapter's own; base: folder with the base model's config.json, None takes
    the path that the adapter names, if it is a folder; outtype: f32, f16 (auto) or bf16.

    >>> import gguftools, json, tempfile
    >>> from pathlib import Path
    >>> name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    >>> halves = {name.format("A"): ([2, 256], [0, 2048]), name.format("B"): ([256, 2], [2048, 4096])}
    >>> header = {k: {"dtype": "F32", "shape": s, "data_offsets": at} for k, (s, at) in halves.items()}
    >>> text = json.dumps(header).encode()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     size = Path(folder, "adapter_config.json").write_text('{"r": 2, "lora_alpha": 4}')
    ...     data = len(text).to_bytes(8, "little") + text + bytes(4096)
    ...     size = Path(folder, "adapter_model.safetensors").write_bytes(data)
    ...     done = gguftools.convert_lora(folder, base=gguftools.demo_folder())
    >>> list(done.tensors), done.alpha
    (['blk.0.attn_q.weight'], 4.0)

    Raises GGUFError for adapters of other kinds (DoRA, trained biases or whole layers), tensors without a place in the
    base, and shapes that do not fit.
    """
    folder = Path(folder)
    if outtype.lower() not in _OUTTYPES:
        raise GGUFError(f"unknown outtype '{outtype}' for an adapter; there are {', '.join(_OUTTYPES)}")
    settings = load_json(folder / "adapter_config.json")
    _check(settings)
    config = load_json(_base(folder, settings, base) / "config.json")
    arch = arch_of_config(text_class(config))
    h, _, _ = read_hparams(normalize(config), arch)
    pairs = _pairs(folder, settings)
    tensors = _mapped(folder, pairs, arch, h)
    fmt = FORMATS[_OUTTYPES[outtype.lower()]]
    name = parse_name(folder.resolve().name)
    path = folder if output is None else Path(output)
    path = path / f"{folder.resolve().name}-{fmt.name}-LoRA.gguf" if path.is_dir() else path
    done = Adapter(path, arch.name, _alpha(settings), tensors)
    if dry_run:
        return done
    with Writer(path, [*folder.glob("*.safetensors"), *folder.glob("*.json")]) as w:
        w.add("general.architecture", arch.name)
        w.add("general.type", "adapter")
        w.add("general.name", title(name.name or "adapter"))
        w.add("adapter.type", "lora")
        w.add("adapter.lora.alpha", done.alpha, "float32")
        w.add("general.quantization_version", 2)
        halves = {stem + ending: half for stem, pair in sorted(tensors.items()) for ending, half in zip((A, B), pair)}
        for tensor, values in halves.items():
            w.declare(tensor, values.shape, fmt)
        for tensor, values in halves.items():
            blocks = np.empty(values.shape, fmt.block)
            quantize_into(np.ascontiguousarray(values), fmt, blocks, name=tensor)
            w.write(tensor, blocks)
    return done


def _check(settings: Mapping[str, Any]) -> None:
    where = "adapter_config.json:"
    if settings.get("peft_type", "LORA") != "LORA":
        raise GGUFError(f"{where} 'peft_type' is {settings['peft_type']!r}; LORA is converted")
    for key, what in _REFUSED:
        if settings.get(key):
            raise GGUFError(
                f"{where} '{key}' is {settings[key]!r}: {what or 'trained tokens'} cannot be in a LoRA file"
            )
    if settings.get("bias", "none") != "none":
        raise GGUFError(f"{where} 'bias' is {settings['bias']!r}: trained biases cannot be in a LoRA file; merge them")
    for key in ("r", "lora_alpha"):
        if not is_number(settings.get(key)) or settings[key] <= 0:
            raise GGUFError(f"{where} '{key}' is {settings.get(key)!r}, expected a number above 0")


def _base(folder: Path, settings: Mapping[str, Any], base: str | os.PathLike | None) -> Path:
    if base is not None:
        return Path(base)
    named = settings.get("base_model_name_or_path")
    for path in (folder, *([Path(named)] if isinstance(named, str) and named else [])):
        if (path / "config.json").is_file():
            return path
    raise GGUFError(
        f"{folder}: the base model {named!r} is not here; name its folder with --base (config.json is enough)"
    )


def _alpha(settings: Mapping[str, Any]) -> float:
    """The alpha that divided by the rank gives the adapter's scale."""
    alpha, rank = float(settings["lora_alpha"]), float(settings["r"])
    return alpha * math.sqrt(rank) if settings.get("use_rslora") else alpha


def _pairs(folder: Path, settings: Mapping[str, Any]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Name of the base's weight -> A, B, float32; what differs in scale from the rest is in B."""
    from gguftools.conversion.transforms import rows_of

    halves: dict[str, dict[str, SafetensorView]] = {}
    for name, view in open_checkpoint(folder / ADAPTER).items():
        found = _NAME.fullmatch(name)
        if found is None:
            raise GGUFError(f"{folder}: '{name}' is no half of a LoRA matrix; merge it into the base instead")
        halves.setdefault(found["weight"], {})[found["half"]] = view
    pairs = {}
    for weight, both in halves.items():
        if set(both) != {"A", "B"}:
            raise GGUFError(f"{folder}: '{weight}' has only one half of its LoRA matrix; save the adapter again")
        a, b = (rows_of(both[half]).read(0, rows_of(both[half]).n_rows) for half in "AB")
        if a.ndim != 2 or b.shape[1] != len(a):
            raise GGUFError(f"{folder}: '{weight}' has A {list(a.shape)} and B {list(b.shape)}: they do not fit")
        pairs[weight] = a, b * np.float32(_own_scale(weight, len(a), settings))
    return pairs


def _own_scale(weight: str, rank: int, settings: Mapping[str, Any]) -> float:
    """Scale of one matrix over what alpha and rank of the file give: PEFT has patterns for some."""
    alpha = float(settings["lora_alpha"])
    for pattern, value in (settings.get("alpha_pattern") or {}).items():
        if weight == pattern or weight.endswith("." + pattern):
            alpha = float(value)
    root = settings.get("use_rslora")
    wanted = alpha / (math.sqrt(rank) if root else rank)
    return wanted / (_alpha(settings) / rank)


def _mapped(
    folder: Path, pairs: dict[str, tuple[np.ndarray, np.ndarray]], arch: Arch, h: Hparams
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """GGUF name -> A, B."""
    left = dict.fromkeys(pairs)
    found = {}
    for row in arch.tensors:
        for i in row.places(h):
            for spelling in row.sources:
                weight = spelling.format(i=i, e="{e}").removesuffix(".weight")
                if weight not in pairs:
                    continue
                a, b = pairs[weight]
                name, shape = row.name.format(i=i), row.shape_of(h, i)
                for step in row.steps:
                    if not isinstance(step, Take):
                        raise GGUFError(
                            f"{folder}: '{weight}' is changed by conversion in a way that LoRA cannot follow"
                        )
                    order = step.rows(h, i)
                    if order.size and order.max() >= len(b):
                        raise GGUFError(f"{folder}: '{weight}' has {len(b)} rows, the base has {int(order.max()) + 1}")
                    b = b[order]
                if (len(b), a.shape[1]) != shape:
                    raise GGUFError(f"{folder}: '{weight}' is {[len(b), a.shape[1]]}, the base has {list(shape)}")
                found[name] = a, b
                left.pop(weight, None)
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise GGUFError(
            f"{folder}: no place for '{next(iter(left))}'{more} in a '{arch.name}' model; is --base the base?"
        )
    return found
