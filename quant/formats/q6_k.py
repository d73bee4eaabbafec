"""Q6_K: x = d * scale * (q - 32), super-blocks of 16 groups of 16. 6.5625 bits per weight.

| field | bytes | content |
|---|---|---|
| ql | 128 | for each 128 weights 64 bytes: low four bits of code j (low nibble) and of j + 64 (high) |
| qh | 64 | for each 128 weights 32 bytes: high two bits of codes j, j + 32, j + 64, j + 96, from the low bits up |
| scales | 16 | signed bytes |
| d | 2 | scale of the scales, IEEE half |

ggml's `block_q6_K`. Group scales are searched (`search.symmetric`) with weights x^2, or the importance as it is;
the largest becomes -128; codes are computed again for the scales as stored.
"""

import numpy as np

from quant.format import block_dtype
from quant.groups import SUPER, gather, largest, symmetric_requantize
from quant.half import float_to_half, half_to_float
from quant.jit import kernel
from quant.lanes import load, load_codes, store
from quant.pack import pack_crumbs, pack_nibbles
from quant.search import GROUP_EPS, INVERSE, SCALE, nearest, symmetric_codes, symmetric_groups

BLOCK = block_dtype("Q6_K", ql=("u1", 128), qh=("u1", 64), scales=("i1", 16), d="<u2")


@kernel
def dequantize(b, y):
    d = half_to_float(b["d"])
    for group in range(16):
        half, k, j = group // 8, group % 8 // 2, 16 * (group % 2)  # of 128, 32 and 16 weights
        low = load_codes(b["ql"], 64 * half + 32 * (k % 2) + j, 4 * (k // 2), 15)
        high = load_codes(b["qh"], 32 * half + j, 2 * k, 3)
        store(y, 16 * group, d * np.float32(b["scales"][group]) * (low + np.float32(16) * high - np.float32(32)))


@kernel
def _write(b, x, start, fit, codes):
    """One block from its sixteen fitted groups; `codes` is scratch."""
    m = largest(fit[SCALE])
    if abs(m) < GROUP_EPS:
        b["d"] = 0
        b["scales"][:] = 0
        b["ql"][:] = 0
        b["qh"][:] = 0
        return
    inverse = np.float32(-128) / m
    b["d"] = float_to_half(np.float32(1) / inverse)
    d = half_to_float(b["d"])
    for j in range(16):
        scale = np.int8(min(np.int32(127), nearest(inverse * fit[SCALE, j])))
        b["scales"][j] = scale
        dl = d * np.float32(scale)
        if dl == np.float32(0):
            symmetric_codes(x, start + 16 * j, 16, 32, fit[INVERSE, j], codes)
        else:
            symmetric_requantize(x, start + 16 * j, 16, dl, 32, codes)
    pack_nibbles(codes, start, 64, b["ql"])
    pack_crumbs(codes, start, 4, b["qh"])


@kernel
def quantize(x, blocks):
    codes = np.empty(x.size, np.uint8)
    xs = np.empty(SUPER, np.float32)
    ws = np.empty(SUPER, np.float32)
    fit = np.empty((5, 16), np.float32)
    for i in range(blocks.size):
        gather(x, SUPER * i, 16, 16, xs)
        for j in range(0, SUPER, 16):
            store(ws, j, load(xs, j) * load(xs, j))
        symmetric_groups(xs, ws, 16, 32, fit)
        _write(blocks[i], x, SUPER * i, fit, codes)


@kernel
def quantize_weighted(x, w, blocks):
    codes = np.empty(x.size, np.uint8)
    xs = np.empty(SUPER, np.float32)
    ws = np.empty(SUPER, np.float32)
    fit = np.empty((5, 16), np.float32)
    for i in range(blocks.size):
        gather(x, SUPER * i, 16, 16, xs)
        gather(w, SUPER * i, 16, 16, ws)
        symmetric_groups(xs, ws, 16, 32, fit)
        _write(blocks[i], x, SUPER * i, fit, codes)
