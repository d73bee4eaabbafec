"""Kernels of rounding with feedback. Rows are independent of each other; each kernel goes through some of them.

Names: `t` is the target of a column with the errors of earlier columns fed back, `w` the weight itself, `q` its value
after rounding. The error of a row is tr(e H e'), e = w - q, H the second moments of the inputs. With H = R R', R upper
triangular, it is the sum over columns of D_j (t_j - q_j)^2, where t_j = w_j + sum over k < j of (w_k - q_k) M_kj,
D_j = R_jj^2 and M_kj = R_kj / R_jj (GPTQ: Frantar et al. 2022, arXiv 2210.17323, in the form
of LDLQ: Chee et al. 2023, arXiv 2307.13304). For points the columns of one cell are rounded together: D is then a small
matrix for each cell, and M has the cells' inverses in it.

`descend_*` go on from there: each code, or each group's scale with its codes, is changed where that lowers the error,
until a pass changes nothing; d is fitted again by least squares.
"""

import numpy as np

from quant.half import float_to_half, half_to_float
from quant.jit import fast_kernel
from quant.refine.parts import EVEN, NONE, POWER

_HUGE = np.float32(3e38)
_LEAST_GAIN = np.float32(1e-12)


@fast_kernel
def rounded(d, rounding):
    """d as the format can store it."""
    if rounding == POWER:
        if not d > np.float32(1e-38):
            return np.float32(1e-38)
        return np.float32(2.0 ** np.rint(np.log2(d)))
    return half_to_float(float_to_half(max(np.float32(-65504), min(np.float32(65504), d))))


