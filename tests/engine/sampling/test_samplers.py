"""Samplers with a memory or random numbers: by hand, against slow definitions, and as distributions."""

import random

import numpy as np
import pytest

from engine.errors import EngineError
from engine.sampling import Candidates
from engine.sampling.dry import Dry, breakers_of, continuations, since_breaker
from engine.sampling.rng import RANDOM_SEED, Stream
from engine.sampling.samplers import AdaptiveP, Dist, Greedy, LogitBias, Mirostat, Penalties, Xtc, zipf_k
from engine.sampling.texts import TokenTexts

LOG = np.log(np.array([0.1, 0.2, 0.3, 0.4], np.float32))


def test_the_mersenne_twister():
    """The C++ standard gives the 10,000th number of the seed 5489 (and libstdc++ the way from bits to numbers)."""
    stream = Stream(5489)
    assert [stream.bits() for _ in range(10_000)][-1] == 4123659995
    a, b = Stream(1), Stream(1)
    low, high = b.bits(), b.bits()
    assert a.uniform() == (low + high * 2**32) / 2**64
    assert a.uniform32() == np.float32(b.bits()) / np.float32(2**32)


def test_streams():
    stream = Stream(7)
    first = [stream.uniform() for _ in range(3)]
    other = stream.clone()
    assert [stream.uniform() for _ in range(3)] == [other.uniform() for _ in range(3)]
    stream.reset()
    assert [stream.uniform() for _ in range(3)] == first
    assert Stream(RANDOM_SEED).used != Stream(RANDOM_SEED).used
    assert Stream(3).draw(np.array([0.0, 0.0, 1.0])) == 2


def test_greedy_takes_the_first_of_equals():
    c = Candidates(np.array([1, 3, 3], np.float32))
    Greedy().apply(c)
    assert c.token == 1
    for empty in (np.empty(0, np.float32), np.full(2, -np.inf, np.float32)):
        with pytest.raises(EngineError, match="no token is left"):
            Greedy().apply(Candidates(empty))


def test_dist_follows_the_probabilities():
    sampler = Dist(Stream(3))
    counts = np.zeros(4)
    for _ in range(4000):
        c = Candidates(LOG)
        sampler.apply(c)
        counts[c.token] += 1
    expected = 4000 * np.exp(LOG)
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # chi-square, 3 degrees of freedom, 0.1 %


def test_dist_draws_once_for_every_token():
    """Also when there is no choice, so that a seed means the same whatever the filters leave."""
    sampler, stream = Dist(Stream(3)), Stream(3)
    sampler.apply(Candidates(np.zeros(1, np.float32)))
    stream.uniform()
    assert sampler.stream.uniform() == stream.uniform()


def test_dist_never_takes_what_is_excluded():
    sampler = Dist(Stream(0))
    for _ in range(50):
        c = Candidates(np.array([-np.inf, 0, -np.inf, 0], np.float32))
        sampler.apply(c)
        assert c.token in (1, 3)


def test_logit_bias():
    c = Candidates(np.zeros(4, np.float32))
    LogitBias({1: 2.5, 3: -np.inf, 99: 1.0}).apply(c)
    assert c.logits.tolist() == [0, 2.5, 0, -np.inf]
    c = Candidates(np.zeros(4, np.float32))
    c.take(np.array([3, 1]))
    LogitBias({1: 2.5}).apply(c)
    assert c.logits.tolist() == [0, 2.5]


