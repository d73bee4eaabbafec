"""Scale searches and roundings shared by formats.

Strict float32, sums in the reference's order: identical bytes are the test. `symmetric` and `positive` take one group
of values; their lane forms, `affine`, `symmetric_groups` and `refined_groups`, take sixteen groups at once, element j
of group l at index 16 * j + l (`lanes.transpose`), and leave one row of numbers for each quantity in `fit`.
"""

import numpy as np

from quant.half import bits_of
from quant.jit import kernel
from quant.lanes import absolute, any_lane, load, nearest_code, select, splat, store, store_codes

GROUP_EPS = np.float32(1e-15)  # a group whose largest magnitude is below this is stored as zeros

# rows of `fit`, float32 [5, 16]: the scale; minus the offset, where there is one; sum of weights; and the inverse scale
# and offset that the final codes came from (codes are computed again from them, which is cheaper than to keep them)
SCALE, MIN, TOTAL, INVERSE, OFFSET = range(5)


@kernel
def round_away(v):
    """float32 -> int32, nearest, halves away from zero (C's roundf)."""
    magnitude = np.floor(abs(v))
    if abs(v) - magnitude >= np.float32(0.5):  # the difference is exact, the sum abs(v) + 0.5 is not
        magnitude += np.float32(1)
    return np.int32(-magnitude) if v < np.float32(0) else np.int32(magnitude)


@kernel
def nearest(v):
    """float32 -> int32, nearest, halves to even, by adding 1.5 * 2^23; meant for |v| <= 2^22."""
    return np.int32(bits_of(v + np.float32(12582912.0)) & np.uint32(0x007FFFFF)) - np.int32(0x00400000)


@kernel
def square_sum(x):
    """Sum of squares, from left to right."""
    total = np.float32(0)
    for j in range(x.size):
        total += x[j] * x[j]
    return total


@kernel
def row_mean_square(x):
    """Mean of the squares of a row."""
    return square_sum(x) / np.float32(x.size)


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


@kernel
def positive(x, weight, nmax, codes):
    """Scale d for non-negative x ~ d * q with q in 0..nmax, least weighted squares; codes (uint8) get q.

    Chooses among nine inverse scales near nmax / max by the error without refitting, then refits by least squares and
    moves single codes while that helps, at most five passes (ggml: make_qp_quants).
    """
    n = x.size
    limit = np.float32(nmax)
    largest = np.float32(0)
    for j in range(n):
        largest = largest if largest > x[j] else x[j]
    if largest < GROUP_EPS:
        codes[:] = 0
        return np.float32(0)
    inverse = limit / largest
    scale = np.float32(1) / inverse
    best = np.float32(0)
    for j in range(n):
        diff = x[j] - scale * np.float32(np.uint8(nearest(inverse * x[j])))
        best += weight[j] * diff * diff
    for step in range(-4, 5):
        if step == 0:
            continue
        trial = (np.float32(0.1) * np.float32(step) + limit) / largest
        scale = np.float32(1) / trial
        error = np.float32(0)
        for j in range(n):
            diff = x[j] - scale * np.float32(min(nmax, nearest(trial * x[j])))
            error += weight[j] * diff * diff
        if error < best:
            best = error
            inverse = trial
    sum_lx = np.float32(0)
    sum_l2 = np.float32(0)
    for j in range(n):
        q = min(nmax, nearest(inverse * x[j]))
        codes[j] = q
        code = np.float32(q)
        sum_lx += weight[j] * x[j] * code
        sum_l2 += weight[j] * code * code
    for _ in range(5):
        changed = False
        for j in range(n):
            code = np.float32(codes[j])
            lx = sum_lx - weight[j] * x[j] * code
            l2 = sum_l2 - weight[j] * code * code
            if not (lx > np.float32(0) and l2 > np.float32(0)):
                continue
            q = min(nmax, nearest(x[j] * l2 / lx))
            if q == codes[j]:
                continue
            code = np.float32(q)
            lx += weight[j] * x[j] * code
            l2 += weight[j] * code * code
            if lx * lx * sum_l2 > sum_lx * sum_lx * l2:
                codes[j] = q
                sum_lx = lx
                sum_l2 = l2
                changed = True
        if not changed:
            break
    return sum_lx / sum_l2 if sum_l2 > np.float32(0) else np.float32(0)


