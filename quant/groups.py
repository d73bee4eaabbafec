"""From rows to groups and back: what the 32-weight and the K formats share around the searches of `quant/search.py`.

Sixteen groups are searched side by side (`quant/lanes.py`); codes are then written in the row's own order. The kernels
that take `blocks` fill the scale fields of a row's blocks and leave one uint8 code per weight in `codes` [n]; packing
them is the format's business.
"""

import numpy as np

from quant.half import float_to_half, half_to_float
from quant.jit import kernel
from quant.lanes import absolute, load, nearest_code, root, select, splat, store, store_codes, transpose
from quant.pack import pack_scales_mins, scale_min
from quant.search import (
    INVERSE,
    MIN,
    OFFSET,
    SCALE,
    TOTAL,
    affine,
    affine_codes,
    nearest,
    positive,
    row_mean_square,
    square_sum,
    symmetric_codes,
    symmetric_groups,
)

SUPER = 256  # weights in a super-block


@kernel
def gather(x, start, size, count, out):
    """Lay `count` (up to 16) neighbouring groups of `size` weights into lanes: out float32 [size * 16]."""
    for j in range(0, size, 16):
        transpose(x, start + j, size, count, out, 16 * j)


@kernel
def importance_weights(x, w, n, sigma2, out):
    """out = w * sqrt(sigma2 + x^2), in lanes; sigma2: float32 [16], one for each lane."""
    s2 = load(sigma2, 0)
    for j in range(0, 16 * n, 16):
        v = load(x, j)
        store(out, j, load(w, j) * root(s2 + v * v))


@kernel
def affine_requantize(x, start, n, d, m, nmax, codes):
    """codes[start : start + n] = nearest (x + m) / d in 0..nmax."""
    for j in range(start, start + n, 16):
        store_codes(codes, j, nearest_code((load(x, j) + m) / d, 0, nmax))


@kernel
def symmetric_requantize(x, start, n, d, nmax, codes):
    """codes[start : start + n] = nearest x / d in -nmax..nmax-1, plus nmax."""
    for j in range(start, start + n, 16):
        store_codes(codes, j, nearest_code(load(x, j) / d, -nmax, nmax - 1) + np.float32(nmax))


@kernel
def largest(values):
    """The value of largest magnitude, with its sign; the first of equals; 0 for zeros."""
    found = np.float32(0)
    for j in range(values.size):
        if abs(values[j]) > abs(found):
            found = values[j]
    return found


@kernel
def scale_codes(values, levels, codes):
    """Non-negative values as codes 0..levels (uint8) of a common scale, largest / levels, which is returned."""
    top = np.float32(0)
    for j in range(values.size):
        if values[j] > top:
            top = values[j]
    inverse = np.float32(levels) / top if top > np.float32(0) else np.float32(0)
    for j in range(values.size):
        codes[j] = nearest(inverse * values[j])
    return top / np.float32(levels)


# ---- blocks of 32 with one scale, or one scale and one offset


@kernel
def _truncated(v, nmax):
    """v cut to an integer, at most nmax; 0 where a denormal scale's inverse overflowed."""
    v = select(absolute(v) < np.float32(128), v, splat(np.float32(0)))
    return select(v < np.float32(nmax), v, splat(np.float32(nmax)))


@kernel
def symmetric_blocks(x, blocks, half, codes):
    """d = m / -half with m the weight of largest magnitude; codes = trunc(x / d + half + 0.5), at most 2 * half - 1."""
    xs = np.empty(512, np.float32)
    scale = np.empty(16, np.float32)
    zero = splat(np.float32(0))
    for i in range(0, blocks.size, 16):
        count = min(16, blocks.size - i)
        gather(x, 32 * i, 32, count, xs)
        m = zero
        for j in range(0, 512, 16):
            v = load(xs, j)
            m = select(absolute(v) > absolute(m), v, m)
        store(scale, 0, m / np.float32(-half))
        for lane in range(count):
            d = scale[lane]
            inverse = np.float32(1) / d if d != np.float32(0) else np.float32(0)
            blocks[i + lane]["d"] = float_to_half(d)
            for j in range(32 * (i + lane), 32 * (i + lane) + 32, 16):
                v = load(x, j) * inverse + (np.float32(half) + np.float32(0.5))
                store_codes(codes, j, _truncated(v, 2 * half - 1))


