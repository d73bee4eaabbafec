"""Importance of experts, on tiny checkpoints of real families: what is summed, files of both forms, quantization by
them, experts without tokens, and `--all-experts`."""

import json
import struct
from functools import partial

import numpy as np
import pytest

import gguftools
from engine.errors import EngineError
from engine.evaluate import collect
from engine.evaluate.scoring import cut
from gguftools import measure
from gguftools.cli import main
from gguftools.gguf.reader import GGUF
from gguftools.imatrix_file import read_imatrix, write_imatrix
from quant import get_format, quantize
from quant.imatrix import IMatrix
from quant.mixes import PlanOptions
from tests.conftest import DATA

N_CTX = 32


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def plain(logits, bias):
    return logits


def biased(logits, bias):
    return sigmoid(logits) + bias


#: folder -> by what its router's logits rank experts; all have the usual gate, up and down
CHOICES = {
    "mixtral": plain,
    "qwen2moe": plain,
    "qwen3moe": plain,
    "olmoe": plain,
    "qwen3next": plain,
    "glm4moe": biased,
    "minimax-m2": biased,
    "lfm2moe": biased,
}
#: families that differ in how they choose, or in what an expert computes
OTHERS = (
    "deepseek2",
    "deepseek3",
    "gemma4-experts",
    "gpt-oss",
    "granitehybrid",
    "nemotron_h_moe",
    "phimoe",
    "qwen35moe",
)


@pytest.fixture(scope="session")
def model(shared, tmp_path_factory):
    """Function name of a checkpoint -> its file of type Q8_0."""
    done = {}

    def make(name):
        if name not in done:
            own = DATA / "families" / name
            folder = own if own.is_dir() else shared / "golden" / "arch" / name
            done[name] = tmp_path_factory.mktemp(name) / "q8_0.gguf"
            gguftools.convert(folder, done[name], "q8_0")
        return done[name]

    return make


def tokens():
    return np.load(DATA / "families" / "olmoe" / "expected.npz")["ids1"]


def collected(path, backend="cpu", **options):
    return collect(gguftools.load(path, backend, threads=2), tokens(), N_CTX, n_batch=64, **options)


def weights_of(path):
    """name -> float64 array."""
    with GGUF(path) as f:
        return {name: t.dequantize().astype(np.float64) for name, t in f.tensors.items() if name.startswith("blk.")}


def by_hand(path, choice):
    """The sums by their definition: name -> expert -> inputs that went to it."""
    session, w, inputs = gguftools.load(path, "reference"), weights_of(path), {}

    def observe(name, x, ids=None, n_mat=1):
        if name.endswith("ffn_gate_inp.weight"):
            inputs[name] = x.astype(np.float64)

    bos = session.tokenizer.bos if session.tokenizer.add_bos else None
    session.hidden(cut(tokens(), N_CTX, None, bos).inputs(0, 2), observe=observe)
    found = {}
    for router, x in inputs.items():
        blk, n_expert = router.removesuffix("ffn_gate_inp.weight"), len(w[router])
        rows = {part: [[] for _ in range(n_expert)] for part in ("gate", "up", "down")}
        for row in x:
            scores = choice(w[router] @ row, w.get(blk + "exp_probs_b.bias"))
            for e in np.argsort(-scores, kind="stable")[: session.hparams.n_expert_used]:
                gate, up = (w[f"{blk}ffn_{part}_exps.weight"][e] @ row for part in ("gate", "up"))
                for part, value in (("gate", row), ("up", row), ("down", gate * sigmoid(gate) * up)):
                    rows[part][e].append(value)
        found |= {f"{blk}ffn_{part}_exps.weight": experts for part, experts in rows.items()}
    return found


def experts_of(matrix):
    return {name: entry for name, entry in matrix.entries.items() if "_exps." in name}


