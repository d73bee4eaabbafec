"""Bytes of the legacy and K formats where their searches degenerate, against compiled ggml.

The kernels are called past the public function's check for overflowing scales: even what it refuses is computed as the
reference computes it.
"""

from __future__ import annotations

import numpy as np
import pytest

from quant import FORMATS, kernels
from tests.quant import oracle

NAMES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K")
WEIGHTED = tuple(name for name in NAMES if FORMATS[name].kernels.quantize_weighted is not None)
N = 1280  # an odd number of super-blocks, and of blocks no multiple of 16

VALUES = {
    "normal": lambda r, shape: r.standard_normal(shape),
    "denormal": lambda r, shape: r.standard_normal(shape) * 1e-40,
    "few bits": lambda r, shape: r.standard_normal(shape) * 3e-44,
    "1e-37": lambda r, shape: r.standard_normal(shape) * 1e-37,
    "1e-20": lambda r, shape: r.standard_normal(shape) * 1e-20,
    "1e-15": lambda r, shape: r.standard_normal(shape) * 1e-15,
    "1e18": lambda r, shape: r.standard_normal(shape) * 1e18,
    "1e30": lambda r, shape: r.standard_normal(shape) * 1e30,
    "largest": lambda r, shape: np.clip(r.standard_normal(shape), -1, 1) * 3.4e38,
    "zeros": lambda r, shape: np.where(r.random(shape) < 0.5, -0.0, 0.0),
    "signed zeros": lambda r, shape: np.where(r.random(shape) < 0.8, -0.0, r.gamma(1, size=shape)),
    "flat": lambda r, shape: np.repeat(r.standard_normal((shape[0], 1)), shape[1], 1),
    "flat groups": lambda r, shape: np.repeat(r.standard_normal((shape[0], shape[1] // 16)), 16, 1),
    "nearly flat": lambda r, shape: -1 - 6e-8 * r.integers(0, 3, shape),
    "two values": lambda r, shape: np.where(r.random(shape) < 0.5, -1.5, 1.5),
    "sparse": lambda r, shape: r.standard_normal(shape) * (r.random(shape) < 0.05),
    "scales": lambda r, shape: r.standard_normal(shape) * np.repeat(10.0 ** r.integers(-38, 30, shape[1] // 32), 32),
    "all scales": lambda r, shape: r.standard_normal(shape) * 10.0 ** r.uniform(-30, 20, shape),
}
IMPORTANCE = {
    "ordinary": lambda r, n: r.standard_normal(n) ** 2,
    "zero": lambda r, n: np.zeros(n),
    "mostly zero": lambda r, n: r.random(n) * (r.random(n) < 0.1),
    "zero groups": lambda r, n: r.random(n) * np.repeat(r.random(n // 32) < 0.5, 32),
    "denormal": lambda r, n: r.random(n) * 1e-40,
    "1e30": lambda r, n: r.random(n) * 1e30,
}


def _quantize(name: str, x: np.ndarray, w: np.ndarray | None = None) -> np.ndarray:
    fmt = FORMATS[name]
    blocks = np.zeros((x.shape[0], x.shape[1] // fmt.block_size), fmt.block)
    if w is None:
        kernels.quantize_rows(x, blocks, fmt.tables)
    else:
        kernels.quantize_rows_weighted(x, w, blocks, fmt.tables)
    return blocks.view(np.uint8).reshape(x.shape[0], -1)


def _values(kind: str, rows: int) -> np.ndarray:
    return VALUES[kind](np.random.default_rng(sum(kind.encode())), (rows, N)).astype(np.float32)


def _differ(name: str, q: np.ndarray, expected: np.ndarray) -> list[int]:
    """Numbers of the blocks that are not equal."""
    size = FORMATS[name].type_size
    return np.flatnonzero((q.reshape(-1, size) != expected.reshape(-1, size)).any(1)).tolist()


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("name", NAMES)
def test_bytes_where_searches_degenerate(name, kind):
    x = _values(kind, 6)
    assert _differ(name, _quantize(name, x), oracle.quantize(name, x)) == []


@pytest.mark.parametrize("weights", IMPORTANCE)
@pytest.mark.parametrize("name", WEIGHTED)
def test_bytes_where_importance_degenerates(name, weights):
    w = IMPORTANCE[weights](np.random.default_rng(7), N).astype(np.float32)
    for kind in VALUES:
        x = _values(kind, 6)
        assert _differ(name, _quantize(name, x, w), oracle.quantize(name, x, w)) == [], kind


def test_negative_scale_codes_are_cut_as_the_reference_cuts_them():
    """With little importance a fitted group scale can be negative; its code wraps round, and only Q5_K cuts it."""
    r = np.random.default_rng(0)
    x = r.standard_t(1.5, (200, N)).astype(np.float32)
    w = (r.random(N) * (r.random(N) < 0.1)).astype(np.float32)
    for name in ("Q4_K", "Q5_K"):
        assert _differ(name, _quantize(name, x, w), oracle.quantize(name, x, w)) == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [256, 512, 768, 4096, 4352])
def test_a_row_does_not_depend_on_its_neighbours(name, n):
    """Groups are searched sixteen at a time; the lanes that a short or odd row leaves over change nothing."""
    r = np.random.default_rng(n)
    x = r.standard_normal((1, n)).astype(np.float32)
    w = r.random(n).astype(np.float32)
    pieces = [slice(i, i + 256) for i in range(0, n, 256)]
    assert (_quantize(name, x) == np.hstack([_quantize(name, x[:, p].copy()) for p in pieces])).all()
    if name in WEIGHTED and name.endswith("K"):
        assert (_quantize(name, x, w) == np.hstack([_quantize(name, x[:, p].copy(), w[p]) for p in pieces])).all()
