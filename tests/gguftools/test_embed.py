"""`gguftools embed`: vectors of texts, by encoders and by models that write."""

import json
import subprocess
import sys

import numpy as np
import pytest

import gguftools
from engine import Batch, EngineError, ModelContext
from engine.pooling import normalize


def run(*arguments, code=0):
    done = subprocess.run(
        [sys.executable, "-m", "gguftools", "embed", *map(str, arguments)],
        capture_output=True, text=True, check=False, encoding="utf-8",
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture(scope="module")
def demo():
    return str(gguftools.demo_model())


@pytest.fixture(scope="module")
def minilm(minilm_folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("minilm") / "minilm.gguf"
    gguftools.convert(minilm_folder, path, "f32")
    return path


# --- encoders ---


def test_an_encoder(minilm, shared):
    golden = np.load(shared / "golden" / "minilm.npz")
    texts = [str(text) for text in golden["sentences"]]
    found = gguftools.embed(minilm, texts, threads=2)
    assert found.pooling == "mean"
    np.testing.assert_allclose(np.stack(found.vectors), golden["mean_normalized"], atol=1e-4)
    raw = gguftools.embed(minilm, texts, "mean", normalize=-1, threads=2)
    np.testing.assert_allclose(np.stack(raw.vectors), golden["mean"], atol=1e-4)
    cls = gguftools.embed(minilm, texts, "cls", normalize=-1, threads=2)
    np.testing.assert_allclose(np.stack(cls.vectors), golden["cls"], atol=1e-4)
    np.testing.assert_allclose(np.diag(found.similarities()), 1, atol=1e-5)


def test_an_encoder_in_a_context(minilm, shared):
    """Encoders remember nothing; texts of one batch do not see each other."""
    golden = np.load(shared / "golden" / "minilm.npz")
    texts = [str(text) for text in golden["sentences"]]
    session = gguftools.load(minilm, threads=2)
    c = ModelContext(session, n_ctx=256, n_seq_max=4, embeddings=True, pooling="mean")
    assert c.memory is None
    batch = Batch()
    for seq, text in enumerate(texts):
        for pos, token in enumerate(session.tokenize(text)):
            batch.add(token, pos, (seq,))
    c.process(batch)
    for seq, mean in enumerate(golden["mean"]):
        np.testing.assert_allclose(c.sequence_embedding(seq), mean, atol=1e-4)
    small = ModelContext(session, n_ubatch=64, embeddings=True)
    with pytest.raises(EngineError, match="100 tokens, more than n_ubatch 64"):
        small.process([101] * 100)


def test_encoders_do_not_write(minilm):
    with pytest.raises(EngineError, match="a bert model gives embeddings"):
        gguftools.generate(minilm, "Hello")


# --- models that write ---


@pytest.mark.parametrize("pooling", ["mean", "cls", "last", "none"])
def test_a_model_that_writes(demo, pooling):
    texts = ["One text", "Another text, a longer one", "One text"]
    session = gguftools.load(demo, threads=1)
    found = gguftools.embed(session, texts, pooling, normalize=-1)
    for ids, vector in zip(found.ids, found.vectors):
        hidden = session.hidden(np.array([ids]))
        expected = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1], "none": hidden}[pooling]
        np.testing.assert_allclose(vector, expected, atol=1e-4)
    np.testing.assert_array_equal(found.vectors[0], found.vectors[2])


def test_attention_both_ways(demo):
    session = gguftools.load(demo, threads=1)
    one, other = ("one two three", "one two four")
    both = [gguftools.embed(session, text, "cls", causal=False).vectors[0] for text in (one, other)]
    assert np.abs(both[0] - both[1]).max() > 1e-4
    ahead = [gguftools.embed(session, text, "cls", causal=True).vectors[0] for text in (one, other)]
    np.testing.assert_allclose(ahead[0], ahead[1], atol=1e-6)


@pytest.mark.parametrize(("norm", "length"), [(2, lambda x: np.sqrt((x**2).sum())), (1, lambda x: np.abs(x).sum())])
def test_lengths(norm, length):
    x = np.float32([3, -4, 12])
    assert length(normalize(x, norm)) == pytest.approx(1, abs=1e-6)
    np.testing.assert_array_equal(normalize(np.zeros(3, np.float32), norm), 0)


def test_lengths_that_are_none():
    x = np.float32([3, -4, 12])
    np.testing.assert_array_equal(normalize(x, -1), x)
    assert np.abs(normalize(x, 0)).max() == 32760
    with pytest.raises(EngineError, match="no norm -2"):
        normalize(x, -2)


# --- the command ---


def test_the_command(demo, tmp_path):
    (tmp_path / "texts.txt").write_text("One text\n\nAnother\n")
    done = run(demo, "-f", tmp_path / "texts.txt", "-t", 1)
    rows = [[float(x) for x in line.split()] for line in done.stdout.splitlines()]
    assert len(rows) == 2
    assert np.linalg.norm(rows[0]) == pytest.approx(1, abs=1e-3)
    found = json.loads(run(demo, "-p", "One text", "-p", "Another", "--similarity", "--json", "-t", 1).stdout)
    assert found["pooling"] == "mean"
    np.testing.assert_allclose(found["embeddings"][0]["embedding"], rows[0], atol=1e-5)
    assert found["similarity"][0][0] == pytest.approx(1)
    table = run(demo, "-p", "One text", "-p", "Another", "--similarity").stdout.splitlines()
    assert len(table) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "which texts? Give -p or -f"),
        (("-p", "a", "--pooling", "max"), "no pooling 'max'; use one of none, mean, cls, last"),
        (("-p", "a", "--attention", "both"), "--attention both: expected causal or non-causal"),
        (("-p", "word " * 2000), "is beyond the"),
    ],
)
def test_what_cannot_be(demo, arguments, message):
    assert message in run(demo, *arguments, code=1).stderr
