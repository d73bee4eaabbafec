"""Q2_0: x = d * (q - 1), q in 0..3, blocks of 64. 2.25 bits per weight.

| field | bytes | content |
|---|---|---|
| d | 2 | scale, IEEE half |
| qs | 16 | byte j: codes of weights 4 * j to 4 * j + 3, from the low bits up |

ggml's `block_q2_0`. The scale is the largest magnitude, so code 3 is read but never written; importance is ignored.
"""

import numpy as np

from quant.format import block_dtype
from quant.half import float_to_half, half_to_float
from quant.jit import kernel
from quant.ternary import ternary

BLOCK = block_dtype("Q2_0", d="<u2", qs=("u1", 16))


@kernel
def dequantize(b, y):
    d = half_to_float(b["d"])
    for j in range(16):
        q = b["qs"][j]
        for k in range(4):
            y[4 * j + k] = np.float32(np.int32((q >> (2 * k)) & 3) - 1) * d


@kernel
def quantize(x, blocks):
    codes = np.empty(64, np.uint8)
    for i in range(blocks.size):
        b = blocks[i]
        b["d"] = float_to_half(ternary(x[64 * i : 64 * i + 64], np.uint8(0), codes))
        for j in range(16):
            c = codes[4 * j : 4 * j + 4]
            b["qs"][j] = np.uint8(c[0] | (c[1] << 2) | (c[2] << 4) | (c[3] << 6))


quantize_weighted = None