@kernel
def _code(v, nmax, bounded):
    """Nearest code in 0..nmax; `bounded`: as if v were clamped before rounding, NaN to 0."""
    if bounded:
        limit = splat(np.float32(nmax))
        zero = splat(np.float32(0))
        v = select(v > zero, select(v < limit, v, limit), zero)
    return nearest_code(v, 0, nmax)


@kernel
def affine(x, weight, n, nmax, first, step, tries, magnitude, bounded, fit, codes):
    """Sixteen groups x ~ scale * q + offset with q in 0..nmax and offset <= 0, least weighted squares, or least
    weighted magnitudes if `magnitude`, of the error.

    Tries inverse scales (nmax + first + k * step) / (max - offset), k = 0..tries, each followed by the least-squares
    fit of scale and offset. The best offset so far takes part in the next tries, as it does in the reference.
    x, weight, codes (scratch): float32 [n * 16] (ggml: make_qkx2_quants; make_qkx3_quants if `bounded`).
    """
    limit = np.float32(nmax)
    zero = splat(np.float32(0))
    low = load(x, 0)
    high = low
    sum_w = load(weight, 0)
    sum_x = sum_w * low
    for j in range(1, n):
        v = load(x, 16 * j)
        w = load(weight, 16 * j)
        low = select(v < low, v, low)
        high = select(v > high, v, high)
        sum_w += w
        sum_x += w * v
    low = select(low > zero, zero, low)
    lowest = low
    flat = high == low
    inverse = limit / (high - low)
    scale = np.float32(1) / inverse
    best = zero
    for j in range(n):
        v = load(x, 16 * j)
        diff = scale * nearest_code(inverse * (v - low), 0, nmax) + low - v
        best += load(weight, 16 * j) * (absolute(diff) if magnitude else diff * diff)
    # an infinite inverse scale (a range of denormals) gives zeros
    best_inverse = select(inverse < np.float32(np.inf), inverse, zero)
    best_offset = low
    for k in range(tries + 1):
        inverse = (first + step * np.float32(k) + limit) / (high - low)
        sum_l = zero
        sum_l2 = zero
        sum_xl = zero
        for j in range(n):
            v = load(x, 16 * j)
            code = _code(inverse * (v - low), nmax, bounded)
            store(codes, 16 * j, code)
            wl = load(weight, 16 * j) * code
            sum_l += wl
            sum_l2 += wl * code
            sum_xl += wl * v
        determinant = sum_w * sum_l2 - sum_l * sum_l
        new_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
        new_low = (sum_l2 * sum_x - sum_l * sum_xl) / determinant
        above = new_low > zero
        new_low = select(above, zero, new_low)
        new_scale = select(above, sum_xl / sum_l2, new_scale)
        error = zero
        for j in range(n):
            diff = new_scale * load(codes, 16 * j) + new_low - load(x, 16 * j)
            error += load(weight, 16 * j) * (absolute(diff) if magnitude else diff * diff)
        better = (determinant > zero) & (error < best)
        best = select(better, error, best)
        best_inverse = select(better, inverse, best_inverse)
        best_offset = select(better, low, best_offset)
        scale = select(better, new_scale, scale)
        low = select(better, new_low, low)
    store(fit[SCALE], 0, select(flat, zero, scale))
    store(fit[MIN], 0, np.float32(-1) * select(flat, lowest, low))
    store(fit[TOTAL], 0, sum_w)
    store(fit[INVERSE], 0, select(flat, zero, best_inverse))
    store(fit[OFFSET], 0, select(flat, zero, best_offset))


@kernel
def affine_codes(x, start, n, nmax, bounded, inverse, offset, codes):
    """codes[start : start + n] (uint8) that `affine` found for this stretch of a row."""
    for j in range(start, start + n, 16):
        store_codes(codes, j, _code(inverse * (load(x, j) - offset), nmax, bounded))


