"""Contexts: batches through the cache give what whole texts give, however they are cut; codes, sizes, reuse."""

import json
import logging
from dataclasses import replace

import numpy as np
import pytest

import gguftools
from engine import Batch, Code, ContextParams, EngineError, ModelContext, Session
from engine.cache.kv import CACHE_TYPES
from engine.cache.layout import Layout
from engine.cache.memory import CacheMemory
from gguftools.gguf import GGUF


def log_softmax(x):
    wide = x.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


@pytest.fixture(scope="module")
def session(tiny):
    return gguftools.load(tiny["f32"], threads=2)


@pytest.fixture(scope="module")
def ids(data):
    return [int(i) for i in np.load(data / "tiny" / "expected.npz")["ids1"][:90]]


@pytest.fixture(scope="module")
def whole(session, ids):
    """Log-probabilities of the next token behind each, without a cache."""
    return log_softmax(session.logits(ids))


@pytest.fixture(scope="module")
def windowed(shared, tmp_path_factory):
    """A model whose tokens see 32 positions."""
    path = tmp_path_factory.mktemp("windowed") / "m.gguf"
    gguftools.convert(shared / "golden" / "arch" / "mistral-swa", path, "f32")
    return gguftools.load(path, threads=2)


def first_layer_only(path):
    """A model of one layer: its keys and values depend on their own tokens alone."""
    with GGUF(path) as f:
        metadata = {**f.metadata, "llama.block_count": 1}
        tensors = {name: f.tensors[name] for name in f.tensors if not name.startswith("blk.") or "blk.0." in name}
        return Session(metadata, tensors, threads=2)


def context(session, n_ctx=256, type="F32", **options):
    return ModelContext(session, ContextParams(n_ctx, type_k=type, type_v=type, **options))


def every(ids, pos=None, seq=0):
    """A batch whose outputs are all wanted."""
    n = len(ids)
    return Batch(list(ids), pos=pos, seqs=[(seq,)] * n, outputs=[True] * n)


def run(c, ids, seq=0):
    """Log-probabilities behind each of the next tokens of a sequence."""
    c.process(every(ids, seq=seq))
    return log_softmax(c.all_logits())


# --- the same, however it is cut ---


@pytest.mark.parametrize("n_ubatch", [512, 64, 7, 1])
def test_ubatches_change_nothing(session, ids, whole, n_ubatch):
    np.testing.assert_allclose(run(context(session, n_ubatch=n_ubatch), ids), whole, atol=1e-4)


def test_token_by_token(session, ids, whole):
    c = context(session)
    for i, token in enumerate(ids):
        c.process([token])
        np.testing.assert_allclose(log_softmax(c.logits()), whole[i], atol=1e-4)
    assert c.counts.reused >= len(ids) - 1  # one graph for all of them
    assert c.counts.built == 1


def test_on_the_reference_backend(tiny, ids, whole):
    c = context(gguftools.load(tiny["f32"], backend="reference"))
    np.testing.assert_allclose(run(c, ids[:20]), whole[:20], atol=1e-4)
    np.testing.assert_allclose(run(c, ids[20:21]), whole[20:21], atol=1e-4)


@pytest.mark.parametrize("name", CACHE_TYPES)
def test_cache_types(session, ids, whole, name):
    """Loss grows as bits go. The bounds are twice what was measured."""
    bound = {"F32": 1e-4, "F16": 0.01, "BF16": 0.05, "Q8_0": 0.2, "Q5_1": 0.9, "Q5_0": 1.2}.get(name, 2.5)
    found = run(context(session, type=name, n_ubatch=16), ids)
    assert np.abs(found - whole).max() < bound
    assert np.mean(np.abs(found - whole)) < bound / 5


def test_rotation_makes_quantized_caches_better(session, ids, whole, monkeypatch):
    def error():
        return np.mean(np.abs(run(context(session, type="Q4_0"), ids) - whole))

    with_rotation = error()
    monkeypatch.setattr("engine.cache.reads.rotation", lambda *args: 0)
    assert with_rotation < error()