@kernel
def affine_blocks(x, blocks, nmax, codes):
    """m = the least weight, d = (greatest - m) / nmax, codes = trunc((x - m) / d + 0.5)."""
    xs = np.empty(512, np.float32)
    scale = np.empty(16, np.float32)
    least = np.empty(16, np.float32)
    for i in range(0, blocks.size, 16):
        count = min(16, blocks.size - i)
        gather(x, 32 * i, 32, count, xs)
        low = load(xs, 0)
        high = low
        for j in range(16, 512, 16):
            v = load(xs, j)
            low = select(v < low, v, low)
            high = select(v > high, v, high)
        store(least, 0, low)
        store(scale, 0, (high - low) / np.float32(nmax))
        for lane in range(count):
            d = scale[lane]
            inverse = np.float32(1) / d if d != np.float32(0) else np.float32(0)
            blocks[i + lane]["d"] = float_to_half(d)
            blocks[i + lane]["m"] = float_to_half(least[lane])
            for j in range(32 * (i + lane), 32 * (i + lane) + 32, 16):
                store_codes(codes, j, _truncated((load(x, j) - least[lane]) * inverse + np.float32(0.5), nmax))


@kernel
def symmetric_blocks_weighted(x, w, blocks, half, codes):
    """d and codes 0..2 * half - 1 by `search.symmetric` with weights w * sqrt(mean square of the row + x^2)."""
    xs = np.empty(512, np.float32)
    ws = np.empty(512, np.float32)
    fit = np.empty((5, 16), np.float32)
    sigma2 = np.full(16, row_mean_square(x), np.float32)
    for i in range(0, blocks.size, 16):
        count = min(16, blocks.size - i)
        gather(x, 32 * i, 32, count, xs)
        gather(w, 32 * i, 32, count, ws)
        importance_weights(xs, ws, 32, sigma2, ws)
        symmetric_groups(xs, ws, 32, half, fit)
        for lane in range(count):
            blocks[i + lane]["d"] = float_to_half(fit[SCALE, lane])
            symmetric_codes(x, 32 * (i + lane), 32, half, fit[INVERSE, lane], codes)


@kernel
def affine_blocks_weighted(x, w, blocks, nmax, codes):
    """d, m and codes 0..nmax by `search.affine` with weights w * sqrt(mean square of the row + x^2)."""
    xs = np.empty(512, np.float32)
    ws = np.empty(512, np.float32)
    trial = np.empty(512, np.float32)
    fit = np.empty((5, 16), np.float32)
    sigma2 = np.full(16, row_mean_square(x), np.float32)
    for i in range(0, blocks.size, 16):
        count = min(16, blocks.size - i)
        gather(x, 32 * i, 32, count, xs)
        gather(w, 32 * i, 32, count, ws)
        importance_weights(xs, ws, 32, sigma2, ws)
        affine(xs, ws, 32, nmax, np.float32(-0.9), np.float32(0.05), 36, False, True, fit, trial)
        for lane in range(count):
            blocks[i + lane]["d"] = float_to_half(fit[SCALE, lane])
            blocks[i + lane]["m"] = float_to_half(-fit[MIN, lane])
            affine_codes(x, 32 * (i + lane), 32, nmax, True, fit[INVERSE, lane], fit[OFFSET, lane], codes)


# ---- super-blocks of eight groups of 32, x = d * scale * q - dmin * min, 6-bit scales and mins (Q4_K, Q5_K)


