"""What the IQ formats share: points near a vector, signs folded away, and the search for a group's scale and points.

A group of 16 or 32 weights is cut into vectors of 8 (or 4) magnitudes; each vector is stored as a point of the format's
codebook, the group as one scale. Vectors and points are handled as packed codes (see `quant.codebooks`).

Strict float32, sums in the reference's order. Speed comes from side by side work that leaves each sum alone: all tries
of a scale go through the loops together, and so do all candidates for a point.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from quant.codebooks import CODEBOOKS
from quant.half import bits_of, float_to_half
from quant.jit import kernel
from quant.search import nearest, positive

OFF_GRID, ALL_IF_ANY, ALL = range(3)


class Method(NamedTuple):
    """How a format searches.

    group: weights per scale; dims: weights per point; even: signs have even parity (see `fold_signs`); eps: a group
    whose largest magnitude is below is stored as zeros; tries: how many inverse scales, an odd number of them around
    (2 * levels - 1) / largest, whose numerators are `step` apart; again: the vectors projected once more with the best
    scale: those that were not on the grid, all if there was one (or no try was better than none), or all; start: the
    tries are laid around the scale of a plain search (`search.positive`), not around the largest magnitude.
    """

    group: int
    dims: int
    even: bool
    eps: np.float32
    tries: int
    step: np.float32
    again: int
    start: bool


class Work(NamedTuple):
    """Arrays of a search in one block of 256 weights: first its results, then scratch for one group."""

    codes: np.ndarray  # int32 [256 / dims, 1], the points' packed codes
    signs: np.ndarray  # uint8 [32], bit i: weight i of 8 is negative
    scales: np.ndarray  # float32 [256 / group], not negative
    weight: np.ndarray  # float32 [256]
    magnitude: np.ndarray  # float32 [256]
    root: np.ndarray  # float32 [256], square roots of the weights
    plain: np.ndarray  # uint8 [group], levels of the plain search
    tried: np.ndarray  # int32 [group / dims, width], codes; width: tries, filled up to whole vectors
    off: np.ndarray  # int32 [width], bit k: vector k was not on the grid
    floats: np.ndarray  # float32 [4, width], inverse scales, scales and two sums


_NONE = np.uint64(0x7F7FFFFF) << np.uint64(32)  # a key above that of every distance below the largest float32
_PAD = 8  # lists are filled up to a multiple of this, so that whole vectors cover them


@lru_cache(maxsize=len(CODEBOOKS))
def tables(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Index and neighbour lists of a format's codebook: (index, near).

    index: int32, by packed code: the point's position in the codebook, or -1 - offset of a list in `near` where the
    code is no point. near: uint16, a list is its length and then the codes of the points in the `shells` smallest
    distances from the vector, by distance and then by position; the last is repeated to fill whole vectors of `_PAD`.
    """
    book = CODEBOOKS[name]
    index = np.zeros(1 << (book.bits * book.dims), np.int32)  # codes of levels that no search uses stay zero
    near = np.empty(book.levels**book.dims * (1 + book.codes.size + _PAD), np.uint16)
    used = _list_neighbours(book.codes, book.dims, book.bits, book.levels, book.shells, index, near)
    return index, near[:used].copy()


@kernel
def _list_neighbours(codes, dims, bits, levels, shells, index, near):
    """Fill the tables; returns how much of `near` is used."""
    full = np.int32((1 << bits) - 1)
    index[codes] = -1
    distance = np.empty(codes.size, np.int32)
    used = 0
    for code in range(index.size):
        usual = True
        for i in range(dims):
            usual &= (code >> (bits * i)) & full < levels
        if index[code] or not usual:
            continue
        distance[:] = 0
        for i in range(dims):
            level = np.int32(code >> (bits * i)) & full
            for p in range(codes.size):
                diff = level - (np.int32(codes[p] >> np.int32(bits * i)) & full)
                distance[p] += diff * diff
        start = used
        used += 1
        shell = np.int32(-1)
        for _ in range(shells):
            next_shell = np.int32(1 << 30)
            for p in range(codes.size):
                if distance[p] > shell:
                    next_shell = min(next_shell, distance[p])
            shell = next_shell
            for p in range(codes.size):
                if distance[p] == shell:
                    near[used] = codes[p]
                    used += 1
        while (used - start - 1) % _PAD:
            near[used] = near[used - 1]
            used += 1
        near[start] = used - start - 1
        index[code] = -1 - start
    for p in range(codes.size):
        index[codes[p]] = p
    return used


