"""Four-bit floats (E2M1), which MXFP4 and NVFP4 share: sign, two bits of exponent, one of mantissa.

Values are kept doubled, so that they are integers; scales are halved for that.
"""

import numpy as np

from quant.jit import kernel

#: code -> twice its value; code 8 is minus zero and never written
FP4_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


@kernel
def nearest_fp4(x, d, best, codes):
    """codes[n] (uint8) = codes of the values nearest to x[n] / d, the lower code where two are equally near.

    d: the halved scale; best: scratch float32 [n]. Nearness is compared in float32, |v * d - x|.
    """
    n = x.size
    for j in range(n):
        best[j] = abs(x[j])
        codes[j] = 0
    for code in range(1, 8):
        v = FP4_DOUBLED[code] * d
        for j in range(n):
            error = abs(v - abs(x[j]))
            codes[j] = np.uint8(code) if error < best[j] else codes[j]
            best[j] = min(error, best[j])
    for j in range(n):
        codes[j] |= np.uint8(8) if x[j] < np.float32(0) and codes[j] != np.uint8(0) else np.uint8(0)


@kernel
def unpack_fp4(qs, d, y):
    """y[2 * n] = the weights of qs[n]: low nibbles first, then high ones."""
    n = qs.size
    for j in range(n):
        y[j] = FP4_DOUBLED[qs[j] & 15] * d
        y[j + n] = FP4_DOUBLED[qs[j] >> 4] * d


@kernel
def pack_fp4(codes, qs):
    """The reverse of `unpack_fp4` for codes[2 * n]."""
    n = qs.size
    for j in range(n):
        qs[j] = codes[j] | (codes[j + n] << np.uint8(4))