def test_greedy_ids_of_a_real_model(shared, smollm2):
    session = gguftools.load(smollm2, threads=2)
    c = context(session, 256, "F32")
    for golden in json.loads((shared / "golden" / "smollm2-greedy.json").read_text()):
        assert session.tokenize(golden["prompt"]) == golden["prompt_ids"]
        c.memory.clear()
        c.process(golden["prompt_ids"])
        for token, margin, nll in zip(golden["new_ids"], golden["margin"], golden["nll"]):
            found = log_softmax(c.logits())
            assert found[token] == pytest.approx(-nll, abs=1e-3)
            assert margin <= 0.002 or int(found.argmax()) == token
            c.process([token])


# --- several sequences ---


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("n_ubatch", [512, 16])
def test_two_sequences_in_one_batch(session, ids, whole, unified, n_ubatch):
    other = ids[::-1][:70]
    alone = log_softmax(session.logits(other))
    c = context(session, 512, n_seq_max=2, kv_unified=unified, n_ubatch=n_ubatch)
    batch = Batch()
    for i in range(90):
        batch.add(ids[i], i, (0,), True)
        if i < 70:
            batch.add(other[i], i, (1,), True)
    c.process(batch)
    found = log_softmax(c.all_logits())
    which = np.array([s[0] for s in batch.seqs])
    np.testing.assert_allclose(found[which == 0], whole, atol=1e-4)
    np.testing.assert_allclose(found[which == 1], alone, atol=1e-4)
    again = Batch()
    again.add(ids[0], 90, (0,), True)
    again.add(ids[0], 70, (1,), True)
    c.process(again)
    np.testing.assert_allclose(log_softmax(c.logits(1)), log_softmax(session.logits([*other, ids[0]]))[-1], atol=1e-4)


def test_shared_tokens_of_two_sequences(session, ids, whole):
    c = context(session, 256, n_seq_max=2, kv_unified=True)
    batch = Batch()
    for i, token in enumerate(ids[:40]):
        batch.add(token, i, (0, 1), i == 39)
    batch.add(ids[40], 40, (0,), True)
    batch.add(ids[50], 40, (1,), True)
    c.process(batch)
    np.testing.assert_allclose(log_softmax(c.logits(40)), whole[40], atol=1e-4)
    other = log_softmax(session.logits([*ids[:40], ids[50]]))[-1]
    np.testing.assert_allclose(log_softmax(c.logits(41)), other, atol=1e-4)
    assert c.memory.caches[0].streams[0].used == 42


@pytest.mark.parametrize("unified", [True, False])
def test_copies_of_a_sequence_go_their_own_ways(session, ids, whole, unified):
    c = context(session, 512, n_seq_max=2, kv_unified=unified)
    run(c, ids[:50])
    c.memory.copy(0, 1)
    assert c.memory.pos_max(1) == 49
    np.testing.assert_allclose(run(c, ids[50:], seq=0), whole[50:], atol=1e-4)
    np.testing.assert_allclose(run(c, ids[50:], seq=1), whole[50:], atol=1e-4)
    c.memory.keep(1)
    assert (c.memory.pos_max(0), c.memory.pos_max(1)) == (-1, 89)


# --- positions ---


def test_the_end_of_a_sequence_is_removed(session, ids, whole):
    c = context(session)
    run(c, ids[:60])
    run(c, ids[:10])
    assert c.memory.remove(0, 30)
    assert c.memory.pos_max(0) == 29
    np.testing.assert_allclose(run(c, ids[30:]), whole[30:], atol=1e-4)


@pytest.mark.parametrize("type", ["F32", "F16", "Q8_0"])
def test_moved_positions(session, ids, whole, type):
    """Attention knows differences of positions only: a sequence that was moved as a whole goes on as before."""
    c = context(session, type=type)
    run(c, ids[:50])
    c.memory.add(0, 0, -1, 7)
    assert (c.memory.pos_min(0), c.memory.pos_max(0)) == (7, 56)
    found = run(c, ids[50:])
    assert c.memory.pos_max(0) == 96
    np.testing.assert_allclose(found, whole[50:], atol={"F32": 1e-3, "F16": 0.02, "Q8_0": 0.3}[type])


