"""Q5_0: x = d * (q - 16), blocks of 32. 5.5 bits per weight.

| field | bytes | content |
|---|---|---|
| d | 2 | scale, IEEE half |
| qh | 4 | fifth bits: bit j of the little-endian word belongs to weight j |
| qs | 16 | byte j: low four bits of code j (low nibble) and of j + 16 (high) |

ggml's `block_q5_0`. Without importance the scale is m / -16, m the weight of largest magnitude with its sign; with
importance it is searched (`search.symmetric`).
"""

import numpy as np

from quant.format import block_dtype
from quant.groups import symmetric_blocks, symmetric_blocks_weighted
from quant.half import half_to_float
from quant.jit import kernel
from quant.lanes import load_bits, load_codes, store
from quant.pack import pack_fifth_bits, pack_nibbles

BLOCK = block_dtype("Q5_0", d="<u2", qh=("u1", 4), qs=("u1", 16))


@kernel
def dequantize(b, y):
    d = half_to_float(b["d"])
    for k in range(2):
        q = load_codes(b["qs"], 0, 4 * k, 15) + np.float32(16) * load_bits(b["qh"], 2 * k)
        store(y, 16 * k, d * (q - np.float32(16)))


@kernel
def _pack(codes, blocks):
    for i in range(blocks.size):
        pack_nibbles(codes, 32 * i, 16, blocks[i]["qs"])
        pack_fifth_bits(codes, 32 * i, blocks[i]["qh"])


@kernel
def quantize(x, blocks):
    codes = np.empty(x.size, np.uint8)
    symmetric_blocks(x, blocks, 16, codes)
    _pack(codes, blocks)


@kernel
def quantize_weighted(x, w, blocks):
    codes = np.empty(x.size, np.uint8)
    symmetric_blocks_weighted(x, w, blocks, 16, codes)
    _pack(codes, blocks)