@pytest.mark.parametrize("name", CHOICES)
def test_sums_by_definition(model, name):
    want, found = by_hand(model(name), CHOICES[name]), collected(model(name))
    assert experts_of(found).keys() == want.keys()
    for weight, experts in want.items():
        entry = found.entries[weight]
        assert entry.counts.tolist() == list(map(len, experts))
        for e, rows in enumerate(experts):
            squares, sums = (np.sum(f, axis=0) if rows else 0.0 for f in (np.square(rows), rows))
            np.testing.assert_allclose(entry.squares[e], squares, rtol=1e-4, atol=1e-9)
            np.testing.assert_allclose(entry.sums[e], sums, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", [*CHOICES, *OTHERS])
def test_every_family(model, name):
    """Every expert tensor has an entry; each token counts once for each of its experts; all experts, without effect on
    anything else."""
    session = gguftools.load(model(name), threads=2)
    shapes = {n: t.ne for n, t in session.weights.items() if n.endswith("_exps.weight")}
    ppl = []
    for every in (False, True):
        m = collect(
            session, tokens(), N_CTX, n_batch=64, all_experts=every, on_chunk=lambda done, n, value: ppl.append(value)
        )
        assert experts_of(m).keys() == shapes.keys() != set()
        for weight, (n, _, n_expert, _) in shapes.items():
            entry = m.entries[weight]
            assert entry.squares.shape == (n_expert, n)
            if every:
                assert entry.counts.tolist() == [2 * N_CTX] * n_expert
            else:
                assert entry.counts.sum() == 2 * N_CTX * session.hparams.n_expert_used
        if not every:
            usual = m
    assert ppl[1] == pytest.approx(ppl[0], rel=1e-6)
    for weight, entry in usual.entries.items():
        if weight not in shapes:
            np.testing.assert_allclose(m.entries[weight].squares, entry.squares, rtol=1e-4)


@pytest.mark.parametrize("name", ["mixtral", "qwen3moe", "minimax-m2"])
def test_all_experts_by_definition(model, name):
    """What `--all-experts` sums is what a router sums that sends every token to every expert."""
    session = gguftools.load(model(name), "reference")
    usual, found = (collected(model(name), every, all_experts=every == "cpu") for every in ("reference", "cpu"))
    w, inputs = weights_of(model(name)), {}

    def observe(name, x, ids=None, n_mat=1):
        if name.endswith("ffn_gate_inp.weight"):
            inputs[name.removesuffix("ffn_gate_inp.weight")] = x.astype(np.float64)

    bos = session.tokenizer.bos if session.tokenizer.add_bos else None
    session.hidden(cut(tokens(), N_CTX, None, bos).inputs(0, 2), observe=observe)
    for blk, x in inputs.items():
        gate, up = (np.einsum("enk,tk->etn", w[f"{blk}ffn_{part}_exps.weight"], x) for part in ("gate", "up"))
        down = found.entries[blk + "ffn_down_exps.weight"]
        np.testing.assert_allclose(down.squares, np.square(gate * sigmoid(gate) * up).sum(1), rtol=1e-4, atol=1e-9)
        for part in ("gate", "up"):
            squares = found.entries[f"{blk}ffn_{part}_exps.weight"].squares
            np.testing.assert_allclose(squares, np.tile(np.square(x).sum(0), (len(squares), 1)), rtol=1e-4)
        assert (down.squares >= usual.entries[blk + "ffn_down_exps.weight"].squares * (1 - 1e-4)).all()


def test_all_experts_where_weights_multiply_inputs(model, monkeypatch):
    """Others than the chosen ones see the inputs as they are; the result does not change."""
    from engine.models import experts as module

    monkeypatch.setattr(module, "experts", partial(module.experts, weigh_inputs=True))
    session, seen, gates = gguftools.load(model("mixtral"), "reference"), [], {}

    def observe(name, x, ids=None, n_mat=1):
        if name == "blk.0.ffn_gate_inp.weight":
            gates[name] = x.copy()
        if name == "blk.0.ffn_up_exps.weight":
            seen.append((x.copy(), ids.copy()))

    windows = tokens()[None, :8]
    usual, every = (session.hidden(windows, observe=observe, all_experts=flag) for flag in (False, True))
    np.testing.assert_array_equal(usual, every)
    (x, ids), (x_all, ids_all) = seen
    assert (np.sort(ids_all) == np.arange(4)).all()
    np.testing.assert_array_equal(ids_all[:, :2], ids)
    np.testing.assert_array_equal(x_all[:, :2], x)
    for slot in (2, 3):
        np.testing.assert_array_equal(x_all[:, slot], gates["blk.0.ffn_gate_inp.weight"])


# --- files and quantization -------------------------------------------------------------------------------------------


def uneven(path) -> IMatrix:
    """The importance of a model, but with expert 1 of every layer out of reach."""
    m = collected(path)
    m.datasets, m.chunk_count = ["t"], 2
    for entry in experts_of(m).values():
        entry.squares[1], entry.sums[1], entry.counts[1] = 0, 0, 0
    return m


def test_layout_of_gguf(model, tmp_path):
    m = uneven(model("mixtral"))
    write_imatrix(tmp_path / "a.gguf", m)
    with GGUF(tmp_path / "a.gguf") as f:
        for name, entry in experts_of(m).items():
            n_expert, n = entry.squares.shape
            squares, counts = f.tensors[name + ".in_sum2"], f.tensors[name + ".counts"]
            assert (squares.ne, counts.ne) == ((n, n_expert), (1, n_expert))
            np.testing.assert_array_equal(squares.data.view("<f4"), entry.squares.astype("<f4").ravel())
            np.testing.assert_array_equal(counts.data.view("<f4"), entry.counts)
            assert f.tensors[name + ".in_sum"].ne == (n, n_expert)


def test_layout_of_dat(model, tmp_path):
    """Means times calls, expert by expert; ones times calls for those without tokens."""
    m = uneven(model("mixtral"))
    write_imatrix(tmp_path / "a.dat", m, format="dat")
    data = (tmp_path / "a.dat").read_bytes()
    name = "blk.1.ffn_down_exps.weight"
    entry = m.entries[name]
    calls = -(-int(entry.counts.max()) // N_CTX)
    means = [s / c if c else np.ones_like(s) for s, c in zip(entry.squares, entry.counts)]
    at = data.index(name.encode()) + len(name)
    assert struct.unpack_from("<ii", data, at) == (calls, entry.squares.size)
    found = np.frombuffer(data, "<f4", entry.squares.size, at + 8)
    np.testing.assert_allclose(found, calls * np.concatenate(means), rtol=1e-6)


@pytest.mark.parametrize("order", [("a.gguf", "b.dat"), ("b.dat", "a.gguf")])
def test_merge_of_both_forms(model, tmp_path, order):
    """The older form has experts behind each other, the newer one says how many there are."""
    m = collected(model("mixtral"))
    m.chunk_count = 2
    write_imatrix(tmp_path / "a.gguf", m)
    write_imatrix(tmp_path / "b.dat", m, format="dat")
    merged = measure.merge([tmp_path / name for name in order], tmp_path / "c.gguf")
    for name, entry in experts_of(m).items():
        calls = -(-int(entry.counts.max()) // N_CTX)  # the older form has one count for all experts
        counts = entry.counts + calls * N_CTX
        assert merged.entries[name].counts.tolist() == counts.tolist()
        np.testing.assert_allclose(merged.importance(name), m.importance(name), rtol=1e-5)


@pytest.mark.parametrize("form", ["gguf", "dat"])
def test_quantized_by_each_experts_importance(model, tmp_path, form):
    m = uneven(model("mixtral"))
    write_imatrix(tmp_path / f"a.{form}", m, format=form)
    gguftools.quantize(
        model("mixtral"),
        tmp_path / "o.gguf",
        "Q4_0",
        tmp_path / f"a.{form}",
        PlanOptions(pure=True),
        True,
    )
    w, form_of = weights_of(model("mixtral")), get_format("Q4_0")
    with GGUF(tmp_path / "o.gguf") as f:
        for name, entry in experts_of(m).items():
            assert f.tensors[name].format is form_of
            for e, x in enumerate(w[name].astype(np.float32)):
                ours = np.asarray(f.tensors[name].data).reshape(len(entry.counts), -1)[e]
                importance = m.importance(name)[e]
                assert (importance == 1).all() == (e == 1)
                np.testing.assert_array_equal(ours, quantize(x, form_of, importance).view(np.uint8).reshape(-1))


def test_experts_that_no_token_reached_are_listed(model, tmp_path, capsys):
    """Short texts do not reach all of qwen3moe's experts."""
    text, out = tmp_path / "t.txt", tmp_path / "o.gguf"
    text.write_text("a " * 40)
    command = ["imatrix", str(model("qwen3moe")), "-f", str(text), "-o", str(out), "-c", "8", "--chunks", "1"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["unreached"]
    assert found
    m = read_imatrix(out)
    for name, experts in found.items():
        assert np.flatnonzero(m.entries[name].counts == 0).tolist() == experts
        assert (m.importance(name)[experts] == 1).all()
    assert main(command) == 0
    table = capsys.readouterr().out
    assert all(name in table for name in found)
    assert main([*command, "--all-experts", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unreached"] == {}
    assert all((e.counts == 8).all() for e in read_imatrix(out).entries.values())


def test_models_without_experts(tiny, tmp_path, capsys):
    text = str(gguftools.demo_text("calibration"))
    out = tmp_path / "o.gguf"
    assert main(["imatrix", str(tiny["bf16"]), "-f", text, "-o", str(out), "-c", "64", "--all-experts"]) == 1
    error = capsys.readouterr().err
    assert "has no experts" in error
    assert str(tiny["bf16"]) in error
    assert not out.exists()
    with pytest.raises(EngineError, match="has no experts"):
        collect(gguftools.load(tiny["bf16"]), list(range(3, 200)), N_CTX, all_experts=True)
