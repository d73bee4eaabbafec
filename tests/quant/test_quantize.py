"""Quantized bytes against ggml's, properties that hold for every format, and input that tries to break them.

All tests walk the table of formats: a format takes part as soon as its row names a module.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import quant
from quant import FORMATS, QuantError
from tests.quant import oracle

GOLDEN = np.load(Path(__file__).parent.parent / "data/quant.npz")
X, IMPORTANCE = GOLDEN["x"], GOLDEN["imatrix"]
N = 1024

WRITTEN = [
    name
    for name, fmt in FORMATS.items()
    if fmt.module and (fmt.kernels.quantize is not None or fmt.kernels.quantize_weighted is not None)
]
WEIGHTED = [name for name in WRITTEN if FORMATS[name].kernels.quantize_weighted is not None]
NEED_IMPORTANCE = [name for name in WRITTEN if FORMATS[name].kernels.quantize is None]
QUANTIZED = [name for name in WRITTEN if FORMATS[name].is_quantized]
#: formats for weights of three values: ordinary ones come out badly
TERNARY = ("TQ1_0", "TQ2_0", "Q2_0")
#: formats whose scales are no halves: wider, so that large values fit
WIDE = ("F32", "BF16", "MXFP4", "NVFP4", "Q8_K")
#: (format, with importance or not) for all that can be written
WAYS = [(name, False) for name in WRITTEN if name not in NEED_IMPORTANCE] + [(name, True) for name in WEIGHTED]


def _importance_for(name: str, n: int = N) -> np.ndarray | None:
    """Importance where the format cannot be written without."""
    return IMPORTANCE[:n] if name in NEED_IMPORTANCE else None


def _bad_blocks(name: str, q: np.ndarray, expected: np.ndarray) -> str:
    size = FORMATS[name].type_size
    differ = np.argwhere((q != expected).reshape(q.shape[0], -1, size).any(axis=2))
    return f"{name}: {len(differ)} of {q.size // size} blocks differ, first (row, block) {differ[:3].tolist()}"


# --- the reference's bytes ---


@pytest.mark.parametrize(("name", "weighted"), WAYS)
def test_golden_bytes(name, weighted):
    key = f"{name}.imatrix" if weighted else name
    if key not in GOLDEN:
        pytest.skip("a type of activations, not of files" if name in ("Q8_1", "Q8_K") else "the value itself")
    q = quant.quantize(X, name, IMPORTANCE if weighted else None)
    expected = GOLDEN[key].reshape(q.shape)
    assert (q == expected).all(), _bad_blocks(name, q, expected)


@pytest.mark.parametrize("name", [n for n in WRITTEN if n not in WEIGHTED])
def test_importance_is_ignored_where_the_format_does(name):
    assert (quant.quantize(X, name, IMPORTANCE) == quant.quantize(X, name)).all()


def test_golden_file_names_every_format_of_files():
    named = {key.removesuffix(".imatrix") for key in GOLDEN} - {"x", "imatrix"}
    assert named == {n for n in FORMATS if FORMATS[n].is_quantized} - {"Q8_1", "Q8_K"} | {"F16", "BF16"}


KINDS = {
    "normal": lambda r, shape: r.standard_normal(shape),
    "heavy tails": lambda r, shape: r.standard_t(2, shape),
    "laplace": lambda r, shape: r.laplace(size=shape),
    "one sign": lambda r, shape: np.abs(r.standard_normal(shape)),
    "minus": lambda r, shape: -r.gamma(0.5, size=shape),
    "outliers": lambda r, shape: r.standard_normal(shape) * np.where(r.random(shape) < 0.01, 50, 1),
    "sparse": lambda r, shape: r.standard_normal(shape) * (r.random(shape) < 0.1),
    "few values": lambda r, shape: r.integers(-3, 4, shape),
    "offset": lambda r, shape: 5 + 0.1 * r.standard_normal(shape),
    "waves": lambda r, shape: 0.1 + 2 * np.cos(np.arange(np.prod(shape)).reshape(shape) + r.random()),
    "groups": lambda r, shape: r.standard_normal(shape) * np.repeat(10.0 ** r.integers(-6, 1, shape[1] // 32), 32),
}

samples = st.tuples(
    st.integers(0, 2**32 - 1), st.sampled_from(sorted(KINDS)), st.integers(-4, 3), st.sampled_from([256, 512, 768])
)


def _sample(sample: tuple[int, str, int, int], rows: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """(values [rows, n], importance [n]) of a drawn sample."""
    seed, kind, exponent, n = sample
    r = np.random.default_rng(seed)
    x = (KINDS[kind](r, (rows, n)) * 10.0**exponent).astype(np.float32)
    return x, (r.standard_normal(n) ** 2 + 1e-3).astype(np.float32)


@pytest.mark.parametrize(("name", "weighted"), WAYS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(sample=samples)
def test_bytes_equal_compiled_ggml(name, weighted, sample):
    if name in ("F32", "IQ1_M"):  # IQ1_M's search changed after the oracle's version: the golden file decides
        return
    x, w = _sample(sample)
    expected = oracle.quantize(name, x, w if weighted else None)
    try:
        q = quant.quantize(x, name, w if weighted else None)
    except quant.QuantError:  # values beyond the scale's range: the oracle stores infinity, we refuse
        assert quant.validate(expected, name) >= 0
        return
    assert (q == expected).all(), _bad_blocks(name, q, expected)


@pytest.mark.parametrize(("name", "weighted"), [way for way in WAYS if way[0] in QUANTIZED])
def test_bytes_equal_another_build(name, weighted):
    w = IMPORTANCE if weighted else None
    q, expected = quant.quantize(X[:8], name, w), oracle.second_quantize(name, X[:8], w)
    assert (q == expected).all(), _bad_blocks(name, q, expected)


def test_mxfp4_scales_around_powers_of_two():
    """The reference rounds the logarithm, so that values just below a power of two get the scale above."""
    powers = 2.0 ** np.arange(-100, 100)
    steps = powers[:, None] * (1 + np.arange(-24, 25) * 2.0**-24)
    x = np.repeat(steps.astype(np.float32).reshape(-1, 1), 32, axis=1)
    assert (quant.quantize(x, "MXFP4") == oracle.quantize("MXFP4", x)).all()


def test_nvfp4_scales_over_the_whole_range():
    x = np.repeat(np.geomspace(1e-4, 1e5, 20_000, dtype=np.float32).reshape(-1, 1), 64, axis=1)
    assert (quant.quantize(x, "NVFP4") == oracle.quantize("NVFP4", x)).all()


# --- properties ---


def _weighted_error(name: str, x: np.ndarray, importance: np.ndarray | None, judge: np.ndarray) -> float:
    q = quant.quantize(x, name, importance)
    error = quant.error_report(x, q, name, judge).weighted_rmse
    assert error is not None
    return error


@pytest.mark.parametrize("name", QUANTIZED)
def test_error_is_as_small_as_the_bits_allow(name):
    """The error is within a factor of what so many bits can do: catches wrong scales and swapped weights."""
    x = X[:4]
    error = quant.error_report(x, quant.quantize(x, name, _importance_for(name)), name)
    if name in TERNARY:
        assert error.relative < 1
        x = np.sign(x) * (np.abs(x) > 0.5)
        error = quant.error_report(x, quant.quantize(x.astype(np.float32), name), name)
        assert error.rmse == 0
    else:
        assert error.relative < min(0.7, 4 * 2.0 ** -FORMATS[name].bpw)
        assert error.cosine > 1 - error.relative**2


def test_error_falls_as_bits_grow():
    errors = {
        name: quant.error_report(X[:4], quant.quantize(X[:4], name, _importance_for(name)), name).rmse
        for name in WRITTEN
        if name not in TERNARY
    }
    for a in errors:
        for b in errors:
            if FORMATS[b].bpw > 1.2 * FORMATS[a].bpw:
                assert errors[b] < errors[a], (a, b)


@pytest.mark.parametrize("name", [n for n in WEIGHTED if n not in NEED_IMPORTANCE])
def test_importance_lowers_the_weighted_error(name):
    x = X[:6]
    weighted = _weighted_error(name, x, IMPORTANCE, IMPORTANCE)
    assert weighted < _weighted_error(name, x, None, IMPORTANCE)


@pytest.mark.parametrize("name", WEIGHTED)
@pytest.mark.parametrize("exponent", [-120, -40, 15, 40, 110])
def test_only_ratios_of_importance_count(name, exponent):
    w = np.round(64 * IMPORTANCE) + 1
    scaled = np.ldexp(w, exponent)
    assert np.isfinite(scaled).all()
    assert (quant.quantize(X[:8], name, scaled) == quant.quantize(X[:8], name, w)).all()


@pytest.mark.parametrize("name", WRITTEN)
def test_result_depends_on_nothing_but_the_row(name, monkeypatch):
    monkeypatch.setattr(importlib.import_module("quant.quantize"), "ROWS_PER_TASK", N)
    w = IMPORTANCE if name in WEIGHTED else None
    expected = quant.quantize(X, name, w, threads=1)
    assert (quant.quantize(X, name, w, threads=3) == expected).all()
    assert (quant.quantize(np.asfortranarray(X), name, w) == expected).all()
    assert (quant.quantize(X[::-1], name, w)[::-1] == expected).all()
    assert (quant.quantize(X[3], name, w) == expected[3]).all()
    read_only = X.copy()
    read_only.flags.writeable = False
    assert (quant.quantize(read_only, name, w) == expected).all()
    assert (read_only == X).all()


@pytest.mark.parametrize("name", WRITTEN)
def test_sign_and_power_of_two_change_nothing_but_the_scale(name):
    """x * 4 is quantized to 4 times the weights: nothing depends on the absolute size."""
    if name in ("NVFP4", "F16"):
        pytest.skip("its scales have subnormals within reach")
    w = IMPORTANCE if name in WEIGHTED else None
    x = X[:4]
    y = quant.dequantize(quant.quantize(x, name, w), name)
    y4 = quant.dequantize(quant.quantize(4 * x, name, w), name)
    if name in ("Q4_0", "Q8_0", "Q1_0", "TQ1_0", "TQ2_0", "MXFP4", "F32", "BF16"):
        assert (y4 == 4 * y).all()
    else:
        np.testing.assert_allclose(y4, 4 * y, atol=4e-2 * float(np.abs(y4).max()))


# --- hard input ---

_R = np.random.default_rng(5)
_NORMAL = _R.standard_normal(N).astype(np.float32)
_SPIKE = _NORMAL.copy()
_SPIKE[700] = 1e4
HARD = {
    "zeros": np.zeros(N),
    "minus zeros": -np.zeros(N),
    "denormals": _NORMAL * 1e-40,
    "smallest denormal": np.full(N, 1e-45),
    "around the smallest normal": _NORMAL * 2e-38,
    "tiny": _NORMAL * 1e-30,
    "small halves": _NORMAL * 1e-7,
    "one weight": np.eye(1, N, 300)[0],
    "spike": _SPIKE,
    "constant": np.full(N, 0.3),
    "alternating": np.resize([1, -1], N),
    "denormals beside normals": np.where(np.arange(N) % 2, 1e-40, _NORMAL),
    "zero groups": _NORMAL * (np.arange(N) // 16 % 2),
    "large": _NORMAL * 1e3,
}
HUGE = {
    "spike of 1e30": np.where(np.arange(N) == 700, 1e30, _NORMAL),
    "all 1e38": np.sign(_NORMAL) * 1e38,
    "around 1e20": _NORMAL * 1e20,
    "largest": np.full(N, np.finfo(np.float32).max),
    "half's end": _NORMAL * 65504,
}


def _assert_sane(name: str, q: np.ndarray) -> np.ndarray:
    assert quant.validate(q, name) == -1
    y = quant.dequantize(q, name)
    assert np.isfinite(y).all()
    return y


@pytest.mark.parametrize(("name", "weighted"), WAYS)
@pytest.mark.parametrize("kind", HARD)
def test_hard_rows(name, weighted, kind):
    x = HARD[kind].astype(np.float32)[None]
    y = _assert_sane(name, quant.quantize(x, name, IMPORTANCE if weighted else None))
    assert np.abs(y).max() <= 2 * np.abs(x).max() + 1e-6
    if kind.endswith("zeros"):
        assert (y == 0).all()


@pytest.mark.parametrize(("name", "weighted"), WAYS)
@pytest.mark.parametrize("kind", HUGE)
def test_huge_rows_are_quantized_or_refused(name, weighted, kind):
    x = HUGE[kind].astype(np.float32)[None]
    try:
        q = quant.quantize(x, name, IMPORTANCE if weighted else None)
    except QuantError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert "row 0, column " in refusal
        assert "overflow" in refusal
        assert name not in WIDE or kind == "largest"
        return
    assert quant.validate(q, name) == -1
    if kind != "largest":  # a code's rounding may lead beyond the largest float
        _assert_sane(name, q)


HARD_IMPORTANCE = {
    "zeros": np.zeros(N),
    "zero block": np.where(np.arange(N) // 256 == 1, 0, 1),
    "zero groups": np.arange(N) // 16 % 2,
    "one column": np.eye(1, N, 300)[0],
    "1e38": np.full(N, 1e38),
    "largest": np.full(N, np.finfo(np.float32).max),
    "1e-38": np.full(N, 1e-38),
    "denormals": np.full(N, 1e-42),
    "one huge": np.where(np.arange(N) == 300, 1e38, 1),
    "wide": 10.0 ** _R.uniform(-30, 30, N),
}


@pytest.mark.parametrize("name", WEIGHTED)
@pytest.mark.parametrize("kind", HARD_IMPORTANCE)
def test_hard_importance(name, kind):
    w = HARD_IMPORTANCE[kind].astype(np.float32)
    y = _assert_sane(name, quant.quantize(X, name, w))
    # IQ1_M fits its scale by least squares, which overshoots when almost all importance lies on few weights
    assert np.abs(y).max() <= (32 if name == "IQ1_M" else 4) * np.abs(X).max()


@pytest.mark.parametrize("name", WEIGHTED)
@pytest.mark.parametrize("row", ["zeros", "denormals", "large", "zero groups"])
@pytest.mark.parametrize("kind", ["zeros", "1e38", "denormals"])
def test_hard_rows_with_hard_importance(name, row, kind):
    x = HARD[row].astype(np.float32)[None]
    _assert_sane(name, quant.quantize(x, name, HARD_IMPORTANCE[kind].astype(np.float32)))


# --- refusals ---


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(name, value):
    x = X.copy()
    x[5, 77] = value
    with pytest.raises(QuantError, match=rf"row 5, column 77 is {value}; repair the source"):
        quant.quantize(x, name, _importance_for(name))


@pytest.mark.parametrize("name", WEIGHTED)
@pytest.mark.parametrize("value", [np.nan, np.inf, -1, -1e-30])
def test_importance_that_cannot_be_is_refused(name, value):
    w = IMPORTANCE.copy()
    w[77] = value
    with pytest.raises(QuantError, match=r"importance of column 77 is .*; it must be finite and not negative"):
        quant.quantize(X, name, w)
    with pytest.raises(QuantError, match=r"importance has shape \(1023,\), the rows have 1024 columns"):
        quant.quantize(X, name, IMPORTANCE[:-1])


@pytest.mark.parametrize("name", NEED_IMPORTANCE)
def test_formats_that_need_importance_say_so(name):
    with pytest.raises(QuantError, match=f"{name} needs an importance matrix; collect one"):
        quant.quantize(X, name)


@pytest.mark.parametrize("name", WRITTEN)
def test_rows_that_do_not_fit(name):
    fmt = FORMATS[name]
    if fmt.block_size > 1:
        with pytest.raises(QuantError, match=f"row length 1025 is not a multiple of {fmt.block_size}"):
            quant.quantize(np.zeros((2, 1025), np.float32), name)
    with pytest.raises(QuantError, match="1 or 2 dimensions"):
        quant.quantize(np.zeros((2, 2, 256), np.float32), name)
    for shape in ((0, N), (3, 0), (0,)):
        w = _importance_for(name, shape[-1])
        q = quant.quantize(np.zeros(shape, np.float32), name, w)
        assert q.shape == (*shape[:-1], fmt.row_size(shape[-1]))
        assert quant.dequantize(q, name).shape == shape


def test_names_go_into_messages():
    from quant.quantize import quantize_into

    fmt = FORMATS["Q4_0"]
    with pytest.raises(QuantError, match=r"^blk\.0\.attn_q\.weight: row 0, column 0 is nan"):
        quantize_into(
            np.full((1, 32), np.nan, np.float32), fmt, np.empty((1, 1), fmt.block), name="blk.0.attn_q.weight"
        )
