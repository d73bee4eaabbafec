"""TQ1_0: x = d * (q - 1), q in 0..2, blocks of 256. 1.6875 bits per weight.

| field | bytes | content |
|---|---|---|
| qs | 48 | five codes a byte: bytes 0-31 for weights 0-159 (byte m: m, m + 32, ...), 32-47 for 160-239 (stride 16) |
| qh | 4 | four codes a byte, for weights 240-255 (byte m: 240 + m, 244 + m, ...) |
| d | 2 | scale, IEEE half |

ggml's `block_tq1_0`. A byte is the fraction of its base-3 digits, first digit first: ceil(256 / 243 * number); the
digits come out by multiplying with 3 and taking the carry. The scale is the largest magnitude; importance is ignored.
"""

import numpy as np

from quant.format import block_dtype
from quant.half import float_to_half, half_to_float
from quant.jit import kernel
from quant.ternary import ternary

BLOCK = block_dtype("TQ1_0", qs=("u1", 48), qh=("u1", 4), d="<u2")


@kernel
def _digits(bytes, count, d, y):
    """y[count * n] = d * (digit - 1) for the first `count` digits of n bytes, byte m's at m, m + n, ..."""
    n = bytes.size
    for m in range(n):
        rest = np.uint8(bytes[m])
        for k in range(count):
            product = np.uint16(rest) * np.uint16(3)
            y[k * n + m] = np.float32(np.int32(product >> 8) - 1) * d
            rest = np.uint8(product & 255)


@kernel
def _fractions(codes, count, bytes):
    """The reverse of `_digits`, from codes 0..2; digits beyond `count` are zero."""
    n = bytes.size
    for m in range(n):
        number = np.uint32(0)
        for k in range(count):
            number = np.uint32(number * np.uint32(3) + np.uint32(codes[k * n + m]))
        for _ in range(count, 5):
            number = np.uint32(number * np.uint32(3))
        bytes[m] = np.uint8((number * np.uint32(256) + np.uint32(242)) // np.uint32(243))


@kernel
def dequantize(b, y):
    d = half_to_float(b["d"])
    _digits(b["qs"][:32], 5, d, y[:160])
    _digits(b["qs"][32:], 5, d, y[160:240])
    _digits(b["qh"], 4, d, y[240:])


@kernel
def quantize(x, blocks):
    codes = np.empty(256, np.uint8)
    for i in range(blocks.size):
        b = blocks[i]
        b["d"] = float_to_half(ternary(x[256 * i : 256 * i + 256], np.uint8(1), codes))
        _fractions(codes[:160], 5, b["qs"][:32])
        _fractions(codes[160:240], 5, b["qs"][32:])
        _fractions(codes[240:], 4, b["qh"])


quantize_weighted = None
