"""quantize --refine: plain files of the preset, closer to the original on held-back text; odd texts; runs that stop."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

import gguftools
from engine.errors import EngineError
from engine.refine.walk import Store
from gguftools.cli import app
from gguftools.errors import GGUFError
from gguftools.gguf.reader import GGUF
from gguftools.refining import Calibration, overlap

TEXT = str(gguftools.demo_text("calibration"))
SMALL = Calibration((TEXT,), n_tokens=4096, n_ctx=64, dampings=(0.3,))


@pytest.fixture(scope="module")
def refined(tiny, tmp_path_factory):
    """Q2_K of the tiny model, refined on a little text."""
    output = tmp_path_factory.mktemp("refined") / "q2.gguf"
    return gguftools.refine(tiny["bf16"], output, "Q2_K", SMALL, threads=2)


def test_a_plain_file_that_is_closer(refined, tiny, tmp_path):
    assert refined.held.refined[0] < 0.6 * refined.held.plain[0]
    assert all(min(d.refined.values()) < d.plain and d.choice == 0.3 for d in refined.decisions)
    assert [i for d in refined.decisions for i in d.layers] == list(range(6))
    importance = tmp_path / "imatrix.gguf"
    gguftools.imatrix(tiny["bf16"], TEXT, importance, n_ctx=64, chunks=8)
    gguftools.quantize(tiny["bf16"], tmp_path / "plain.gguf", "Q2_K", importance)
    with GGUF(refined.quantized.output) as ours, GGUF(tmp_path / "plain.gguf") as plain:
        assert {n: (t.format, t.shape) for n, t in ours.tensors.items()} == {
            n: (t.format, t.shape) for n, t in plain.tensors.items()
        }
        for name in ("output_norm.weight", "token_embd.weight"):
            assert bytes(ours.tensors[name].data) == bytes(plain.tensors[name].data)
    base = tiny["bf16"]
    text = gguftools.demo_text("valid")
    found = [
        gguftools.perplexity(path, text, n_ctx=64, chunks=16, base=base).divergence.mean_kld.value
        for path in (refined.quantized.output, tmp_path / "plain.gguf")
    ]
    assert found[0] < 0.7 * found[1]  # on text that was not calibrated on, read back by the usual loader


def test_no_work_is_left_behind(refined):
    assert [path.name for path in refined.quantized.output.parent.iterdir()] == ["q2.gguf"]
    assert not gguftools.check(refined.quantized.output).faults


def test_a_run_that_stops_goes_on(refined, tiny, tmp_path, monkeypatch):
    """Ended behind the second decision: the same again gives the same file, without the first layers' work."""

    class Ended(Exception):
        pass

    commit = Store.commit

    def failing(self, layer):
        commit(self, layer)
        if layer == 2:
            raise Ended

    monkeypatch.setattr(Store, "commit", failing)
    with pytest.raises(Ended):
        gguftools.refine(tiny["bf16"], tmp_path / "q2.gguf", "Q2_K", SMALL, threads=2)
    assert not (tmp_path / "q2.gguf").exists()
    kept = json.loads((tmp_path / ".q2.gguf.refine" / "state.json").read_text())
    assert kept["next"] == 2
    monkeypatch.undo()
    begun = []
    monkeypatch.setattr(
        Store,
        "new",
        lambda self, name, layer, shape, new=Store.new: (begun.append(layer), new(self, name, layer, shape))[1],
    )
    done = gguftools.refine(tiny["bf16"], tmp_path / "q2.gguf", "Q2_K", SMALL, threads=2)
    assert min(begun) == 3
    assert done.quantized.output.read_bytes() == refined.quantized.output.read_bytes()


@pytest.mark.parametrize("name", ["qwen3moe", "gemma3", "granite"])
def test_families(name, shared, tmp_path):
    """Experts, norms behind the products, multipliers: straight from a folder."""
    wanted = Calibration(("random",), n_tokens=2048, n_ctx=64, dampings=(0.3,))
    done = gguftools.refine(shared / "golden" / "arch" / name, tmp_path / "q.gguf", "Q4_0", wanted, threads=2)
    assert done.held.refined[0] < done.held.plain[0]


def test_recurrent_families(shared, tmp_path):
    wanted = Calibration(("random",), n_tokens=2048, n_ctx=64, dampings=(0.3,))
    done = gguftools.refine(shared / "golden" / "arch" / "mamba", tmp_path / "q.gguf", "Q4_0", wanted, threads=2)
    assert done.held.refined[0] <= done.held.plain[0]


