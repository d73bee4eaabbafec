"""Q8_1: x = d * q, blocks of 32. 9 bits per weight. For activations: s saves products with an offset a sum of codes.

| field | bytes | content |
|---|---|---|
| d | 2 | scale, IEEE half |
| s | 2 | d * (sum of the codes), IEEE half |
| qs | 32 | signed codes |

ggml's `block_q8_1`.
"""

import numpy as np

from quant.format import block_dtype
from quant.half import float_to_half, half_to_float
from quant.jit import kernel
from quant.lanes import load_signed, store
from quant.search import round_away

BLOCK = block_dtype("Q8_1", d="<u2", s="<u2", qs=("i1", 32))


@kernel
def dequantize(b, y):
    d = half_to_float(b["d"])
    for j in range(0, 32, 16):
        store(y, j, d * load_signed(b["qs"], j))


@kernel
def quantize(x, blocks):
    for i in range(blocks.size):
        b = blocks[i]
        amax = np.float32(0)
        for j in range(32):
            amax = max(amax, abs(x[32 * i + j]))
        d = amax / np.float32(127)
        inverse = np.float32(1) / d if d != np.float32(0) else np.float32(0)
        total = np.int32(0)
        for j in range(32):
            q = np.int8(round_away(x[32 * i + j] * inverse))
            b["qs"][j] = q
            total += q
        b["d"] = float_to_half(d)
        b["s"] = float_to_half(np.float32(total) * d)


quantize_weighted = None