@pytest.mark.parametrize("sorted_first", [False, True])
def test_penalties(sorted_first):
    """Token 0 was said twice, 1 once; 2 is forgotten."""
    sampler = Penalties(3, 2.0, 0.25, 0.5)
    for token in (2, 0, 1, 0):
        sampler.accept(token)
    c = Candidates(np.array([4, -4, 3, 1], np.float32))
    if sorted_first:
        c.sort()
    sampler.apply(c)
    assert dict(zip(c.ids.tolist(), c.logits.tolist())) == {
        0: 4 / 2 - 2 * 0.25 - 0.5,
        1: -4 * 2 - 0.25 - 0.5,
        2: 3,
        3: 1,
    }
    assert not c.sorted
    twin = sampler.clone()
    sampler.reset()
    c = Candidates(np.array([4, -4, 3, 1], np.float32))
    sampler.apply(c)
    assert c.logits.tolist() == [4, -4, 3, 1]
    assert list(twin.recent) == [0, 1, 0]


def test_xtc_tosses_a_coin():
    sampler = Xtc(0.3, 0.15, 0, Stream(1))
    hits = 0
    for _ in range(2000):
        c = Candidates(LOG)
        sampler.apply(c)
        assert c.ids.tolist() in ([0, 1, 2, 3], [1, 0])
        hits += len(c) == 2
    assert abs(hits - 600) < 75  # 3.6 standard deviations
    again = sampler.clone()
    assert again.stream.uniform() == sampler.stream.uniform()


# --- DRY --------------------------------------------------------------------------------------------------------------


def slow_continuations(tokens, reach):
    """For every earlier place: how long what stands before it agrees with the end."""
    found = {}
    for at in range(1, len(tokens)):
        n = 0
        while n < at and tokens[at - 1 - n] == tokens[-1 - n]:
            n += 1
        if n:
            found[tokens[at]] = max(found.get(tokens[at], 0), min(n, reach))
    return found


def test_continuations_are_those_of_the_definition():
    dice = random.Random(0)
    for _ in range(500):
        tokens = [dice.randrange(3) for _ in range(dice.randrange(40))]
        reach = dice.randrange(10)
        assert continuations(tokens, reach) == slow_continuations(tokens, reach)


def test_dry_example():
    """`a b c c b c y a b c`: c would go on with 3 tokens, y with 2, b with 1."""
    a, b, c, y = range(4)
    sampler = Dry(2.0, 1.5, 2, 64, {})
    for token in (a, b, c, c, b, c, y, a, b, c):
        sampler.accept(token)
    x = Candidates(np.zeros(5, np.float32))
    sampler.apply(x)
    assert x.logits.tolist() == [0, 0, -2 * 1.5**1, -2 * 1.5**0, 0]
    sampler.clone().reset()
    assert len(sampler.recent) == 10


def test_dry_stops_at_breakers():
    assert since_breaker([1, 2, 3, 4], {2: {()}}) == 2
    assert since_breaker([1, 2, 3, 4], {2: {(3,)}}) == 1
    assert since_breaker([1, 2, 3, 4], {2: {(4,)}}) == 4
    assert since_breaker([1, 2], {2: {(), (3,)}}) == 0
    assert since_breaker([1, 2, 3], {2: {(), (3,)}}) == 0
    sampler = Dry(1.0, 2.0, 1, 64, {9: {()}})
    for token in (1, 2, 9, 3, 4, 1, 2, 9):
        sampler.accept(token)
    x = Candidates(np.zeros(10, np.float32))
    sampler.apply(x)  # nothing behind the breaker is repeated
    assert not x.logits.any()
    sampler.accept(3)
    x = Candidates(np.zeros(10, np.float32))
    sampler.apply(x)
    assert x.logits.tolist() == [0, 0, 0, 0, -1, 0, 0, 0, 0, 0]


def test_dry_does_not_overflow():
    sampler = Dry(1.0, 3.0, 1, 1000, {})
    for _ in range(1000):
        sampler.accept(0)
    x = Candidates(np.zeros(2, np.float32))
    sampler.apply(x)
    assert np.isfinite(x.logits).all()
    assert x.logits[0] < -1e37


