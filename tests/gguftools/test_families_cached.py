"""Every model family through a context, whose cache or states hold what came before: a prompt in parts, then token by
token, gives the logits of the whole text at once."""

import numpy as np
import pytest

import gguftools
from engine import Batch, ContextParams, EngineError, ModelContext
from tests.gguftools.test_families import checkpoint, converted, folders, pytest_generate_tests, whole  # noqa: F401

N_PROMPT = 70  # longer than the windows; the last twenty tokens come one by one


def test_cached(checkpoint, converted):  # noqa: F811
    ids = np.load(checkpoint / "expected.npz")["ids1"]
    session = gguftools.load(converted(checkpoint), threads=2)
    if not session.arch.causal:
        context = ModelContext(session, ContextParams(128, embeddings=True))
        context.process(Batch([int(i) for i in ids], outputs=[True] * len(ids)))
        found = np.stack([context.embedding(i) for i in range(len(ids))])
        np.testing.assert_allclose(found, session.hidden(ids[None]), atol=2e-4, rtol=0)
        return
    expected = session.logits(ids)
    context = ModelContext(session, ContextParams(128, n_ubatch=17, type_k="F32", type_v="F32"))
    if "rope_factors_long.weight" in session.weights and len(ids) <= session.hparams.n_ctx_orig < context.n_ctx:
        pytest.skip("the size of the context decides how the model rotates")
    context.process(Batch([int(i) for i in ids[:N_PROMPT]], outputs=[True] * N_PROMPT))
    np.testing.assert_allclose(context.all_logits(), expected[:N_PROMPT], atol=2e-3, rtol=0)
    for i in range(N_PROMPT, len(ids)):
        context.process([int(ids[i])])
        np.testing.assert_allclose(context.logits(), expected[i], atol=2e-3, rtol=0)


@pytest.mark.parametrize("name", ["gpt2"])
def test_no_positions_beyond_the_learned_ones(name, shared, converted):  # noqa: F811
    session = gguftools.load(converted(folders(shared)[name]), threads=2)
    context = ModelContext(session, ContextParams(1024))
    context.process([5] * 512)
    with pytest.raises(EngineError, match="position 512 in the batch: the model has learned 512"):
        context.process([5])
    with pytest.raises(EngineError, match="more than the 512 positions"):
        session.hidden(np.full((1, 513), 5))
