"""What only the IQ formats have: points near a vector, parity of signs, splits of sorted weights, groups of zeros."""

from __future__ import annotations

import numpy as np
import pytest

import quant
from quant import FORMATS, QuantError, lattice
from quant.codebooks import CODEBOOKS, IQ4_VALUES
from quant.formats import iq1_m, iq1_s, iq4_nl
from tests.quant import oracle

IQ = [name for name in FORMATS if name.startswith("IQ")]
F = np.float32


# --- IQ4 ---


def test_iq4_nl_block_worked_out_by_hand():
    x = np.concatenate([IQ4_VALUES, IQ4_VALUES[::-1]]).astype(F)[None] * F(0.5)
    q = quant.quantize(x, "IQ4_NL")
    assert (quant.dequantize(q, "IQ4_NL") == x).all()
    assert q[0, :2].view(np.float16)[0] == 0.5
    assert q[0, 2:].tolist() == [j | (15 - j) << 4 for j in range(16)]


def test_iq4_takes_the_upper_value_in_the_middle():
    values = IQ4_VALUES.astype(F)
    for code, border in enumerate((values[1:] + values[:-1]) / 2):
        assert iq4_nl.nearest_code(border) == code + 1
        assert iq4_nl.nearest_value(border) == values[code + 1]
        below = np.nextafter(border, F(-np.inf))
        assert iq4_nl.nearest_code(below) == code
        assert iq4_nl.nearest_value(below) == values[code]


@pytest.mark.parametrize("x", [-np.inf, -1e30, -127, -115.5, 0, 100.99, 113, np.inf])
def test_iq4_codes_and_values_agree(x):
    assert iq4_nl.nearest_value(F(x)) == IQ4_VALUES[iq4_nl.nearest_code(F(x))]


