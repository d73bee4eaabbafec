"""Filters: numbers worked out by hand, and slow definitions that follow the papers' words."""

import math

import numpy as np
import pytest

from engine.errors import EngineError
from engine.sampling import Candidates, TokenTexts, filters, log_probabilities
from engine.sampling.candidates import largest


def of(*p: float) -> Candidates:
    """Candidates with these probabilities."""
    with np.errstate(divide="ignore"):
        return Candidates(np.log(np.array(p, np.float32)))


def slow(c: Candidates) -> list[tuple[int, float]]:
    """(id, probability), likeliest first, in Python's floats."""
    top = max(c.logits)
    weights = [math.exp(float(x) - float(top)) for x in c.logits]
    rows = [(int(i), w / sum(weights)) for i, w in zip(c.ids, weights)]
    return sorted(rows, key=lambda row: -row[1])


HAND = [
    (filters.top_k, {"k": 1}, (0.1, 0.2, 0.3, 0.4), [3]),
    (filters.top_k, {"k": 3}, (0.1, 0.2, 0.3, 0.4), [3, 2, 1]),
    (filters.top_k, {"k": 9}, (0.1, 0.2, 0.3, 0.4), [3, 2, 1, 0]),
    (filters.top_k, {"k": 0}, (0.1, 0.2, 0.3, 0.4), [0, 1, 2, 3]),
    (filters.top_p, {"p": 0.0}, (0.1, 0.2, 0.3, 0.4), [3]),
    (filters.top_p, {"p": 0.69}, (0.1, 0.2, 0.3, 0.4), [3, 2]),
    (filters.top_p, {"p": 0.71}, (0.1, 0.2, 0.3, 0.4), [3, 2, 1]),
    (filters.top_p, {"p": 1.0}, (0.1, 0.2, 0.3, 0.4), [0, 1, 2, 3]),
    (filters.top_p, {"p": 0.0, "min_keep": 2}, (0.1, 0.2, 0.3, 0.4), [3, 2]),
    (filters.min_p, {"p": 0.0}, (0.1, 0.2, 0.3, 0.4), [0, 1, 2, 3]),
    (filters.min_p, {"p": 0.45}, (0.1, 0.2, 0.3, 0.4), [1, 2, 3]),
    (filters.min_p, {"p": 1.0}, (0.1, 0.2, 0.3, 0.4), [3]),
    (filters.min_p, {"p": 0.9, "min_keep": 3}, (0.1, 0.2, 0.3, 0.4), [3, 2, 1]),
    # the surprises are 0.03, 4.6 and 4.6, the entropy 0.11: the likeliest is nearest
    (filters.typical, {"p": 0.5}, (0.97, 0.01, 0.01, 0.01), [0]),
    # entropy 1.28 nats; surprises 0.92, 1.20, 1.61, 2.30: the second is nearest, then the third
    (filters.typical, {"p": 0.4}, (0.4, 0.3, 0.2, 0.1), [1, 2]),
    (filters.typical, {"p": 1.0}, (0.4, 0.3, 0.2, 0.1), [0, 1, 2, 3]),
    (filters.typical, {"p": 0.1, "min_keep": 3}, (0.4, 0.3, 0.2, 0.1), [1, 2, 0]),
    (filters.xtc, {"threshold": 0.25}, (0.1, 0.2, 0.3, 0.4), [2, 1, 0]),
    (filters.xtc, {"threshold": 0.05}, (0.1, 0.2, 0.3, 0.4), [0]),
    (filters.xtc, {"threshold": 0.35}, (0.1, 0.2, 0.3, 0.4), [3, 2, 1, 0]),
    (filters.xtc, {"threshold": 0.05, "min_keep": 2}, (0.1, 0.2, 0.3, 0.4), [3, 2, 1, 0]),
    (filters.temperature, {"t": 0.0}, (0.1, 0.4, 0.1, 0.4), [1]),
]


