"""The tensors of a checkpoint as weights, whatever number format they are stored in.

A model's tensors are not always what lies in its files: quantized checkpoints keep a weight as several tensors (packed
numbers, scales, zero points). `logical` gives each weight once, under the name that a plain checkpoint would use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gguftools.conversion.hf import look_up
from gguftools.conversion.transforms import Rows, rows_of
from gguftools.errors import GGUFError
from gguftools.safetensors import SafetensorView


def logical(views: Iterable[SafetensorView], config: Mapping[str, Any]) -> dict[str, Rows]:
    """Weight's name -> its rows, in the order of `views`. config: of config.json, normalized.

    Raises GGUFError for number formats that are not known here.
    """
    quantized = config.get("quantization_config")
    if quantized:
        method = look_up(quantized, "quant_method") if isinstance(quantized, Mapping) else quantized
        raise GGUFError(f"config.json: the weights are quantized ({method}); convert the original model")
    return {view.name: rows_of(view) for view in views}
