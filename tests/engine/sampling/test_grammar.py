"""Grammars over tokens: masks against a slow definition, parts of characters, tokens by name, a real vocabulary."""

import random
import time

import numpy as np
import pytest

from engine.errors import EngineError
from engine.sampling import Candidates, Chain, Grammar, GrammarMatcher, Params, TokenTexts
from engine.sampling import grammar as grammar_module
from engine.sampling.json_schema import json_to_gbnf

JSON = r"""
root ::= object
value ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
array ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x00-\x1f] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ws
ws ::= [ \t\n]*
"""


def texts_of(*pieces, eog=(), names=None):
    ids = dict(names or {})
    return TokenTexts(tuple(pieces), tuple(pieces), frozenset(eog), lambda text: ids.get(text, [0, 0]))


def slow_mask(grammar_text, before, texts):
    """A token fits if some continuation does: every prefix that can go on is found by trying bytes."""
    grammar = Grammar(grammar_text)
    return [bool(p) and grammar.read(grammar.start, before + p) != () for p in texts.pieces]


GRAMMARS = [
    'root ::= [a-c]+ ("x" | "é" root)',
    'root ::= "ab" "c"{2,3} [^a]*',
    JSON,
    'root ::= ("é" | "😀" | [ぁ-ゟ])+ "."',
]


@pytest.mark.parametrize("text", GRAMMARS, ids=["words", "repeats", "json", "unicode"])
def test_masks(text):
    """Along random texts, with tokens that cut characters anywhere."""
    dice = random.Random(text)
    samples = ["abcxé", "é😀ぁゟ.", '{"a": [1, "é"], "b": null}', "abccc", "\n\t ", "truefalse"]
    raw = "".join(samples).encode()
    pieces = {raw[i : i + n] for i in range(len(raw)) for n in (1, 2, 3, 5)} | {b""}
    texts = texts_of(*sorted(pieces, key=lambda p: (len(p), p)))
    matcher = GrammarMatcher.of(text, texts)
    steps = 0
    for _ in range(4):
        matcher.reset()
        before = b""
        for _ in range(12):
            mask = matcher.mask()
            assert mask.tolist() == slow_mask(text, before, texts)
            allowed = np.flatnonzero(mask).tolist()
            assert all(matcher.allows(i) == mask[i] for i in range(len(mask)))
            if not allowed:
                break
            token = dice.choice(allowed)
            matcher.accept(token)
            before += texts.pieces[token]
            steps += 1
    assert steps > 20


def test_half_characters():
    """é is C3 A9: the first byte fits alone, then only its second does."""
    texts = texts_of(b"\xc3", b"\xa9", b"\xa8", "é".encode(), b"\xc3\xa9\xc3", b"a")
    matcher = GrammarMatcher.of('root ::= "é"+', texts)
    assert matcher.mask().tolist() == [True, False, False, True, True, False]
    matcher.accept(0)
    assert not matcher.complete
    assert matcher.mask().tolist() == [False, True, False, False, False, False]
    matcher.accept(1)
    assert matcher.complete


def test_the_end_of_a_text():
    texts = texts_of(b"a", b"", eog={1})
    matcher = GrammarMatcher.of('root ::= "a"+', texts)
    assert matcher.mask().tolist() == [True, False]
    with pytest.raises(EngineError, match="token 1 does not fit"):
        matcher.accept(1)
    matcher.accept(0)
    assert matcher.mask().tolist() == [True, True]
    matcher.accept(1)


def test_tokens_by_name_and_id():
    texts = texts_of(b"a", b"", b"b", b"", names={"<t>": [1]}, eog={3})
    matcher = GrammarMatcher.of("root ::= <t> !<t>* <[1]> [a]", texts)
    assert matcher.mask().tolist() == [False, True, False, False]
    matcher.accept(1)
    assert matcher.mask().tolist() == [True, True, True, False]
    matcher.accept(2)
    matcher.accept(1)
    assert matcher.mask().tolist() == [True, False, False, False]
    matcher.accept(0)
    assert matcher.mask().tolist() == [False, False, False, True]
    # a token that ends a text is not among "any but", but can be named
    matcher = GrammarMatcher.of("root ::= !<t>", texts)
    assert matcher.mask().tolist() == [matcher.allows(i) for i in range(4)] == [True, False, True, False]
    matcher = GrammarMatcher.of('root ::= <[3]> "a"', texts)
    assert matcher.mask().tolist() == [False, False, False, True]
    matcher.accept(3)
    assert matcher.mask().tolist() == [True, False, False, False]


