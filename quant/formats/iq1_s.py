"""IQ1_S: x = d * (2 s + 1) * (q +- 1/8), q points of 8 numbers -1, 0, 1, blocks of 256. 1.5625 bits per weight.

| field | bytes | content |
|---|---|---|
| d | 2 | scale, IEEE half |
| qs | 32 | byte k: low bits of the position of point k in the codebook |
| qh | 16 | per group of 32: 3 high bits of each of its 4 positions, s in bits 12 to 14, bit 15: the shift is -1/8 |

ggml's `block_iq1_s`; the codebook has 2048 points. Needs importance w. A group's weights are sorted; all splits into
-1, 0, 1 are compared, with both shifts, by least squares with weights w * sqrt(2 * mean x^2 + x^2). Vectors that are
no point of the codebook then take one of their list (`lattice.nearest_point8`).

Where the reference aborts or stores an infinite scale: a scale beyond the half's range is stored as the largest; a
group whose sums leave the range of float32 is stored like one of zeros.
"""

import numpy as np

from quant import lattice
from quant.codebooks import CODEBOOKS
from quant.format import block_dtype
from quant.half import half_to_float
from quant.jit import kernel
from quant.lattice import finite_half, importance_weights, mean_square, nearest_level, nearest_point8

BLOCK = block_dtype("IQ1_S", d="<u2", qs=("u1", 32), qh=("<u2", 8))

DELTA = np.float32(0.125)
LOWEST = np.float32(-3.4028235e38)  # a score below that of any split
ALL_SPLITS = np.uint64(0xFFFFFFFFFFFFFFFF)
_EPS = np.float32(1e-12)
CODES = CODEBOOKS["IQ1_S"].codes


def tables():
    """Index and neighbour lists of the codebook (see `lattice.tables`)."""
    return lattice.tables("IQ1_S")


