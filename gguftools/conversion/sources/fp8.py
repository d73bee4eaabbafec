"""FP8: weights as 8-bit floats, with one scale for the tensor, for each row, or for each block of rows and columns.

x = scale * q. DeepSeek and Qwen call the scales `_scale_inv` (they multiply all the same), FBGEMM `_scale`, Mistral's
own files `.qscale_weight`. Block sizes are in `weight_block_size`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gguftools.conversion.sources.numbers import FLOAT8
from gguftools.conversion.sources.parts import ACTIVATIONS, Kind, Method, Parts, scaled
from gguftools.conversion.transforms import Rows
from gguftools.errors import GGUFError
from gguftools.safetensors import SafetensorView


def is_float8(view: SafetensorView) -> bool:
    return view.dtype in FLOAT8


def float8_rows(view: SafetensorView) -> Rows:
    """A tensor of 8-bit floats without scales."""
    table, data = FLOAT8[view.dtype], view.array()
    n = view.shape[-1] if len(view.shape) > 1 else 1
    rows = data.reshape(-1, n) if data.size else data.reshape(0, n)
    return Rows(view.name, "F32", view.shape, lambda lo, hi: table[rows[lo:hi]], lambda order: table[rows[order]])


def float8_scaled(parts: Parts, main: str, scale: str, block: tuple[int, ...] | None) -> Rows:
    """A tensor of 8-bit floats, times scales."""
    view = parts.views[main]
    return scaled(parts, view.shape, float8_rows(view).fetch, scale, block)


def block_size(settings: Mapping[str, Any], key: str) -> tuple[int, ...] | None:
    """Sizes of blocks out of settings. Raises GGUFError if they are none."""
    found = settings.get(key)
    if found is None:
        return None
    if not isinstance(found, list) or not found or not all(type(n) is int and n > 0 for n in found):
        raise GGUFError(f"config.json: quantization_config: '{key}' is {found!r}, expected sizes such as [128, 128]")
    return tuple(found)


def _kinds(settings: Mapping[str, Any]) -> tuple[Kind, ...]:
    block = block_size(settings, "weight_block_size")

    def made(main: str, scale: str) -> Kind:
        return Kind(main, (scale,), lambda p: float8_scaled(p, main, scale, block), result=main, fits=is_float8)

    return made("", "_scale_inv"), made("", "_scale"), made(".weight", ".qscale_weight")


METHOD = Method(
    names=("fp8", "fbgemm_fp8"),
    kinds=_kinds,
    row="FP8 E4M3 and E5M2: scales of tensors, rows and blocks",
    apart=ACTIVATIONS,
)
