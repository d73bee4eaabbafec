"""Elementary functions that the compiler can vectorize."""

import math

import numpy as np

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


@fast_kernel
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return np.float32(1) / (np.float32(1) + exp(-x))


@fast_kernel
def tanh(x):
    """Hyperbolic tangent, within 1e-6 relative: by e^2x, near 0 by its series."""
    if abs(x) < np.float32(0.2):
        s = x * x
        return x + x * s * (
            np.float32(-1 / 3) + s * (np.float32(2 / 15) + s * (np.float32(-17 / 315) + s * np.float32(62 / 2835)))
        )
    return np.float32(1) - np.float32(2) / (exp(x + x) + np.float32(1))


@fast_kernel
def gelu(x):
    """x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))): the tanh form."""
    inner = np.float32(0.7978845608) * x * (np.float32(1) + np.float32(0.044715) * x * x)
    return np.float32(0.5) * x * (np.float32(1) + tanh(inner))


@fast_kernel
def gelu_erf(x):
    """x/2 (1 + erf(x / sqrt 2)): the exact form."""
    return np.float32(0.5) * x * (np.float32(1) + np.float32(math.erf(x * np.float32(0.70710678))))


@fast_kernel
def softplus(x):
    """log(1 + e^x), x itself above 20."""
    return x if x > np.float32(20) else np.float32(math.log1p(exp(x)))


@fast_inline
def dot(a, b):
    """Sum of a[i] * b[i]."""
    total = np.float32(0)
    for i in range(a.size):
        total += a[i] * b[i]
    return total


@kernel
def slope(head, n_head, max_bias):
    """ALiBi's factor of the mask for a head, 1 without a bias (see `slopes` in engine/ops/softmax.py)."""
    if max_bias <= np.float32(0):
        return np.float32(1)
    n = 1
    while 2 * n <= n_head:
        n *= 2
    power = head + 1.0 if head < n else (2 * (head - n) + 1) * 0.5
    return np.float32(2.0 ** (-np.float64(max_bias) / n * power))


@fast_inline
def row_max(x):
    """Largest element; -inf for none."""
    best = np.float32(-np.inf)
    for i in range(x.size):
        best = max(best, x[i])
    return best