@kernel
def symmetric_groups(x, weight, n, nmax, fit):
    """`symmetric` for sixteen groups; x, weight: float32 [n * 16]. An inverse scale of zero means: all codes zero."""
    limit = np.float32(nmax)
    zero = splat(np.float32(0))
    m = zero
    amax = zero
    total = zero
    for j in range(n):
        v = load(x, 16 * j)
        larger = absolute(v) > amax
        amax = select(larger, absolute(v), amax)
        m = select(larger, v, m)
        total += load(weight, 16 * j)
    inverse = -limit / m
    best_inverse = inverse
    scale = zero
    best = zero
    for trial in range(19):
        step = 0 if trial == 0 else trial - 10 if trial < 10 else trial - 9
        inverse = -(limit + np.float32(0.1) * np.float32(step)) / m
        sum_lx = zero
        sum_l2 = zero
        for j in range(n):
            v = load(x, 16 * j)
            w = load(weight, 16 * j)
            code = nearest_code(inverse * v, -nmax, nmax - 1)
            sum_lx += w * v * code
            sum_l2 += w * code * code
        if trial == 0:
            scale = select(sum_l2 == zero, zero, sum_lx / sum_l2)
            best = scale * sum_lx
        else:
            better = (sum_l2 > zero) & (sum_lx * sum_lx > best * sum_l2)
            best_inverse = select(better, inverse, best_inverse)
            scale = select(better, sum_lx / sum_l2, scale)
            best = select(better, scale * sum_lx, best)
    empty = amax < GROUP_EPS
    store(fit[SCALE], 0, select(empty, zero, scale))
    store(fit[TOTAL], 0, total)
    store(fit[INVERSE], 0, select(empty, zero, best_inverse))


@kernel
def symmetric_codes(x, start, n, nmax, inverse, codes):
    """codes[start : start + n] (uint8, q + nmax) that `symmetric_groups` found for this stretch of a row."""
    for j in range(start, start + n, 16):
        if inverse == np.float32(0):
            store_codes(codes, j, splat(np.float32(0)))
        else:
            store_codes(codes, j, nearest_code(inverse * load(x, j), -nmax, nmax - 1) + np.float32(nmax))


@kernel
def refined_groups(x, n, nmax, fit, codes):
    """Sixteen groups x ~ scale * q with q in -nmax..nmax-1, least squares with weights x^2: starts from -nmax / m and
    moves single codes while that helps, at most five passes (ggml: make_q3_quants).

    x: float32 [n * 16]; codes, float32 [n * 16], get q + nmax.
    """
    limit = np.float32(nmax)
    zero = splat(np.float32(0))
    m = zero
    amax = zero
    for j in range(n):
        v = load(x, 16 * j)
        larger = absolute(v) > amax
        amax = select(larger, absolute(v), amax)
        m = select(larger, v, m)
    empty = amax < GROUP_EPS
    inverse = -limit / m
    sum_lx = zero
    sum_l2 = zero
    for j in range(n):
        v = load(x, 16 * j)
        w = v * v
        code = nearest_code(inverse * v, -nmax, nmax - 1)
        store(codes, 16 * j, code)
        sum_lx += w * v * code
        sum_l2 += w * code * code
    for _ in range(5):
        changed = zero > zero
        for j in range(n):
            v = load(x, 16 * j)
            w = v * v
            code = load(codes, 16 * j)
            lx = sum_lx - w * v * code
            l2 = sum_l2 - w * code * code
            new = nearest_code(v * l2 / lx, -nmax, nmax - 1)
            new_lx = lx + w * v * new
            new_l2 = l2 + w * new * new
            better = (lx > zero) & (new_l2 > zero) & (new_lx * new_lx * sum_l2 > sum_lx * sum_lx * new_l2)
            better &= (new < code) | (new > code)
            store(codes, 16 * j, select(better, new, code))
            sum_lx = select(better, new_lx, sum_lx)
            sum_l2 = select(better, new_l2, sum_l2)
            changed |= better
        if not any_lane(changed):
            break
    for j in range(n):
        store(codes, 16 * j, select(empty, zero, load(codes, 16 * j) + limit))
    store(fit[SCALE], 0, select(empty, zero, select(sum_l2 > zero, sum_lx / sum_l2, zero)))