@pytest.mark.parametrize(("function", "values", "p", "kept"), HAND)
def test_by_hand(function, values, p, kept):
    c = of(*p)
    function(c, **values)
    assert c.ids.tolist() == kept


def test_top_n_sigma_by_hand():
    c = Candidates(np.array([0, 1, 2, 9, -np.inf], np.float32))  # mean 3, deviation sqrt(12.5) = 3.54
    filters.top_n_sigma(c, 2.1)  # 9 - 7.42 = 1.58
    assert c.ids.tolist() == [2, 3]
    c = Candidates(np.array([0, 1], np.float32))
    filters.top_n_sigma(c, 0.0)
    assert len(c) == 2


def test_temperature_divides_logits():
    c = Candidates(np.array([1, -2, 3], np.float32))
    filters.temperature(c, 0.5)
    assert c.logits.tolist() == [2, -4, 6]


@pytest.mark.parametrize("exponent", [1.0, 2.0])
def test_dynamic_temperature(exponent):
    """Entropy of (0.5, 0.25, 0.15, 0.1) is 1.2080 nats, log 4 is 1.3863: the share of the range is 0.8714."""
    p = (0.5, 0.25, 0.15, 0.1)
    share = (-sum(x * math.log(x) for x in p) / math.log(4)) ** exponent
    c, plain = of(*p), of(*p)
    filters.dynamic_temperature(c, 0.8, 0.5, exponent)
    filters.temperature(plain, 0.3 + 1.0 * share)
    np.testing.assert_allclose(c.logits, plain.logits, rtol=1e-5)
    c = of(0.9, 0.1)
    filters.dynamic_temperature(c, 0.5, 1.0, exponent)  # from 0 to 1.5, not from -0.5
    share = (-(0.9 * math.log(0.9) + 0.1 * math.log(0.1)) / math.log(2)) ** exponent
    np.testing.assert_allclose(c.logits, np.log([0.9, 0.1]) / (1.5 * share), rtol=1e-5)
    c = of(0.5, 0.5)
    filters.dynamic_temperature(c, 0.5, 1.0, 1.0)  # highest entropy: 1.5
    np.testing.assert_allclose(c.logits, np.log(0.5) / 1.5, rtol=1e-5)


@pytest.mark.parametrize("n", [1, 2, 50, 3000, 9000])
@pytest.mark.parametrize("seed", range(3))
def test_slow_definitions(n, seed):
    """On random logits, some of them equal, some -inf: the same tokens as the definition in words."""
    rng = np.random.default_rng([n, seed])
    logits = (rng.standard_normal(n) * rng.choice([0.5, 3])).astype(np.float32).round(2)
    logits[rng.random(n) < 0.1] = -np.inf
    logits[0] = 1
    rows = slow(Candidates(logits))
    for p in (0.3, 0.9, 0.999):
        c = Candidates(logits)
        filters.top_p(c, p)
        k = len(c)
        assert sum(q for _, q in rows[:k]) >= p - 1e-4
        assert sum(q for _, q in rows[: k - 1]) < p + 1e-4
        assert c.logits.tolist() == sorted(logits.tolist(), reverse=True)[:k]
        c = Candidates(logits)
        filters.min_p(c, p)
        assert set(c.ids.tolist()) == {i for i, q in rows if logits[i] >= logits.max() + np.log(np.float32(p))}
        c = Candidates(logits)
        filters.typical(c, p)
        entropy = -sum(q * math.log(q) for _, q in rows if q > 0)
        far = [abs(-math.log(q) - entropy) if q > 0 else math.inf for _, q in rows]
        q = dict(rows)
        kept = [q[i] for i in c.ids.tolist()]
        assert sum(kept) > p - 1e-4 or len(c) == n
        assert max(abs(-math.log(x) - entropy) for x in kept if x) <= sorted(far)[len(kept) - 1] + 1e-3
    for k in (1, 7, 300):
        c = Candidates(logits)
        filters.top_k(c, k)
        assert c.logits.tolist() == sorted(logits.tolist(), reverse=True)[:k]
        assert c.sorted


