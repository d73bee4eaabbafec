"""IQ4_NL: x = d * v[q], v sixteen unevenly spaced values, blocks of 32. 4.5 bits per weight.

| field | bytes | content |
|---|---|---|
| d | 2 | scale, IEEE half |
| qs | 16 | byte j: code of weight j (low nibble) and of j + 16 (high) |

ggml's `block_iq4_nl`; the values are `codebooks.IQ4_VALUES`. The scale is searched (`search_scale`) with weights x^2,
or w * sqrt(2 * mean x^2 + x^2) with importance w. A scale beyond the half's range is stored as the largest, where the
reference stores infinity; so is zero where sums leave the range of float32.
"""

import numpy as np

from quant.codebooks import IQ4_VALUES
from quant.format import block_dtype
from quant.half import half_to_float
from quant.jit import kernel
from quant.lattice import finite_half, importance_weights, mean_square
from quant.search import GROUP_EPS

BLOCK = block_dtype("IQ4_NL", d="<u2", qs=("u1", 16))

TRIES = 16
_VALUES = IQ4_VALUES.astype(np.float32)
_BORDERS = (_VALUES[1:] + _VALUES[:-1]) / np.float32(2)  # at the middle, the upper value is taken


@kernel
def dequantize(b, y):
    d = half_to_float(b["d"])
    for j in range(16):
        q = b["qs"][j]
        y[j] = d * _VALUES[q & 15]
        y[j + 16] = d * _VALUES[q >> 4]


@kernel
def nearest_code(v):
    """Code of the value nearest to v."""
    code = np.int32(0)
    for i in range(15):
        code += np.int32(not v < _BORDERS[i])
    return code


@kernel
def nearest_value(v):
    """The value nearest to v."""
    value = _VALUES[0]
    for i in range(15):
        value = value if v < _BORDERS[i] else _VALUES[i + 1]
    return value


@kernel
def search_scale(x, weight, inverse, sum_qx, sum_q2):
    """Scale d for x[32] ~ d * v, least weighted squares; inverse, sum_qx, sum_q2 are scratch [TRIES].

    Tries 1/d = 127 / m and (k - 127) / m for k = -7..7, where m is the weight of largest magnitude; each is followed by
    the least-squares scale for its codes. The tries lie side by side in vectors, each sums from left to right.
    """
    amax = np.float32(0)
    m = np.float32(0)
    for j in range(32):
        if abs(x[j]) > amax:
            amax = abs(x[j])
            m = x[j]
    if amax < GROUP_EPS:
        return np.float32(0)
    inverse[0] = np.float32(1) / (-m / _VALUES[0])
    for t in range(1, TRIES):
        inverse[t] = (np.float32(t - 8) + _VALUES[0]) / m
    sum_qx[:] = 0
    sum_q2[:] = 0
    for j in range(32):
        v = x[j]
        w = weight[j]
        for t in range(TRIES):
            q = nearest_value(inverse[t] * v)
            sum_qx[t] += w * q * v
            sum_q2[t] += w * q * q
    scale = sum_qx[0] / sum_q2[0] if sum_q2[0] > np.float32(0) else np.float32(0)
    best = scale * sum_qx[0]
    for t in range(1, TRIES):
        if sum_q2[t] > np.float32(0) and sum_qx[t] * sum_qx[t] > best * sum_q2[t]:
            scale = sum_qx[t] / sum_q2[t]
            best = scale * sum_qx[t]
    return scale if np.isfinite(scale) else np.float32(0)


@kernel
def pack(x, inverse, qs):
    """qs[16] = codes of the values nearest to inverse * x[32]."""
    for j in range(16):
        qs[j] = nearest_code(inverse * x[j]) | (nearest_code(inverse * x[j + 16]) << np.int32(4))


@kernel
def _quantize(x, w, blocks):
    weight = np.empty(32, np.float32)
    scratch = np.empty((3, TRIES), np.float32)
    for i in range(blocks.size):
        b = blocks[i]
        group = x[32 * i : 32 * i + 32]
        importance = None if w is None else w[32 * i : 32 * i + 32]
        importance_weights(group, importance, mean_square(group, np.float32(2)), weight)
        d = search_scale(group, weight, scratch[0], scratch[1], scratch[2])
        b["d"] = finite_half(d)
        pack(group, np.float32(1) / d if d != np.float32(0) else np.float32(0), b["qs"])


@kernel
def quantize(x, blocks):
    _quantize(x, None, blocks)


@kernel
def quantize_weighted(x, w, blocks):
    _quantize(x, w, blocks)
