"""Statistics on arrays whose answers can be worked out on paper, and the scoring window."""

import math

import numpy as np
import pytest

from engine import EngineError
from engine.evaluate import statistics as stats
from engine.evaluate.scoring import cut, cut_strided, divergence, negative_log_likelihood


def test_mean_and_error():
    x = np.array([1.0] * 6 + [3.0] * 6)  # mean 2, mean of squares 5, variance 1
    assert stats.mean(x) == stats.Estimate(2.0, math.sqrt(1 / 11))
    assert stats.mean(x[:10]).error == 0  # ten or fewer: no error is given
    assert stats.mean(np.full(12, 7.0)) == stats.Estimate(7.0, 0.0)


def test_perplexity():
    nll = np.array([math.log(2)] * 6 + [math.log(8)] * 6)  # mean ln 4, deviation ln 2
    found = stats.perplexity(nll)
    assert found.value == pytest.approx(4)
    assert found.error == pytest.approx(4 * math.log(2) / math.sqrt(11))


def test_log_ratio_knows_the_common_part():
    base = np.arange(20, dtype=float)
    found = stats.log_ratio(base + 0.5, base)  # a constant shift has no error
    assert found.value == pytest.approx(0.5)
    assert found.error == pytest.approx(0, abs=1e-7)


def test_covariance():
    a, b = np.array([0.0, 2.0] * 6), np.array([1.0, 5.0] * 6)  # mean product 5, means 1 and 3
    assert stats.covariance(a, b) == pytest.approx((5 - 3) / 11)
    assert stats.covariance(a[:9], b[:9]) == 0


def test_share_and_root_mean_square():
    assert stats.share(np.array([True] * 3 + [False])) == stats.Estimate(0.75, math.sqrt(0.75 * 0.25 / 3))
    x = np.array([3.0, 4.0] * 6)  # squares 9 and 16: mean 12.5, deviation 3.5
    found = stats.root_mean_square(x)
    assert found.value == pytest.approx(math.sqrt(12.5))
    assert found.error == pytest.approx(0.5 * 3.5 / math.sqrt(11) / math.sqrt(12.5))


def test_percentiles_interpolate():
    x = np.array([4.0, 1.0, 3.0, 2.0])
    assert stats.percentiles(x, (0.0, 50.0, 100.0, 90.0)) == {0.0: 1.0, 50.0: 2.5, 100.0: 4.0, 90.0: pytest.approx(3.7)}


def test_log_likelihood_by_hand():
    logits = np.log(np.array([[1, 2, 5], [8, 1, 1]], np.float32))
    found = negative_log_likelihood(logits, np.array([2, 1]))
    np.testing.assert_allclose(found, [-math.log(5 / 8), -math.log(1 / 10)], rtol=1e-6)
    np.testing.assert_allclose(negative_log_likelihood(logits + 1000, np.array([2, 1])), found, rtol=1e-4)
    with pytest.raises(EngineError, match="not finite"):
        negative_log_likelihood(np.array([[np.nan, 1.0]], np.float32), np.array([0]))


def test_divergence_by_hand():
    base = np.log(np.array([[0.5, 0.25, 0.25], [0.9, 0.05, 0.05]], np.float32))
    model = np.log(np.array([[0.25, 0.5, 0.25], [0.9, 0.05, 0.05]], np.float32))
    kld, same = divergence(base, model + 3)
    assert kld[0] == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2), abs=1e-6)
    assert kld[1] == pytest.approx(0, abs=1e-6)
    assert same.tolist() == [False, True]


def test_divergence_of_a_model_from_itself_is_exactly_zero():
    x = np.random.default_rng(1).standard_normal((50, 999)).astype(np.float32) * 8
    kld, same = divergence(x, x.copy())
    assert (kld == 0).all()
    assert same.all()


def test_divergence_equals_float64():
    rng = np.random.default_rng(2)
    p = rng.standard_normal((40, 3000)) * 3
    q = p + rng.standard_normal(p.shape) * 0.3
    lp, lq = (a - np.log(np.exp(a).sum(1, keepdims=True)) for a in (p, q))
    want = (np.where(lp > -16, np.exp(lp), 0) * (lp - lq)).sum(1)
    kld, same = divergence(p.astype(np.float32), q.astype(np.float32))
    np.testing.assert_allclose(kld, want, rtol=2e-5, atol=2e-7)
    np.testing.assert_array_equal(same, p.argmax(1) == q.argmax(1))


def test_windows():
    w = cut(range(100, 123), 5, None, bos=1)
    assert w.text.tolist() == [list(range(100 + 5 * i, 105 + 5 * i)) for i in range(4)]
    assert w.inputs(1, 3).tolist() == [[1, 106, 107, 108, 109], [1, 111, 112, 113, 114]]
    assert (w.first, w.last, w.scored) == (2, 4, 2)
    assert w.targets(0, 2).tolist() == [103, 104, 108, 109]
    assert len(cut(range(100), 5, 3, None)) == 3
    assert len(cut(range(10), 5, 99, None)) == 2
    assert cut(range(100), 5, 2, None, skip=3).text[0].tolist() == [15, 16, 17, 18, 19]
    assert len(cut(range(25), 5, None, None, skip=3)) == 2
    with pytest.raises(EngineError, match="behind chunk 4"):
        cut(range(25), 5, None, None, skip=4)