def test_largest_keeps_the_order_of_equal_values():
    x = np.array([1, 5, 5, 0, 5, 1, 9], np.float32)
    assert largest(x, 3).tolist() == [6, 1, 2]
    assert largest(x, 6).tolist() == [6, 1, 2, 4, 0, 5]
    assert largest(x, 0).tolist() == []


@pytest.mark.parametrize(
    "function", [filters.top_k, filters.top_p, filters.min_p, filters.typical, filters.top_n_sigma, filters.temperature]
)
def test_nothing_in_nothing_out(function):
    c = Candidates(np.empty(0, np.float32))
    function(c, 1 if function is filters.top_k else 0.5)
    assert len(c) == 0


def test_logits_that_are_no_numbers():
    for bad, message in (([np.nan, 0], "1 of 2 logits are NaN"), ([np.inf], r"\+inf"), ([[1, 2]], "one row of logits")):
        with pytest.raises(EngineError, match=message):
            Candidates(np.array(bad, np.float32))


def test_all_excluded():
    with pytest.raises(EngineError, match="no token is left"):
        Candidates(np.full(3, -np.inf, np.float32)).softmax()


def test_probabilities_sum_to_one_and_large_logits_do_not_overflow():
    c = Candidates(np.array([1e30, 1e30, -1e30], np.float32))
    assert c.softmax().tolist() == [0.5, 0.5, 0]


def test_log_probabilities():
    rows = log_probabilities(np.log(np.array([0.1, 0.7, 0.2], np.float32)) + 5, 2)
    assert [row.id for row in rows] == [1, 2]
    np.testing.assert_allclose([row.log_probability for row in rows], np.log([0.7, 0.2]), atol=1e-5)


def test_positions():
    c = Candidates(np.zeros(5, np.float32))
    where, which = c.positions(np.array([4, 9, 0]))
    assert (where.tolist(), which.tolist()) == ([4, 0], [0, 2])
    c.take(np.array([3, 0, 4]))
    where, which = c.positions(np.array([4, 9, 0]))
    assert dict(zip(where.tolist(), which.tolist())) == {2: 0, 1: 2}


PIECES = (b"", b"he", b"hello", b"x", b"", b"y")  # 0 and 4 end the text


@pytest.mark.parametrize(
    ("p", "kept"),
    [
        # enders have 0.1, more than 1 / 18 of the rest: only they stay
        ((0.06, 0.3, 0.3, 0.2, 0.04, 0.1), [0, 4]),
        # "he" takes what "hello" has, 0.75, x has 0.23: both stay above 0.2, then x falls below a third
        ((0.004, 0.4, 0.35, 0.23, 0.003, 0.013), [1, 0, 4]),
        # "hello" is the likelier: it takes the sum; x has 0.4 of 0.9 and stays
        ((0.004, 0.2, 0.3, 0.4, 0.003, 0.093), [3, 2, 0, 4]),
        # nobody is sure: the likeliest that ends the text
        ((0.002, 0.05, 0.05, 0.19, 0.004, 0.19), [4]),
    ],
)
def test_infill(p, kept):
    if kept == [4]:  # the rest goes to further tokens, each of little
        p, pieces = (*p, *[(1 - sum(p)) / 4] * 4), (*PIECES, *[b"%d" % i for i in range(4)])
    else:
        pieces = PIECES
    c = of(*p)
    filters.infill(c, TokenTexts(pieces, pieces, frozenset({0, 4})))
    assert c.ids.tolist() == kept


def test_infill_wants_few_candidates():
    texts = TokenTexts((), (), frozenset({0}))
    with pytest.raises(EngineError, match="put top_k before it"):
        filters.infill(Candidates(np.zeros(5000, np.float32)), texts)
