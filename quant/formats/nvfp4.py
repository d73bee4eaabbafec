"""NVFP4: x = d * v[q], v the E2M1 values 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, blocks of 64 with a scale for
every 16. 4.5 bits per weight.

| field | bytes | content |
|---|---|---|
| d | 4 | scales of the four sub-blocks, unsigned E4M3 (bias 7); 0 and 127 mean zero |
| qs | 32 | byte 8 * s + j: code of weight j (low nibble) and j + 8 (high) of sub-block s |

ggml's `block_nvfp4`. The scale is the largest magnitude / 6, from 256 on the largest that there is, 448. Models bring a
second scale for the whole tensor, as a tensor of its own. Importance is ignored.
"""

import numpy as np

from quant.format import block_dtype
from quant.fp4 import nearest_fp4, pack_fp4, unpack_fp4
from quant.half import bits_of, float_of
from quant.jit import kernel

BLOCK = block_dtype("NVFP4", d=("u1", 4), qs=("u1", 32))


@kernel
def half_scale(d):
    """Half of an unsigned E4M3, as float32: to go with doubled values."""
    if d == 0 or d == 127:
        return np.float32(0)
    exponent = np.uint32((d >> 3) & 15)
    mantissa = np.uint32(d & 7)
    if exponent == 0:
        return np.float32(mantissa) * np.float32(2.0**-10)
    return float_of(((exponent + np.uint32(119)) << np.uint32(23)) | (mantissa << np.uint32(20)))


@kernel
def to_e4m3(v):
    """Non-negative float32 -> nearest unsigned E4M3, halves up; 448 for all from 256 on."""
    if v < np.float32(2.0**-6):  # subnormal: a multiple of 2^-9
        return np.uint8(min(np.int32(7), np.int32(v * np.float32(512) + np.float32(0.5))))
    # float32's exponent and three bits of mantissa, rounded, with the bias changed from 127 to 7
    rounded = np.int32((bits_of(v) + np.uint32(1 << 19)) >> np.uint32(20)) - np.int32(120 << 3)
    return np.uint8(rounded) if rounded < 15 << 3 else np.uint8(0x7E)


@kernel
def dequantize(b, y):
    for s in range(4):
        unpack_fp4(b["qs"][8 * s : 8 * s + 8], half_scale(b["d"][s]), y[16 * s : 16 * s + 16])


@kernel
def quantize(x, blocks):
    best = np.empty(16, np.float32)
    codes = np.empty(16, np.uint8)
    for i in range(blocks.size):
        b = blocks[i]
        for s in range(4):
            group = x[64 * i + 16 * s : 64 * i + 16 * s + 16]
            amax = np.float32(0)
            for j in range(16):
                amax = max(amax, abs(group[j]))
            d = to_e4m3(amax / np.float32(6))
            b["d"][s] = d
            nearest_fp4(group, half_scale(d), best, codes)
            pack_fp4(codes, b["qs"][8 * s : 8 * s + 8])


quantize_weighted = None