def test_removing_a_part_and_closing_the_gap(tiny, ids):
    """What is left is what a fresh run on the kept tokens gives, where keys and values do not depend on others."""
    session = first_layer_only(tiny["f32"])
    c = context(session)
    run(c, ids[:60])
    assert c.memory.remove(0, 10, 30)
    c.memory.add(0, 30, -1, -20)
    assert c.memory.pos_max(0) == 39
    kept = [*ids[:10], *ids[30:60]]
    fresh = log_softmax(session.logits([*kept, *ids[60:]]))
    np.testing.assert_allclose(run(c, ids[60:]), fresh[40:], atol=1e-3)


def test_divided_positions(tiny, ids):
    session = first_layer_only(tiny["f32"])
    c = context(session)
    run(c, ids[:40])
    c.memory.divide(0, 0, -1, 2)
    assert (c.memory.pos_min(0), c.memory.pos_max(0)) == (0, 19)
    again = context(session)
    again.process(Batch(ids[:40], pos=[i // 2 for i in range(40)]))
    np.testing.assert_allclose(run(c, ids[40:]), run(again, ids[40:]), atol=1e-3)


# --- windows ---


@pytest.mark.parametrize("n_ubatch", [16, 512])
def test_windowed_layers(windowed, ids, n_ubatch):
    text = (ids * 6)[:500]
    whole = log_softmax(windowed.logits(text))
    c = context(windowed, 768, n_ubatch=n_ubatch)
    np.testing.assert_allclose(run(c, text), whole, atol=1e-4)
    small = c.memory.caches[0].n_cells
    assert small == (256 if n_ubatch == 16 else 768)  # pad(min(n_ctx, window + n_ubatch))
    if n_ubatch == 16:
        assert c.memory.pos_min(0) > 0  # what nobody will see any more is gone
        assert not c.memory.remove(0, 100)
        assert c.memory.pos_max(0) == 499
        full = context(windowed, 768, n_ubatch=16, full_windows=True)
        run(full, text)
        assert full.memory.remove(0, 100)
        np.testing.assert_allclose(run(full, text[100:120]), whole[100:120], atol=1e-4)


# --- sizes ---


@pytest.mark.parametrize(("type", "bytes_of_32"), [("F32", 128), ("F16", 64), ("Q8_0", 34), ("Q4_0", 18)])
def test_bytes_of_the_cache(session, type, bytes_of_32):
    h = session.hparams
    head = h.n_embd_head_k
    c = context(session, 512, type)
    assert c.memory.nbytes == 512 * h.n_layer * h.n_head_kv * head * 2 * bytes_of_32 // 32


@pytest.mark.parametrize(("n_seq", "unified", "cells"), [(1, False, 256), (4, True, 256), (16, True, 768)])
def test_bytes_of_a_windowed_cache(windowed, n_seq, unified, cells):
    h = windowed.hparams
    c = context(windowed, 1024, n_ubatch=128, n_seq_max=n_seq, kv_unified=unified)
    assert c.memory.nbytes == cells * h.n_layer * h.n_head_kv * h.n_embd_head_k * 2 * 4


@pytest.mark.parametrize(
    ("params", "n_ctx", "n_ctx_seq", "n_batch", "n_ubatch"),
    [
        ({}, 512, 512, 512, 512),
        ({"n_ctx": 300}, 512, 512, 512, 512),
        ({"n_ctx": 0}, 1024, 1024, 1024, 512),
        ({"n_ctx": 1000, "n_seq_max": 3}, 1536, 512, 1536, 512),
        ({"n_ctx": 1000, "n_seq_max": 3, "kv_unified": True}, 1024, 1024, 1024, 512),
        ({"n_batch": 64}, 512, 512, 64, 64),
        ({"n_batch": 0, "n_ubatch": 32}, 512, 512, 32, 32),
        ({"n_batch": 100, "n_ubatch": 0}, 512, 512, 100, 100),
    ],
)
def test_sizes(session, params, n_ctx, n_ctx_seq, n_batch, n_ubatch):
    c = ModelContext(session, **params)
    n_train = session.n_ctx_train
    expected = n_ctx if params.get("n_ctx") != 0 else n_train
    assert c.n_ctx == expected
    assert c.n_ctx_seq == (n_ctx_seq if params.get("n_ctx") != 0 else n_train)
    assert c.n_batch == (n_batch if params.get("n_ctx") != 0 else min(2048, n_train))
    assert c.n_ubatch == n_ubatch


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"n_seq_max": 257}, "n_seq_max is 1 to 256, not 257"),
        ({"n_seq_max": 0}, "n_seq_max is 1 to 256"),
        ({"n_batch": 0, "n_ubatch": 0}, "both 0"),
        ({"type_k": "Q6_K"}, "a cache of keys cannot be of type Q6_K; use one of F32, F16"),
        ({"type_v": "nothing"}, "a cache of values cannot be of type nothing"),
        ({"pooling": "max"}, "no pooling 'max'"),
        ({"rope_freq_scale": -1.0}, "rope_freq_scale is above 0"),
        ({"n_ctx": -1}, "0 or more"),
    ],
)
def test_impossible_parameters(session, params, message):
    with pytest.raises(EngineError, match=message):
        ModelContext(session, **params)


