"""Q4_K: x = d * scale * q - dmin * min, super-blocks of 8 groups of 32. 4.5 bits per weight.

| field | bytes | content |
|---|---|---|
| d, dmin | 2 + 2 | scales of the scales and of the mins, IEEE half |
| scales | 12 | eight 6-bit scales and eight 6-bit mins (`pack.pack_scales_mins`) |
| qs | 128 | for each 64 weights 32 bytes: codes 0..15 of the first 32 in the low nibbles, of the others in the high |

ggml's `block_q4_K`. Scale and min of each group are searched (`search.affine`), then codes are computed again for the
scales as stored.
"""

import numpy as np

from quant.format import block_dtype
from quant.groups import affine_super_blocks, affine_super_blocks_weighted
from quant.half import half_to_float
from quant.jit import kernel
from quant.lanes import load_codes, store
from quant.pack import pack_nibbles, scale_min

BLOCK = block_dtype("Q4_K", d="<u2", dmin="<u2", scales=("u1", 12), qs=("u1", 128))


@kernel
def dequantize(b, y):
    d = half_to_float(b["d"])
    dmin = half_to_float(b["dmin"])
    for group in range(8):
        scale, offset = scale_min(b["scales"], group)
        dl = d * np.float32(scale)
        ml = dmin * np.float32(offset)
        for j in range(0, 32, 16):
            q = load_codes(b["qs"], 32 * (group // 2) + j, 4 * (group % 2), 15)
            store(y, 32 * group + j, dl * q - ml)


@kernel
def _pack(codes, blocks):
    for i in range(blocks.size):
        pack_nibbles(codes, 256 * i, 32, blocks[i]["qs"])


@kernel
def quantize(x, blocks):
    codes = np.empty(x.size, np.uint8)
    affine_super_blocks(x, blocks, 15, np.float32(-1), np.float32(0.1), 20, codes)
    _pack(codes, blocks)


@kernel
def quantize_weighted(x, w, blocks):
    codes = np.empty(x.size, np.uint8)
    affine_super_blocks_weighted(x, w, blocks, 15, 255, codes)
    _pack(codes, blocks)
