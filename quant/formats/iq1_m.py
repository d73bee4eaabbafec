"""IQ1_M: x = d * (2 s + 1) * (q +- 1/8), q as in IQ1_S, s per 16 and shift per 8 weights. 1.75 bits per weight.

| field | bytes | content |
|---|---|---|
| qs | 32 | byte k: low bits of the position of point k in the codebook |
| qh | 16 | nibble k: 3 high bits of the position of point k, bit 3: its shift is -1/8 |
| scales | 8 | 16 bits per 64 weights: four s in bits 0 to 11; bits 12 to 15 make up d, an IEEE half, lowest first |

ggml's `block_iq1_m`. Search as in IQ1_S, with the four combinations of shifts and weights x^2 or w * sqrt(2 * mean
x^2 + x^2); then d is fitted to all 256 weights by least squares. Bytes are those of ggml 0.26: earlier versions sum
in another order. Where sums or scales leave their range: as in IQ1_S.
"""

import numpy as np

from quant.format import block_dtype
from quant.formats.iq1_s import (
    CODES,
    DELTA,
    LOWEST,
    add_ternary,
    sort_order,
    split_levels,
    tables,
    ternary,
    ternary_point,
)
from quant.half import half_to_float
from quant.jit import kernel
from quant.lattice import finite_half, importance_weights, mean_square, nearest_level

__all__ = ["BLOCK", "dequantize", "quantize", "quantize_weighted", "tables"]

BLOCK = block_dtype("IQ1_M", qs=("u1", 32), qh=("u1", 16), scales=("<u2", 4))

_EPS = np.float32(1e-7)