def test_heads_that_are_no_whole_blocks(session):
    c = context(session)
    layer = replace(c.memory.layout.attention[0], d_k=48)
    with pytest.raises(EngineError, match="heads of layer 0 have 48 elements, no multiple of its block of 32; use F16"):
        CacheMemory(Layout({0: layer}), 256, 64, 1, type_k="Q8_0")


def test_warnings(session, caplog):
    with caplog.at_level(logging.WARNING):
        ModelContext(session, n_ctx=session.n_ctx_train + 1)
        ModelContext(session, n_ctx=600, n_seq_max=2)
    assert "the model was trained for" in caplog.text
    assert "n_ctx is made 1024: 2 sequences of 512" in caplog.text


def test_overridden_rotation(session, ids, whole):
    longer = context(session, rope_freq_scale=0.5)
    doubled = context(session)
    doubled.process(Batch(ids[:20], pos=list(range(20))))
    found = run(longer, ids[:20])
    assert np.abs(found - whole[:20]).max() > 0.01
    same = context(session, rope_freq_base=session.hparams.rope_base)
    np.testing.assert_allclose(run(same, ids[:20]), whole[:20], atol=1e-4)


# --- memory and graphs ---


def test_the_first_tokens_allocate_nothing(session, ids):
    c = context(session, n_ubatch=64)
    before = c.compute_bytes
    assert before > 0
    run(c, ids)
    run(c, ids[:1])
    assert c.compute_bytes == before


def test_graphs_are_reused_while_shapes_are_the_same(session, ids):
    c = context(session, 768)
    for token in (ids * 4)[:300]:
        c.process([token])
    assert (c.counts.built, c.counts.reused) == (2, 298)  # a second one for cells 257 and on
    c.memory.clear()
    c.process([ids[0]])
    assert c.counts.reused == 299
    never = context(session, reuse=False)
    for token in ids[:5]:
        never.process([token])
    assert (never.counts.built, never.counts.reused) == (5, 0)


def test_counts_of_prompt_and_of_single_tokens(session, ids):
    c = context(session)
    c.process(ids[:30])
    c.process(ids[30:31])
    assert (c.counts.n_prompt, c.counts.n_eval) == (30, 1)
    assert c.counts.prompt > 0
    assert c.counts.eval > 0


# --- results ---