def test_what_hands_more_than_states_is_refused(shared, tmp_path):
    wanted = Calibration(("random",), n_tokens=2048, n_ctx=64)
    with pytest.raises(EngineError, match="'gemma4' hands more than hidden states from layer to layer"):
        gguftools.refine(shared / "golden" / "arch" / "gemma4", tmp_path / "q.gguf", "Q4_0", wanted)
    assert not list(tmp_path.glob("*.gguf"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"texts": ("short",)}, "tokens; refining needs 1,024 at least"),
        ({"n_ctx": 100_000}, "beyond the"),
        ({"n_tokens": 64}, "64 tokens are too few for matrices of 512 columns; use 512 or more"),
    ],
)
def test_texts_that_do_not_do(changes, message, tiny, tmp_path):
    (tmp_path / "short.txt").write_text("Only a few words.")
    if "texts" in changes:
        changes = {"texts": (str(tmp_path / "short.txt"),)}
    with pytest.raises((GGUFError, EngineError), match=message):
        gguftools.refine(
            tiny["bf16"], tmp_path / "out.gguf", "Q2_K", Calibration(**{"texts": (TEXT,), "n_ctx": 64} | changes)
        )
    assert not list(tmp_path.glob("*.gguf"))


def test_quantized_sources_are_refused(tiny, tmp_path):
    gguftools.quantize(tiny["bf16"], tmp_path / "q8.gguf", "Q8_0")
    with pytest.raises(GGUFError, match="is Q8_0 already: refining needs the original"):
        gguftools.refine(tmp_path / "q8.gguf", tmp_path / "q2.gguf", "Q2_K", SMALL)


def test_inputs_that_are_not_finite(tiny, tmp_path):
    with GGUF(tiny["f32"]) as f:
        offset = f.data_offset + f.tensors["blk.1.attn_norm.weight"].offset
    raw = bytearray(tiny["f32"].read_bytes())
    raw[offset : offset + 4] = np.float32(3e38).tobytes()
    (tmp_path / "loud.gguf").write_bytes(raw)
    with pytest.raises((GGUFError, EngineError, ValueError), match="not finite"):
        gguftools.refine(tmp_path / "loud.gguf", tmp_path / "q.gguf", "Q4_0", SMALL)
    assert not (tmp_path / "q.gguf").exists()


def test_command(tiny, tmp_path):
    out = tmp_path / "q4.gguf"
    arguments = ["quantize", str(tiny["bf16"]), str(out), "Q4_0", "2", "--refine", TEXT, "--refine-tokens", "1024"]
    arguments += ["--refine-ctx", "64", "--refine-eval", TEXT]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "mean KLD" in done.stdout
    assert "refined (-" in done.stdout
    other = ["--refine-ctx", "64", "--refine-eval", str(gguftools.demo_text("valid")), "--json"]
    done = CliRunner().invoke(app, [*arguments[:9], *other])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["refined"]
    assert found["evaluation"]["change"][0] < 0
    assert found["warnings"] == []
    done = CliRunner().invoke(app, [*arguments[:7], "--json", "--imatrix", str(out)])
    assert done.exit_code == 1
    assert "--refine does not go with --imatrix" in str(done.exception)


def test_overlap():
    a = np.arange(120).reshape(2, 60)
    assert overlap(a, a) == 1
    assert overlap(a, a + 1000) == 0


# --- without any text -------------------------------------------------------------------------------------------------


def test_robust_weighting(tiny, tmp_path):
    """What an importance matrix of ones gives, for types that need importance too; closer than the reference's way."""
    base, text = tiny["bf16"], gguftools.demo_text("valid")
    found = {}
    for how in ("reference", "robust"):
        gguftools.quantize(base, tmp_path / f"{how}.gguf", "IQ3_S", settings=gguftools.Settings(weighting=how))
        measured = gguftools.perplexity(tmp_path / f"{how}.gguf", text, n_ctx=128, chunks=12, base=base)
        found[how] = measured.divergence.mean_kld.value
    assert found["robust"] < 0.8 * found["reference"]
    with GGUF(base) as f:
        from quant import FORMATS
        from quant.quantize import dequantize_blocks, quantize_into

        view = f.tensors["blk.2.ffn_up.weight"]
        x = dequantize_blocks(view.data.view(view.format.block).reshape(view.shape), view.format)
    with GGUF(tmp_path / "robust.gguf") as f:
        view = f.tensors["blk.2.ffn_up.weight"]
        blocks = np.empty((len(x), x.shape[1] // 256), FORMATS[view.format.name].block)
        quantize_into(x, view.format, blocks, np.ones(x.shape[1], np.float32))
        assert bytes(view.data) == blocks.tobytes()
    gguftools.quantize(base, tmp_path / "low.gguf", "IQ2_XS", settings=gguftools.Settings(weighting="robust"))
    with pytest.raises(GGUFError, match="unknown weighting 'best'; there are reference, robust"):
        gguftools.quantize(base, tmp_path / "x.gguf", "Q4_0", settings=gguftools.Settings(weighting="best"))
