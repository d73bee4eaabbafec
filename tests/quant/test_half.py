"""Half precision and bfloat16 against numpy's float16 and integer arithmetic: all values, every rounding boundary."""

import numpy as np
import pytest

from quant import dequantize, quantize

ALL = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
NAN = np.uint32(0x7FC00000)


def _rows(bits: np.ndarray) -> np.ndarray:
    return bits.view(np.uint8).reshape(1, -1)


def _boundaries(floats: np.ndarray) -> np.ndarray:
    """float32 bits at, just below and just above each value and each midpoint to the next one."""
    values = np.unique(floats[np.isfinite(floats)].astype(np.float64))
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2]).astype(np.float32).view(np.int32).astype(np.int64)
    bits = np.unique(np.concatenate([points - 1, points, points + 1]) & 0xFFFFFFFF).astype(np.uint32)
    return bits[np.isfinite(bits.view(np.float32))]


def test_every_half_to_float():
    found = dequantize(_rows(ALL), "F16")[0]
    expected = ALL.view(np.float16).astype(np.float32)
    number = ~np.isnan(expected)
    assert (found.view(np.uint32) == expected.view(np.uint32))[number].all()
    assert np.isnan(found[~number]).all()


def test_every_bfloat_to_float():
    found = dequantize(_rows(ALL), "BF16")[0]
    assert (found.view(np.uint32) == ALL.astype(np.uint32) << 16).all()


def test_float_to_half_rounds_to_even():
    x = _boundaries(ALL.view(np.float16).astype(np.float32)).view(np.float32)
    x = x[np.abs(x) < 65520]  # from there on the result is infinite, which `quantize` refuses
    assert x.size > 300_000
    found = quantize(x[None], "F16")[0].view(np.uint16)
    assert (found == x.astype(np.float16).view(np.uint16)).all()


def test_float_to_bfloat_rounds_to_even():
    bits = _boundaries((ALL.astype(np.uint32) << 16).view(np.float32))
    up = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16
    finite = (up & 0x7F80) != 0x7F80
    assert finite.sum() > 300_000
    found = quantize(bits[finite].view(np.float32)[None], "BF16")[0].view(np.uint16)
    assert (found == up[finite]).all()


@pytest.mark.parametrize(("bits", "half", "bfloat"), [
    (0x7F800000, 0x7C00, 0x7F80), (0xFF800000, 0xFC00, 0xFF80), (0x477FF000, 0x7C00, 0x4780),
    (0x477FEFFF, 0x7BFF, 0x4780), (0x33000000, 0x0000, 0x3300), (0x33000001, 0x0001, 0x3300),
    (0x80000000, 0x8000, 0x8000), (0x7F7FFFFF, 0x7C00, 0x7F80),
])  # fmt: skip
def test_ends_of_the_range(bits, half, bfloat):
    from quant.half import float_of, float_to_bfloat, float_to_half

    assert float_to_half(float_of(np.uint32(bits))) == half
    assert float_to_bfloat(float_of(np.uint32(bits))) == bfloat


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF])
def test_nan_stays_nan_and_becomes_quiet(bits):
    from quant.half import float_of, float_to_bfloat, float_to_half

    x = float_of(np.uint32(bits))
    half, bfloat = int(float_to_half(x)), int(float_to_bfloat(x))
    assert half & 0x7E00 == 0x7E00
    assert bfloat & 0x7FC0 == 0x7FC0
    assert half >> 15 == bfloat >> 15 == bits >> 31
