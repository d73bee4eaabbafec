"""MXFP4: x = 2^(e - 127) * v[q], v the E2M1 values 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, blocks of 32. 4.25
bits per weight.

| field | bytes | content |
|---|---|---|
| e | 1 | scale as a power of two (E8M0); 255 is invalid |
| qs | 16 | byte j: code of weight j (low nibble) and of j + 16 (high) |

ggml's `block_mxfp4`; OCP Microscaling Formats 1.0. The exponent is that of the largest magnitude, less 2, the exponent
of the largest value. It is kept at 0 or above: below 2^-125 the reference's wraps around to huge scales, of zeros or
invalid ones. Importance is ignored.
"""

import numpy as np

from quant.format import block_dtype
from quant.fp4 import nearest_fp4, pack_fp4, unpack_fp4
from quant.half import float_of
from quant.jit import kernel

BLOCK = block_dtype("MXFP4", e="u1", qs=("u1", 16))


@kernel
def half_scale(e):
    """2^(e - 128): half the scale, to go with doubled values. Below e = 2 it is subnormal."""
    if e < 2:
        return float_of(np.uint32(0x00200000) << np.uint32(e))
    return float_of(np.uint32(e - 1) << np.uint32(23))


@kernel
def dequantize(b, y):
    unpack_fp4(b["qs"], half_scale(b["e"]), y)


@kernel
def quantize(x, blocks):
    best = np.empty(32, np.float32)
    codes = np.empty(32, np.uint8)
    for i in range(blocks.size):
        b = blocks[i]
        group = x[32 * i : 32 * i + 32]
        amax = np.float32(0)
        for j in range(32):
            amax = max(amax, abs(group[j]))
        e = np.int32(0)
        if amax > np.float32(0):
            # the logarithm is rounded to float32 first: just below a power of two it reaches the next whole number
            log = np.float32(np.log2(np.float64(amax)))
            e = max(np.int32(0), np.int32(np.floor(log)) - np.int32(2) + np.int32(127))
        b["e"] = np.uint8(e)
        nearest_fp4(group, half_scale(e), best, codes)
        pack_fp4(codes, b["qs"])


quantize_weighted = None
