"""Speculation: the distribution is unchanged, matching gives the plain text, look-up finds what a slow search finds."""

import random

import numpy as np
import pytest

from engine.errors import EngineError
from engine.sampling import Chain, GrammarMatcher, Params, TokenTexts
from engine.sampling.rng import Stream
from engine.sampling.speculative import (
    look_up,
    one_hot,
    residual,
    target_distributions,
    verify_by_matching,
    verify_by_rejection,
)

P = np.array([[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.0, 0.5]])
Q = np.array([[0.2, 0.3, 0.4, 0.1], [0.4, 0.3, 0.2, 0.1]])
TRIALS = 20_000
#: chi-square, 1 in 1,000, by degrees of freedom
CHI = {2: 13.8, 3: 16.3}


def chi_square(counts, p):
    expected = counts.sum() * p
    assert counts[p == 0].sum() == 0
    return (((counts - expected) ** 2)[p > 0] / expected[p > 0]).sum()


@pytest.mark.parametrize("kind", ["drawn", "looked up", "the same"])
def test_the_distribution_is_unchanged(kind):
    """Over many drafts of two tokens, the first, second and third token of the text come as p says."""
    q = {"drawn": Q, "looked up": one_hot([1, 3], 4), "the same": P[:2]}[kind]
    drafts, stream = Stream(11), Stream(12)
    counts = np.zeros((3, 4))
    kept = 0
    for _ in range(TRIALS):
        draft = [drafts.choice(q[0]), drafts.choice(q[1])] if kind != "looked up" else [1, 3]
        n, out = verify_by_rejection(P, q, draft, stream)
        assert len(out) == n + 1
        assert out[:n] == draft[:n]
        kept += n
        for place, token in enumerate(out):
            counts[place, token] += 1
    for place, p in enumerate(P):  # the rows do not depend on what came before: conditional and plain are the same
        assert chi_square(counts[place], p) < CHI[np.count_nonzero(p) - 1], (place, counts[place])
    first = np.minimum(P[0], q[0]).sum()  # Leviathan et al., theorem 3.5: how often a token is kept
    expected = TRIALS * first * (1 + np.minimum(P[1], q[1]).sum())
    assert abs(kept - expected) < 5 * np.sqrt(TRIALS)


def test_a_text_of_a_markov_chain_is_unchanged():
    """The distribution of whole texts of three tokens, where p and q depend on what came before."""
    rng = np.random.default_rng(5)
    target, weak = (rng.dirichlet(np.ones(3), 3) for _ in range(2))
    expected = np.einsum("a,ab,bc->abc", target[0], target, target).ravel()
    drafts, stream = Stream(1), Stream(2)
    counts = np.zeros((3, 3, 3))
    for _ in range(TRIALS):
        text = [0]
        while len(text) < 4:
            draft, q = [], []
            for _ in range(2):
                q.append(weak[(text + draft)[-1]])
                draft.append(drafts.choice(q[-1]))
            p = target[[text[-1], *draft]]
            text += verify_by_rejection(p, np.array(q), draft, stream)[1]
        counts[tuple(text[1:4])] += 1
    assert chi_square(counts.ravel(), expected) < 54.1  # 26 degrees of freedom, 1 in 1,000


def test_residual():
    np.testing.assert_allclose(residual(P[0], Q[0]), [1, 0, 0, 0])
    np.testing.assert_array_equal(residual(P[0], P[0]), P[0])


def test_always_and_never_kept():
    p = np.eye(3)
    assert verify_by_rejection(p, p[:2], [0, 1], Stream(1)) == (2, [0, 1, 2])
    assert verify_by_rejection(p, np.full((2, 3), 1 / 3), [1, 1], Stream(1)) == (0, [0])
    assert verify_by_rejection(p[:1], np.empty((0, 3)), [], Stream(1)) == (0, [0])


def test_bad_shapes_and_drafts():
    with pytest.raises(EngineError, match="1 drafted tokens need p"):
        verify_by_rejection(P, Q, [0], Stream(1))
    with pytest.raises(EngineError, match="drafted token 3 cannot have been drawn"):
        verify_by_rejection(P, one_hot([1, 2], 4), [3, 2], Stream(1))