def test_strided_windows():
    w = cut_strided(range(100), 8, 4, None, bos=-1)  # windows of 10, one every 4 tokens
    assert len(w) == 23  # ceil((100 - 10) / 4)
    assert w.inputs(1, 2).tolist() == [[-1, *range(5, 14)]]
    assert w.targets(0, 2).tolist() == [6, 7, 8, 9, 10, 11, 12, 13]  # every token once
    assert len(cut_strided(range(100), 8, 4, 5, None)) == 5
    for stride in (8, -1):
        with pytest.raises(EngineError, match=f"a stride of {stride} does not fit"):
            cut_strided(range(100), 8, stride, None, None)
    with pytest.raises(EngineError, match="two contexts of 8"):
        cut_strided(range(15), 8, 4, None, None)


def test_ratio_difference_correlation():
    base = np.array([math.log(2)] * 6 + [math.log(8)] * 6)
    nll = base + math.log(1.5)  # a constant factor has no error, and correlates fully
    ratio, difference = stats.ratio(nll, base), stats.difference(nll, base)
    assert ratio.value == pytest.approx(1.5)
    assert ratio.error == pytest.approx(0, abs=1e-7)
    assert difference.value == pytest.approx(6 - 4)
    error = 4 * math.log(2) / math.sqrt(11)  # of the base; 1.5 times of the other, with covariance 1.5 error^2
    assert difference.error == pytest.approx(0.5 * error)
    assert stats.correlation(nll, base) == pytest.approx(1)
    assert stats.correlation(nll, 10 - base) == pytest.approx(-1)
    assert stats.correlation(np.ones(20), np.ones(20)) is None


def test_wilson_interval():
    low, high = stats.wilson(0, 10)
    assert (low, high) == (0, pytest.approx(0.2775, abs=1e-4))  # z^2 / (n + z^2)
    low, high = stats.wilson(81, 263)  # the example of Newcombe (1998)
    assert (low, high) == (pytest.approx(0.2553, abs=1e-4), pytest.approx(0.3662, abs=1e-4))


def test_histogram():
    edges = stats.HISTOGRAM_EDGES
    found = stats.histogram(np.array([0.0, edges[0], edges[3] * 1.01, 1e9]))
    assert len(found) == len(edges) - 1
    assert (found[0], found[3], found[-1], sum(found)) == (2, 1, 1, 4)


def test_stored_log_probabilities():
    """Records by the reference's formulas, on a row whose answer is known: 65,535 steps of 16 / 65,535 at most."""
    from engine.kernels.score import decode_rows, encode_rows

    x = np.array([[0, -8, -16, -40, -4], [3, 3, 3, 3, 3]], np.float32)
    records = np.zeros((2, 10), np.uint16)
    encode_rows(x, records)
    heads = records[:, :4].copy().view(np.float32)
    norm = math.log(1 + math.exp(-8) + math.exp(-16) + math.exp(-4))
    assert heads[0].tolist() == pytest.approx([16 / 65535, -16 - norm])
    assert records[0, 4:9].tolist() == [65535, 32768, 0, 0, 49151]  # 32767.5 to even, 49151.25
    assert heads[1].tolist() == pytest.approx([0, -math.log(5)])
    assert not records[1, 4:].any()
    out = np.empty((2, 5), np.float32)
    decode_rows(records, out)
    np.testing.assert_allclose(out[0, [0, 1, 4]], np.array([0, -8, -4]) - norm, atol=2e-4)
    np.testing.assert_allclose(out[1], -math.log(5), rtol=1e-6)


def test_divergence_from_stored_probabilities_is_not_normalized():
    """A base of log-probabilities is taken as it is, as the reference does."""
    base = np.log(np.array([[0.5, 0.25, 0.125]], np.float32))  # does not sum to 1
    logits = np.log(np.array([[0.25, 0.5, 0.25]], np.float32))
    want = 0.5 * math.log(2) - 0.25 * math.log(2) - 0.125 * math.log(2)
    assert divergence(base, logits, normalized=True)[0][0] == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize(
    ("n", "n_ctx", "chunks", "message"),
    [
        (9, 5, None, "9 tokens, two contexts of 5"),
        (50, 3, None, "leaves nothing"),
        (50, 5, 0, "0 chunks"),
        (0, 5, None, "0 tokens"),
    ],
)
def test_windows_that_do_not_work(n, n_ctx, chunks, message):
    with pytest.raises(EngineError, match=message):
        cut(range(n), n_ctx, chunks, None)
