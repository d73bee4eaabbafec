"""Models that people use, against figures of other programs. They are fetched once, and take minutes: marked slow."""

import json

import numpy as np
import pytest

import gguftools
from engine.errors import EngineError
from engine.pooling import name_of, normalize, pool

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def minilm(minilm_folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("minilm") / "minilm.gguf"
    gguftools.convert(minilm_folder, path, "f32")
    return gguftools.load(path, threads=2)


def test_minilm_embeddings(minilm, shared):
    """Tokens and embeddings of four sentences are those of the original."""
    golden = np.load(shared / "golden" / "minilm.npz")
    assert name_of(minilm.hparams.pooling) == "mean"
    for i, (text, ids) in enumerate(zip(golden["sentences"], json.loads(str(golden["ids"])))):
        assert minilm.tokenize(str(text)) == ids
        states = minilm.hidden(np.array([ids]))
        np.testing.assert_allclose(pool(states, "cls"), golden["cls"][i], atol=1e-4, rtol=0)
        np.testing.assert_allclose(pool(states, "mean"), golden["mean"][i], atol=1e-4, rtol=0)
        np.testing.assert_allclose(normalize(pool(states, "mean")), golden["mean_normalized"][i], atol=1e-4, rtol=0)


def test_minilm_has_limits(minilm):
    with pytest.raises(EngineError, match="gives embeddings"):
        minilm.logits([101, 102])
    with pytest.raises(EngineError, match="513 tokens are more than the 512 positions"):
        minilm.hidden(np.full((1, 513), 101))


def test_gemma3_perplexity(gemma3_270m, shared):
    """llama.cpp b11434 with 16-bit floats: 17.0594 over the first 8 chunks of WikiText-2."""
    text = shared / "data" / "wiki.test.raw"
    session = gguftools.load(gemma3_270m, threads=2)
    n_tokens = len(session.tokenize(text.read_bytes().decode()))
    assert n_tokens == 295_173
    result = gguftools.perplexity(gemma3_270m, text, n_ctx=512, chunks=8, threads=2)
    assert result.ppl.value == pytest.approx(17.0594, rel=5e-4)
