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
from quant.groups import symmetric_blocks, symmetric_blocks_weighted
from quant.half import half_to_float
from quant.jit import kernel
from quant.lanes import load_codes, store
from quant.pack import pack_nibbles

BLOCK = block_dtype("Q4_0", d="<u2", qs=("u1", 16))


@kernel
def dequantize(b, y):
    d = half_to_float(b["d"])
    for k in range(2):
        store(y, 16 * k, d * (load_codes(b["qs"], 0, 4 * k, 15) - np.float32(8)))


@kernel
def _pack(codes, blocks):
    for i in range(blocks.size):
        pack_nibbles(codes, 32 * i, 16, blocks[i]["qs"])


@kernel
def quantize(x, blocks):
    codes = np.empty(x.size, np.uint8)
    symmetric_blocks(x, blocks, 8, codes)
    _pack(codes, blocks)


@kernel
def quantize_weighted(x, w, blocks):
    codes = np.empty(x.size, np.uint8)
    symmetric_blocks_weighted(x, w, blocks, 8, codes)
    _pack(codes, blocks)
