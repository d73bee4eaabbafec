"""The loop: what comes out is what plain decoding gives, with and without drafts, and however full the context is."""

from types import SimpleNamespace

import numpy as np
import pytest

import gguftools
from engine import EngineError, ModelContext
from engine.generation import DraftModel, Generator, LookUp, TextStream
from engine.generation.draft import check_vocabularies
from engine.sampling import Chain, Params, TokenTexts


@pytest.fixture(scope="module")
def session(tiny):
    return gguftools.load(tiny["f32"], threads=2)


@pytest.fixture(scope="module")
def small(tiny, tmp_path_factory):
    """The same model in few bits: a draft that is often right."""
    path = tmp_path_factory.mktemp("draft") / "draft.gguf"
    gguftools.quantize(tiny["f32"], path, "Q4_0")
    return gguftools.load(path, threads=2)


@pytest.fixture(scope="module")
def ids(data):
    return [int(i) for i in np.load(data / "tiny" / "expected.npz")["ids1"][:60]]


def context(session, n_ctx=512, **options):
    return ModelContext(session, **{"n_ctx": n_ctx, "type_k": "F32", "type_v": "F32"} | options)


def text_of(session, ids, n, chain=None, drafter=None, n_ctx=512, options=None, **more):
    generator = Generator(context(session, n_ctx, **options or {}), chain or Chain.greedy(), drafter, **more)
    generator.feed(ids)
    return [t.id for t in generator.run(n)], generator


def plain_greedy(session, ids, n):
    """Without a cache."""
    text = list(ids)
    for _ in range(n):
        text.append(int(session.logits(text)[-1].argmax()))
    return text[len(ids) :]


def test_greedy_text(session, ids):
    expected = plain_greedy(session, ids[:20], 12)
    found, generator = text_of(session, ids[:20], 12, n_probs=3)
    assert found == expected
    assert generator.stop == "length"


def test_log_probabilities(session, ids):
    generator = Generator(context(session), n_probs=3)
    generator.feed(ids[:20])
    (token,) = generator.run(1)
    wide = session.logits(ids[:20])[-1].astype(np.float64)
    expected = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
    assert token.logprob == pytest.approx(expected.max(), abs=1e-4)
    assert [t.id for t in token.top] == np.argsort(-expected)[:3].tolist()
    assert token.top[0].log_probability == pytest.approx(token.logprob, abs=1e-5)


def test_what_is_known_is_not_computed_again(session, ids):
    generator = Generator(context(session))
    generator.feed(ids[:40])
    first = [t.id for t in generator.run(5)]
    before = generator.context.counts.n_prompt
    generator.feed([*ids[:30], *ids[10:20]])
    assert generator.context.counts.n_prompt - before == 10
    generator.feed(ids[:40])
    assert [t.id for t in generator.run(5)] == first
    generator.feed(ids[:40])  # all of it is known: the last token is run again for its result
    assert [t.id for t in generator.run(5)] == first


# --- drafts ---


@pytest.mark.parametrize("n_draft", [1, 4, 16])
@pytest.mark.parametrize("kind", ["model", "look-up"])
def test_drafts_do_not_change_greedy_text(session, small, ids, kind, n_draft):
    prompt = ids[:20] * 2
    expected, _ = text_of(session, prompt, 60)
    drafter = DraftModel(context(small), session) if kind == "model" else LookUp()
    found, generator = text_of(session, prompt, 60, drafter=drafter, n_draft=n_draft)
    assert found == expected
    assert 0 < generator.accepted <= generator.drafted


@pytest.mark.parametrize("seed", range(5))
def test_drafts_do_not_change_sampled_text(session, small, ids, seed):
    def chain():
        return Chain.of(Params(seed=seed, temp=0.7), TokenTexts.of(session.tokenizer))

    expected, _ = text_of(session, ids[:20], 30, chain())
    for drafter in (DraftModel(context(small), session, p_min=0.1), LookUp(shortest=1)):
        assert text_of(session, ids[:20], 30, chain(), drafter, n_draft=4)[0] == expected


@pytest.mark.slow
def test_the_distribution_of_sampled_text_is_unchanged(session, small, ids):
    """The second token, drafted, against its exact distribution: chi-squared, for 400 seeds."""
    prompt, k, draws = ids[:20], 4, 400
    params = {"samplers": ("top_k", "temperature"), "top_k": k, "temp": 1.5}

    def exact(text):
        logits = session.logits(text)[-1].astype(np.float64) / 1.5
        best = np.argsort(-logits)[:k]
        p = np.exp(logits[best] - logits[best].max())
        return dict(zip(best.tolist(), p / p.sum()))

    expected: dict[int, float] = {}
    for first, p in exact(prompt).items():
        for second, q in exact([*prompt, first]).items():
            expected[second] = expected.get(second, 0.0) + p * q
    target, drafter = context(session), DraftModel(context(small), session)
    counts: dict[int, int] = {}
    drafted = 0
    for seed in range(draws):
        generator = Generator(target, Chain.of(Params(seed=seed, **params)), drafter, n_draft=2)
        target.memory.clear()
        generator.feed(prompt)
        second = [t.id for t in generator.run(3)][1]
        counts[second] = counts.get(second, 0) + 1
        drafted += generator.accepted
    assert drafted > draws / 10
    assert set(counts) <= set(expected)
    chi = sum((counts.get(t, 0) - draws * p) ** 2 / (draws * p) for t, p in expected.items())
    degrees = len(expected) - 1
    assert chi < degrees + 4 * np.sqrt(2 * degrees)


