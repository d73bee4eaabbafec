"""NVIDIA ModelOpt: FP8 with a scale for the tensor or each row, NVFP4 with scales of groups and of the tensor."""

from __future__ import annotations

from gguftools.conversion.sources.fp8 import float8_scaled, is_float8
from gguftools.conversion.sources.nvfp4 import nvfp4_rows
from gguftools.conversion.sources.parts import ACTIVATIONS, Kind, Method, Parts, single
from gguftools.conversion.transforms import Rows


def _nvfp4(parts: Parts) -> Rows:
    return nvfp4_rows(parts, ".weight", ".weight_scale", single(parts, ".weight_scale_2"))


def _float8(parts: Parts) -> Rows:
    return float8_scaled(parts, ".weight", ".weight_scale", None)


METHOD = Method(
    names=("modelopt",),
    kinds=lambda settings: (
        Kind(".weight", (".weight_scale", ".weight_scale_2"), _nvfp4, fits=lambda view: view.dtype == "U8"),
        Kind(".weight", (".weight_scale",), _float8, fits=is_float8),
    ),
    row="ModelOpt: FP8, NVFP4",
    apart=ACTIVATIONS,
)
