"""Q3_K: x = d * (scale - 32) * (q - 4), super-blocks of 16 groups of 16. 3.4375 bits per weight.

| field | bytes | content |
|---|---|---|
| hmask | 32 | third bits: bit k of byte j belongs to weight 32 * k + j |
| qs | 64 | for each 128 weights 32 bytes: low two bits of codes j, j + 32, j + 64, j + 96, from the low bits up |
| scales | 12 | sixteen 6-bit scales (`pack.pack_scales`) |
| d | 2 | scale of the scales, IEEE half |

ggml's `block_q3_K`. Group scales are searched, by moving single codes (`search.refined_groups`), or, with importance w,
over inverse scales (`search.symmetric`) with weights w * sqrt(2 * mean square of the super-block + x^2), and then once
more over the group scales. Codes are computed again for the scales as stored.
"""

import numpy as np

from quant.format import block_dtype
from quant.groups import SUPER, gather, importance_weights, largest, symmetric_requantize
from quant.half import float_to_half, half_to_float
from quant.jit import kernel
from quant.lanes import load_codes, store
from quant.pack import pack_crumbs, pack_plane, pack_scales, packed_scale
from quant.search import (
    INVERSE,
    SCALE,
    TOTAL,
    nearest,
    refined_groups,
    square_sum,
    symmetric,
    symmetric_codes,
    symmetric_groups,
)

BLOCK = block_dtype("Q3_K", hmask=("u1", 32), qs=("u1", 64), scales=("u1", 12), d="<u2")


@kernel
def dequantize(b, y):
    d = half_to_float(b["d"])
    for group in range(16):
        j = 16 * (group % 2)
        low = load_codes(b["qs"], 32 * (group // 8) + j, group % 8 // 2 * 2, 3)
        high = load_codes(b["hmask"], j, group // 2, 1)
        scale = d * np.float32(np.int32(packed_scale(b["scales"], group)) - 32)
        store(y, 16 * group, scale * (low + np.float32(4) * high - np.float32(4)))


@kernel
def _write(b, x, start, d, scales, codes):
    """One block from its coded scales; `codes` holds the search's codes, which stay where a scale is stored as zero."""
    b["d"] = float_to_half(d)
    pack_scales(scales, b["scales"])
    for j in range(16):
        dl = half_to_float(b["d"]) * np.float32(np.int32(scales[j]) - 32)
        if dl != np.float32(0):
            symmetric_requantize(x, start + 16 * j, 16, dl, 4, codes)
    pack_crumbs(codes, start, 0, b["qs"])
    pack_plane(codes, start, 2, b["hmask"])


@kernel
def quantize(x, blocks):
    codes = np.empty(x.size, np.uint8)
    xs = np.empty(SUPER, np.float32)
    refined = np.empty(SUPER, np.float32)
    fit = np.empty((5, 16), np.float32)
    scales = np.empty(16, np.uint8)
    for i in range(blocks.size):
        gather(x, SUPER * i, 16, 16, xs)
        refined_groups(xs, 16, 4, fit, refined)
        m = largest(fit[SCALE])
        d = np.float32(0)
        scales[:] = 0
        if m != np.float32(0):
            inverse = np.float32(-32) / m
            d = np.float32(1) / inverse
            for j in range(16):
                scales[j] = max(-32, min(31, nearest(inverse * fit[SCALE, j]))) + 32
        for j in range(16):
            for k in range(16):
                codes[SUPER * i + 16 * j + k] = np.uint8(refined[16 * k + j])
        _write(blocks[i], x, SUPER * i, d, scales, codes)


@kernel
def quantize_weighted(x, w, blocks):
    codes = np.empty(x.size, np.uint8)
    xs = np.empty(SUPER, np.float32)
    ws = np.empty(SUPER, np.float32)
    fit = np.empty((5, 16), np.float32)
    sigma2 = np.empty(16, np.float32)
    scales = np.empty(16, np.uint8)
    for i in range(blocks.size):
        gather(x, SUPER * i, 16, 16, xs)
        gather(w, SUPER * i, 16, 16, ws)
        sigma2[:] = np.float32(2) * square_sum(x[SUPER * i : SUPER * i + SUPER]) / np.float32(SUPER)
        importance_weights(xs, ws, 16, sigma2, ws)
        symmetric_groups(xs, ws, 16, 4, fit)
        for j in range(16):
            symmetric_codes(x, SUPER * i + 16 * j, 16, 4, fit[INVERSE, j], codes)
        d = symmetric(fit[SCALE], fit[TOTAL], 32, scales)
        _write(blocks[i], x, SUPER * i, d, scales, codes)
