"""Packings against the layout as ggml documents it, written out in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from quant import pack

RNG = np.random.default_rng(0)
CODES = RNG.integers(0, 64, 300, np.uint8)
START = 17


@pytest.mark.parametrize(("half", "n"), [(16, 32), (32, 256), (64, 256)])
def test_nibbles(half, n):
    qs = np.full(n // 2, 255, np.uint8)
    pack.pack_nibbles(CODES, START, half, qs)
    groups = CODES[START : START + n].reshape(-1, 2, half) & 15
    assert (qs == (groups[:, 0] | groups[:, 1] << 4).reshape(-1)).all()


@pytest.mark.parametrize("shift", [0, 4])
def test_crumbs(shift):
    qs = np.full(64, 255, np.uint8)
    pack.pack_crumbs(CODES, START, shift, qs)
    groups = (CODES[START : START + 256].reshape(2, 4, 32) >> shift) & 3
    assert (qs == (groups << np.array([0, 2, 4, 6], np.uint8)[:, None]).sum(1).reshape(-1)).all()


@pytest.mark.parametrize("shift", [2, 4])
def test_plane(shift):
    bits = np.full(32, 255, np.uint8)
    pack.pack_plane(CODES, START, shift, bits)
    groups = (CODES[START : START + 256].reshape(8, 32) >> shift) & 1
    assert (bits == np.packbits(groups, axis=0, bitorder="little")[0]).all()


def test_fifth_bits():
    qh = np.full(4, 255, np.uint8)
    pack.pack_fifth_bits(CODES, START, qh)
    assert (qh == np.packbits((CODES[START : START + 32] >> 4) & 1, bitorder="little")).all()


def test_scales_and_mins():
    scales, mins = RNG.integers(0, 64, (2, 8), np.uint8)
    packed = np.full(12, 255, np.uint8)
    pack.pack_scales_mins(scales, mins, packed)
    assert [pack.scale_min(packed, j) for j in range(8)] == list(zip(scales, mins, strict=True))
    assert (packed[8:] == (scales[4:] & 15 | (mins[4:] & 15) << 4)).all()
    assert (packed[:4] & 63 == scales[:4]).all()
    assert (packed[4:8] & 63 == mins[:4]).all()


def test_sixteen_scales():
    scales = RNG.integers(0, 64, 16, np.uint8)
    packed = np.full(12, 255, np.uint8)
    pack.pack_scales(scales, packed)
    assert [pack.packed_scale(packed, j) for j in range(16)] == list(scales)
    assert (packed[:8] == (scales[:8] & 15 | (scales[8:] & 15) << 4)).all()
    high = (scales >> 4).reshape(4, 4) << np.array([0, 2, 4, 6], np.uint8)[:, None]
    assert (packed[8:] == high.sum(0)).all()