def test_control_tokens_have_no_text():
    texts = TokenTexts((b"", b"<"), (b"<|im_start|>", b"<"))
    assert GrammarMatcher.of("root ::= .*", texts).mask().tolist() == [False, True]


def test_candidates_are_narrowed():
    texts = texts_of(b"a", b"b", b"c")
    matcher = GrammarMatcher.of("root ::= [bc]", texts)
    c = Candidates(np.zeros(5, np.float32))  # logits are padded beyond the vocabulary
    matcher.apply(c)
    assert c.ids.tolist() == [1, 2]
    c = Candidates(np.zeros(5, np.float32))
    c.take(np.array([4, 2, 0]))
    matcher.apply(c)
    assert c.ids.tolist() == [2]
    with pytest.raises(EngineError, match="no token of this vocabulary fits"):
        GrammarMatcher.of('root ::= "z"', texts).apply(Candidates(np.zeros(3, np.float32)))


def test_clones_go_their_own_ways():
    texts = texts_of(b"a", b"b")
    matcher = GrammarMatcher.of('root ::= "ab" | "ba"', texts)
    twin = matcher.clone()
    matcher.accept(0)
    twin.accept(1)
    assert matcher.mask().tolist() == [False, True]
    assert twin.mask().tolist() == [True, False]
    twin.reset()
    assert twin.mask().tolist() == [True, True]


def test_tables_that_are_begun_anew_change_nothing(monkeypatch):
    monkeypatch.setattr(grammar_module, "MANY_STATES", 3)
    monkeypatch.setattr(grammar_module, "MAX_MASKS", 1)
    texts = texts_of(b"a", b"b", b"ab", b"(", b")")
    matcher = GrammarMatcher.of('root ::= "(" root ")" | [ab]+', texts)
    for token in (3, 3, 3, 2, 0, 4, 4):
        assert matcher.mask()[token]
        matcher.accept(token)
    assert matcher.grammar.age > 0
    assert matcher.mask().tolist() == [False, False, False, False, True]


HOSTILE = [
    'root ::= "a" root "b" | "a" root "c" | "a"',  # two ways at every step
    'root ::= ("a"? "a"? "a"?){0,9999}',
    "root ::= " + "(" * 90 + '"a"' + "*)" * 90 + "*",
    "root ::= " + " | ".join(f'"{i:x}"' for i in range(9999)),
    'root ::= ("a"{0,9999} "b"){0,9999}',
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_grammars_end_in_an_answer(text):
    """A refusal or a mask, soon; the state does not grow without bound."""
    texts = texts_of(*[b"a" * n for n in range(1, 40)], b"b", b"ab" * 20)
    start = time.monotonic()
    try:
        matcher = GrammarMatcher.of(text, texts)
        for _ in range(5):
            token = int(np.flatnonzero(matcher.mask())[-1])
            matcher.accept(token)
    except (EngineError, IndexError):
        pass
    assert time.monotonic() - start < 60  # a hang, not a figure


@pytest.fixture(scope="module")
def smollm2_texts(smollm2):
    import gguftools
    from engine.tokenizer import from_metadata

    with gguftools.open(smollm2) as f:
        return TokenTexts.of(from_metadata(f.metadata))


def test_a_real_vocabulary_writes_json(smollm2_texts):
    """Random logits, a grammar: what comes out is JSON."""
    import json

    rng = np.random.default_rng(0)
    n = len(smollm2_texts.pieces)
    letters = np.array([p.isascii() and len(p) < 4 for p in smollm2_texts.pieces])
    closers = np.array([p.strip() in (b'"', b"}", b"]", b'"}', b'"]') for p in smollm2_texts.pieces])
    ended = 0
    for seed in range(6):
        matcher = GrammarMatcher.of(json_to_gbnf(), smollm2_texts)
        chain = Chain.of(Params(seed=seed, top_k=0, min_p=0), smollm2_texts, matcher)
        out = b""
        for _ in range(150):
            logits = rng.standard_normal(n).astype(np.float32) + letters * 3 + closers * 12
            logits[list(smollm2_texts.eog)] = 30
            token = chain.sample(logits)
            chain.accept(token)
            if token in smollm2_texts.eog:
                assert isinstance(json.loads(out), dict)
                ended += 1
                break
            out += smollm2_texts.pieces[token]
    assert ended >= 3


def test_masks_are_those_of_single_tokens_on_a_real_vocabulary(smollm2_texts):
    matcher = GrammarMatcher.of(JSON, smollm2_texts)
    dice = random.Random(1)
    for _ in range(5):
        mask = matcher.mask()
        for token in dice.sample(range(len(mask)), 300):
            assert matcher.allows(token) == mask[token]
        matcher.accept(dice.choice(np.flatnonzero(mask).tolist()))