def test_iq4_xs_takes_the_scale_of_each_group():
    x = np.tile(IQ4_VALUES.astype(F), 16).reshape(8, 32)
    scales = np.array([32, -31, 16, 1, -2, 5, 0, 9], F)
    x = (x * scales[:, None]).reshape(1, 256)
    np.testing.assert_allclose(quant.dequantize(quant.quantize(x, "IQ4_XS"), "IQ4_XS"), x, atol=0.6 * 127)
    s = quant.quantize(x, "IQ4_XS").view(FORMATS["IQ4_XS"].block)[0, 0]
    low = [(int(s["scales_l"][g // 2]) >> (4 * (g % 2))) & 15 for g in range(8)]
    high = [(int(s["scales_h"]) >> (2 * g)) & 3 for g in range(8)]
    stored = [a + 16 * b - 32 for a, b in zip(low, high, strict=True)]
    assert np.array(stored).tolist() == (-scales).astype(int).tolist()


# --- signs and points ---


@pytest.mark.parametrize("code", range(128))
def test_sign_codes_have_even_parity(code):
    signs = lattice.even_signs(np.int32(code))
    assert signs & 127 == code
    assert signs.bit_count() % 2 == 0


def test_an_odd_number_of_signs_flips_the_cheapest_weight():
    x = np.array([1, -2, 3, 4, 5, 6, 7, 8], F)
    weight = np.array([9, 1, 1, 1, 1, 1, 1, 1], F)  # costs 9, 4, 9, 16, ..
    magnitude, signs = np.empty(8, F), np.empty(1, np.uint8)
    lattice.fold_signs(x, weight, True, magnitude, signs)
    assert signs[0] == 0
    assert magnitude.tolist() == [1, -2, 3, 4, 5, 6, 7, 8]
    lattice.fold_signs(x, weight, False, magnitude, signs)
    assert signs[0] == 2
    assert magnitude.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    weight[1] = 10  # now weights 0 and 2 cost 9 both: the first is flipped
    lattice.fold_signs(x, weight, True, magnitude, signs)
    assert signs[0] == 3
    assert magnitude.tolist() == [-1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(("name", "find"), [("IQ2_XS", lattice.nearest_point8), ("IQ3_S", lattice.nearest_point4)])
def test_nearest_point_is_the_first_of_the_best(name, find):
    """Against the definition, in float32 from left to right."""
    book = CODEBOOKS[name]
    index, near = lattice.tables(name)
    rng = np.random.default_rng(3)
    shift = book.bits * np.arange(book.dims)
    for code in rng.choice(np.flatnonzero(index < 0), 100):
        start = -1 - index[code]
        points = near[start + 1 : start + 1 + near[start]]
        x = rng.integers(0, 2 * book.levels, book.dims).astype(F)  # whole numbers: ties are frequent
        w = rng.integers(0, 3, book.dims).astype(F)
        q = 2 * ((points[:, None].astype(int) >> shift) & ((1 << book.bits) - 1)) + 1
        cost = (w * (F(1) * q.astype(F) - x) ** 2).sum(1)  # exact: small whole numbers
        assert find(near, start, x, w, np.uint64(0), F(1), F(2), F(1)) == points[cost.argmin()]


@pytest.mark.parametrize("bad", [np.inf, np.nan, 3e38])
def test_nearest_point_where_no_distance_is_finite(bad):
    index, near = lattice.tables("IQ2_XS")
    start = -1 - index[np.flatnonzero(index < 0)[5]]
    w = np.full(8, bad, F)
    x = np.full(8, 1e20, F)
    assert lattice.nearest_point8(near, start, x, w, np.uint64(0), F(1), F(2), F(1)) == near[start + 1]


def test_kernels_of_different_shapes_have_different_names():
    """Machine code from the cache is linked by name; with equal names one shape would run the other's code."""
    for a, b in (
        (lattice.nearest_point8, lattice.nearest_point4),
        (lattice.encode8, lattice.encode4),
        (lattice.add_sums8, lattice.add_sums4),
    ):
        assert a.py_func.__qualname__ != b.py_func.__qualname__


# --- IQ1 ---


def test_sort_order_is_stable():
    x = np.array([3, 1, -0.0, 2, 1, 0.0, 3, -5], F)
    order, rank = np.empty(8, np.int64), np.empty(8, np.int32)
    iq1_s.sort_order(x, rank, order)
    assert order.tolist() == np.argsort(x, kind="stable").tolist()


@np.errstate(over="ignore")  # the first comparison is with the lowest float
def _first_best(candidates) -> tuple:
    """(candidate, scale) by the definition: one after the other, better than the best so far."""
    best, chosen = F(-np.finfo(F).max), None
    for key, qx, q2 in candidates:
        if q2 > 0 and qx * qx > best * q2:
            scale = qx / q2
            best = scale * qx
            chosen = (*key, scale)
    return chosen


def _weights(seed: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Sorted values, some of them equal, and weights, some of them zero."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(n) if seed % 3 else rng.integers(-2, 3, n)
    w = rng.integers(0, 3, n) if seed % 2 else rng.random(n)
    return np.sort(x).astype(F), w.astype(F)


def _before(values: np.ndarray) -> np.ndarray:
    """Sums before each position."""
    sums = np.zeros(values.size + 1, F)
    for j, v in enumerate(values):
        sums[j + 1] = sums[j] + v
    return sums


@pytest.mark.parametrize("seed", range(12))
def test_iq1_s_split_is_the_first_best(seed):
    x, w = _weights(seed, 32)
    sx, sw = _before(w * x), _before(w)

    def candidates():
        for i1 in range(33):
            for i2 in range(i1, 33):
                for d in (F(0.125), F(-0.125)):
                    q = d - F(1), d, d + F(1)
                    qx = sx[i1] * q[0] + (sx[i2] - sx[i1]) * q[1] + (sx[32] - sx[i2]) * q[2]
                    parts = sw[i1], sw[i2] - sw[i1], sw[32] - sw[i2]
                    q2 = parts[0] * q[0] * q[0] + parts[1] * q[1] * q[1] + parts[2] * q[2] * q[2]
                    yield (i1, i2, d), qx, q2

    assert iq1_s._best_split(sx, sw) == _first_best(candidates())


@pytest.mark.parametrize("seed", range(12))
def test_iq1_m_split_is_the_first_best(seed):
    x, w = _weights(seed, 16)
    first = np.random.default_rng(seed).permutation(16) < 8  # which of the sorted weights lie in the first half
    sums = [_before(np.where(half, v, F(0))) for half in (first, ~first) for v in (w * x, w)]

    def half_sums(sx, sw, i1, i2, d):
        low, high = (d - F(1)) ** 2 - d * d, d * d - (d + F(1)) ** 2
        qx = sx[16] * (d + F(1)) - (sx[i1] + sx[i2])
        return qx, sw[16] * (d + F(1)) * (d + F(1)) + sw[i1] * low + sw[i2] * high

    def candidates():
        for i1 in range(17):
            for i2 in range(i1, 17):
                for k, (d1, d2) in enumerate(((1, 1), (1, -1), (-1, 1), (-1, -1))):
                    a = half_sums(sums[0], sums[1], i1, i2, F(d1) / F(8))
                    b = half_sums(sums[2], sums[3], i1, i2, F(d2) / F(8))
                    yield (i1, i2, k), a[0] + b[0], a[1] + b[1]

    padded = [np.concatenate([s, np.full(15, s[16], F)]) for s in sums]
    assert iq1_m._best_split(*padded) == _first_best(candidates())


# --- whole blocks ---


def _error(name: str, x: np.ndarray, q: np.ndarray) -> float:
    """Relative root mean square error."""
    return float(np.linalg.norm(quant.dequantize(q, name) - x) / np.linalg.norm(x))


@pytest.mark.parametrize("name", [n for n in IQ if n not in ("IQ4_NL", "IQ3_S")])
def test_a_group_of_zeros_leaves_the_others_in_place(name):
    x = np.random.default_rng(8).standard_normal((4, 256)).astype(F)
    w = np.ones(256, F)
    x[:, 32:96] = 0
    q = quant.quantize(x, name, w)
    assert _error(name, x, q) < 0.7  # misplaced, it is above 1


def test_iq3_s_keeps_the_fault_of_the_reference():
    """Behind a group of zeros, points and signs are written one group too early; scales and high bits are not."""
    x = np.random.default_rng(9).standard_normal((6, 256)).astype(F)
    x[:3, 64:96] = 0
    q = quant.quantize(x, "IQ3_S")
    assert (q == oracle.quantize("IQ3_S", x)).all()
    assert _error("IQ3_S", x[3:], q[3:]) < 0.25
    assert _error("IQ3_S", x[:3], q[:3]) > 0.5
    behind = x[:3].copy()
    behind[:, 64:96], behind[:, 224:] = x[:3, 224:], 0  # zeros behind all others move nothing
    assert _error("IQ3_S", behind, quant.quantize(behind, "IQ3_S")) < 0.25


@pytest.mark.parametrize("size", [1e-44, 1e-30, 1e-20, 1e-10])
def test_iq3_s_moves_groups_of_zeros_only(size):
    """Not groups so small that their scale is zero."""
    x = (np.random.default_rng(12).standard_normal((4, 256)) * size).astype(F)
    x[2:, 128:] = np.random.default_rng(13).standard_normal((2, 128))
    assert (quant.quantize(x, "IQ3_S") == oracle.quantize("IQ3_S", x)).all()


@pytest.mark.parametrize("name", [n for n in IQ if n not in oracle.NEEDS_IMPORTANCE])
def test_importance_of_ones_is_not_none(name):
    """Weights without importance have another form: the two ways must not be mixed up."""
    x = np.random.default_rng(10).standard_t(3, (8, 256)).astype(F)
    assert (quant.quantize(x, name) != quant.quantize(x, name, np.ones(256, F))).any()


@pytest.mark.parametrize("name", oracle.NEEDS_IMPORTANCE)
def test_formats_that_the_reference_asserts_importance_for(name):
    assert FORMATS[name].kernels.quantize is None
    with pytest.raises(QuantError, match="needs an importance matrix"):
        quant.quantize(np.ones((1, 256), F), name)