@pytest.mark.parametrize("name", ["mamba", "granitehybrid", "mistral-swa"])
def test_drafts_of_models_whose_memory_does_not_go_back(shared, tmp_path, name):
    folder = shared / "golden" / "arch" / name
    gguftools.convert(folder, tmp_path / "m.gguf", "f32")
    session = gguftools.load(tmp_path / "m.gguf", threads=2)
    ids = [int(i) for i in np.load(folder / "expected.npz")["ids1"][:60]]

    class Half:
        """Right at first, then wrong."""

        def draft(self, tokens, n):
            return [*expected[len(tokens) - len(ids) :][:3], 1, 2, 3][:n]

    expected, _ = text_of(session, ids, 24, options={"n_ubatch": 8})
    found, generator = text_of(session, ids, 24, drafter=Half(), options={"n_ubatch": 8})
    assert found == expected
    assert 0 < generator.accepted < generator.drafted


def test_vocabularies_of_drafts(session, shared, monkeypatch):
    check_vocabularies(session, session)
    other = gguftools.load(shared / "golden" / "vocab" / "gpt-2.gguf", vocab_only=True)
    with pytest.raises(EngineError, match="the draft model has a vocabulary of 50257, the model one of 2048"):
        check_vocabularies(other, session)
    monkeypatch.setattr(other, "tokenizer", SimpleNamespace(vocab=SimpleNamespace(tokens=["?"] * 2048)))
    with pytest.raises(EngineError, match=r"token 0 of the draft model is '\?', of the model "):
        check_vocabularies(other, session)


# --- ends ---


def test_the_end_of_the_text(session, ids, monkeypatch):
    expected = plain_greedy(session, ids[:20], 6)
    monkeypatch.setattr(session.tokenizer, "eog", frozenset({expected[3]}))
    found, generator = text_of(session, ids[:20], 12)
    assert found == expected[: expected.index(expected[3])]
    assert generator.stop == "end of text"


def test_a_full_context(session, ids, monkeypatch):
    monkeypatch.setattr(session.tokenizer, "eog", frozenset())
    found, generator = text_of(session, ids * 4, -1, n_ctx=256)
    assert generator.stop == "context full"
    assert len(generator.tokens) == 256
    assert len(found) == 17  # the last one came out of the last cell
    drafted, other = text_of(session, ids * 4, -1, n_ctx=256, drafter=LookUp())
    assert drafted == found
    assert other.stop == "context full"


def test_room_is_made(session, ids, monkeypatch):
    monkeypatch.setattr(session.tokenizer, "eog", frozenset())
    found, generator = text_of(session, ids * 4, 300, n_ctx=256, shift=True, keep=8)
    assert len(found) == 300
    assert generator.stop == "length"
    assert generator.tokens[:8] == ids[:8]
    assert generator.memory.pos_max(0) == len(generator.tokens) - 1 < 256


def test_models_whose_positions_cannot_be_moved(shared, tmp_path):
    gguftools.convert(shared / "golden" / "arch" / "mamba", tmp_path / "m.gguf", "f32")
    session = gguftools.load(tmp_path / "m.gguf", threads=1)
    with pytest.raises(EngineError, match="leave the shifting of the context off"):
        Generator(context(session), shift=True)


@pytest.mark.parametrize(
    ("prompt", "message"), [([], "the prompt is empty"), ([1] * 512, "the prompt has 512 tokens, the context room for")]
)
def test_prompts_that_cannot_be(session, prompt, message):
    with pytest.raises(EngineError, match=message):
        Generator(context(session)).feed(prompt)


def test_contexts_that_do_not_write(session):
    with pytest.raises(EngineError, match="use `embed`"):
        Generator(context(session, embeddings=True))


def test_no_tokens(session, ids):
    assert text_of(session, ids[:5], 0)[0] == []


# --- text ---


@pytest.mark.parametrize("cut", range(1, 7))
def test_text_comes_whole_however_it_is_cut(cut):
    data = "a é 漢字 😀 END of STOP".encode()
    for stops, expected in (((), data.decode()), (("STOP", "ST"), "a é 漢字 😀 END of "), (("ND",), "a é 漢字 😀 E")):
        stream = TextStream(stops)
        shown = "".join(stream.feed(data[i : i + cut]) for i in range(0, len(data), cut)) + stream.finish()
        assert shown == expected
        assert (stream.stopped is not None) == bool(stops)


def test_nothing_is_shown_that_may_be_a_stop():
    stream = TextStream(["\nUser:"])
    assert [stream.feed(p) for p in (b"Hi\n", b"Us", b"e", b" it\nUser", b": more")] == ["Hi", "", "", "\nUse it", ""]
    assert stream.stopped == "\nUser:"


def test_half_a_character_at_the_end():
    stream = TextStream()
    assert stream.feed(b"a\xe2\x82") == "a"
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"


def test_an_empty_stop():
    with pytest.raises(EngineError, match="empty stop string"):
        TextStream([""])
