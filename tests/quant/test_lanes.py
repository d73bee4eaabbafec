"""Sixteen lanes at once give what NumPy gives lane by lane, bit for bit."""

from __future__ import annotations

import numba
import numpy as np
import pytest

from quant import lanes
from quant.lanes import load, store
from quant.search import nearest

SPECIAL = np.array(
    [0, -0.0, 1, -1, 0.5, 1.5, 2.5, -2.5, 1e-45, 1e-38, 3e38, -3e38, np.inf, -np.inf, np.nan, 4194303.5], np.float32
)
RNG = np.random.default_rng(0)
PAIRS = [(a, b) for a in (SPECIAL, RNG.standard_normal(16).astype(np.float32)) for b in (SPECIAL[::-1].copy(), SPECIAL)]


@numba.njit(error_model="numpy")
def _arithmetic(a, b, out):
    x, y = load(a, 0), load(b, 0)
    total = x
    total += y
    store(out[0], 0, total)
    store(out[1], 0, x - y)
    store(out[2], 0, x * y)
    store(out[3], 0, x / y)
    store(out[4], 0, np.float32(3) * x - np.float32(1))
    store(out[5], 0, lanes.root(lanes.absolute(x)))


@numba.njit(error_model="numpy")
def _choices(a, b, out):
    x, y, one, zero = load(a, 0), load(b, 0), lanes.splat(np.float32(1)), lanes.splat(np.float32(0))
    less, more, same = x < y, x > y, x == y
    either = less | more
    both = less & (y > zero)
    for i, m in enumerate((less, more, same, either, both)):
        store(out[i], 0, lanes.select(m, one, zero))
    return lanes.any_lane(less), lanes.any_lane(x < x)


@numba.njit(error_model="numpy")
def _rounding(a, lowest, highest, out, codes):
    v = lanes.nearest_code(load(a, 0), lowest, highest)
    store(out, 0, v)
    lanes.store_codes(codes, 3, v)


@numba.njit(error_model="numpy")
def _unpacking(bytes, signed, out):
    store(out[0], 0, lanes.load_codes(bytes, 1, 4, 15))
    store(out[1], 0, lanes.load_codes(bytes, 1, 0, 3))
    store(out[2], 0, lanes.load_bits(bytes, 2))
    store(out[3], 0, lanes.load_signed(signed, 4))


@numba.njit(error_model="numpy")
def _transposed(x, start, stride, count, out):
    lanes.transpose(x, start, stride, count, out, 5)


def _same(a, b):
    return ((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))).all()


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_arithmetic(a, b):
    out = np.empty((6, 16), np.float32)
    _arithmetic(a, b, out)
    with np.errstate(all="ignore"):
        expected = (a + b, a - b, a * b, a / b, np.float32(3) * a - np.float32(1), np.sqrt(np.abs(a)))
    assert all(_same(row, values) for row, values in zip(out, expected, strict=True))


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_comparison_and_choice(a, b):
    out = np.empty((5, 16), np.float32)
    some, none = _choices(a, b, out)
    assert (out == [a < b, a > b, a == b, (a < b) | (a > b), (a < b) & (b > 0)]).all()
    assert (some, none) == ((a < b).any(), False)


@pytest.mark.parametrize(("lowest", "highest"), [(0, 15), (-32, 31), (-(1 << 22), 1 << 22)])
def test_nearest_code_is_the_scalar_rounding_for_any_value(lowest, highest):
    for a in (SPECIAL, (RNG.standard_normal(16) * 20).astype(np.float32), np.arange(-4, 4, 0.5).astype(np.float32)):
        out, codes = np.empty(16, np.float32), np.zeros(32, np.int8)
        _rounding(a, lowest, highest, out, codes)
        expected = np.clip([nearest(v) for v in a], lowest, highest)
        assert (out == expected).all()
        assert (codes[3:19] == expected.astype(np.int64).astype(np.int8)).all()
        assert not codes[:3].any()
        assert not codes[19:].any()


def test_bytes_become_codes():
    packed = RNG.integers(0, 256, 20, np.uint8)
    signed = packed.view(np.int8)
    out = np.empty((4, 16), np.float32)
    _unpacking(packed, signed, out)
    bits = np.unpackbits(packed[2:4], bitorder="little")
    assert (out == [packed[1:17] >> 4, packed[1:17] & 3, bits, signed[4:]]).all()


@pytest.mark.parametrize("count", [1, 7, 16])
def test_transpose_repeats_the_last_group(count):
    stride, start = 20, 3
    x = RNG.standard_normal(start + stride * (count - 1) + 16).astype(np.float32)
    out = np.zeros(5 + 256 + 5, np.float32)
    _transposed(x, start, stride, count, out)
    rows = [x[start + stride * min(lane, count - 1) :][:16] for lane in range(16)]
    assert (out[5:261].reshape(16, 16) == np.transpose(rows)).all()
    assert not out[:5].any()
    assert not out[261:].any()
