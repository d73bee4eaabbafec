"""Q4_0: x = d * (q - 8), blocks of 32. 4.5 bits per weight.

| field | bytes | content |
|---|---|---|
| d | 2 | scale, IEEE half |
| qs | 16 | byte j: code of weight j (low nibble) and of j + 16 (high) |

ggml's `block_q4_0`. Without importance the scale is m / -8, m the weight of largest magnitude with its sign, and codes
are truncated after adding 8.5. With importance the scale is searched (`search.symmetric`).
"""

import numpy as np

from quant.format import block_dtype
from quant.half import float_to_half, half_to_float
from quant.jit import kernel
from quant.search import row_mean_square, symmetric

BLOCK = block_dtype("Q4_0", d="<u2", qs=("u1", 16))


@kernel
def dequantize(b, y):
    d = half_to_float(b["d"])
    for j in range(16):
        q = np.int32(b["qs"][j])
        y[j] = d * np.float32((q & 15) - 8)
        y[j + 16] = d * np.float32((q >> 4) - 8)


@kernel
def _code(x, inverse):
    return min(np.int32(15), np.int32(np.int8(x * inverse + np.float32(8.5))))


@kernel
def quantize(x, blocks):
    for i in range(blocks.size):
        b = blocks[i]
        amax = np.float32(0)
        m = np.float32(0)
        for j in range(32):
            v = x[32 * i + j]
            if amax < abs(v):
                amax = abs(v)
                m = v
        d = m / np.float32(-8)
        inverse = np.float32(1) / d if d != np.float32(0) else np.float32(0)
        b["d"] = float_to_half(d)
        for j in range(16):
            low = _code(x[32 * i + j], inverse)
            high = _code(x[32 * i + j + 16], inverse)
            b["qs"][j] = np.uint8(low | (high << 4))


@kernel
def quantize_weighted(x, w, blocks):
    sigma2 = row_mean_square(x)
    weight = np.empty(32, np.float32)
    codes = np.empty(32, np.int8)
    for i in range(blocks.size):
        b = blocks[i]
        group = x[32 * i : 32 * i + 32]
        for j in range(32):
            weight[j] = w[32 * i + j] * np.sqrt(sigma2 + group[j] * group[j])
        b["d"] = float_to_half(symmetric(group, weight, 8, codes))
        for j in range(16):
            b["qs"][j] = np.uint8(codes[j] | (codes[j + 16] << 4))
