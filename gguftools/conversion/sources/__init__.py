"""The tensors of a checkpoint as weights, whatever number format they are stored in.

A model's tensors are not always what lies in its files: quantized checkpoints keep a weight as several tensors (packed
numbers, scales, zero points). `logical` gives each weight once, under the name that a plain checkpoint would use; its
rows are dequantized when they are read. A method of quantization is one file here, and one entry in METHODS.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gguftools.conversion.hf import load_json
from gguftools.conversion.sources import awq, bitsandbytes, compressed, fp8, gptq, modelopt, mxfp4
from gguftools.conversion.sources.parts import Kind, Method, Parts
from gguftools.conversion.transforms import Rows, rows_of
from gguftools.errors import GGUFError
from gguftools.safetensors import SafetensorView

log = logging.getLogger(__name__)

#: all methods of quantization that are read
METHODS: tuple[Method, ...] = tuple(
    module.METHOD for module in (fp8, mxfp4, gptq, awq, bitsandbytes, compressed, modelopt)
)

#: files beside config.json in which older or other programs keep the settings, and the method that they mean
_SETTINGS_FILES = (("quantize_config.json", "gptq"), ("quant_config.json", "awq"), ("hf_quant_config.json", "modelopt"))


def logical(views: Iterable[SafetensorView], config: Mapping[str, Any], folder: Path) -> dict[str, Rows]:
    """Weight's name -> its rows, in the order of `views`; weights that only come about here are last.

    config: of config.json, normalized. Raises GGUFError for number formats that are not known here, and for tensors
    that do not go together.
    """
    views = list(views)
    settings = _settings(config, folder)
    if settings is None:
        return {view.name: _plain(view) for view in views}
    method = _method(settings)
    kinds = method.kinds(settings)
    by_name = {view.name: view for view in views}
    found: dict[str, Rows] = {}
    late: dict[str, Rows] = {}
    used: set[str] = set()
    for view in views:
        match = _match(view, kinds, by_name)
        if match is None:
            continue
        kind, parts = match
        stem = view.name.removesuffix(kind.main)
        weight = stem + kind.result
        used.update(part.name for part in parts.values())
        rows = kind.make(Parts(weight, parts, settings))
        if weight in late or (weight in by_name and weight != view.name):
            raise GGUFError(f"{view.path}: the weight '{weight}' is there twice, also as '{view.name}'; remove one")
        (found if weight == view.name else late)[weight] = rows
    if not used:
        log.warning("%s: config.json speaks of weights quantized by %s, but there are none", folder, method.names[0])
    plain = {
        view.name: found[view.name] if view.name in found else _plain(view, method)
        for view in views
        if view.name in found or not (view.name in used or view.name.endswith(method.apart))
    }
    return plain | late


def _plain(view: SafetensorView, method: Method | None = None) -> Rows:
    if fp8.is_float8(view) and view.dtype != "F8_E8M0":
        if method is not None:
            raise GGUFError(f"{view.path}: tensor '{view.name}' has no scales; download the model again")
        return fp8.float8_rows(view)
    return rows_of(view)


def _match(
    view: SafetensorView, kinds: tuple[Kind, ...], by_name: Mapping[str, SafetensorView]
) -> tuple[Kind, dict[str, SafetensorView]] | None:
    """The kind of weight that begins with this tensor, and its parts by their endings."""
    missing = None
    for kind in kinds:
        if not view.name.endswith(kind.main) or not kind.fits(view):
            continue
        stem = view.name.removesuffix(kind.main)
        parts = {kind.main: view} | {
            ending: by_name[stem + ending] for ending in (*kind.needed, *kind.optional) if stem + ending in by_name
        }
        lost = [stem + ending for ending in kind.needed if ending not in parts]
        if not lost:
            return kind, parts
        if kind.main not in ("", ".weight"):
            missing = missing or lost[0]
    if missing is not None:
        raise GGUFError(f"{view.path}: tensor '{missing}' is missing, '{view.name}' needs it; download the model again")
    return None


def _settings(config: Mapping[str, Any], folder: Path) -> Mapping[str, Any] | None:
    """How the weights are quantized, with `quant_method`; None if they are not.

    Raises GGUFError for settings that are no object.
    """
    found = config.get("quantization_config") or config.get("compression_config")
    if not found:
        for name, method in _SETTINGS_FILES:
            written = load_json(folder / name, required=False)
            if written:
                inner = written.get("quantization")
                return {**(inner if isinstance(inner, Mapping) else written), "quant_method": method}
        return None
    if not isinstance(found, Mapping):
        raise GGUFError(f"config.json: 'quantization_config' is {str(found)[:60]!r}, expected an object")
    if found.get("quant_method") is None:
        guess = "compressed-tensors" if "config_groups" in found else "modelopt" if "quant_algo" in found else None
        found = {**found, "quant_method": guess}
    return found


def _method(settings: Mapping[str, Any]) -> Method:
    name = settings["quant_method"]
    for method in METHODS:
        if name in method.names:
            return method
    known = ", ".join(name for method in METHODS for name in method.names)
    raise GGUFError(f"config.json: the weights are quantized by {name!r}; {known} are read: convert the original model")
