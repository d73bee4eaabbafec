"""Q4_1: x = d * q + m, blocks of 32. 5 bits per weight.

| field | bytes | content |
|---|---|---|
| d, m | 2 + 2 | scale and offset, IEEE half |
| qs | 16 | byte j: code of weight j (low nibble) and of j + 16 (high) |

ggml's `block_q4_1`. Without importance the block's range is cut in 15 equal steps; with importance scale and offset
are searched (`search.affine`).
"""

import numpy as np

from quant.format import block_dtype
from quant.groups import affine_blocks, affine_blocks_weighted
from quant.half import half_to_float
from quant.jit import kernel
from quant.lanes import load_codes, store
from quant.pack import pack_nibbles

BLOCK = block_dtype("Q4_1", d="<u2", m="<u2", qs=("u1", 16))


@kernel
def dequantize(b, y):
    d = half_to_float(b["d"])
    m = half_to_float(b["m"])
    for k in range(2):
        store(y, 16 * k, d * load_codes(b["qs"], 0, 4 * k, 15) + m)


@kernel
def _pack(codes, blocks):
    for i in range(blocks.size):
        pack_nibbles(codes, 32 * i, 16, blocks[i]["qs"])


@kernel
def quantize(x, blocks):
    codes = np.empty(x.size, np.uint8)
    affine_blocks(x, blocks, 15, codes)
    _pack(codes, blocks)


@kernel
def quantize_weighted(x, w, blocks):
    codes = np.empty(x.size, np.uint8)
    affine_blocks_weighted(x, w, blocks, 15, codes)
    _pack(codes, blocks)