@fast_kernel
def nearest(x, a, b, levels, even_steps):
    """Number of the level for which a * level + b is nearest to x."""
    n = levels.size
    if a == np.float32(0):
        return 0
    y = (x - b) / a
    if even_steps:
        return max(0, min(n - 1, int(np.rint(y - levels[0]))))
    low, high = 0, n - 1
    if y <= levels[0]:
        return 0
    if y >= levels[high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if y < levels[middle]:
            high = middle
        else:
            low = middle
    return low if y - levels[low] < levels[high] - y else high


# --- levels -----------------------------------------------------------------------------------------------------------


@fast_kernel
def _try_levels(t, w, at, a, b, levels, even_steps, feedback, weight, limit, q, codes):
    """Round the columns at .. at + t.size of a row one after the other, with feedback among them; `t` is used up.
    Returns the error; stops where it passes `limit`."""
    error = np.float32(0)
    for j in range(t.size):
        k = nearest(t[j], a, b, levels, even_steps)
        y = a * levels[k] + b
        error += weight[at + j] * (t[j] - y) * (t[j] - y)
        if error >= limit:
            return error
        q[j], codes[j] = y, k
        left = w[at + j] - y
        for i in range(j + 1, t.size):
            t[i] += left * feedback[at + j, at + i]
    return error


@fast_kernel
def round_levels(target, w, feedback, weight, layout, window, factors, parts, q):
    """One block of every row: target, w, q float32 [rows, block]; feedback float32 [block, block], weight float32
    [block]: M and D of the block's columns. layout: (group, levels, even steps, scale range, min range, rounding), an
    empty range is (1, 0); window: how far scales and mins are moved from where they are; factors: of d, where it is the
    only scale. parts: (d, dmin, scales, mins, codes), of the block, changed in place."""
    group, levels, even_steps, (s_low, s_high), (m_low, m_high), rounding = layout
    d, dmin, scales, mins, codes = parts
    rows, size = target.shape
    t, trial = np.empty(size, np.float32), np.empty(group, np.float32)
    tried, found = np.empty(group, np.float32), np.empty(group, np.int32)
    for r in range(rows):
        t[:] = target[r]
        kept = d[r]
        for g in range(size // group):
            at = g * group
            best, scale0, min0 = _HUGE, scales[r, g], mins[r, g]
            first, last = max(s_low, scale0 - window), min(s_high, scale0 + window)
            if s_low > s_high:
                first, last = 0, factors.size - 1
            min_first, min_last = max(m_low, min0 - window), min(m_high, min0 + window)
            if m_low > m_high:
                min_first = min_last = min0
            for s in range(first, last + 1):
                a = d[r] * np.float32(s) if s_low <= s_high else rounded(d[r] * factors[s], rounding)
                for m in range(min_first, min_last + 1):
                    trial[:] = t[at : at + group]
                    error = _try_levels(
                        trial, w[r], at, a, -dmin[r] * np.float32(m), levels, even_steps, feedback, weight, best,
                        tried, found,
                    )  # fmt: skip
                    if error < best:
                        best = error
                        mins[r, g] = m
                        if s_low <= s_high:
                            scales[r, g] = s
                        else:
                            kept = a
                        q[r, at : at + group] = tried
                        codes[r, at : at + group] = found
            for j in range(at, at + group):
                left = w[r, j] - q[r, j]
                for i in range(at + group, size):
                    t[i] += left * feedback[j, i]
        d[r] = kept


@fast_kernel
def _add_row(g, factor, row):
    for i in range(g.size):
        g[i] += factor * row[i]


@fast_kernel
def _gradient(w, q, moments, g):
    """g = (w - q) H of one row."""
    g[:] = np.float32(0)
    for j in range(w.size):
        left = w[j] - q[j]
        if left != np.float32(0):
            _add_row(g, left, moments[j])


@fast_kernel
def descend_levels(w, moments, layout, window, passes, parts, q):
    """Coordinate descent on codes, scales and mins, and least squares for d and dmin, of whole rows: w, q float32
    [rows, n]; moments: H, float32 [n, n]; layout as in `round_levels`; parts: (d, dmin, scales, mins, codes) of all
    blocks."""
    group, levels, even_steps, (s_low, s_high), (m_low, m_high), rounding = layout
    d, dmin, scales, mins, codes = parts
    rows, n = w.shape
    blocks = d.shape[1]
    size = n // blocks
    g = np.empty(n, np.float32)
    trial_g, trial_q, trial_c = np.empty(group, np.float32), np.empty(group, np.float32), np.empty(group, np.int32)
    best_q, best_c = np.empty(group, np.float32), np.empty(group, np.int32)
    pattern, shift = np.empty(size, np.float32), np.empty(size, np.float32)
    for r in range(rows):
        _gradient(w[r], q[r], moments, g)
        for _ in range(passes):
            changes = 0
            for block in range(blocks):
                for part in range(size // group):
                    at = block * size + part * group
                    scale0, min0 = scales[r, block, part], mins[r, block, part]
                    first, last = max(s_low, scale0 - window), min(s_high, scale0 + window)
                    if s_low > s_high:
                        first = last = 1
                    min_first, min_last = max(m_low, min0 - window), min(m_high, min0 + window)
                    if m_low > m_high:
                        min_first = min_last = min0
                    best = -_LEAST_GAIN
                    for s in range(first, last + 1):
                        a = d[r, block] * np.float32(s)
                        for m in range(min_first, min_last + 1):
                            b = -dmin[r, block] * np.float32(m)
                            trial_g[:] = g[at : at + group]
                            trial_q[:] = q[r, at : at + group]
                            change = np.float32(0)
                            for j in range(group):
                                h = moments[at + j, at + j]
                                k = nearest(trial_q[j] + trial_g[j] / h, a, b, levels, even_steps)
                                y = a * levels[k] + b
                                trial_c[j] = k
                                step = y - trial_q[j]
                                if step != np.float32(0):
                                    change += step * (step * h - np.float32(2) * trial_g[j])
                                    for i in range(group):
                                        trial_g[i] -= step * moments[at + j, at + i]
                                    trial_q[j] = y
                            if change < best:
                                best = change
                                scales[r, block, part], mins[r, block, part] = s, m
                                best_q[:] = trial_q
                                best_c[:] = trial_c
                    if best < -_LEAST_GAIN:
                        changes += 1
                        for j in range(group):
                            step = best_q[j] - q[r, at + j]
                            if step != np.float32(0):
                                _add_row(g, -step, moments[at + j])
                            q[r, at + j], codes[r, at + j] = best_q[j], best_c[j]
            for block in range(blocks):
                at = block * size
                for j in range(size):
                    pattern[j] = np.float32(scales[r, block, j // group]) * levels[codes[r, at + j]]
                    shift[j] = np.float32(-mins[r, block, j // group])
                new_d, new_dmin = _fitted(
                    pattern, shift, moments, g, at, d[r, block], dmin[r, block], rounding, s_low >= 0
                )
                if new_d == d[r, block] and new_dmin == dmin[r, block]:
                    continue
                d[r, block], dmin[r, block] = new_d, new_dmin
                for j in range(size):
                    k = j // group
                    y = new_d * np.float32(scales[r, block, k]) * levels[codes[r, at + j]]
                    y -= new_dmin * np.float32(mins[r, block, k])
                    step = y - q[r, at + j]
                    if step != np.float32(0):
                        _add_row(g, -step, moments[at + j])
                        q[r, at + j] = y
            if changes == 0:
                break


@fast_kernel
def _fitted(pattern, shift, moments, g, at, d, dmin, rounding, positive):
    """d and dmin that make the error least with the codes as they are: of d * pattern + dmin * shift, from the columns
    `at` on. The old ones where rounding them eats the gain up."""
    size = pattern.size
    a11, a12, a22, r1, r2 = np.float64(0), np.float64(0), np.float64(0), np.float64(0), np.float64(0)
    for j in range(size):
        h1, h2 = np.float64(0), np.float64(0)
        for i in range(size):
            h = np.float64(moments[at + j, at + i])
            h1 += h * np.float64(pattern[i])
            h2 += h * np.float64(shift[i])
        a11 += h1 * np.float64(pattern[j])
        a12 += h1 * np.float64(shift[j])
        a22 += h2 * np.float64(shift[j])
        r1 += np.float64(pattern[j]) * np.float64(g[at + j])
        r2 += np.float64(shift[j]) * np.float64(g[at + j])
    determinant = a11 * a22 - a12 * a12
    x1, x2 = np.float64(0), np.float64(0)
    if a22 > 0 and determinant > 1e-9 * a11 * a22:
        x1, x2 = (r1 * a22 - r2 * a12) / determinant, (r2 * a11 - r1 * a12) / determinant
    elif a11 > 0:
        x1 = r1 / a11
    new_d, new_dmin = rounded(np.float32(d + x1), rounding), rounded(np.float32(dmin + x2), 0)
    if positive and new_d < np.float32(0):
        new_d = d
    if positive and new_dmin < np.float32(0):
        new_dmin = dmin
    x1, x2 = np.float64(new_d) - np.float64(d), np.float64(new_dmin) - np.float64(dmin)
    gain = 2 * (x1 * r1 + x2 * r2) - (x1 * x1 * a11 + 2 * x1 * x2 * a12 + x2 * x2 * a22)
    if gain > 0 and np.isfinite(gain):
        return new_d, new_dmin
    return d, dmin


# --- points -----------------------------------------------------------------------------------------------------------


@fast_kernel
def _fits(x, weight, points, a, squares, dims, at, parity, plain, flipped):
    """Costs a^2 N_i - 2 a P_i of all points for the `dims` columns of x from `at`, under the weights, without the part
    that all share. With signs of x given to the points; `flipped`: one sign turned, that which costs least."""
    n = points.shape[1]
    for i in range(n):
        plain[i] = np.float32(0)
    if parity != NONE:
        for i in range(n):
            flipped[i] = _HUGE
        for j in range(dims):
            f = weight[at + j] * abs(x[at + j])
            for i in range(n):
                z = f * points[j, i]
                plain[i] += z
                flipped[i] = min(flipped[i], z)
    else:
        for j in range(dims):
            f = weight[at + j] * x[at + j]
            for i in range(n):
                plain[i] += f * points[j, i]
    for i in range(n):
        plain[i] = a * (a * squares[i] - np.float32(2) * plain[i])
        flipped[i] = plain[i] + np.float32(4) * a * flipped[i]


@fast_kernel
def _least(costs):
    best = 0
    for i in range(1, costs.size):
        if costs[i] < costs[best]:
            best = i
    return best


@fast_kernel
def _pick(x, weight, points, a, squares, signs, work, codes, negative, y):
    """Best points for the columns of one cell, x, under diagonal weights. points: float32 [dims, points]; squares:
    float32 [vectors, points], sums of weight * point^2; codes, negative, y get the result."""
    plain, flipped, choice = work
    dims = points.shape[0]
    vectors = x.size // dims
    odd = False
    if signs == EVEN:
        for j in range(x.size):
            odd ^= x[j] < np.float32(0)
    turn = 0  # bit v: vector v has one sign turned
    costs = choice[0]
    for v in range(vectors):
        _fits(x, weight, points, a, squares[v], dims, v * dims, signs, plain, flipped)
        i, k = _least(plain), 0
        costs[2 * v] = plain[i]
        choice[1, 2 * v] = np.float32(i)
        if signs == EVEN:
            k = _least(flipped)
            costs[2 * v + 1] = flipped[k]
            choice[1, 2 * v + 1] = np.float32(k)
    if signs == EVEN:
        least = _HUGE
        for bits in range(1 << vectors):
            ones, total = 0, np.float32(0)
            for v in range(vectors):
                one = (bits >> v) & 1
                ones ^= one
                total += costs[2 * v + one]
            if ones == odd and total < least:
                least, turn = total, bits
    for v in range(vectors):
        at, turned = v * dims, (turn >> v) & 1
        i = int(choice[1, 2 * v + turned])
        codes[v] = i
        weakest, least = -1, _HUGE
        if turned:
            for j in range(dims):
                z = weight[at + j] * abs(x[at + j]) * points[j, i]
                if z < least:
                    weakest, least = j, z
        for j in range(dims):
            level = a * points[j, i]
            if signs != NONE:
                minus = (x[at + j] < np.float32(0)) ^ (j == weakest)
                negative[at + j] = minus
                y[at + j] = -level if minus else level
            else:
                y[at + j] = level


@fast_kernel
def _work(points):
    return np.empty(points, np.float32), np.full(points, _HUGE, np.float32), np.empty((2, 4), np.float32)


@fast_kernel
def round_points(target, w, feedback, metric, layout, window, squares, parts, q):
    """As `round_levels`, for points. metric: float32 [cells, cell, cell], the small matrices of the block's cells;
    layout: (group, points [sets, dims, points a set], signs, highest scale, odd); squares: float32 [cells, sets,
    vectors, points]; parts: (d, scales, codes, negative) of the block."""
    group, points, signs, top = layout
    d, scales, codes, negative = parts
    rows, size = target.shape
    cell = metric.shape[1]
    sets, dims, n_points = points.shape
    vectors, per_group = cell // dims, group // dims
    t, trial = np.empty(size, np.float32), np.empty(group, np.float32)
    tried, tried_c = np.empty(group, np.float32), np.empty(per_group, np.int32)
    tried_n, weight, e = np.zeros(group, np.bool_), np.empty(cell, np.float32), np.empty(cell, np.float32)
    work = _work(n_points)
    for r in range(rows):
        t[:] = target[r]
        for g in range(size // group):
            at = g * group
            best, scale0 = _HUGE, scales[r, g]
            for s in range(max(0, scale0 - window), min(top, scale0 + window) + 1):
                a = d[r] * np.float32(2 * s + 1)
                for chosen in range(sets):
                    trial[:] = t[at : at + group]
                    error = np.float32(0)
                    for c in range(group // cell):
                        o = c * cell
                        place = (at + o) // cell
                        m = metric[place]
                        for j in range(cell):
                            weight[j] = m[j, j]
                        _pick(
                            trial[o : o + cell], weight, points[chosen], a, squares[place, chosen], signs, work,
                            tried_c[o // dims : o // dims + vectors], tried_n[o : o + cell], tried[o : o + cell],
                        )  # fmt: skip
                        for j in range(cell):
                            e[j] = trial[o + j] - tried[o + j]
                        for i in range(cell):
                            total = np.float32(0)
                            for j in range(cell):
                                total += m[i, j] * e[j]
                            error += e[i] * total
                        if error >= best:
                            break
                        for j in range(cell):
                            left = w[r, at + o + j] - tried[o + j]
                            for i in range(o + cell, group):
                                trial[i] += left * feedback[at + o + j, at + i]
                    if error < best:
                        best = error
                        scales[r, g] = s
                        q[r, at : at + group] = tried
                        if negative.size:
                            negative[r, at : at + group] = tried_n
                        for k in range(per_group):
                            codes[r, at // dims + k] = tried_c[k] + chosen * n_points
            for j in range(at, at + group):
                left = w[r, j] - q[r, j]
                for i in range(at + group, size):
                    t[i] += left * feedback[j, i]


@fast_kernel
def descend_points(w, moments, layout, cell, window, squares, passes, parts, q):
    """As `descend_levels`, for points. squares: as in `round_points`, under H's diagonal, of all cells of a row."""
    group, points, signs, top = layout
    d, scales, codes, negative = parts
    rows, n = w.shape
    blocks = d.shape[1]
    size = n // blocks
    sets, dims, n_points = points.shape
    vectors, per_group = cell // dims, group // dims
    g, weight = np.empty(n, np.float32), np.empty(cell, np.float32)
    x, step, new_y = np.empty(cell, np.float32), np.empty(cell, np.float32), np.empty(cell, np.float32)
    new_c, new_n = np.empty(vectors, np.int32), np.zeros(cell, np.bool_)
    trial_g, trial_q, trial_n = np.empty(group, np.float32), np.empty(group, np.float32), np.zeros(group, np.bool_)
    trial_c, best_c = np.empty(per_group, np.int32), np.empty(per_group, np.int32)
    best_q, best_n = np.empty(group, np.float32), np.zeros(group, np.bool_)
    pattern, shift = np.empty(size, np.float32), np.zeros(size, np.float32)
    work = _work(n_points)
    for r in range(rows):
        _gradient(w[r], q[r], moments, g)
        for _ in range(passes):
            changes = 0
            for block in range(blocks):
                for part in range(size // group):
                    at = block * size + part * group
                    scale0, set0 = scales[r, block, part], codes[r, at // dims] // n_points
                    best = -_LEAST_GAIN
                    for s in range(max(0, scale0 - window), min(top, scale0 + window) + 1):
                        a = d[r, block] * np.float32(2 * s + 1)
                        for chosen in range(sets):
                            same = s == scale0 and chosen == set0
                            trial_g[:] = g[at : at + group]
                            trial_q[:] = q[r, at : at + group]
                            for k in range(per_group):
                                trial_c[k] = codes[r, at // dims + k]
                            if negative.size:
                                trial_n[:] = negative[r, at : at + group]
                            change = np.float32(0)
                            for c in range(group // cell):
                                o = c * cell
                                for j in range(cell):
                                    weight[j] = moments[at + o + j, at + o + j]
                                    x[j] = trial_q[o + j] + trial_g[o + j] / weight[j]
                                _pick(
                                    x, weight, points[chosen], a, squares[(at + o) // cell, chosen], signs, work, new_c,
                                    new_n, new_y,
                                )  # fmt: skip
                                part_change = np.float32(0)
                                for j in range(cell):
                                    step[j] = new_y[j] - trial_q[o + j]
                                for i in range(cell):
                                    total = np.float32(0)
                                    for j in range(cell):
                                        total += moments[at + o + i, at + o + j] * step[j]
                                    part_change += step[i] * (total - np.float32(2) * trial_g[o + i])
                                if same and part_change >= np.float32(0):
                                    continue
                                change += part_change
                                for j in range(cell):
                                    for i in range(group):
                                        trial_g[i] -= step[j] * moments[at + o + j, at + i]
                                    trial_q[o + j], trial_n[o + j] = new_y[j], new_n[j]
                                for k in range(vectors):
                                    trial_c[o // dims + k] = new_c[k] + chosen * n_points
                            if change < best:
                                best = change
                                scales[r, block, part] = s
                                best_q[:] = trial_q
                                best_n[:] = trial_n
                                best_c[:] = trial_c
                    if best < -_LEAST_GAIN:
                        changes += 1
                        for j in range(group):
                            move = best_q[j] - q[r, at + j]
                            if move != np.float32(0):
                                _add_row(g, -move, moments[at + j])
                            q[r, at + j] = best_q[j]
                        if negative.size:
                            negative[r, at : at + group] = best_n
                        for k in range(per_group):
                            codes[r, at // dims + k] = best_c[k]
            for block in range(blocks):
                at = block * size
                if d[r, block] == np.float32(0):
                    continue
                for j in range(size):
                    pattern[j] = q[r, at + j] / d[r, block]
                new_d, _none = _fitted(pattern, shift, moments, g, at, d[r, block], np.float32(0), 0, True)
                if new_d == d[r, block] or new_d == np.float32(0):
                    continue
                for j in range(size):
                    k = codes[r, (at + j) // dims]
                    y = new_d * np.float32(2 * scales[r, block, j // group] + 1)
                    y *= points[k // n_points, (at + j) % dims, k % n_points]
                    if negative.size and negative[r, at + j]:
                        y = -y
                    move = y - q[r, at + j]
                    _add_row(g, -move, moments[at + j])
                    q[r, at + j] = y
                d[r, block] = new_d
            if changes == 0:
                break
