"""A Hugging Face config.json as the parameters and metadata keys of a model family's rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from engine.models.arch import REQUIRED, Arch, Hparam, Hparams
from gguftools.conversion.card import Pair, is_number
from gguftools.errors import GGUFError
from gguftools.files import read_whole
from gguftools.safetensors import read_json

MAX_JSON = 1 << 28  # bytes


def load_json(path: Path, required: bool = True) -> dict[str, Any]:
    """A JSON object from a file; {} if it is absent and not required.

    Raises GGUFError if it is missing, too large, unreadable or something else.
    """
    if not path.is_file() and not required:
        return {}
    if path.parent.exists() and not path.parent.is_dir():
        raise GGUFError(f"{path.parent}: is a file; name the folder of a Hugging Face model")
    if not path.exists():
        raise GGUFError(f"{path.parent}: has no {path.name}; is it the folder of a Hugging Face model?")
    if path.stat().st_size > MAX_JSON:
        raise GGUFError(f"{path}: has more than {MAX_JSON:,} bytes; this cannot be what it is called")
    return read_json(read_whole(path, "a JSON file"), str(path))


def normalize(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with one spelling of rotary embedding: everything in `rope_parameters`, as newer configs have it.

    `scaling_type` and `scaling_factor` are added there for linear scaling, the one kind that is written as such.
    """
    found = config.get("rope_parameters", config.get("rope_scaling"))
    rope = dict(found) if isinstance(found, dict) else {}
    for ours, theirs in (("rope_theta", config.get("rope_theta")), ("rope_type", rope.get("type"))):
        if theirs is not None:
            rope.setdefault(ours, theirs)
    if rope.get("rope_type") == "linear" and rope.get("factor") is not None:
        rope |= {"scaling_type": "linear", "scaling_factor": rope["factor"]}
    return {**config, "rope_parameters": rope}


def look_up(config: Mapping[str, Any], key: str) -> Any:
    """The value of a key with dots into nested objects, None if it is not there."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def check_handled(config: Mapping[str, Any], arch: Arch) -> None:
    """Raises GGUFError, naming the key, for settings that change the mathematics in a way the family does not have."""
    for key, accepted, what in arch.refused:
        value = look_up(config, key)
        if value is not None and value not in accepted:
            names = ", ".join(map(repr, accepted))
            raise GGUFError(f"config.json: '{key}' is {value!r}: {what}; '{arch.name}' here has only {names}")
    quantized = config.get("quantization_config")
    if quantized:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise GGUFError(f"config.json: the weights are quantized ({method}); convert the original model")


def read_hparams(config: Mapping[str, Any], arch: Arch) -> tuple[Hparams, list[Pair], list[Pair]]:
    """Parameters of a normalized config; keys of the rows that all families have, and of the family's own.

    Raises GGUFError for values of a wrong kind, EngineError for missing ones.
    """
    h = Hparams()
    pairs = (_fill(h, config, arch, arch.hparams), _fill(h, config, arch, arch.extra_hparams))
    return h, *pairs


def _fill(h: Hparams, config: Mapping[str, Any], arch: Arch, rows: Iterable[Hparam]) -> list[Pair]:
    pairs = []
    for row in rows:
        key = next((k for k in row.config if look_up(config, k) is not None), None)
        found = None if key is None else _checked(look_up(config, key), row, key)
        value = row.fill(found, h, f"config.json: {' or '.join(map(repr, row.config))}")
        setattr(h, row.field, value)
        if value is not None and (found is not None or row.always):
            pairs.append((arch.key(row), value))
    return pairs


_EXPECTED = {"uint32": "a whole number", "float32": "a number", "bool": "true or false", "string": "a text"}


def _checked(value: Any, row: Hparam, key: str) -> Any:
    """The value in the row's kind."""
    number = is_number(value)
    if row.kind == "float32" and number:
        return float(value)
    least = 1 if row.default is REQUIRED else 0  # sizes that a model must have cannot be 0
    if row.kind == "uint32" and number and value == int(value) and least <= value < 2**32:
        return int(value)
    if (row.kind == "bool" and isinstance(value, bool)) or (row.kind == "string" and isinstance(value, str)):
        return value
    raise GGUFError(f"config.json: '{key}' is {value!r}, expected {_EXPECTED[row.kind]}")


_LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama3_rope_factors(config: Mapping[str, Any], h: Hparams) -> np.ndarray | None:
    """Divisors of the rotary frequencies for the `llama3` kind of scaling, float32 [n_rot / 2]; None for other kinds.

    Wavelengths below original context / high_freq_factor stay, those above original context / low_freq_factor are
    divided by `factor`, between them the change is smooth (Llama 3.1).
    """
    rope = config["rope_parameters"]
    if str(rope.get("rope_type", "")).lower() != "llama3":
        return None
    settings = {name: rope.get(name, default) for name, default in _LLAMA3_ROPE.items()}
    for name, value in settings.items():
        if not is_number(value) or value <= 0:
            raise GGUFError(f"config.json: 'rope_parameters.{name}' is {value!r}, expected a positive number")
    factor, low, high, n_ctx = map(np.float32, settings.values())
    if low == high:
        raise GGUFError("config.json: 'low_freq_factor' and 'high_freq_factor' of rope_parameters must differ")
    exponents = np.arange(0, h.n_rot, 2, dtype=np.float32) / np.float32(h.n_rot)
    frequencies = np.float32(1) / np.float32(h.rope_base) ** exponents
    wavelengths = np.float32(2 * math.pi) / frequencies
    smooth = (n_ctx / wavelengths - low) / (high - low)
    between = np.float32(1) / ((np.float32(1) - smooth) / factor + smooth)
    long = np.where(wavelengths > n_ctx / low, factor, between)
    return np.where(wavelengths < n_ctx / high, np.float32(1), long).astype(np.float32)


#: tensors that no checkpoint holds: GGUF name -> function of config and parameters
GENERATED = {"rope_freqs.weight": llama3_rope_factors}