@kernel
def dequantize(b, y):
    d = half_to_float(b["d"])
    for k in range(32):
        h = np.int32(b["qh"][k // 4])
        scale = d * np.float32(2 * ((h >> np.int32(12)) & np.int32(7)) + 1)
        delta = -DELTA if h & 0x8000 else DELTA
        high = (h >> np.int32(3 * (k % 4))) & np.int32(7)
        code = np.int32(CODES[np.int32(b["qs"][k]) | (high << np.int32(8))])
        for i in range(8):
            y[8 * k + i] = scale * (ternary(code, i) + delta)


@kernel
def ternary(code, i):
    """-1, 0 or 1: weight i of a point."""
    return np.float32((code >> np.int32(2 * i)) & np.int32(3)) - np.float32(1)


@kernel
def sort_order(x, rank, order):
    """order = positions of x in ascending order of values, equal values in their order; rank is scratch int32 [n]."""
    rank[:] = 0
    for i in range(x.size):
        for j in range(x.size):  # counts without branches: faster here than any sort with them
            rank[j] += np.int32((x[i] < x[j]) | ((x[i] == x[j]) & (i < j)))
    for j in range(x.size):
        order[rank[j]] = j


@kernel
def split_levels(order, end1, end2, flip, levels):
    """levels = 0, 1, 2 for the first end1 weights of the order, those up to end2 and the rest; reversed with `flip`."""
    for j in range(order.size):
        level = 0 if j < end1 else 1 if j < end2 else 2
        levels[order[j]] = 2 - level if flip else level


@kernel
def ternary_point(x, weight, first, levels, scale, delta, index, near):
    """Code of the point for the levels of x[first : first + 8], and whether that is another vector than theirs."""
    code = np.int32(0)
    for i in range(8):
        code |= np.int32(levels[first + i]) << np.int32(2 * i)
    at = index[code]
    if at >= 0:
        return code, False
    base = delta - np.float32(1)
    return nearest_point8(near, -1 - at, x, weight, np.uint64(first), scale, np.float32(1), base), True


@kernel
def add_ternary(x, weight, first, code, factor, delta, qx, q2):
    """Sums qx, q2 continued with weight * q * x and weight * q^2 over a vector, q = factor * (its point + delta)."""
    for i in range(8):
        q = (ternary(code, i) + delta) * factor
        qx += weight[first + i] * q * x[first + i]
        q2 += weight[first + i] * q * q
    return qx, q2


@kernel
def _score(sum_x, sum_w, i1, i2, delta, best):
    """A split's sums of weight * x * q and weight * q^2, and whether they are better than `best`."""
    low, high = delta - np.float32(1), delta + np.float32(1)
    qx = sum_x[i1] * low + (sum_x[i2] - sum_x[i1]) * delta + (sum_x[32] - sum_x[i2]) * high
    q2 = sum_w[i1] * low * low + (sum_w[i2] - sum_w[i1]) * delta * delta + (sum_w[32] - sum_w[i2]) * high * high
    return qx, q2, (q2 > np.float32(0)) & (qx * qx > best * q2)


@kernel
def _better_splits(sum_x, sum_w, i1, best):
    """Bit i2 is set for each split (i1, i2) that is better than `best` with some shift; all are asked at once."""
    bits = np.uint64(0)
    for i2 in range(np.uint64(i1), np.uint64(33)):
        plus = _score(sum_x, sum_w, i1, i2, DELTA, best)[2]
        minus = _score(sum_x, sum_w, i1, i2, -DELTA, best)[2]
        bits |= np.uint64(plus | minus) << i2
    return bits


@kernel
def _best_split(sum_x, sum_w):
    """(end of the -1s, end of the 0s, shift, scale) of the best split; a shift of zero means that there is none.

    sum_x, sum_w: sums of weight * x and of weight before each position of the sorted weights.
    """
    best = LOWEST
    end1, end2, shift, scale = 0, 0, np.float32(0), np.float32(0)
    for i1 in range(33):
        ahead = _better_splits(sum_x, sum_w, i1, best)  # for most i1 there is none
        if not ahead:
            continue
        for i2 in range(np.uint64(i1), np.uint64(33)):
            if not (ahead >> i2) & np.uint64(1):
                continue
            for delta in (DELTA, -DELTA):
                qx, q2, better = _score(sum_x, sum_w, i1, i2, delta, best)
                if better:
                    end1, end2, shift, scale = i1, int(i2), delta, qx / q2
                    if scale * qx < best:  # rounding: what was no better than the old best may be better now
                        ahead = ALL_SPLITS
                    best = scale * qx
    return end1, end2, shift, scale


@kernel
def _search_group(x, weight, tables, sum_x, sum_w, rank, order, levels, codes):
    """(scale, shift) of a group, and its points in codes; scale zero where it is too small or not finite."""
    index, near = tables
    codes[:] = CODES[0]
    largest = np.float32(0)
    for j in range(32):
        largest = max(largest, abs(x[j]))
    if largest < _EPS:
        return np.float32(0), DELTA
    sort_order(x, rank, order)
    sum_x[0] = 0
    sum_w[0] = 0
    for j in range(32):
        i = order[j]
        sum_x[j + 1] = sum_x[j] + weight[i] * x[i]
        sum_w[j + 1] = sum_w[j] + weight[i]
    end1, end2, shift, scale = _best_split(sum_x, sum_w)
    if shift == np.float32(0) or not np.isfinite(scale):
        return np.float32(0), DELTA
    flip = scale < np.float32(0)
    split_levels(order, end1, end2, flip, levels)
    if flip:
        scale, shift = -scale, -shift
    moved = False
    qx, q2 = np.float32(0), np.float32(0)
    for k in range(4):
        codes[k], other = ternary_point(x, weight, 8 * k, levels, scale, shift, index, near)
        qx, q2 = add_ternary(x, weight, 8 * k, codes[k], np.float32(1), shift, qx, q2)
        moved |= other
    if moved and qx > np.float32(0) and q2 > np.float32(0):
        scale = qx / q2
    if not np.isfinite(scale):
        codes[:] = CODES[0]
        return np.float32(0), DELTA
    return scale, shift


quantize = None


@kernel
def quantize_weighted(x, w, blocks, tables):
    index = tables[0]
    weight = np.empty(256, np.float32)
    sum_x = np.empty(33, np.float32)
    sum_w = np.empty(33, np.float32)
    rank = np.empty(32, np.int32)
    order = np.empty(32, np.int64)
    levels = np.empty(32, np.int32)
    codes = np.empty(32, np.int32)
    scales = np.empty(8, np.float32)
    shifts = np.empty(8, np.float32)
    for i in range(blocks.size):
        b = blocks[i]
        block = x[256 * i : 256 * i + 256]
        importance_weights(block, w[256 * i : 256 * i + 256], mean_square(block, np.float32(2)), weight)
        largest = np.float32(0)
        for g in range(8):
            group = slice(32 * g, 32 * g + 32)
            points = codes[4 * g : 4 * g + 4]
            scales[g], shifts[g] = _search_group(
                block[group], weight[group], tables, sum_x, sum_w, rank, order, levels, points
            )
            largest = max(largest, scales[g])
        d = largest / np.float32(15)
        inverse = np.float32(1) / d
        b["d"] = finite_half(d * np.float32(1.125))
        for g in range(8):
            h = nearest_level(scales[g], inverse, 7) << 12
            if shifts[g] < np.float32(0) and d != np.float32(0):
                h |= 0x8000
            for k in range(4):
                position = index[codes[4 * g + k]]
                b["qs"][4 * g + k] = position & 255
                h |= (position >> 8) << (3 * k)
            b["qh"][g] = h
