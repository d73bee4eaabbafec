"""Q5_K: x = d * scale * q - dmin * min, super-blocks of 8 groups of 32. 5.5 bits per weight.

| field | bytes | content |
|---|---|---|
| d, dmin | 2 + 2 | scales of the scales and of the mins, IEEE half |
| scales | 12 | eight 6-bit scales and eight 6-bit mins (`pack.pack_scales_mins`) |
| qh | 32 | fifth bits: bit k of byte j belongs to weight 32 * k + j |
| qs | 128 | for each 64 weights 32 bytes: low four bits of the first 32 in the low nibbles, of the others in the high |

ggml's `block_q5_K`. Scale and min of each group are searched (`search.affine`), then codes are computed again for the
scales as stored.
"""

import numpy as np

from quant.format import block_dtype
from quant.groups import affine_super_blocks, affine_super_blocks_weighted
from quant.half import half_to_float
from quant.jit import kernel
from quant.lanes import load_codes, store
from quant.pack import pack_nibbles, pack_plane, scale_min

BLOCK = block_dtype("Q5_K", d="<u2", dmin="<u2", scales=("u1", 12), qh=("u1", 32), qs=("u1", 128))


@kernel
def dequantize(b, y):
    d = half_to_float(b["d"])
    dmin = half_to_float(b["dmin"])
    for group in range(8):
        scale, offset = scale_min(b["scales"], group)
        dl = d * np.float32(scale)
        ml = dmin * np.float32(offset)
        for j in range(0, 32, 16):
            low = load_codes(b["qs"], 32 * (group // 2) + j, 4 * (group % 2), 15)
            high = load_codes(b["qh"], j, group, 1)
            store(y, 32 * group + j, dl * (low + np.float32(16) * high) - ml)


@kernel
def _pack(codes, blocks):
    for i in range(blocks.size):
        pack_nibbles(codes, 256 * i, 32, blocks[i]["qs"])
        pack_plane(codes, 256 * i, 4, blocks[i]["qh"])


@kernel
def quantize(x, blocks):
    codes = np.empty(x.size, np.uint8)
    affine_super_blocks(x, blocks, 31, np.float32(-0.5), np.float32(0.1), 15, codes)
    _pack(codes, blocks)


@kernel
def quantize_weighted(x, w, blocks):
    codes = np.empty(x.size, np.uint8)
    affine_super_blocks_weighted(x, w, blocks, 31, 63, codes)
    _pack(codes, blocks)
