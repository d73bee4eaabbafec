"""The searches against their definitions, written out for one group in NumPy scalars, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

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
    refined_groups,
    round_away,
    symmetric,
    symmetric_codes,
    symmetric_groups,
)

F = np.float32
ZERO, ONE = F(0), F(1)


def _nearest(v) -> int:
    """Half to even by the float32 trick, for any value."""
    with np.errstate(all="ignore"):
        return int((F(v) + F(12582912)).view(np.int32) & 0x7FFFFF) - 0x400000


def _clamp(v: int, low: int, high: int) -> int:
    return max(low, min(high, v))


def _sum(terms) -> F:
    total = ZERO
    for term in terms:
        total = total + term
    return total


def define_affine(x, w, nmax, first, step, tries, magnitude, bounded):
    """One group: (scale, -offset, codes)."""

    def code(v):
        return _clamp(_nearest(v), 0, nmax) if not bounded else _nearest(min(v, F(nmax))) if v > 0 else 0

    def error(scale, codes, low):
        diff = [scale * F(q) + low - v for q, v in zip(codes, x)]
        return _sum(wj * (abs(d) if magnitude else d * d) for wj, d in zip(w, diff))

    low, high = min(x.min(), ZERO), x.max()
    sum_w, sum_x = _sum(w), _sum(w * x)
    if low == high:
        return ZERO, -low, [0] * x.size
    inverse = F(nmax) / (high - low)
    codes = [_clamp(_nearest(inverse * (v - low)), 0, nmax) for v in x]
    scale = ONE / inverse
    best = error(scale, codes, low)
    for k in range(tries + 1):
        inverse = (F(first) + F(step) * F(k) + F(nmax)) / (high - low)
        trial = [code(inverse * (v - low)) for v in x]
        wl = [wj * F(q) for wj, q in zip(w, trial)]
        sum_l, sum_l2 = _sum(wl), _sum(a * F(q) for a, q in zip(wl, trial))
        sum_xl = _sum(a * v for a, v in zip(wl, x))
        determinant = sum_w * sum_l2 - sum_l * sum_l
        if not determinant > 0:
            continue
        new_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
        new_low = (sum_l2 * sum_x - sum_l * sum_xl) / determinant
        if new_low > 0:
            new_scale, new_low = sum_xl / sum_l2, ZERO
        new_error = error(new_scale, trial, new_low)
        if new_error < best:
            best, scale, low, codes = new_error, new_scale, new_low, trial
    return scale, -low, codes


def define_refined(x, nmax):
    """One group: (scale, codes)."""
    m = x[np.argmax(abs(x))]
    if abs(m) < F(1e-15):
        return ZERO, [0] * x.size
    codes = [_clamp(_nearest(-F(nmax) / m * v), -nmax, nmax - 1) for v in x]
    lx, l2 = _sum(v * v * v * F(q) for v, q in zip(x, codes)), _sum(v * v * F(q) * F(q) for v, q in zip(x, codes))
    for _ in range(5):
        before = list(codes)
        for j, v in enumerate(x):
            w, q = v * v, F(codes[j])
            a, b = lx - w * v * q, l2 - w * q * q
            if not a > 0:
                continue
            new = _clamp(_nearest(v * b / a), -nmax, nmax - 1)
            a, b = a + w * v * F(new), b + w * F(new) * F(new)
            if new != codes[j] and b > 0 and a * a * l2 > lx * lx * b:
                codes[j], lx, l2 = new, a, b
        if codes == before:
            break
    return (lx / l2 if l2 > 0 else ZERO), [q + nmax for q in codes]


def _groups(kind: str, n: int, seed: int = 0):
    """Sixteen groups of n, and weights."""
    r = np.random.default_rng(seed)
    x = {
        "normal": lambda: r.standard_normal((16, n)),
        "offset": lambda: 3 + 0.01 * r.standard_normal((16, n)),
        "minus": lambda: -r.gamma(0.5, size=(16, n)),
        "flat": lambda: np.repeat(r.standard_normal((16, 1)), n, 1),
        "nearly flat": lambda: -1 - 6e-8 * r.integers(0, 3, (16, n)),
        "sparse": lambda: r.standard_normal((16, n)) * (r.random((16, n)) < 0.1),
        "scales": lambda: r.standard_normal((16, n)) * 10.0 ** np.arange(-44, 36, 5)[:, None],
    }[kind]()
    return x.astype(F), (r.random((16, n)) * (r.random((16, n)) < 0.8)).astype(F)


KINDS = ("normal", "offset", "minus", "flat", "nearly flat", "sparse", "scales")


def _equal(a, b) -> bool:
    return bool(((a == b) | (np.isnan(a) & np.isnan(b))).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("n", "nmax", "first", "step", "tries", "magnitude", "bounded"),
    [(32, 15, -1, 0.1, 20, False, False), (16, 3, -0.5, 0.1, 15, True, False), (32, 31, -0.9, 0.05, 36, False, True)],
)
def test_affine(kind, n, nmax, first, step, tries, magnitude, bounded):
    x, w = _groups(kind, n)
    fit = np.zeros((5, 16), F)
    scratch = np.empty(16 * n, F)
    flat, weights = x.T.copy().reshape(-1), w.T.copy().reshape(-1)
    affine(flat, weights, n, nmax, F(first), F(step), tries, magnitude, bounded, fit, scratch)
    for lane in range(16):
        codes = np.empty(n, np.uint8)
        affine_codes(x[lane], 0, n, nmax, bounded, fit[INVERSE, lane], fit[OFFSET, lane], codes)
        with np.errstate(all="ignore"):
            scale, low, expected = define_affine(x[lane], w[lane], nmax, first, step, tries, magnitude, bounded)
            total = _sum(w[lane])
        assert _equal(fit[[SCALE, MIN, TOTAL], lane], np.array([scale, low, total]))
        assert codes.tolist() == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "nmax"), [(16, 32), (32, 8), (16, 4)])
def test_symmetric_groups(kind, n, nmax):
    x, w = _groups(kind, n)
    fit = np.zeros((5, 16), F)
    symmetric_groups(x.T.copy().reshape(-1), w.T.copy().reshape(-1), n, nmax, fit)
    for lane in range(16):
        codes, expected = np.empty(n, np.uint8), np.empty(n, np.int8)
        symmetric_codes(x[lane], 0, n, nmax, fit[INVERSE, lane], codes)
        assert _equal(fit[SCALE, lane], symmetric(x[lane], w[lane], nmax, expected))
        assert (codes == expected).all()


@pytest.mark.parametrize("kind", KINDS)
def test_refined_groups(kind):
    x, _ = _groups(kind, 16)
    fit, codes = np.zeros((5, 16), F), np.empty(256, F)
    refined_groups(x.T.copy().reshape(-1), 16, 4, fit, codes)
    for lane in range(16):
        with np.errstate(all="ignore"):
            scale, expected = define_refined(x[lane], 4)
        assert _equal(fit[SCALE, lane], scale)
        assert codes[lane::16].tolist() == expected


@pytest.mark.parametrize("nmax", [4, 15, 63])
def test_positive_is_near_the_best_scale(nmax):
    """No scale of a fine grid, with its own nearest codes, is much better; codes belong to the scale."""
    r = np.random.default_rng(nmax)
    for _ in range(20):
        x, w = r.gamma(2, size=16).astype(F), r.random(16).astype(F)
        codes = np.empty(16, np.uint8)
        d = positive(x, w, nmax, codes)
        grid = x.max() / np.linspace(nmax - 0.5, nmax + 0.5, 501)
        errors = [(w * (x - s * np.clip(np.rint(x / s), 0, nmax)) ** 2).sum() for s in grid]
        assert codes.max() <= nmax
        assert (w * (x - d * codes) ** 2).sum() <= 1.2 * min(errors) + 1e-12


def test_positive_without_anything():
    codes = np.full(8, 7, np.uint8)
    assert positive(np.zeros(8, F), np.ones(8, F), 63, codes) == 0
    assert not codes.any()
    assert positive(np.ones(8, F), np.zeros(8, F), 63, codes) == 0  # no weight: no scale


def test_symmetric_is_exact_on_a_grid():
    x = F(0.25) * np.arange(-8, 8).astype(F)
    codes = np.empty(16, np.int8)
    assert symmetric(x, np.ones(16, F), 8, codes) == F(0.25)
    assert codes.tolist() == list(range(16))


def test_roundings():
    v = np.concatenate([np.arange(-8, 8, 0.25), [0.49999997, -0.49999997, 8388607.5, 0.0]]).astype(F)
    away = [int(np.sign(a) * np.floor(abs(float(a)) + 0.5)) for a in v]
    assert [round_away(a) for a in v] == away
    assert [nearest(a) for a in v[:-2]] == [int(np.rint(a)) for a in v[:-2]]
    assert all(nearest(a) == _nearest(a) for a in (F(np.inf), F(-np.inf), F(np.nan), F(1e30)))