def test_breakers_and_tokens():
    """A breaker may lie within a token, or begin in one and go on in the next."""
    pieces = (b"a", b"a\n", b"b", b"xxab", b"xa", b"ab", b"bc")
    texts = TokenTexts(pieces, pieces, tokenize=lambda text: {"b": [2], "bc": [6], "c": []}.get(text, [6]))
    assert breakers_of(texts, ["ab"]) == {0: {(2,)}, 3: {()}, 4: {(2,)}, 5: {()}}
    assert breakers_of(texts, ["\n", ""]) == {1: {()}}


# --- Mirostat, adaptive p ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_holds_the_surprise(version):
    """Over a Zipf distribution the average surprise comes out at tau."""
    logits = (-1.1 * np.log(np.arange(1, 2001))).astype(np.float32)
    sampler = Mirostat(version, 4.0, 0.1, Stream(5))
    total = 0.0
    for i in range(600):
        c = Candidates(logits)
        sampler.apply(c)
        total += -np.log2(c.p[c.selected]) if i >= 100 else 0
    assert abs(total / 500 - 4.0) < 0.2
    sampler.reset()
    assert sampler.mu == 8.0


def test_mirostat_2_by_hand():
    """mu is 2 tau = 2 bits: 0.4 and 0.3 are kept (1.3 and 1.7 bits), 0.2 is not."""
    sampler = Mirostat(2, 1.0, 0.5, Stream(1))
    c = Candidates(LOG)
    sampler.apply(c)
    assert c.ids.tolist() == [3, 2]
    surprise = -np.log2({3: 4 / 7, 2: 3 / 7}[c.token])
    assert sampler.mu == pytest.approx(2 - 0.5 * (surprise - 1), rel=1e-5)
    c = Candidates(LOG)
    sampler.mu = 0.1  # nothing surprises so little: the likeliest is kept
    sampler.apply(c)
    assert c.ids.tolist() == [3]


def test_zipf_fit():
    """Probabilities that follow Zipf's law with s = 1.5: the formula with that s."""
    p = np.arange(1, 1001) ** -1.5
    p /= p.sum()
    k = (0.5 * 2**6 / (1 - 1000**-0.5)) ** (1 / 1.5)
    assert zipf_k(p, 6.0, 1000, 100) == int(k)
    assert zipf_k(np.ones(5) / 5, 3.0, 5, 100) == 5
    assert zipf_k(np.array([1.0, 0.0]), 3.0, 2, 100) == 1
    assert zipf_k(np.arange(1, 1001) ** -1.0 / 7.5, 2.0, 1000, 100) >= 1


def test_adaptive_p_by_hand():
    """target 0.3, nothing said yet: the average is the target, so the token of 0.3 is at the peak."""
    sampler = AdaptiveP(0.3, 0.5, Stream(2))
    c = Candidates(LOG)
    sampler.apply(c)
    d = np.abs(np.array([0.1, 0.2, 0.3, 0.4]) - 0.3) / 0.3
    np.testing.assert_allclose(c.logits, 5 - 10 * d * d / (1 + d), atol=1e-4)
    p = (0.1, 0.2, 0.3, 0.4)[c.token]
    sampler.accept(c.token)
    assert sampler.weighted == pytest.approx(p + 0.5 * 0.6, rel=1e-5)
    assert sampler.total == 1 + 0.5 * 2
    sampler.accept(0)  # a token that was not chosen here teaches nothing
    assert sampler.total == 2
    c = Candidates(LOG)
    sampler.apply(c)
    weighted = sampler.weighted
    sampler.accept((c.token + 1) % 4)
    assert sampler.weighted == weighted
    sampler.reset()
    assert sampler.weighted == pytest.approx(0.6)


def test_adaptive_p_off_is_dist():
    counts = np.zeros(4)
    sampler = AdaptiveP(-1.0, 0.9, Stream(2))
    for _ in range(2000):
        c = Candidates(LOG)
        sampler.apply(c)
        counts[c.token] += 1
    expected = 2000 * np.exp(LOG)
    assert ((counts - expected) ** 2 / expected).sum() < 16.3
