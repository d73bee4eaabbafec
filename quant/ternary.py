"""Codes -1, 0, 1 times the largest magnitude, as TQ1_0, TQ2_0 and Q2_0 store them."""

import numpy as np

from quant.jit import kernel


@kernel
def ternary(x, lost, codes):
    """Scale of the block x, its largest magnitude; codes (uint8) get round(x / scale) + 1, halves away from zero.

    lost: the code of every weight where 1 / scale overflows. The scale is then zero as a half, so that the code does
    not matter, but the reference's bytes follow from what its conversion makes of an infinity.
    """
    d = np.float32(0)
    for j in range(x.size):
        d = max(d, abs(x[j]))
    inverse = np.float32(1) / d if d != np.float32(0) else np.float32(0)
    if np.isinf(inverse):
        codes[:] = lost
        return d
    for j in range(x.size):
        v = x[j] * inverse
        codes[j] = np.uint8(1) + np.uint8(v >= np.float32(0.5)) - np.uint8(v <= np.float32(-0.5))
    return d
