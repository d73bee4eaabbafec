"""TQ2_0: x = d * (q - 1), q in 0..2, blocks of 256. 2.0625 bits per weight.

| field | bytes | content |
|---|---|---|
| qs | 64 | byte 32 * h + m: codes of weights 128 * h + m, + 32, + 64, + 96, from the low bits up |
| d | 2 | scale, IEEE half |

ggml's `block_tq2_0`. The scale is the largest magnitude; importance is ignored.
"""

import numpy as np

from quant.format import block_dtype
from quant.half import float_to_half, half_to_float
from quant.jit import kernel
from quant.ternary import ternary

BLOCK = block_dtype("TQ2_0", qs=("u1", 64), d="<u2")


@kernel
def dequantize(b, y):
    d = half_to_float(b["d"])
    for half in range(2):
        for k in range(4):
            for m in range(32):
                q = (b["qs"][32 * half + m] >> (2 * k)) & 3
                y[128 * half + 32 * k + m] = np.float32(np.int32(q) - 1) * d


@kernel
def quantize(x, blocks):
    codes = np.empty(256, np.uint8)
    for i in range(blocks.size):
        b = blocks[i]
        b["d"] = float_to_half(ternary(x[256 * i : 256 * i + 256], np.uint8(1), codes))
        for half in range(2):
            c = codes[128 * half : 128 * half + 128]
            for m in range(32):
                b["qs"][32 * half + m] = np.uint8(c[m] | (c[m + 32] << 2) | (c[m + 64] << 4) | (c[m + 96] << 6))


quantize_weighted = None
