"""Refined matrices: less error where the inputs matter, for every format; odd inputs; the definition of feedback."""

import numpy as np
import pytest

from quant import FORMATS
from quant.errors import QuantError
from quant.quantize import dequantize_blocks, quantize_into
from quant.refine.matrix import Settings, factored, refine, relative_error
from quant.refine.parts import FORMATS_OF

N, ROWS = 512, 40


@pytest.fixture(scope="module")
def case():
    """Weights [ROWS, N], and second moments of inputs that live near a subspace, some of them loud."""
    rng = np.random.default_rng(3)
    inputs = rng.standard_normal((2048, 48)) @ rng.standard_normal((48, N)) / 7 + 0.3 * rng.standard_normal((2048, N))
    inputs *= np.exp(0.5 * rng.standard_normal(N))
    weights = (0.05 * rng.standard_normal((ROWS, N))).astype(np.float32)
    return weights, inputs.T @ inputs / len(inputs)


def plain(weights, moments, fmt):
    blocks = np.empty((len(weights), weights.shape[1] // fmt.block_size), fmt.block)
    weighted = fmt.kernels.quantize_weighted is not None
    quantize_into(weights, fmt, blocks, np.diag(moments).astype(np.float32) if weighted else None)
    return blocks


@pytest.mark.parametrize("name", FORMATS_OF)
def test_less_error_than_plain(name, case):
    weights, moments = case
    fmt = FORMATS[name]
    before = relative_error(weights, dequantize_blocks(plain(weights, moments, fmt), fmt), moments)
    ready = factored(moments, 0.05)
    once = refine(weights, ready, fmt, Settings(passes=0))
    whole = refine(weights, ready, fmt)
    assert once.nbytes == whole.nbytes == ROWS * fmt.row_size(N)
    after = [relative_error(weights, dequantize_blocks(blocks, fmt), moments) for blocks in (once, whole)]
    assert after[0] < 0.5 * before
    assert after[1] < after[0]


@pytest.mark.parametrize("name", ["Q4_K", "Q4_1", "IQ2_XXS", "IQ3_S", "IQ1_S", "MXFP4"])
def test_threads_do_not_matter(name, case):
    weights, moments = case
    ready = factored(moments, 0.3)
    one = refine(weights, ready, FORMATS[name], threads=1)
    assert one.tobytes() == refine(weights, ready, FORMATS[name], threads=3).tobytes()
    assert refine(weights[7:9], ready, FORMATS[name]).tobytes() == one[7:9].tobytes()  # rows are independent


@pytest.mark.parametrize("name", FORMATS_OF)
def test_odd_weights(name, case):
    """Zeros, constants, one outlier, tiny and huge values: finite, and never far worse than plain."""
    _, moments = case
    fmt = FORMATS[name]
    rows = np.zeros((6, N), np.float32)
    rows[1] = 0.25
    rows[2, 100] = 30
    rows[3] = 1e-7
    rows[4] = np.linspace(-300, 300, N)
    rows[5, :256] = 0.01
    values = dequantize_blocks(refine(rows, factored(moments, 0.3), fmt), fmt)
    assert np.isfinite(values).all()
    base = dequantize_blocks(plain(rows, moments, fmt), fmt)
    for r in (1, 2, 4, 5):
        ours, theirs = (relative_error(rows[r : r + 1], v[r : r + 1], moments) for v in (values, base))
        assert ours < 1.05 * theirs + 1e-4, r


def test_without_correlation_it_is_rounding():
    """Moments without correlation: nothing is fed back, so codes are the nearest levels of the chosen scales."""
    rng = np.random.default_rng(5)
    weights = rng.standard_normal((4, 256)).astype(np.float32)
    fmt = FORMATS["Q4_K"]
    blocks = refine(weights, factored(np.eye(256), 0.0), fmt, Settings(passes=0))
    from quant.refine.parts import apart, layout_of

    parts, layout = apart(blocks, layout_of("Q4_K")), layout_of("Q4_K")
    a = np.repeat(parts.d[..., None] * parts.scales, 32, -1).reshape(4, -1)
    b = np.repeat(parts.dmin[..., None] * parts.mins, 32, -1).reshape(4, -1)
    levels = a[..., None] * layout.levels - b[..., None]
    best = np.abs(levels - weights[..., None]).argmin(-1)
    assert (np.abs(parts.codes - best) <= 1).all()  # exact ties may fall either way
    assert (parts.codes == best).mean() > 0.999


def test_dead_columns():
    rng = np.random.default_rng(6)
    inputs = rng.standard_normal((1024, N))
    inputs[:, 64:96] = 0
    weights = rng.standard_normal((8, N)).astype(np.float32)
    values = dequantize_blocks(
        refine(weights, factored(inputs.T @ inputs / 1024, 0.3), FORMATS["Q4_K"]), FORMATS["Q4_K"]
    )
    assert np.abs(values - weights)[:, 64:96].max() < 0.5  # rounded like any others, not thrown away


@pytest.mark.parametrize(
    ("moments", "message"),
    [
        (np.full((256, 256), np.nan), "not finite"),
        (np.zeros((256, 256)), "all zero"),
        (np.eye(256) - 2 * np.ones((256, 256)) + 2 * np.eye(256), "singular"),
    ],
)
def test_bad_moments(moments, message):
    with pytest.raises(QuantError, match=message):
        factored(moments, 0.0)


def test_bad_formats(case):
    weights, moments = case
    with pytest.raises(QuantError, match="Q8_0 cannot be refined; formats that can: Q4_0"):
        refine(weights, factored(moments, 0.3), FORMATS["Q8_0"])
    with pytest.raises(QuantError, match="row length 100"):
        refine(weights[:, :100], factored(moments[:100, :100], 0.3), FORMATS["Q4_K"])
