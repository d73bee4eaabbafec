"""The error report against its formulas, and the mistakes it refuses."""

import importlib

import numpy as np
import pytest

import quant
from quant import QuantError

R = np.random.default_rng(3)
X = R.standard_normal((6, 512)).astype(np.float32)
W = R.random(512).astype(np.float32)


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "F16"])
def test_formulas(name):
    q = quant.quantize(X, name)
    y = quant.dequantize(q, name).astype(np.float64)
    x = X.astype(np.float64)
    d = x - y
    report = quant.error_report(X, q, name, W)
    assert report.n == X.size
    assert report.rmse == pytest.approx(np.sqrt(np.mean(d**2)))
    assert report.weighted_rmse == pytest.approx(np.sqrt(np.average(d**2, weights=np.broadcast_to(W, d.shape))))
    assert report.max_error == np.abs(d).max()
    assert report.cosine == pytest.approx((x * y).sum() / np.linalg.norm(x) / np.linalg.norm(y), abs=1e-12)
    assert report.relative == pytest.approx(np.linalg.norm(d) / np.linalg.norm(x))
    block = quant.get_format(name).block_size
    assert report.worst_block == (d**2 * W).reshape(-1, block).sum(axis=1).argmax()
    unweighted = quant.error_report(X, q, name)
    assert unweighted.weighted_rmse is None
    assert unweighted.worst_block == (d**2).reshape(-1, block).sum(axis=1).argmax()


def test_pieces_do_not_show(monkeypatch):
    q = quant.quantize(X, "Q4_0")
    whole = quant.error_report(X, q, "Q4_0", W)
    monkeypatch.setattr(importlib.import_module("quant.error"), "WEIGHTS_PER_STEP", 1024)
    pieces = quant.error_report(X, q, "Q4_0", W)
    assert pieces.worst_block == whole.worst_block
    assert pieces.rmse == pytest.approx(whole.rmse, rel=1e-12)


def test_worst_block_is_found():
    x = X.copy()
    q = quant.quantize(x, "Q8_0")
    x[4, 100] += 3  # block 3 of 16 in row 4
    assert quant.error_report(x, q, "Q8_0").worst_block == 4 * 16 + 3


def test_exact_and_empty():
    zeros = np.zeros((2, 64), np.float32)
    report = quant.error_report(zeros, quant.quantize(zeros, "Q4_0"), "Q4_0", np.zeros(64, np.float32))
    assert (report.rmse, report.weighted_rmse, report.max_error, report.cosine, report.relative) == (0, 0, 0, 1, 0)
    report = quant.error_report(X, X.view(np.uint8), "F32")
    assert (report.rmse, report.max_error) == (0, 0)
    assert report.cosine == pytest.approx(1)
    empty = np.zeros((0, 64), np.float32)
    assert quant.error_report(empty, quant.quantize(empty, "Q4_0"), "Q4_0").n == 0


def test_rows_may_be_single():
    q = quant.quantize(X[0], "Q4_0")
    assert quant.error_report(X[0], q, "Q4_0") == quant.error_report(X[:1], q[None], "Q4_0")


def test_what_does_not_belong_together():
    q = quant.quantize(X, "Q4_0")
    for x, packed in ((X[:5], q), (X[:, :256], q), (X, q[:, :-18]), (X[None], q)):
        with pytest.raises(QuantError, match="do not belong"):
            quant.error_report(x, packed, "Q4_0")
    with pytest.raises(QuantError, match="importance has shape"):
        quant.error_report(X, q, "Q4_0", W[:-1])
