"""NVFP4: FP4 codes in groups of 16 with an E4M3 scale each, and one float32 scale for the tensor.

x = value[q] * scale[group] * factor. The first product is exact in float32, so the weight is rounded once.
"""

from __future__ import annotations

import numpy as np

from gguftools.conversion.sources.numbers import FLOAT4, nibbles
from gguftools.conversion.sources.parts import Parts, codes, scaled
from gguftools.conversion.transforms import Rows

GROUP = 16


def nvfp4_rows(parts: Parts, main: str, scale: str, factor: float) -> Rows:
    """Byte i of a row in `main` holds codes 2 i (low half) and 2 i + 1; `scale` is [rows, n / 16]."""
    packed, shape = codes(parts, main, 2)
    parts.array(scale, "F8_E4M3")
    parts.expect(scale, (*shape[:-1], shape[-1] // GROUP))
    if not np.isfinite(factor):
        raise parts.fail(f"the scale of the tensor is {factor}")

    def values(lo: int, hi: int) -> np.ndarray:
        return FLOAT4[nibbles(packed[lo:hi])]

    return scaled(parts, shape, values, scale, (GROUP,), factor)