def test_results_by_place(session, ids, whole):
    c = context(session, n_ubatch=7)
    c.process(Batch(ids[:20], outputs=[i in (3, 11, 19) for i in range(20)]))
    for place, i in ((3, 3), (11, 11), (19, 19), (-1, 19), (-3, 3)):
        np.testing.assert_allclose(log_softmax(c.logits(place)), whole[i], atol=1e-4)
    with pytest.raises(EngineError, match="token 4 of the last batch has no result: its output flag was not set"):
        c.logits(4)
    with pytest.raises(EngineError, match="negative index -4 is out of range"):
        c.logits(-4)
    with pytest.raises(EngineError, match="no embeddings"):
        c.embedding()
    assert c.all_logits().shape == (3, session.n_vocab)


def test_only_the_last_result_by_default(session, ids, whole):
    c = context(session, n_ubatch=16)
    c.process(ids)
    np.testing.assert_allclose(log_softmax(c.logits()), whole[-1], atol=1e-4)
    with pytest.raises(EngineError, match="no result"):
        c.logits(0)


def test_embeddings(session, ids):
    hidden = session.hidden(np.array([ids]))
    c = context(session, embeddings=True, n_ubatch=16)
    c.process(every(ids))
    np.testing.assert_allclose(c.embedding(5), hidden[5], atol=1e-3)
    with pytest.raises(EngineError, match="this context gives embeddings"):
        c.logits()
    for kind, expected in (("mean", hidden.mean(0)), ("cls", hidden[0]), ("last", hidden[-1])):
        pooled = context(session, embeddings=True, pooling=kind, n_ubatch=16)
        pooled.process(ids)
        np.testing.assert_allclose(pooled.sequence_embedding(0), expected, atol=1e-3)
        with pytest.raises(EngineError, match="no pooled embedding of sequence 1"):
            pooled.sequence_embedding(1)


def test_embeddings_as_input(session, ids, whole):
    rows = session.weights["token_embd.weight"].array()[0, 0][ids]
    c = context(session)
    c.process(Batch(None, embd=rows, outputs=[True] * len(ids)))
    np.testing.assert_allclose(log_softmax(c.all_logits()), whole, atol=1e-4)


def test_without_causality(session, ids):
    c = context(session, causal=False)
    c.process(ids[:10])
    forward = c.all_logits().copy()
    c.memory.clear()
    c.process([*ids[:9], ids[20]])
    assert np.abs(c.all_logits()[0] - forward[0]).max() > 0.01  # the first token sees the last one


# --- codes ---


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (Batch([]), "the batch is empty"),
        (Batch([2048]), "token 0 of the batch is 2048: ids of this model are 0 to 2047"),
        (Batch([-1]), "token 0 of the batch is -1"),
        (Batch([1], seqs=[(2,)]), "belongs to sequence 2: there are 2"),
        (Batch([1], seqs=[(-1,)]), "belongs to sequence -1"),
        (Batch([1], seqs=[()]), "belongs to no sequence"),
        (Batch([1], pos=[3]), "sequence 0 ends at position 4 in memory, the batch begins at 3: give 5"),
        (Batch([1], pos=[7]), "the batch begins at 7: give 5"),
        (Batch([1, 2], pos=[5, 7]), "positions of sequence 0 have gaps"),
        (Batch([1, 2], pos=[6, 5]), "positions of sequence 0 decrease"),
        (Batch([1], pos=[-3]), "position -3 in the batch"),
        (Batch([1, 2], pos=[5]), "2 tokens and 1 positions"),
        (Batch([1, 2], seqs=[(1,), (0, 1)], pos=[0, 5]), "sequence 1 belongs to incompatible sets"),
        (Batch([1], seqs=[(0, 1)], pos=[5]), "sequences 0, 1 share tokens in the batch, but have diverged"),
        (Batch(None, embd=np.zeros((2, 3), np.float32)), "embeddings of shape"),
        (Batch([1] * 600), "more than n_batch 256"),
        (Batch([1.5]), "whole numbers"),
    ],
)
def test_bad_batches(session, ids, batch, message):
    c = context(session, n_seq_max=2, kv_unified=True)
    c.process(ids[:5])
    assert c.decode(batch) is Code.INVALID == -1
    assert message in c.error
    assert c.memory.pos_max(0) == 4
    with pytest.raises(EngineError, match="batch"):
        c.process(batch)