@kernel
def dequantize(b, y):
    bits = np.int32(0)
    for g in range(4):
        bits |= (np.int32(b["scales"][g]) >> np.int32(12)) << np.int32(4 * g)
    d = half_to_float(bits)
    for k in range(32):
        s = (np.int32(b["scales"][k // 8]) >> np.int32(3 * (k // 2 % 4))) & np.int32(7)
        scale = d * np.float32(2 * s + 1)
        high = np.int32(b["qh"][k // 2]) >> np.int32(4 * (k % 2))
        delta = -DELTA if high & 8 else DELTA
        code = np.int32(CODES[np.int32(b["qs"][k]) | ((high & np.int32(7)) << np.int32(8))])
        for i in range(8):
            y[8 * k + i] = scale * (ternary(code, i) + delta)


@kernel
def _delta(shifts, half):
    """Shift of the first (0) or second (1) half: bit 1 or bit 0 of `shifts` means minus."""
    return -DELTA if (shifts >> (1 - half)) & 1 else DELTA


@kernel
def _half_sums(sum_x, sum_w, i1, i2, delta):
    """A split's sums of weight * x * q and weight * q^2 over one half, from the half's sums before each position."""
    low, high = delta - np.float32(1), delta + np.float32(1)
    middle2 = delta * delta
    qx = sum_x[16] * high - (sum_x[i1] + sum_x[i2])
    q2 = sum_w[16] * high * high + sum_w[i1] * (low * low - middle2) + sum_w[i2] * (middle2 - high * high)
    return qx, q2


@kernel
def _score(first_x, first_w, second_x, second_w, i1, i2, shifts, best):
    """A split's sums of weight * x * q and weight * q^2, and whether they are better than `best`."""
    qx1, q21 = _half_sums(first_x, first_w, i1, i2, _delta(shifts, 0))
    qx2, q22 = _half_sums(second_x, second_w, i1, i2, _delta(shifts, 1))
    qx = qx1 + qx2
    q2 = q21 + q22
    return qx, q2, (q2 > np.float32(0)) & (qx * qx > best * q2)


@kernel
def _better_splits(first_x, first_w, second_x, second_w, i1, best):
    """Bit i2 is set for each split (i1, i2) that is better than `best` with some shifts; all are asked at once.

    Whole vectors of 16: the sums go on behind the last split, and so do the bits, which then say nothing new.
    """
    bits = np.int32(0)
    for i2 in range(np.uint64(i1), np.uint64(i1) + np.uint64(32 if i1 == 0 else 16)):
        hit = False
        for k in range(4):
            hit |= _score(first_x, first_w, second_x, second_w, i1, i2, k, best)[2]
        bits |= np.int32(np.int32(hit) << np.int32(i2))
    return bits


@kernel
def _best_split(first_x, first_w, second_x, second_w):
    """(end of the -1s, end of the 0s, shifts, scale) of the best split; shifts of -1 mean that there is none."""
    best = LOWEST
    end1, end2, shifts, scale = 0, 0, -1, np.float32(0)
    for i1 in range(17):
        ahead = _better_splits(first_x, first_w, second_x, second_w, i1, best)  # as in IQ1_S
        if not ahead:
            continue
        for i2 in range(np.uint64(i1), np.uint64(17)):
            if not (ahead >> np.int32(i2)) & 1:
                continue
            for k in range(4):
                qx, q2, better = _score(first_x, first_w, second_x, second_w, i1, i2, k, best)
                if better:
                    end1, end2, shifts, scale = i1, int(i2), k, qx / q2
                    if scale * qx < best:
                        ahead = np.int32(-1)
                    best = scale * qx
    return end1, end2, shifts, scale


@kernel
def _search_group(x, weight, tables, sums, rank, order, levels, codes):
    """(scale, shifts) of a group, and its points in codes; scale zero where it is too small or not finite."""
    index, near = tables
    codes[:] = CODES[0]
    largest = np.float32(0)
    for j in range(16):
        largest = max(largest, abs(x[j]))
    if largest < _EPS:
        return np.float32(0), 0
    sort_order(x, rank, order)
    sums[:, 0] = 0
    for j in range(16):
        i = order[j]
        half = 0 if i < 8 else 2
        for row in range(4):
            sums[row, j + 1] = sums[row, j]
        sums[half, j + 1] += weight[i] * x[i]
        sums[half + 1, j + 1] += weight[i]
    for row in range(4):
        for j in range(17, 32):
            sums[row, j] = sums[row, 16]
    end1, end2, shifts, scale = _best_split(sums[0], sums[1], sums[2], sums[3])
    if shifts < 0 or not np.isfinite(scale):
        return np.float32(0), 0
    flip = scale < np.float32(0)
    split_levels(order, end1, end2, flip, levels)
    if flip:
        scale, shifts = -scale, 3 - shifts
    moved = False
    qx, q2 = np.float32(0), np.float32(0)
    for k in range(2):
        codes[k], other = ternary_point(x, weight, 8 * k, levels, scale, _delta(shifts, k), index, near)
        qx, q2 = add_ternary(x, weight, 8 * k, codes[k], np.float32(1), _delta(shifts, k), qx, q2)
        moved |= other
    if moved and qx > np.float32(0) and q2 > np.float32(0):
        scale = qx / q2
    if not np.isfinite(scale):
        codes[:] = CODES[0]
        return np.float32(0), 0
    return scale, shifts


@kernel
def _quantize(x, w, blocks, tables):
    index = tables[0]
    weight = np.empty(256, np.float32)
    sums = np.empty((4, 32), np.float32)
    rank = np.empty(16, np.int32)
    order = np.empty(16, np.int64)
    levels = np.empty(16, np.int32)
    codes = np.empty(32, np.int32)
    scales = np.empty(16, np.float32)
    shifts = np.empty(16, np.int64)
    for i in range(blocks.size):
        b = blocks[i]
        block = x[256 * i : 256 * i + 256]
        importance = None if w is None else w[256 * i : 256 * i + 256]
        importance_weights(block, importance, mean_square(block, np.float32(2)), weight)
        largest = np.float32(0)
        for g in range(16):
            group = slice(16 * g, 16 * g + 16)
            points = codes[2 * g : 2 * g + 2]
            scales[g], shifts[g] = _search_group(block[group], weight[group], tables, sums, rank, order, levels, points)
            largest = max(largest, scales[g])
        d = largest / np.float32(15)
        inverse = np.float32(1) / d
        if d == np.float32(0):
            shifts[:] = 0
        b["scales"][:] = 0
        qx, q2 = np.float32(0), np.float32(0)
        for g in range(16):
            s = nearest_level(scales[g], inverse, 7)
            b["scales"][g // 4] |= s << (3 * (g % 4))
            high = np.int32(0)
            for k in range(2):
                delta = _delta(shifts[g], k)
                code = codes[2 * g + k]
                qx, q2 = add_ternary(block, weight, 16 * g + 8 * k, code, np.float32(2 * s + 1), delta, qx, q2)
                b["qs"][2 * g + k] = index[code] & 255
                high |= (index[code] >> 8 | (8 if delta < np.float32(0) else 0)) << (4 * k)
            b["qh"][g] = high
        if d != np.float32(0) and q2 > np.float32(0):
            d = qx / q2
        bits = np.int32(finite_half(d * np.float32(1.1125)))
        for g in range(4):
            b["scales"][g] |= ((bits >> (4 * g)) & 15) << 12


@kernel
def quantize(x, blocks, tables):
    _quantize(x, None, blocks, tables)


@kernel
def quantize_weighted(x, w, blocks, tables):
    _quantize(x, w, blocks, tables)
