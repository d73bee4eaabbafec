"""Accumulation of input squares, and the means that quantization takes from them."""

import numpy as np
import pytest

from quant import QuantError
from quant.imatrix import IMatrix

NAME = "blk.0.ffn_down.weight"


def _inputs(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def test_importance_is_the_mean_square():
    x = _inputs(70, 32)
    m = IMatrix()
    for part in (x[:1], x[1:40], x[40:]):
        m.observe(NAME, part)
    assert m.entries[NAME].counts.tolist() == [70]
    np.testing.assert_allclose(m.importance(NAME), (x.astype(np.float64) ** 2).mean(axis=0)[None], rtol=1e-6)
    np.testing.assert_allclose(m.entries[NAME].sums, x.astype(np.float64).sum(axis=0)[None], rtol=1e-6)
    assert m.importance(NAME).dtype == np.float32


def test_leading_axes_are_rows_of_a_plain_weight():
    x = _inputs(2, 3, 5, 8)
    m = IMatrix()
    m.observe(NAME, x)
    assert m.entries[NAME].counts.tolist() == [30]
    np.testing.assert_allclose(m.importance(NAME)[0], (x.reshape(-1, 8) ** 2).mean(axis=0), rtol=1e-6)


def test_weights_of_several_matrices():
    x = _inputs(2, 3, 5, 8)
    m = IMatrix()
    m.observe(NAME, x, n_mat=3)
    assert m.entries[NAME].counts.tolist() == [10, 10, 10]
    np.testing.assert_allclose(m.importance(NAME), (x**2).mean(axis=(0, 2)), rtol=1e-6)


@pytest.mark.parametrize("shared", [True, False])
def test_experts(shared):
    x = _inputs(6, 1 if shared else 2, 8)
    ids = np.array([[0, 2], [2, 0], [0, 2], [4, 0], [2, 0], [0, 4]])
    m = IMatrix()
    m.observe_experts(NAME, x[:4], ids[:4], 5)
    m.observe_experts(NAME, x[4:], ids[4:], 5)
    assert m.entries[NAME].counts.tolist() == [6, 0, 4, 0, 2]
    found = m.importance(NAME)
    assert (found[[1, 3]] == 1).all(), "experts that no token reached"
    seen = [x[t, 0 if shared else s] for t in range(6) for s in range(2) if ids[t, s] == 2]
    np.testing.assert_allclose(found[2], np.mean(np.square(seen), axis=0), rtol=1e-6)


def test_merge_is_as_if_observed_together():
    x = _inputs(20, 8)
    parts, whole = [], IMatrix()
    for name, part in (("a", x[:7]), ("b", x[7:])):
        parts.append(IMatrix(datasets=[name, "both"], chunk_count=2))
        parts[-1].observe(NAME, part)
        whole.observe(NAME, part)
    parts[1].observe("only.weight", x)
    parts[0].merge(parts[1])
    assert (parts[0].importance(NAME) == whole.importance(NAME)).all()
    assert parts[0].datasets == ["a", "both", "b"]
    assert parts[0].chunk_count == 4
    assert set(parts[0].entries) == {NAME, "only.weight"}
    parts[1].observe("only.weight", x)
    assert parts[0].entries["only.weight"].counts == [20], "a merged entry is a copy"


def test_unknown_sums_stay_unknown():
    x = _inputs(3, 8)
    a, b = IMatrix(), IMatrix()
    a.observe(NAME, x)
    b.observe(NAME, x)
    b.entries[NAME].sums = None
    a.merge(b)
    a.observe(NAME, x)
    assert a.entries[NAME].sums is None
    assert a.entries[NAME].counts == [9]


def test_what_does_not_fit_is_refused():
    m = IMatrix()
    m.observe(NAME, _inputs(2, 8))
    with pytest.raises(QuantError, match="another model"):
        m.observe(NAME, _inputs(2, 16))
    with pytest.raises(QuantError, match="not finite"):
        m.observe(NAME, np.float32([[np.inf] * 8]))
    with pytest.raises(QuantError, match=r"expert 0\.\.9 chosen of 4"):
        m.observe_experts("x.weight", _inputs(1, 1, 8), np.array([[0, 9]]), 4)
    with pytest.raises(QuantError, match="no entry in the importance matrix"):
        m.importance("blk.1.ffn_down.weight")
    other = IMatrix()
    other.observe("new.weight", _inputs(2, 8))
    other.observe(NAME, _inputs(2, 16))
    with pytest.raises(QuantError, match="cannot be merged"):
        m.merge(other)
    assert set(m.entries) == {NAME}