@pytest.mark.parametrize("params", [Params(temp=0), Params(seed=4, repeat_penalty=1.2), Params(seed=4, mirostat=2)])
def test_matching_gives_the_plain_text(params):
    """Whatever is drafted, with any chain: the same tokens as one at a time."""

    def logits(tokens):
        return (np.random.default_rng(tokens[-3:]).standard_normal(12) * 2).astype(np.float32)

    def plain():
        chain, tokens = Chain.of(params), [0]
        for _ in range(60):
            tokens.append(chain.sample(logits(tokens)))
            chain.accept(tokens[-1])
        return tokens

    expected = plain()
    chain, tokens, dice, kept = Chain.of(params), [0], random.Random(1), 0
    while len(tokens) < 61:
        at = len(tokens)
        draft = [t if dice.random() < 0.7 else dice.randrange(12) for t in expected[at : at + 4]]
        before = [*tokens]

        def sample(i, draft=draft, before=before):
            token = chain.sample(logits([*before, *draft[:i]]))
            chain.accept(token)
            return token

        n, out = verify_by_matching(draft, sample)
        assert out[:n] == draft[:n]
        kept += n
        tokens += out
    assert tokens[:61] == expected
    assert kept > 20


def test_matching_ends_with_the_text():
    assert verify_by_matching([1, 2, 3], lambda i: [1, 2, 3, 4][i], eog={2}) == (2, [1, 2])
    assert verify_by_matching([1, 5], lambda i: [1, 2, 3][i]) == (1, [1, 2])
    assert verify_by_matching([], lambda i: 9) == (0, [9])


def slow_look_up(tokens, longest, shortest, n_draft):
    for n in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if n < len(tokens) and tokens[start : start + n] == tokens[-n:]:
                return tokens[start + n : start + n + n_draft]
    return []


def test_look_up():
    assert look_up([1, 2, 3, 4, 1, 2], 3, 1, 3) == [3, 4, 1]
    assert look_up([1, 2, 9, 1, 2, 8, 1, 2], 3, 1, 1) == [8]
    assert look_up([1, 2, 3], 3, 1, 5) == []
    assert look_up([], 3, 1, 5) == look_up([1], 3, 1, 5) == []
    with pytest.raises(EngineError, match="1 or more"):
        look_up([1], 0)
    dice = random.Random(0)
    for _ in range(500):
        tokens = [dice.randrange(4) for _ in range(dice.randrange(60))]
        longest = dice.randint(1, 5)
        shortest = dice.randint(1, longest)
        assert look_up(tokens, longest, shortest, 4) == slow_look_up(tokens, longest, shortest, 4)


def test_a_chain_with_a_memory_and_a_coin_is_unchanged():
    """Texts of two tokens, by penalties, XTC and a grammar: as often with drafts as without."""
    pieces = (b"a", b"b", b"c", b"d")
    texts = TokenTexts(pieces, pieces)
    params = Params(seed=9, repeat_penalty=1.5, xtc_probability=0.5, xtc_threshold=0.2, temp=1.2)
    rows = np.array([[1.0, 0.8, 0.2, 2.0], [0.5, 1.0, 1.2, 3.0], [0, 0, 0, 0]], np.float32)
    q = np.array([[0.3, 0.3, 0.2, 0.2], [0.25, 0.25, 0.25, 0.25]])
    chain = Chain.of(params, texts, GrammarMatcher.of("root ::= [abc] [abd] .*", texts))
    counts = np.zeros((2, 4, 4))
    drafts, stream = Stream(1), Stream(2)
    for _ in range(2000):
        plain, drafted = chain.fork(), chain.fork()
        text = []
        for row in rows[:2]:
            text.append(plain.sample(row, grammar_first=True))
            plain.accept(text[-1])
        counts[0][tuple(text)] += 1
        text = []
        while len(text) < 2:
            at = len(text)
            draft = [drafts.choice(one) for one in q[at:]]
            p = target_distributions(drafted, rows[at:], draft)
            _, out = verify_by_rejection(p, q[at:], draft, stream)
            for token in out:
                drafted.accept(token)
            text += out
        counts[1][tuple(text[:2])] += 1
    assert counts[:, 3].sum() == counts[:, :, 2].sum() == 0  # what the grammar excludes
    plain_, drafted_ = counts.reshape(2, -1)
    both = plain_ + drafted_ > 0
    assert both.sum() == 9
    statistic = ((plain_ - drafted_) ** 2)[both] / (plain_ + drafted_)[both]
    assert statistic.sum() < 26.1  # 8 degrees of freedom, 1 in 1,000
