"""Models against an independent float32 implementation: logits and log-probabilities of every token."""

import numpy as np
import pytest

import gguftools
from engine import EngineError, Session
from gguftools.gguf import GGUF


@pytest.fixture(scope="module")
def expected(data):
    return np.load(data / "tiny" / "expected.npz")


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("outtype", ["f32", "bf16"])
def test_logits(tiny, expected, outtype, which, backend):
    session = gguftools.load(tiny[outtype], backend=backend, threads=2)
    ids = expected[f"ids{which}"]
    logits = session.logits(ids)
    np.testing.assert_allclose(logits[expected[f"rows{which}"]], expected[f"logits{which}"], atol=1e-4)
    wide = logits.astype(np.float64)
    nll = np.log(np.exp(wide).sum(1))[:-1] - wide[np.arange(len(ids) - 1), ids[1:]]
    np.testing.assert_allclose(nll, expected[f"nll{which}"], atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "llama3-rope"])
def test_random_models(shared, tmp_path, name):
    folder = shared / "golden" / "arch" / name
    gguftools.convert(folder, tmp_path / "m.gguf", "f32")
    expected = np.load(folder / "expected.npz")
    session = gguftools.load(tmp_path / "m.gguf", threads=2)
    for which in (0, 1):
        logits = session.logits(expected[f"ids{which}"])
        np.testing.assert_allclose(logits[expected[f"rows{which}"]], expected[f"logits{which}"], atol=1e-4)


def test_graphs_are_reused_and_results_repeat(tiny, expected):
    session = gguftools.load(tiny["bf16"], threads=2)
    first = session.logits(expected["ids0"])
    built = session.graphs_built
    np.testing.assert_array_equal(session.logits(expected["ids0"]), first)
    assert session.graphs_built == built
    assert session.graphs_reused == built
    other = session.logits(expected["ids0"][::-1])  # a reused graph must not remember
    assert not np.array_equal(other, first)
    np.testing.assert_array_equal(session.logits(expected["ids0"]), first)


def test_windows_of_a_batch_are_independent(tiny, expected):
    session = gguftools.load(tiny["bf16"], threads=2)
    ids = expected["ids1"][:64]
    alone = session.hidden(ids[None])
    both = session.hidden(np.stack([ids[::-1], ids]))
    np.testing.assert_allclose(both[64:], alone, atol=1e-4)
    part = session.hidden(np.stack([ids[::-1], ids]), 10, 20)
    np.testing.assert_allclose(part[10:], alone[10:20], atol=1e-4)


def test_one_token(tiny, expected):
    """One row takes another way through the products."""
    session = gguftools.load(tiny["bf16"], threads=2)
    one = session.logits(expected["ids0"][:1])
    np.testing.assert_allclose(one[0], session.logits(expected["ids0"])[0], atol=1e-4)


def test_observer_sees_every_product(tiny, expected):
    session = gguftools.load(tiny["bf16"], threads=2)
    seen = {}
    hidden = session.hidden(expected["ids0"][None], observe=lambda name, x: seen.setdefault(name, x.copy()))
    np.testing.assert_array_equal(hidden, session.hidden(expected["ids0"][None]))
    assert len(seen) == 6 * 7
    assert all(x.shape[0] == len(expected["ids0"]) for x in seen.values())
    np.testing.assert_array_equal(seen["blk.0.attn_q.weight"], seen["blk.0.attn_v.weight"])
    assert seen["blk.3.ffn_down.weight"].shape[1] == 512


@pytest.mark.parametrize(
    ("ids", "message"),
    [([], "text is empty"), ([0, 2048], "token id 2048 is outside"), ([-1], "token id -1 is outside")],
)
def test_bad_tokens(tiny, ids, message):
    with pytest.raises(EngineError, match=message):
        gguftools.load(tiny["bf16"], threads=1).logits(ids)


def test_vocab_only_has_no_logits(tiny):
    session = gguftools.load(tiny["bf16"], vocab_only=True)
    assert session.detokenize(session.tokenize("plain text")).strip() == "plain text"
    with pytest.raises(EngineError, match="vocab_only"):
        session.logits([1])


class Broken(dict):
    """Tensors or metadata of a file with some entries replaced or dropped (None)."""

    def __init__(self, mapping, **changes):
        changes = {key.replace("__", "."): value for key, value in changes.items()}
        super().__init__({key: mapping[key] for key in mapping} | changes)
        for key in [k for k, v in changes.items() if v is None]:
            del self[key]


@pytest.mark.parametrize(
    ("metadata", "tensors", "message"),
    [
        ({"general__architecture": "none"}, {}, "unknown model architecture: 'none'; this version has: .*llama"),
        ({"general__architecture": None}, {}, "unknown model architecture: None"),
        ({"llama__block_count": None}, {}, "key 'llama.block_count': required parameter is missing"),
        ({"llama__block_count": "six"}, {}, "key 'llama.block_count' is 'six', expected a whole number"),
        ({"llama__attention__head_count": 0}, {}, "head_count"),
        ({"llama__attention__head_count_kv": 3}, {}, "head_count_kv"),
        ({"llama__block_count": 10**6}, {}, "block_count"),
        ({"llama__block_count": 5}, {}, "tensor 'blk.5.attn_k.weight' is not part of a llama model|blk.5"),
        ({"llama__embedding_length": 128}, {}, "has shape"),
        ({"llama__rope__scaling__type": "longrope"}, {}, "longrope"),
        ({}, {"output_norm__weight": None}, "tensor 'output_norm.weight' is missing"),
    ],
)
def test_damaged_models(tiny, metadata, tensors, message):
    with GGUF(tiny["bf16"]) as f, pytest.raises(EngineError, match=message):
        Session(Broken(f.metadata, **metadata), Broken(f.tensors, **tensors), threads=1)