def test_no_room(session, ids, whole):
    c = context(session, 256)
    run(c, (ids * 3)[:250])
    assert c.decode(ids[:7]) is Code.NO_SLOT == 1
    assert "no room for 7 tokens in a cache of 256: use a larger context (-c)" in c.error
    assert c.memory.pos_max(0) == 249  # nothing was done
    assert c.decode(ids[:6]) is Code.OK == 0
    c.memory.clear()
    np.testing.assert_allclose(run(c, ids), whole, atol=1e-4)


def test_an_aborted_run_is_rolled_back(session, ids, whole):
    c = context(session, n_ubatch=30)
    seen = iter(range(10**9))
    per_ubatch = len(c._graph(c._key(_first_ubatch(c, ids))).prepared.executable.program.steps)
    c.abort = lambda: next(seen) > 1.5 * per_ubatch
    assert c.decode(ids) is Code.ABORTED == 2
    assert c.memory.pos_max(0) == 29  # the first ubatch stays
    c.abort = None
    np.testing.assert_allclose(run(c, ids[30:]), whole[30:], atol=1e-4)


def _first_ubatch(c, ids):
    return c.memory.split(c._completed(Batch.of(ids)), c.n_ubatch)[0]


@pytest.mark.parametrize(("error", "code"), [(MemoryError(), Code.NO_MEMORY), (EngineError("broken"), Code.FAILED)])
def test_a_run_that_fails(session, ids, whole, monkeypatch, error, code):
    c = context(session, n_ubatch=30)

    def fails(*args):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(c, "_fill", fails)
        assert c.decode(ids) is code
        assert code < -1
        assert c.error
    assert c.memory.pos_max(0) == -1
    np.testing.assert_allclose(run(c, ids), whole, atol=1e-4)


def test_an_interrupt_leaves_memory_in_order(session, ids, monkeypatch):
    c = context(session)

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(c, "_fill", interrupted)
    with pytest.raises(KeyboardInterrupt):
        c.decode(ids)
    assert c.memory.pos_max(0) == -1


# --- families ---

