"""A Hugging Face config.json as the parameters and metadata keys of a model family's rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from engine.errors import EngineError
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
    """The config in one spelling: the text part's settings at the top, everything about rotary embedding in
    `rope_parameters`, as newer configs have it."""
    text = config.get("text_config")
    config = {**config, **text} if isinstance(text, dict) else dict(config)
    found = config.get("rope_parameters") or config.get("rope_scaling")
    rope = dict(found) if isinstance(found, dict) else {}
    theta = next((config[key] for key in _ROPE_BASES if config.get(key) is not None), None)
    for ours, theirs in (("rope_theta", theta), ("rope_type", rope.get("type"))):
        if theirs is not None:
            rope.setdefault(ours, theirs)
    return {**config, "rope_parameters": rope}


#: old spellings of `rope_parameters.rope_theta`
_ROPE_BASES = ("rope_theta", "global_rope_theta", "rotary_emb_base")


def look_up(config: Mapping[str, Any], key: str) -> Any:
    """The value of a key with dots into nested objects, None if it is not there."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def check_handled(written: Mapping[str, Any], config: Mapping[str, Any], arch: Arch) -> None:
    """Raises GGUFError, naming the key, for settings that change the mathematics in a way the family does not have.

    written: the config as it is; config: normalized.
    """
    for key, accepted, what in arch.refused:
        value = look_up(config, key)
        if value is not None and value not in accepted:
            spellings = (key, key.replace("rope_parameters.", "rope_scaling."), "rope_scaling.type")
            name = next((k for k in spellings if look_up(written, k) == value), key)
            names = "none such" if accepted == (None,) else "only " + ", ".join(map(repr, accepted))
            raise GGUFError(f"config.json: '{name}' is {value!r}: {what}; '{arch.name}' here has {names}")


def read_hparams(config: Mapping[str, Any], arch: Arch) -> tuple[Hparams, list[Pair], list[Pair]]:
    """Parameters of a normalized config; keys of the rows that all families have, and of the family's own.

    Raises GGUFError for values of a wrong kind, EngineError for missing ones.
    """
    h = Hparams()
    pairs = (_fill(h, config, arch, arch.hparams), _fill(h, config, arch, arch.extra_hparams))
    arch.check_hparams(h, lambda row: f"config.json: '{_name(row)}'")
    return h, *pairs


def _fill(h: Hparams, config: Mapping[str, Any], arch: Arch, rows: Iterable[Hparam]) -> list[Pair]:
    pairs = []
    for row in rows:
        where, found = _look_up_row(config, row, h)
        found = None if found is None else _checked(found, row, where)
        if row.per_layer and not row.is_list and isinstance(found, tuple) and len(found) < h.n_layer:
            raise GGUFError(f"config.json: '{where}' has {len(found)} values for {h.n_layer} layers")
        value = row.fill(found, h, f"config.json: {where}")
        setattr(h, row.field, value)
        if value is not None and row.written and (found is not None or row.always):
            pairs.append((arch.key(row), list(value) if isinstance(value, tuple) else value))
    return pairs


def _look_up_row(config: Mapping[str, Any], row: Hparam, h: Hparams) -> tuple[str, Any]:
    """What to call a row's place in the config, and its value, None if there is none."""
    if callable(row.config):
        try:
            return row.field, row.config(config, h)
        except EngineError as error:
            raise GGUFError(f"config.json: {error}") from None
        except (TypeError, AttributeError, ValueError, KeyError, IndexError, ZeroDivisionError):
            raise GGUFError(f"config.json: '{row.field}' cannot be derived: settings are missing or damaged") from None
    key = next((k for k in row.config if look_up(config, k) is not None), None)
    return (_name(row), None) if key is None else (key, look_up(config, key))


def _name(row: Hparam) -> str:
    return row.field if callable(row.config) else " or ".join(row.config) or row.field


_EXPECTED = {"uint32": "a whole number", "float32": "a number", "bool": "true or false", "string": "a text"}


def _checked(value: Any, row: Hparam, key: str) -> Any:
    """The value in the row's kind; lists become tuples."""
    if isinstance(value, (list, tuple)) and (row.per_layer or row.is_list):
        return tuple(_checked_one(v, row, key) for v in value)
    return _checked_one(value, row, key)


def _checked_one(value: Any, row: Hparam, key: str) -> Any:
    number = is_number(value)
    if row.kind == "float32" and number:
        return float(value)
    least = 1 if row.default is REQUIRED and not row.per_layer else 0  # sizes that a model must have cannot be 0
    if row.kind == "uint32" and number and value == int(value) and least <= value < 2**32:
        return int(value)
    if (row.kind == "bool" and isinstance(value, bool)) or (row.kind == "string" and isinstance(value, str)):
        return value
    raise GGUFError(f"config.json: '{key}' is {value!r}, expected {_EXPECTED[row.kind]}")
