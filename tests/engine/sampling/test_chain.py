"""The chain: what it is built from, in which order, and that it repeats."""

import numpy as np
import pytest

from engine.errors import EngineError
from engine.sampling import (
    Chain,
    GrammarMatcher,
    Params,
    TokenTexts,
    recommended,
    samplers_from_letters,
    samplers_from_names,
)
from engine.sampling.chain import TABLE
from engine.sampling.params import DEFAULT_ORDER

PIECES = (b"", b"a", b"b", b"ab", b"\n")
TEXTS = TokenTexts(PIECES, (b"</s>", *PIECES[1:]), frozenset({0}), lambda text: [PIECES.index(text.encode())])


def logits(n=300, seed=0):
    return (np.random.default_rng(seed).standard_normal(n) * 3).astype(np.float32)


def test_the_default_chain():
    assert str(Chain.of(Params(seed=1))) == (
        "logits -> ?penalties -> ?dry -> ?top-n-sigma -> top-k k=40 -> ?typical -> top-p p=0.95 -> min-p p=0.05 -> "
        "?xtc -> temp t=0.8 -> dist"
    )


def test_names_and_letters():
    assert samplers_from_letters("edskypmxt") == DEFAULT_ORDER
    assert samplers_from_names(["top-k", "TOPK", "top_k", "nucleus", "typ", "temp", "topnsigma"]) == (
        *("top_k",) * 3,
        *("top_p", "typ_p", "temperature", "top_n_sigma"),
    )
    assert len({row.letter for row in TABLE}) == len(TABLE)
    for row in TABLE:
        assert samplers_from_names([row.name]) == samplers_from_letters(row.letter) == (row.name,)
    with pytest.raises(EngineError, match="unknown sampler 'tfs'; there are: penalties"):
        samplers_from_names(["tfs"])
    with pytest.raises(EngineError, match="unknown letter 'q'"):
        samplers_from_letters("kq")
    with pytest.raises(EngineError, match="unknown sampler"):
        Chain.of(Params(samplers=("nope",)))


ALL = Params(
    seed=3,
    samplers=(*DEFAULT_ORDER, "adaptive_p"),
    repeat_penalty=1.1,
    dry_multiplier=0.8,
    top_n_sigma=4.0,
    typ_p=0.99,
    xtc_probability=0.5,
    dynatemp_range=0.3,
    adaptive_target=0.4,
    logit_bias={7: 2.0},
)


@pytest.mark.parametrize(
    "params",
    [Params(seed=3), ALL, Params(seed=3, mirostat=1), Params(seed=3, mirostat=2), Params(seed=3, top_k=0, top_p=1)],
    ids=["default", "all", "mirostat", "mirostat-v2", "long"],
)
def test_a_seed_is_a_text(params):
    """The same from the beginning, after a reset, and from a clone in the middle."""
    chain = Chain.of(params, TEXTS)

    def go_on(chain, n):
        out = []
        for i in range(n):
            out.append(chain.sample(logits(seed=i)))
            chain.accept(out[-1])
        return out

    first = go_on(chain, 8)
    assert len(set(first)) > 1
    assert go_on(Chain.of(params, TEXTS), 8) == first
    chain.reset()
    assert go_on(chain, 4) == first[:4]
    twin = chain.clone()
    assert go_on(chain, 5) == go_on(twin, 5)


def test_another_seed_is_another_text():
    texts = {tuple(Chain.of(Params(seed=s)).sample(logits(seed=i)) for i in range(6)) for s in range(5)}
    assert len(texts) > 1


def test_all_samplers_print():
    assert str(Chain.of(ALL, TEXTS)).split(" -> ")[1:] == [
        "logit-bias n=1",
        "penalties n=64 repeat=1.1 frequency=0 presence=0",
        "dry multiplier=0.8 base=1.75 allowed=2 n=64",
        "top-n-sigma n=4",
        "top-k k=40",
        "typical p=0.99",
        "top-p p=0.95",
        "min-p p=0.05",
        "xtc p=0.5 threshold=0.1",
        "temp t=0.8 span=0.3 exponent=1",
        "adaptive-p target=0.4 decay=0.9",
    ]
    assert str(Chain.of(Params(mirostat=2, temp=1.0))) == "logits -> ?temp -> mirostat-v2 tau=5 eta=0.1"
    assert str(Chain.greedy()) == "logits -> greedy"


def test_temperature_zero_is_greedy():
    for i in range(5):
        x = logits(seed=i)
        assert Chain.of(Params(temp=0)).sample(x) == Chain.greedy().sample(x) == x.argmax()


