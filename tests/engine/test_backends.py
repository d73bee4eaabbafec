"""The registry, and what a session says of its memory, threads and runs."""

import pytest

import gguftools
from engine import EngineError
from engine.backends import _REGISTRY as REGISTRY
from engine.backends import Device, get_backend, register, registered
from engine.backends.reference import ReferenceBackend
from engine.memory import report


def test_registry(tiny):
    assert list(registered()) == ["cpu", "reference"]
    made = []

    def make(threads=None, **options):
        made.append(threads)
        return ReferenceBackend()

    register("other", make, Device.ACCEL)
    try:
        assert registered()["other"].device is Device.ACCEL
        session = gguftools.load(tiny["bf16"], backend="other", threads=3)
        assert session.logits([1]).shape == (1, session.n_vocab)
        assert made == [3]
    finally:
        del REGISTRY["other"]
    with pytest.raises(EngineError, match="unknown backend 'other'; there are: cpu, reference"):
        get_backend("other")


def test_without_backends_only_the_vocabulary_loads(tiny, monkeypatch):
    monkeypatch.setattr("engine.backends._REGISTRY", {})
    with pytest.raises(EngineError, match="no backends are registered"):
        gguftools.load(tiny["bf16"])
    assert gguftools.load(tiny["bf16"], vocab_only=True).tokenize("text")


def test_five_memories(tiny):
    session = gguftools.load(tiny["bf16"], threads=2)
    n_weights = len(session.weights)
    assert [m.bytes for m in session.memory()[2:]] == [0, 0, 0]  # no graph yet
    ids = list(range(300, 364))
    session.logits(ids)
    found = {m.name: m for m in session.memory()}
    assert list(found) == ["model headers", "weights", "graph headers", "compute buffers", "scratch"]
    assert found["model headers"].bytes == n_weights * 368
    assert found["weights"].bytes == sum(t.nbytes for t in session.weights.values())
    assert 100_000 < found["graph headers"].bytes < 400_000
    buffers, body = found["compute buffers"], session.prepared_body(1, len(ids))
    assert buffers.bytes < buffers.naive
    ratio = body.executable.plan.size / body.executable.plan.naive
    print(f"planned / naive memory of the tiny model at {len(ids)} tokens: {ratio:.3f}")
    assert ratio < 0.1
    assert found["scratch"].bytes == sum(p.executable.program.scratch_size for p in session._prepared.values())
    assert all(m.lifetime for m in found.values())
    assert report(session._headers, [], [])[1].bytes == 0


def test_one_token_and_many_have_their_own_threads(tiny):
    session = gguftools.load(tiny["bf16"], get_backend("cpu", 1, threads_batch=2), threads=1)
    assert session.prepared_body(1, 1).executable.program.threads == 1
    assert session.prepared_body(1, 2).executable.program.threads == 2


def test_a_session_can_be_ended(tiny):
    session = gguftools.load(tiny["bf16"], threads=2)
    session.abort = lambda: True
    with pytest.raises(EngineError, match="ended by its abort callback"):
        session.logits([1, 2, 3])
    session.abort = None
    assert session.logits([1, 2, 3]).shape[0] == 3


def test_runs_are_told(tiny):
    session = gguftools.load(tiny["bf16"], threads=2)
    told = []
    session.on_run = lambda prepared, timings: told.append((prepared.io["result"].ne[0], len(timings)))
    session.logits([1, 2, 3])
    assert [n for n, _ in told] == [session.hparams.n_embd, session.n_vocab]
    assert told[1][1] == 1
