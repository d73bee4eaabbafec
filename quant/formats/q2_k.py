"""Q2_K: x = d * scale * q - dmin * min, super-blocks of 16 groups of 16. 2.625 bits per weight.

| field | bytes | content |
|---|---|---|
| scales | 16 | scale (low nibble) and min (high) of each group |
| qs | 64 | for each 128 weights 32 bytes: codes j, j + 32, j + 64, j + 96, from the low bits up |
| d, dmin | 2 + 2 | scales of the scales and of the mins, IEEE half |

ggml's `block_q2_K`. Scale and min of each group are searched (`search.affine`): without importance for the least sum of
|x| * |error|; with it for least squares with weights w * sqrt(mean square of the super-block + x^2). Codes are computed
again for the scales as stored.
"""

import numpy as np

from quant.format import block_dtype
from quant.groups import SUPER, affine_requantize, gather, importance_weights, scale_codes
from quant.half import float_to_half, half_to_float
from quant.jit import kernel
from quant.lanes import absolute, load, load_codes, store
from quant.pack import pack_crumbs
from quant.search import INVERSE, MIN, OFFSET, SCALE, TOTAL, affine, affine_codes, positive, row_mean_square

BLOCK = block_dtype("Q2_K", scales=("u1", 16), qs=("u1", 64), d="<u2", dmin="<u2")


@kernel
def dequantize(b, y):
    d = half_to_float(b["d"])
    dmin = half_to_float(b["dmin"])
    for group in range(16):
        scale = b["scales"][group]
        q = load_codes(b["qs"], 32 * (group // 8) + 16 * (group % 2), group % 8 // 2 * 2, 3)
        store(y, 16 * group, d * np.float32(scale & 15) * q - dmin * np.float32(scale >> 4))


@kernel
def _write(b, x, start, bounded, d, dmin, scales, mins, fit, codes):
    """One block from its sixteen fitted groups and their coded scales and mins; `codes` is scratch."""
    b["d"] = float_to_half(d)
    b["dmin"] = float_to_half(dmin)
    for j in range(16):
        b["scales"][j] = scales[j] | (mins[j] << 4)
        dl = half_to_float(b["d"]) * np.float32(b["scales"][j] & 15)
        ml = half_to_float(b["dmin"]) * np.float32(b["scales"][j] >> 4)
        if dl == np.float32(0):
            affine_codes(x, start + 16 * j, 16, 3, bounded, fit[INVERSE, j], fit[OFFSET, j], codes)
        else:
            affine_requantize(x, start + 16 * j, 16, dl, ml, 3, codes)
    pack_crumbs(codes, start, 0, b["qs"])


@kernel
def quantize(x, blocks):
    codes = np.empty(x.size, np.uint8)
    xs = np.empty(SUPER, np.float32)
    ws = np.empty(SUPER, np.float32)
    trial = np.empty(SUPER, np.float32)
    fit = np.empty((5, 16), np.float32)
    scales = np.empty(16, np.uint8)
    mins = np.empty(16, np.uint8)
    for i in range(blocks.size):
        gather(x, SUPER * i, 16, 16, xs)
        for j in range(0, SUPER, 16):
            store(ws, j, absolute(load(xs, j)))
        affine(xs, ws, 16, 3, np.float32(-0.5), np.float32(0.1), 15, True, False, fit, trial)
        d = scale_codes(fit[SCALE], 15, scales)
        dmin = scale_codes(fit[MIN], 15, mins)
        _write(blocks[i], x, SUPER * i, False, d, dmin, scales, mins, fit, codes)


@kernel
def quantize_weighted(x, w, blocks):
    codes = np.empty(x.size, np.uint8)
    xs = np.empty(SUPER, np.float32)
    ws = np.empty(SUPER, np.float32)
    trial = np.empty(SUPER, np.float32)
    fit = np.empty((5, 16), np.float32)
    sigma2 = np.empty(16, np.float32)
    scales = np.empty(16, np.uint8)
    mins = np.empty(16, np.uint8)
    for i in range(blocks.size):
        gather(x, SUPER * i, 16, 16, xs)
        gather(w, SUPER * i, 16, 16, ws)
        sigma2[:] = row_mean_square(x[SUPER * i : SUPER * i + SUPER])
        importance_weights(xs, ws, 16, sigma2, ws)
        affine(xs, ws, 16, 3, np.float32(-0.9), np.float32(0.05), 36, False, True, fit, trial)
        d = positive(fit[SCALE], fit[TOTAL], 15, scales)
        dmin = positive(fit[MIN], fit[TOTAL], 15, mins)
        _write(blocks[i], x, SUPER * i, True, d, dmin, scales, mins, fit, codes)