def test_ignore_eos():
    x = np.array([9, 1, 2, 0, 0], np.float32)
    assert Chain.of(Params(temp=0, ignore_eos=True), TEXTS).sample(x) == 2
    with pytest.raises(EngineError, match="needs the vocabulary"):
        Chain.of(Params(ignore_eos=True))


def test_what_needs_a_vocabulary_says_so():
    with pytest.raises(EngineError, match="DRY sampler needs the vocabulary"):
        Chain.of(Params(dry_multiplier=1.0))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"temp": float("inf")}, "temp is inf"),
        ({"repeat_penalty": 0.0}, "repeat_penalty is 0.0: expected more than 0"),
        ({"repeat_last_n": -1}, "repeat_last_n is -1"),
        ({"dry_base": 0.5}, "dry_base is 0.5"),
        ({"mirostat": 3}, "mirostat is 3: expected 0"),
        ({"seed": -1}, "seed is -1"),
        ({"logit_bias": {3: float("inf")}}, "logit bias inf of token 3"),
    ],
)
def test_bad_parameters_are_named(values, message):
    with pytest.raises(EngineError, match=message) as error:
        Params(**values)
    assert len(str(error.value).splitlines()) == 1


def test_bad_logits():
    chain = Chain.of(Params(seed=1))
    for bad in (np.array([np.nan, 1]), np.full(4, -np.inf), np.empty(0)):
        with pytest.raises(EngineError):
            chain.sample(bad)
    with pytest.raises(EngineError, match="must end with one that selects"):
        Chain([]).sample(logits())


def test_distribution_is_what_sample_draws_from():
    x = logits(6, 4)
    chain = Chain.of(Params(seed=1, temp=1.3, top_k=4))
    p = chain.distribution(x)
    assert p.sum() == pytest.approx(1)
    assert np.count_nonzero(p) <= 4
    counts = np.bincount([chain.sample(x) for _ in range(3000)], minlength=6)
    kept = p > 0
    assert counts[~kept].sum() == 0
    assert ((counts - 3000 * p)[kept] ** 2 / (3000 * p[kept])).sum() < 16.3
    assert Chain.greedy().distribution(x).tolist() == np.eye(6)[x.argmax()].tolist()
    with pytest.raises(EngineError, match="speculate by matching"):
        Chain.of(Params(mirostat=2)).distribution(x)


def test_grammar_in_a_chain():
    """Freely first, once more if the grammar objects; both ways keep to it, and prompts do not move it."""
    for first in (False, True):
        chain = Chain.of(Params(seed=2, temp=1.5), TEXTS, GrammarMatcher.of('root ::= "ab" "b"*', TEXTS))
        assert str(chain).startswith("logits -> grammar -> ")
        chain.accept(4, generated=False)
        out = b""
        for _ in range(30):
            token = chain.sample(np.zeros(5, np.float32), grammar_first=first)
            chain.accept(token)
            if token == 0:
                break
            out += PIECES[token]
        assert token == 0
        assert out.startswith(b"ab")
        assert set(out[1:]) <= set(b"b")
        chain.reset()
        with pytest.raises(EngineError, match="does not fit the grammar"):
            chain.accept(2)
    p = chain.distribution(np.zeros(5, np.float32))
    assert p.tolist() == [0, 0.5, 0, 0.5, 0]


def test_what_a_model_recommends():
    metadata = {
        "general.sampling.sequence": "top_k;temperature",
        "general.sampling.top_k": 20,
        "general.sampling.temp": 0.6,
        "general.sampling.penalty_last_n": 32,
        "general.sampling.penalty_repeat": 1.05,
        "general.architecture": "llama",
    }
    params = recommended(metadata, temp=0.1)
    assert params == Params(
        samplers=("top_k", "temperature"), top_k=20, temp=0.1, repeat_last_n=32, repeat_penalty=1.05
    )
    assert recommended({}, seed=4) == Params(seed=4)
    with pytest.raises(EngineError, match=r"key 'general.sampling.top_k' is 'x', expected a number"):
        recommended({"general.sampling.top_k": "x"})
    with pytest.raises(EngineError, match="mirostat is 9"):
        recommended({"general.sampling.mirostat": 9})


def test_forks_draw_from_one_stream():
    chain = Chain.of(Params(seed=5, top_k=0, top_p=1, min_p=0))
    apart = [chain.fork().sample(logits()) for _ in range(6)]
    chain.reset()
    assert [chain.sample(logits()) for _ in range(6)] == apart
    assert len(set(apart)) > 1