@kernel
def finite_half(d):
    """float32 -> bits of the nearest finite IEEE half; NaN gives zero."""
    if np.isnan(d):
        return np.uint16(0)
    return float_to_half(max(np.float32(-65504), min(np.float32(65504), d)))


@kernel
def mean_square(x, factor):
    """factor * sum of squares / count, summed from left to right."""
    total = np.float32(0)
    for j in range(x.size):
        total += x[j] * x[j]
    return factor * total / np.float32(x.size)


@kernel
def importance_weights(x, w, sigma2, weight):
    """weight = w * sqrt(sigma2 + x^2), or x^2 where w is None."""
    for j in range(x.size):
        if w is None:
            weight[j] = x[j] * x[j]
        else:
            weight[j] = w[j] * np.sqrt(sigma2 + x[j] * x[j])


@kernel
def nearest_level(scale, inverse, top):
    """Level l of 0..top that stores a scale as 2 l + 1 units; inverse: of the unit."""
    return max(np.int32(0), min(np.int32(top), nearest(np.float32(0.5) * (inverse * scale - np.float32(1)))))


@kernel
def fold_signs(x, weight, even, magnitude, signs):
    """x = signs * magnitude: signs get a byte per 8 weights (bit i: weight i is negative).

    With `even`, a byte has an even number of ones, so that its top bit needs no room: where the number is odd, the
    weight with the least weight * x^2 gets the other sign, and so a negative magnitude.
    """
    for k in range(x.size // 8):
        byte = np.int32(0)
        ones = np.int32(0)
        for i in range(8):
            minus = np.int32(x[8 * k + i] < np.float32(0))
            byte |= minus << np.int32(i)
            ones += minus
            magnitude[8 * k + i] = abs(x[8 * k + i])
        if even and ones & 1:
            at = 0
            least = weight[8 * k] * x[8 * k] * x[8 * k]
            for i in range(1, 8):
                cost = weight[8 * k + i] * x[8 * k + i] * x[8 * k + i]
                if cost < least:
                    least = cost
                    at = i
            magnitude[8 * k + at] = -magnitude[8 * k + at]
            byte ^= 1 << at
        signs[k] = byte


@kernel
def even_signs(code):
    """7-bit sign code (low bits of an integer) -> 8 sign bits with an even number of ones."""
    low = np.int32(code) & np.int32(127)
    fold = low ^ (low >> np.int32(4))
    fold ^= fold >> np.int32(2)
    return low | (((fold ^ (fold >> np.int32(1))) & np.int32(1)) << np.int32(7))


@kernel
def iq2_value(code, signs, i):
    """Value of weight i of a point of IQ2: levels 0, 1, 2 are 8, 25, 43."""
    level = (code >> np.int32(2 * i)) & np.int32(3)
    q = np.float32(43) if level == 2 else np.float32(17) * np.float32(level) + np.float32(8)
    return -q if (signs >> np.int32(i)) & np.int32(1) else q


@kernel
def _cost(scale, q, x, w):
    diff = scale * q - x
    return w * diff * diff


def _point_kernels(dims: int, bits: int, levels: int):
    """The kernels that depend on the shape of a point: `nearest_point`, `encode` and `add_sums`."""
    full = (1 << bits) - 1

    def named(function):
        # Compiled functions are linked by name. Two of one name, cached by different processes, would be mixed up.
        function.__qualname__ = f"{function.__name__}{dims}"
        return kernel(function)

    @named
    def nearest_point(near, list_at, x, w, first, scale, step, base):
        """Code of a point for x[first : first + dims]: of the list at near[list_at] the first with the least distance.

        The distance is the sum of w * (scale * q - x)^2, q = step * level + base. Where none is below the largest
        float32 (the reference aborts) the list's first point is taken.
        """
        best = _NONE
        start = np.uint64(list_at) + np.uint64(1)  # unsigned: with a check for wraparound LLVM would not vectorize
        for n in range(np.uint64(near[list_at])):
            code = np.int32(near[start + n])
            total = np.float32(0)
            for i in range(dims):
                at = first + np.uint64(i)
                level = (code >> np.int32(bits * i)) & np.int32(full)
                if levels == 3:  # three costs per weight, computed before the loop
                    cost0 = _cost(scale, base, x[at], w[at])
                    cost1 = _cost(scale, step + base, x[at], w[at])
                    cost2 = _cost(scale, step + step + base, x[at], w[at])
                    total += cost0 if level == 0 else (cost1 if level == 1 else cost2)
                else:
                    total += _cost(scale, step * np.float32(level) + base, x[at], w[at])
            # distances are not negative, so their bits are in their order, and NaN is above all
            best = min(best, (np.uint64(bits_of(total)) << np.uint64(32)) | n)
        return np.int32(near[start + (best & np.uint64(0xFFFFFFFF))])

    @named
    def encode(x, which, inverse, codes):
        """codes[k, t] = the levels l with 2 l + 1 nearest to inverse[t] * vector k of x, for the bits k of `which`."""
        for k in range(codes.shape[0]):
            if (which >> k) & 1:
                first = np.uint64(dims * k)
                for t in range(inverse.size):
                    code = np.int32(0)
                    for i in range(dims):
                        level = nearest(np.float32(0.5) * (inverse[t] * x[first + np.uint64(i)] - np.float32(1)))
                        code |= max(np.int32(0), min(np.int32(levels - 1), level)) << np.int32(bits * i)
                    codes[k, t] = code

    @named
    def add_sums(x, weight, codes, sum_qx, sum_q2):
        """Sums of weight * x * q and weight * q^2 over the vectors k of x with points codes[k, t]."""
        sum_qx[:] = 0
        sum_q2[:] = 0
        for k in range(codes.shape[0]):
            first = np.uint64(dims * k)
            for t in range(sum_qx.size):
                qx = sum_qx[t]
                q2 = sum_q2[t]
                for i in range(dims):
                    level = (codes[k, t] >> np.int32(bits * i)) & np.int32(full)
                    q = np.float32(2) * np.float32(level) + np.float32(1)
                    at = first + np.uint64(i)
                    qx += weight[at] * x[at] * q
                    q2 += weight[at] * q * q
                sum_qx[t] = qx
                sum_q2[t] = q2

    return nearest_point, encode, add_sums


nearest_point8, encode8, add_sums8 = _point_kernels(8, 2, 3)
nearest_point4, encode4, add_sums4 = _point_kernels(4, 3, 8)


@kernel
def _try_scales(x, weight, root, dims, which, tries, inverse, scales, index, near, codes, off, sum_qx, sum_q2):
    """codes[k, t] = points for the vectors in `which` at scales[t]; off[t] = those off the grid; and the sums."""
    two, one = np.float32(2), np.float32(1)
    if dims == 8:
        encode8(x, which, inverse, codes)
    else:
        encode4(x, which, inverse, codes)
    off[:] = 0
    for k in range(codes.shape[0]):
        if not (which >> k) & 1:
            continue
        first = np.uint64(dims * k)
        for t in range(tries):
            at = index[codes[k, t]]
            if at < 0:
                off[t] |= np.int32(1 << k)
                if dims == 8:
                    codes[k, t] = nearest_point8(near, -1 - at, x, root, first, scales[t], two, one)
                else:
                    codes[k, t] = nearest_point4(near, -1 - at, x, root, first, scales[t], two, one)
    if dims == 8:
        add_sums8(x, weight, codes, sum_qx, sum_q2)
    else:
        add_sums4(x, weight, codes, sum_qx, sum_q2)


@kernel
def _search_scale(x, weight, root, largest, scale, method, index, near, tried, off, floats, codes):
    """Scale of a group of magnitudes, x ~ scale * q with q odd, by least weighted squares; codes get its points.

    largest: what the tries' numerators are divided by; scale: the result where no try is better than none. A negative
    result means that all signs flip.
    """
    vectors = codes.shape[0]
    everything = (1 << vectors) - 1
    inverse, scales, qx, q2 = floats[0], floats[1], floats[2], floats[3]
    centre = np.float32(5 if method.dims == 8 else 15)
    for t in range(inverse.size):
        inverse[t] = (centre + np.float32(t - method.tries // 2) * method.step) / largest
        scales[t] = np.float32(1) / inverse[t]
    _try_scales(
        x, weight, root, method.dims, everything, method.tries, inverse, scales, index, near, tried, off, qx, q2
    )

    chosen = -1
    best = np.float32(0)
    for t in range(method.tries):
        if q2[t] > np.float32(0) and qx[t] * qx[t] > best * q2[t]:
            scale = qx[t] / q2[t]
            best = scale * qx[t]
            chosen = t
    for k in range(vectors):
        codes[k, 0] = tried[k, chosen] if chosen >= 0 else 0
    again = np.int64(off[chosen]) if chosen >= 0 else 0
    if method.again == ALL or (method.again == ALL_IF_ANY and (again or chosen < 0)):
        again = everything
    if not (again and scale > np.float32(0)):
        return scale
    inverse[0] = np.float32(1) / scale
    scales[0] = scale
    _try_scales(
        x, weight, root, method.dims, again, 1, inverse[:1], scales[:1], index, near, codes, off[:1], qx[:1], q2[:1]
    )
    return qx[0] / q2[0] if q2[0] > np.float32(0) else scale


@kernel
def workspace(method):
    """The arrays of `Work`."""
    vectors = method.group // method.dims
    width = -(-method.tries // 8) * 8
    return Work(
        np.empty((256 // method.dims, 1), np.int32),
        np.empty(32, np.uint8),
        np.empty(256 // method.group, np.float32),
        np.empty(256, np.float32),
        np.empty(256, np.float32),
        np.empty(256, np.float32),
        np.empty(method.group, np.uint8),
        np.empty((vectors, width), np.int32),
        np.empty(width, np.int32),
        np.empty((4, width), np.float32),
    )


@kernel
def search_block(x, method, tables, work):
    """Search the groups of x[256] with the weights in work.weight; results are in `work`. Returns the largest scale.

    A group is all zero where it is too small, or where its sums leave the range of float32 (the reference aborts).
    """
    index, near = tables
    n, vectors = method.group, method.group // method.dims
    fold_signs(x, work.weight, method.even, work.magnitude, work.signs)
    for j in range(256):
        work.root[j] = np.sqrt(work.weight[j])
    largest_scale = np.float32(0)
    for g in range(256 // n):
        group = slice(g * n, (g + 1) * n)
        magnitude, weight, root = work.magnitude[group], work.weight[group], work.root[group]
        codes = work.codes[g * vectors : (g + 1) * vectors]
        signs = work.signs[g * n // 8 : (g + 1) * n // 8]
        largest = magnitude[0]
        for j in range(1, n):
            largest = max(largest, magnitude[j])
        scale = largest / np.float32(5 if method.dims == 8 else 15)
        small = not (largest > np.float32(0) and largest >= method.eps)
        if method.start and not small:
            scale = positive(magnitude, weight, 4, work.plain)
            largest = scale * np.float32(3)
            small = not largest > np.float32(0)
        if not small:
            scale = _search_scale(
                magnitude, weight, root, largest, scale, method, index, near, work.tried, work.off, work.floats, codes
            )
        if scale < np.float32(0):
            scale = -scale
            for k in range(signs.size):
                signs[k] ^= 255
        if small or not np.isfinite(scale):
            codes[:] = 0
            signs[:] = 0
            scale = np.float32(0)
        work.scales[g] = scale
        largest_scale = max(largest_scale, scale)
    return largest_scale
