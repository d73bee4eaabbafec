"""IQ4_XS: x = d * (s - 32) * v[q], v as in IQ4_NL, a 6-bit s per 32 weights, blocks of 256. 4.25 bits per weight.

| field | bytes | content |
|---|---|---|
| d | 2 | scale, IEEE half |
| scales_h | 2 | bits 2g, 2g + 1: high bits of group g's s |
| scales_l | 4 | byte g / 2: low bits of s, the even group's in the low nibble |
| qs | 128 | 16 bytes per group, as in IQ4_NL |

ggml's `block_iq4_xs`. Scales are searched per group as in IQ4_NL, with the mean square of all 256; d is the scale of
largest magnitude / -32, and the codes follow from the rounded scales. Where sums or scales leave their range: as
there.
"""

import numpy as np

from quant.format import block_dtype
from quant.formats.iq4_nl import _VALUES, TRIES, pack, search_scale
from quant.half import half_to_float
from quant.jit import kernel
from quant.lattice import finite_half, importance_weights, mean_square
from quant.search import nearest

BLOCK = block_dtype("IQ4_XS", d="<u2", scales_h="<u2", scales_l=("u1", 4), qs=("u1", 128))


@kernel
def dequantize(b, y):
    d = half_to_float(b["d"])
    for g in range(8):
        low = (b["scales_l"][g // 2] >> (4 * (g % 2))) & 15
        high = (b["scales_h"] >> (2 * g)) & 3
        scale = d * np.float32(np.int32(low | (high << 4)) - 32)
        for j in range(16):
            q = b["qs"][16 * g + j]
            y[32 * g + j] = scale * _VALUES[q & 15]
            y[32 * g + j + 16] = scale * _VALUES[q >> 4]


@kernel
def _quantize(x, w, blocks):
    weight = np.empty(32, np.float32)
    scratch = np.empty((3, TRIES), np.float32)
    scales = np.empty(8, np.float32)
    for i in range(blocks.size):
        b = blocks[i]
        block = x[256 * i : 256 * i + 256]
        sigma2 = mean_square(block, np.float32(2))
        largest = np.float32(0)
        for g in range(8):
            at = 256 * i + 32 * g
            group = x[at : at + 32]
            importance_weights(group, None if w is None else w[at : at + 32], sigma2, weight)
            scales[g] = search_scale(group, weight, scratch[0], scratch[1], scratch[2])
            if abs(scales[g]) > abs(largest):
                largest = scales[g]
        d = -largest / np.float32(32)
        inverse = np.float32(1) / d if d != np.float32(0) else np.float32(0)
        b["d"] = finite_half(d)
        b["scales_h"] = 0
        b["scales_l"][:] = 0
        for g in range(8):
            s = max(np.int32(-32), min(np.int32(31), nearest(inverse * scales[g])))
            scale = d * np.float32(s)
            group = block[32 * g : 32 * g + 32]
            inverse_scale = np.float32(1) / scale if scale != np.float32(0) else np.float32(0)
            pack(group, inverse_scale, b["qs"][16 * g : 16 * g + 16])
            s += 32
            b["scales_l"][g // 2] |= (s & 15) << (4 * (g % 2))
            b["scales_h"] |= (s >> 4) << (2 * g)


@kernel
def quantize(x, blocks):
    _quantize(x, None, blocks)


@kernel
def quantize_weighted(x, w, blocks):
    _quantize(x, w, blocks)