FAMILIES = (
    "apertus", "cohere", "deepseek2", "falcon", "gemma2", "gemma3", "gemma4", "glm4moe", "gpt-oss", "gpt2", "gptneox",
    "granite", "granitehybrid", "llama3-rope", "mamba", "mistral-swa", "mixtral", "nemotron_h", "olmo2", "olmo3",
    "phi3", "qwen2", "qwen2moe", "qwen3", "qwen35", "qwen3moe", "qwen3next", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip
#: those with states, or with learned positions
FIXED = ("gpt2", "granitehybrid", "mamba", "nemotron_h", "qwen35", "qwen3next")


@pytest.fixture(scope="module")
def family(shared, tmp_path_factory, request):
    """(session, ids) of one of the random models."""
    folder = shared / "golden" / "arch" / request.param
    path = tmp_path_factory.mktemp(request.param) / "m.gguf"
    gguftools.convert(folder, path, "f32")
    return gguftools.load(path, threads=2), [int(i) for i in np.load(folder / "expected.npz")["ids1"][:60]]


@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_families_through_the_cache(family):
    """Experts, windows, states, and both: the same through the memory, cut in any way, and side by side."""
    session, ids = family
    whole, other = log_softmax(session.logits(ids)), log_softmax(session.logits(ids[::-1][:25]))
    for n_ubatch in (512, 7):
        c = context(session, n_ubatch=n_ubatch)
        np.testing.assert_allclose(run(c, ids), whole, atol=1e-3)
    c.memory.clear()
    for i in range(10):
        np.testing.assert_allclose(run(c, ids[i : i + 1]), whole[i : i + 1], atol=1e-3)
    for unified in (True, False):
        two = context(session, 512, n_seq_max=2, kv_unified=unified, n_ubatch=16)
        batch = Batch()
        for i in range(50):
            batch.add(ids[i] if i < 25 else ids[::-1][i - 25], i % 25, (i // 25,), True)
        two.process(batch)
        found = log_softmax(two.all_logits())
        np.testing.assert_allclose(found[:25], whole[:25], atol=1e-3)
        np.testing.assert_allclose(found[25:], other, atol=1e-3)
        two.memory.copy(0, 1)
        np.testing.assert_allclose(run(two, ids[25:35], seq=1), whole[25:35], atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_moved_positions_of_families(family, request):
    """Rotations of all kinds, of parts of the keys, of none, in windows too."""
    session, ids = family
    c = context(session, n_ubatch=16)
    run(c, ids[:40])
    assert c.memory.can_shift == (request.node.callspec.params["family"] not in FIXED)
    if not c.memory.can_shift:
        with pytest.raises(EngineError, match="cannot be moved"):
            c.memory.add(0, 0, -1, 5)
        return
    c.memory.add(0, 0, -1, 5)
    np.testing.assert_allclose(run(c, ids[40:]), log_softmax(session.logits(ids))[40:], atol=2e-3)


@pytest.mark.parametrize("family", ["gpt2"], indirect=True)
def test_positions_that_were_never_learned(family):
    session, ids = family
    n = session.n_ctx_train
    c = context(session, 2 * n)
    for _ in range(n // 32):
        c.process([ids[0]] * 32)
    assert c.decode([ids[0]]) is Code.INVALID
    assert f"position {n} in the batch: the model has learned {n}" in c.error


@pytest.mark.parametrize("family", ["mamba", "granitehybrid"], indirect=True)
def test_states_do_not_go_back(family):
    session, ids = family
    whole = log_softmax(session.logits(ids))
    c = context(session, n_ubatch=16)
    run(c, ids[:20])
    assert not c.memory.remove(0, 10)
    assert c.memory.pos_max(0) == 19
    assert not c.memory.can_shift
    with pytest.raises(EngineError, match="cannot be moved"):
        c.memory.add(0, 0, -1, 3)
    assert c.memory.remove(0, 20)
    np.testing.assert_allclose(run(c, ids[20:30]), whole[20:30], atol=1e-3)
    assert c.memory.remove(0)
    np.testing.assert_allclose(run(c, ids[:30]), whole[:30], atol=1e-3)


@pytest.mark.parametrize("family", ["mamba"], indirect=True)
def test_a_failed_run_of_a_model_with_states(family, monkeypatch):
    """States of a ubatch that failed are half written: the sequence is forgotten."""
    session, ids = family
    c = context(session)
    run(c, ids[:20])
    c.abort = lambda: True
    assert c.decode(ids[20:30]) is Code.ABORTED
    assert c.memory.pos_max(0) == -1
    c.abort = None
    np.testing.assert_allclose(run(c, ids[:30]), log_softmax(session.logits(ids[:30])), atol=1e-3)


def test_bytes_of_states(shared, tmp_path):
    """Mamba: a convolution's last columns and one matrix a layer, in float32, whatever the context."""
    gguftools.convert(shared / "golden" / "arch" / "mamba", tmp_path / "m.gguf", "f32")
    session = gguftools.load(tmp_path / "m.gguf", threads=1)
    sizes = {context(session, n_ctx, n_seq_max=2).memory.nbytes for n_ctx in (512, 1024)}
    h = session.hparams
    assert sizes == {2 * 4 * h.n_layer * (h.d_inner * (h.d_conv - 1) + h.d_inner * h.d_state)}


def test_half_of_the_memory_on_another_backend(tiny, ids, whole):
    """Keys and values are host memory, which every backend reads and writes."""
    from engine.backends import get_backend
    from engine.scheduler import Scheduler

    scheduler = Scheduler([get_backend("reference"), get_backend("cpu", 2)])
    c = context(gguftools.load(tiny["f32"], backend=scheduler), n_ubatch=16)
    for i in range(20, 40, 5):
        c.memory.clear()
        np.testing.assert_allclose(run(c, ids[:i]), whole[:i], atol=1e-4)
