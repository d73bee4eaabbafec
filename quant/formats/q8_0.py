"""Q8_0: x = d * q, q in -127..127, blocks of 32. 8.5 bits per weight.

| field | bytes | content |
|---|---|---|
| d | 2 | scale, IEEE half |
| qs | 32 | codes, int8 |

ggml's `block_q8_0`. The scale is the largest magnitude / 127; codes round half away from zero. Importance is ignored.
"""

import numpy as np

from quant.format import block_dtype
from quant.half import float_to_half, half_to_float
from quant.jit import kernel
from quant.lanes import load_signed, store
from quant.search import round_away

BLOCK = block_dtype("Q8_0", d="<u2", qs=("i1", 32))


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
        b["d"] = float_to_half(d)
        for j in range(32):
            b["qs"][j] = np.int8(round_away(x[32 * i + j] * inverse))


quantize_weighted = None
