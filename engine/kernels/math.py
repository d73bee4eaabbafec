"""Elementary functions that the compiler can vectorize."""

import numpy as np

from engine.kernels.node import floats
from quant.half import float_of
from quant.jit import fast_inline, fast_kernel, kernel


@kernel
def exp(x):
    """e^x in float32, within 2 units in the last place; 0 below -87.3, infinity above 88.7.

    x = n ln 2 + r with |r| <= ln 2 / 2; e^r is a polynomial (Cephes, expf), 2^n goes into the exponent, in two steps.
    Strict: ln 2 is subtracted in two parts, which reordering would merge.
    """
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375)
    r = r - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1)
    bounded = np.int32(max(np.float32(-126), min(np.float32(128), n)))
    half = np.int32(bounded // np.int32(2))
    scaled = p * _power(half) * _power(bounded - half)
    scaled = np.float32(np.inf) if x > np.float32(88.72283) else scaled
    return np.float32(0) if x < np.float32(-87.33654) else scaled


@kernel
def _power(n):
    """2^n for n in -126..127."""
    return float_of(np.uint32((n + np.int32(127)) << np.int32(23)))


@fast_kernel
def silu(x):
    """x / (1 + e^-x)."""
    return x / (np.float32(1) + exp(-x))


@fast_inline
def row_max(x):
    """Largest element; -inf for none."""
    best = np.float32(-np.inf)
    for i in range(x.size):
        best = max(best, x[i])
    return best


@fast_inline
def softmax(address, n):
    """Replace n float32 by e^(x - max) / sum of these; all -inf gives zeros."""
    x = floats(address, n)
    top = row_max(x)
    if top == np.float32(-np.inf):
        top = np.float32(0)
    total = np.float32(0)
    for i in range(n):
        e = exp(x[i] - top)
        x[i] = e
        total += e
    factor = np.float32(1) / total if total > np.float32(0) else np.float32(0)
    for i in range(n):
        x[i] *= factor