@kernel
def _write_affine(b, x, start, nmax, bounded, d, dmin, scales, mins, fit, lane, codes):
    """Fields of one block, and its codes for the scales as stored; the search's codes where a scale is stored as zero.
    `lane`: the block's first in `fit`."""
    b["d"] = float_to_half(d)
    b["dmin"] = float_to_half(dmin)
    packed = b["scales"]
    pack_scales_mins(scales, mins, packed)
    for j in range(8):
        scale, offset = scale_min(packed, j)
        dl = half_to_float(b["d"]) * np.float32(scale)
        if dl == np.float32(0):
            affine_codes(x, start + 32 * j, 32, nmax, bounded, fit[INVERSE, lane + j], fit[OFFSET, lane + j], codes)
        else:
            affine_requantize(x, start + 32 * j, 32, dl, half_to_float(b["dmin"]) * np.float32(offset), nmax, codes)


@kernel
def affine_super_blocks(x, blocks, nmax, first, step, tries, codes):
    """Weights rms(group) + |x|; scales and mins in proportion to their largest. first, step, tries: see `affine`."""
    xs = np.empty(512, np.float32)
    ws = np.empty(512, np.float32)
    trial = np.empty(512, np.float32)
    fit = np.empty((5, 16), np.float32)
    scales = np.empty(8, np.uint8)
    mins = np.empty(8, np.uint8)
    for i in range(0, blocks.size, 2):
        count = min(2, blocks.size - i)
        gather(x, SUPER * i, 32, 8 * count, xs)
        total = splat(np.float32(0))
        for j in range(0, 512, 16):
            v = load(xs, j)
            total += v * v
        rms = root(total / np.float32(32))
        for j in range(0, 512, 16):
            store(ws, j, rms + absolute(load(xs, j)))
        affine(xs, ws, 32, nmax, first, step, tries, False, False, fit, trial)
        for s in range(count):
            lane = 8 * s
            d = scale_codes(fit[SCALE, lane : lane + 8], 63, scales)
            dmin = scale_codes(fit[MIN, lane : lane + 8], 63, mins)
            for j in range(8):
                scales[j] = min(scales[j], np.uint8(63))
                mins[j] = min(mins[j], np.uint8(63))
            _write_affine(blocks[i + s], x, SUPER * (i + s), nmax, False, d, dmin, scales, mins, fit, lane, codes)


@kernel
def affine_super_blocks_weighted(x, w, blocks, nmax, highest, codes):
    """Weights w * sqrt(2 * mean square of the super-block + x^2); scales and mins by `search.positive`.

    highest: what coded scales and mins are cut to. It matters where most importance is zero: a fitted scale can then be
    negative, and its code wraps round.
    """
    xs = np.empty(512, np.float32)
    ws = np.empty(512, np.float32)
    trial = np.empty(512, np.float32)
    fit = np.empty((5, 16), np.float32)
    sigma2 = np.empty(16, np.float32)
    scales = np.empty(8, np.uint8)
    mins = np.empty(8, np.uint8)
    for i in range(0, blocks.size, 2):
        count = min(2, blocks.size - i)
        gather(x, SUPER * i, 32, 8 * count, xs)
        gather(w, SUPER * i, 32, 8 * count, ws)
        for s in range(2):
            at = SUPER * min(i + s, blocks.size - 1)
            sigma2[8 * s : 8 * s + 8] = np.float32(2) * square_sum(x[at : at + SUPER]) / np.float32(SUPER)
        importance_weights(xs, ws, 32, sigma2, ws)
        affine(xs, ws, 32, nmax, np.float32(-0.9), np.float32(0.05), 36, False, True, fit, trial)
        for s in range(count):
            lane = 8 * s
            d = positive(fit[SCALE, lane : lane + 8], fit[TOTAL, lane : lane + 8], 63, scales)
            dmin = positive(fit[MIN, lane : lane + 8], fit[TOTAL, lane : lane + 8], 63, mins)
            for j in range(8):
                scales[j] = min(scales[j], np.uint8(highest))
                mins[j] = min(mins[j], np.uint8(highest))
            _write_affine(blocks[i + s], x, SUPER * (i + s), nmax, True, d, dmin, scales, mins, fit, lane, codes)
