"""Q1_0: x = d or -d, blocks of 128. 1.125 bits per weight.

| field | bytes | content |
|---|---|---|
| d | 2 | scale, IEEE half |
| qs | 16 | byte j: signs of weights 8 * j to 8 * j + 7, from the low bit up; 1 is plus |

ggml's `block_q1_0`. The scale is the mean magnitude, which is the least-squares one; importance is ignored.
"""

import numpy as np

from quant.format import block_dtype
from quant.half import float_to_half, half_to_float
from quant.jit import kernel

BLOCK = block_dtype("Q1_0", d="<u2", qs=("u1", 16))


@kernel
def dequantize(b, y):
    d = half_to_float(b["d"])
    for j in range(16):
        q = b["qs"][j]
        for k in range(8):
            y[8 * j + k] = d if (q >> k) & 1 else -d


@kernel
def quantize(x, blocks):
    for i in range(blocks.size):
        b = blocks[i]
        group = x[128 * i : 128 * i + 128]
        total = np.float32(0)
        for j in range(128):
            total += abs(group[j])
        b["d"] = float_to_half(total / np.float32(128))
        for j in range(16):
            byte = np.uint8(0)
            for k in range(8):
                byte |= np.uint8(group[8 * j + k] >= np.float32(0)) << np.uint8(k)
            b["qs"][j] = byte


quantize_weighted = None
