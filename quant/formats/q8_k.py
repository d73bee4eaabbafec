"""Q8_K: x = d * q, super-blocks of 256. 9.125 bits per weight. For activations that meet K types.

| field | bytes | content |
|---|---|---|
| d | 4 | scale, float32 |
| qs | 256 | signed codes |
| bsums | 32 | sums of 16 codes each, int16 |

ggml's `block_q8_K`. The weight of largest magnitude gets the code -127.
"""

import numpy as np

from quant.format import block_dtype
from quant.groups import largest
from quant.jit import kernel
from quant.lanes import absolute, load, nearest_code, select, store, store_codes

BLOCK = block_dtype("Q8_K", d="<f4", qs=("i1", 256), bsums=("<i2", 16))


@kernel
def dequantize(b, y):
    d = b["d"]
    for j in range(256):
        y[j] = d * np.float32(b["qs"][j])


@kernel
def _largest(x, scratch):
    """`groups.largest` of 256 values."""
    top = absolute(load(x, 0))
    for j in range(16, 256, 16):
        v = absolute(load(x, j))
        top = select(v > top, v, top)
    store(scratch, 0, top)
    amax = largest(scratch)
    j = 0
    while abs(x[j]) != amax:
        j += 1
    return x[j]


@kernel
def quantize(x, blocks):
    scratch = np.empty(16, np.float32)
    for i in range(blocks.size):
        b = blocks[i]
        m = _largest(x[256 * i : 256 * i + 256], scratch)
        inverse = np.float32(-127) / m if m != np.float32(0) else np.float32(0)
        for k in range(16):
            store_codes(b["qs"], 16 * k, nearest_code(inverse * load(x, 256 * i + 16 * k), -(1 << 22), 127))
            total = np.int32(0)
            for j in range(16 * k, 16 * k + 16):
                total += b["qs"][j]
            b["bsums"][k] = total
        b["d"] = np.float32(1) / inverse if m != np.float32(0) else np.float32(0)


quantize_weighted = None
