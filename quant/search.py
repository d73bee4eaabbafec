"""Scale searches and roundings shared by formats.

Strict float32, sums in the reference's order: identical bytes are the test. The functions take one group of weights;
`codes` is scratch or result of the group's length.
"""

import numpy as np

from quant.half import bits_of
from quant.jit import kernel

GROUP_EPS = np.float32(1e-15)  # a group whose largest magnitude is below this is stored as zeros


@kernel
def round_away(v):
    """float32 -> int32, nearest, halves away from zero (C's roundf)."""
    magnitude = np.floor(abs(v) + np.float32(0.5))
    if magnitude - abs(v) > np.float32(0.5):  # abs(v) + 0.5 was rounded up
        magnitude -= np.float32(1)
    return np.int32(-magnitude) if v < np.float32(0) else np.int32(magnitude)


@kernel
def nearest(v):
    """float32 -> int32, nearest, halves to even, by adding 1.5 * 2^23; meant for |v| <= 2^22."""
    return np.int32(bits_of(v + np.float32(12582912.0)) & np.uint32(0x007FFFFF)) - np.int32(0x00400000)


@kernel
def row_mean_square(x):
    """Mean of the squares of a row, summed from left to right."""
    total = np.float32(0)
    for j in range(x.size):
        total += x[j] * x[j]
    return total / np.float32(x.size)


@kernel
def symmetric(x, weight, nmax, codes):
    """Scale d for x ~ d * q with q in -nmax..nmax-1, least weighted squares; codes get q + nmax.

    Starts from -nmax / m, where m is the weight of largest magnitude, and tries 18 nearby inverse scales; each is
    followed by the least-squares scale for its codes (ggml: make_qx_quants with given weights).
    """
    n = x.size
    limit = np.float32(nmax)
    m = np.float32(0)
    amax = np.float32(0)
    for j in range(n):
        if abs(x[j]) > amax:
            amax = abs(x[j])
            m = x[j]
    if amax < GROUP_EPS:
        for j in range(n):
            codes[j] = 0
        return np.float32(0)
    inverse = -limit / m
    sum_lx = np.float32(0)
    sum_l2 = np.float32(0)
    for j in range(n):
        q = max(-nmax, min(nmax - 1, nearest(inverse * x[j])))
        codes[j] = q + nmax
        code = np.float32(q)
        sum_lx += weight[j] * x[j] * code
        sum_l2 += weight[j] * code * code
    scale = sum_lx / sum_l2 if sum_l2 != np.float32(0) else np.float32(0)
    best = scale * sum_lx
    for step in range(-9, 10):
        if step == 0:
            continue
        inverse = -(limit + np.float32(0.1) * np.float32(step)) / m
        sum_lx = np.float32(0)
        sum_l2 = np.float32(0)
        for j in range(n):
            code = np.float32(max(-nmax, min(nmax - 1, nearest(inverse * x[j]))))
            sum_lx += weight[j] * x[j] * code
            sum_l2 += weight[j] * code * code
        if sum_l2 > np.float32(0) and sum_lx * sum_lx > best * sum_l2:
            for j in range(n):
                codes[j] = max(-nmax, min(nmax - 1, nearest(inverse * x[j]))) + nmax
            scale = sum_lx / sum_l2
            best = scale * sum_lx
    return scale
