"""Sessions on disk: a saved one goes on as if it had never ended; damaged and foreign ones are refused."""

import numpy as np
import pytest

import gguftools
from engine import Batch, EngineError, ModelContext
from gguftools import GGUFError
from gguftools.gguf import GGUF, Writer


@pytest.fixture(scope="module")
def session(tiny):
    return gguftools.load(tiny["bf16"], threads=2)


@pytest.fixture(scope="module")
def ids(data):
    return [int(i) for i in np.load(data / "tiny" / "expected.npz")["ids1"][:60]]


def context(session, **options):
    return ModelContext(session, **{"n_ctx": 256, "type_k": "F32", "type_v": "F32"} | options)


def saved(session, ids, path, **options):
    c = context(session, **options)
    c.process(ids[:40])
    gguftools.save_session(path, c, ids[:40])
    return c


@pytest.mark.parametrize("type", ["F32", "F16", "Q8_0"])
def test_a_session_goes_on(session, ids, tmp_path, type):
    options = {"type_k": type, "type_v": type}
    c = saved(session, ids, tmp_path / "s.gguf", **options)
    c.process(ids[40:])
    other = context(session, **options, n_ctx=512)
    other.process(ids[:3])  # is forgotten
    assert gguftools.load_session(tmp_path / "s.gguf", other) == ids[:40]
    assert other.memory.pos_max(0) == 39
    other.process(ids[40:])
    np.testing.assert_allclose(other.logits(), c.logits(), atol=1e-4)


def test_moved_positions_are_saved_as_they_are(session, ids, tmp_path):
    c = context(session)
    c.process(ids[:40])
    c.memory.add(0, 0, -1, 5)
    gguftools.save_session(tmp_path / "s.gguf", c, ids[:40])
    other = context(session)
    gguftools.load_session(tmp_path / "s.gguf", other)
    for one in (c, other):
        one.process(ids[40:])
    np.testing.assert_allclose(other.logits(), c.logits(), atol=1e-4)


def test_several_sequences(session, ids, tmp_path):
    c = context(session, n_seq_max=2, kv_unified=True)
    c.process(Batch(ids[:20], seqs=[(0, 1)] * 20))
    c.process(Batch(ids[20:30], seqs=[(1,)] * 10))
    gguftools.save_session(tmp_path / "s.gguf", c, [])
    other = context(session, n_seq_max=3, kv_unified=True)
    assert gguftools.load_session(tmp_path / "s.gguf", other) == []
    assert [other.memory.pos_max(s) for s in range(3)] == [19, 29, -1]
    with pytest.raises(EngineError, match=r"s\.gguf: the session has a sequence 1, the context 1"):
        gguftools.load_session(tmp_path / "s.gguf", context(session))
    with pytest.raises(EngineError, match="share tokens: restore it to a context with kv_unified"):
        gguftools.load_session(tmp_path / "s.gguf", context(session, n_seq_max=2))


def test_a_model_with_states(shared, tmp_path):
    folder = shared / "golden" / "arch" / "granitehybrid"
    gguftools.convert(folder, tmp_path / "m.gguf", "f32")
    session = gguftools.load(tmp_path / "m.gguf", threads=2)
    ids = [int(i) for i in np.load(folder / "expected.npz")["ids1"][:60]]
    c = saved(session, ids, tmp_path / "s.gguf")
    other = context(session)
    gguftools.load_session(tmp_path / "s.gguf", other)
    for one in (c, other):
        one.process(ids[40:])
    np.testing.assert_allclose(other.logits(), c.logits(), atol=1e-5)


def test_a_session_without_tokens(session, ids, tmp_path):
    c = context(session)
    gguftools.save_session(tmp_path / "s.gguf", c, [])
    assert gguftools.load_session(tmp_path / "s.gguf", c) == []
    assert c.memory.pos_max(0) == -1


def test_sessions_that_do_not_fit(session, tiny, ids, tmp_path):
    path = tmp_path / "s.gguf"
    saved(session, ids, path)
    with pytest.raises(EngineError, match="other types of the cache"):
        gguftools.load_session(path, context(session, type_k="F16"))
    with pytest.raises(EngineError, match="saved by another model"):
        gguftools.load_session(path, context(gguftools.load(tiny["f32"], threads=1)))
    with pytest.raises(EngineError, match="no saved session"):
        gguftools.load_session(tiny["f32"], context(session))
    big = context(session, n_ctx=512)
    big.process((ids * 5)[:300])
    gguftools.save_session(path, big, [])
    small = context(session)
    small.process(ids[:5])
    with pytest.raises(EngineError, match="the session has 300 tokens, the cache room for 256: use a larger context"):
        gguftools.load_session(path, small)
    assert small.memory.pos_max(0) == 4  # nothing changed


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("session.cache.0.positions", [-3] * 40, "out of range"),
        ("session.cache.0.positions", [1.5] * 40, "no list of whole numbers"),
        ("session.cache.0.positions", [1] * 39, "out of range|missing, or not"),
        ("session.cache.0.owners", [0] * 39, "do not agree"),
        ("session.cache.0.owners", [7] * 40, "has a sequence 7"),
        ("session.cache.0.owned_cells", [99] * 40, "out of range"),
        ("session.cache.0.owned_cells", [0] * 40, "a cell belongs to no sequence"),
        ("session.tokens", "text", "no list of whole numbers"),
        ("session.version", 2, "another version"),
        ("session.fingerprint", "", "another model"),
    ],
)
def test_damaged_sessions(session, ids, tmp_path, key, value, message):
    saved(session, ids, tmp_path / "s.gguf")
    with GGUF(tmp_path / "s.gguf") as f, Writer(tmp_path / "bad.gguf") as w:
        for k in f.metadata:
            w.add(k, value if k == key else f.metadata[k])
        for name, t in f.tensors.items():
            w.declare(name, t.shape, t.format)
        for name, t in f.tensors.items():
            w.write(name, [t.data])
    with pytest.raises((EngineError, GGUFError), match=message):
        gguftools.load_session(tmp_path / "bad.gguf", context(session))
