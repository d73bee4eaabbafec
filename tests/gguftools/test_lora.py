"""LoRA: adapters of PEFT to GGUF, and merged into models."""

import json

import numpy as np
import pytest

import gguftools
from gguftools.cli import main
from gguftools.errors import GGUFError
from gguftools.gguf import GGUF
from gguftools.lora_file import read_lora
from tests.gguftools.test_convert import LAYER, N_EMBD, N_FF, N_HEAD, make, save, stored, weights

R, ALPHA = 4, 6.0
RNG = np.random.default_rng(5)
SHAPES = {
    "self_attn.q_proj": (64, N_EMBD),
    "self_attn.k_proj": (32, N_EMBD),
    "mlp.down_proj": (N_EMBD, N_FF),
}
NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "mlp.down_proj": "ffn_down"}


def matrices(seed):
    rng = np.random.default_rng(seed)
    return {
        name: (
            rng.standard_normal((R, shape[1])).astype(np.float32) / 8,
            rng.standard_normal((shape[0], R)).astype(np.float32) / 8,
        )
        for name, shape in SHAPES.items()
    }


def adapter(folder, pairs, tensors=(), **settings):
    folder.mkdir()
    found = {}
    for name, (a, b) in pairs.items():
        found[f"base_model.model.{LAYER}{name}.lora_A.weight"] = stored(a, "F32")
        found[f"base_model.model.{LAYER}{name}.lora_B.weight"] = stored(b, "F32")
    save(folder / "adapter_model.safetensors", found | dict(tensors))
    config = {"peft_type": "LORA", "r": R, "lora_alpha": ALPHA, "bias": "none"} | settings
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged_by_hand(*adapters):
    """The checkpoint with alpha / r * B A added: pairs and factor of each adapter."""
    tensors = weights()
    for pairs, factor in adapters:
        for name, (a, b) in pairs.items():
            dtype, x = tensors[f"{LAYER}{name}.weight"]
            tensors[f"{LAYER}{name}.weight"] = dtype, x + np.float32(factor) * (b @ a)
    return tensors


def check_same(path, tensors, tmp_path):
    expected = gguftools.convert(make(tmp_path / "expected", tensors), tmp_path / "expected.gguf", "f32").output
    for name, t in GGUF(expected).tensors.items():
        np.testing.assert_allclose(GGUF(path).tensors[name].dequantize(), t.dequantize(), rtol=1e-5, atol=1e-6)


def test_merging_equals_merging_the_checkpoint(tmp_path):
    """Two adapters with scales; queries and keys are in another order of rows than in the checkpoint."""
    one, two = matrices(1), matrices(2)
    base = make(tmp_path / "base")
    model = gguftools.convert(base, tmp_path / "base.gguf", "f32").output
    first = gguftools.convert_lora(adapter(tmp_path / "one", one), tmp_path / "one.gguf", base, "f32").output
    del two["mlp.down_proj"]
    second = gguftools.convert_lora(adapter(tmp_path / "two", two), tmp_path / "two.gguf", base, "f32").output
    done = gguftools.merge_lora(model, [first, (second, -0.5)], tmp_path / "out.gguf")
    assert set(done.changed) == {f"blk.0.{name}.weight" for name in NAMES.values()}
    tensors = merged_by_hand((one, ALPHA / R), (two, -0.5 * ALPHA / R))
    check_same(tmp_path / "out.gguf", tensors, tmp_path)
    assert set(GGUF(tmp_path / "out.gguf").fields) == set(GGUF(model).fields)


def test_rank_stabilised_and_patterns(tmp_path):
    pairs = matrices(3)
    settings = {"use_rslora": True, "alpha_pattern": {"mlp.down_proj": 10.0}}
    base = make(tmp_path / "base")
    lora = gguftools.convert_lora(adapter(tmp_path / "a", pairs, **settings), tmp_path / "a.gguf", base, "f32").output
    model = gguftools.convert(base, tmp_path / "base.gguf", "f32").output
    gguftools.merge_lora(model, [lora], tmp_path / "out.gguf")
    down = {"mlp.down_proj": pairs.pop("mlp.down_proj")}
    check_same(tmp_path / "out.gguf", merged_by_hand((pairs, ALPHA / 2), (down, 10 / 2)), tmp_path)


def test_the_file(tmp_path):
    """Layout of llama.cpp's converter: names, shapes, keys."""
    pairs = matrices(4)
    base = make(tmp_path / "base")
    folder = adapter(tmp_path / "a", pairs, base_model_name_or_path=str(base))
    path = gguftools.convert_lora(folder).output
    assert path == folder / "a-F16-LoRA.gguf"
    f = GGUF(path)
    assert {
        k: f.metadata[k] for k in ("general.type", "adapter.type", "adapter.lora.alpha", "general.architecture")
    } == {
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": ALPHA,
        "general.architecture": "llama",
    }
    assert f.tensors["blk.0.ffn_down.weight.lora_a"].shape == (R, N_FF)
    assert f.tensors["blk.0.ffn_down.weight.lora_b"].shape == (N_EMBD, R)
    lora = read_lora(path)
    a, b = lora.tensors["blk.0.attn_q.weight"]
    np.testing.assert_allclose(a, pairs["self_attn.q_proj"][0], atol=1e-3)
    order = np.arange(64).reshape(N_HEAD, 2, -1).swapaxes(1, 2).reshape(-1)
    np.testing.assert_allclose(b, pairs["self_attn.q_proj"][1][order], atol=1e-3)
    assert lora.factor("blk.0.attn_q.weight", 2.0) == 2 * ALPHA / R


def test_quantized_base(tmp_path):
    base = make(tmp_path / "base")
    model = gguftools.convert(base, tmp_path / "base.gguf", "q8_0").output
    lora = gguftools.convert_lora(adapter(tmp_path / "a", matrices(5)), tmp_path / "a.gguf", base).output
    gguftools.merge_lora(model, [lora], tmp_path / "out.gguf")
    before, after = GGUF(model).tensors, GGUF(tmp_path / "out.gguf").tensors
    for name, t in before.items():
        assert after[name].format == t.format
        assert (bytes(after[name].data) == bytes(t.data)) == (name not in {f"blk.0.{n}.weight" for n in NAMES.values()})


X = stored(np.ones((2, 2), np.float32), "F32")
REFUSED = {
    "DoRA": ({"use_dora": True}, {}, "DoRA cannot be"),
    "kind": ({"peft_type": "IA3"}, {}, "'peft_type' is 'IA3'"),
    "bias": ({"bias": "all"}, {}, "'bias' is 'all'"),
    "no rank": ({"r": 0}, {}, "'r' is 0"),
    "whole layer": ({}, {"base_model.model.lm_head.weight": X}, "'base_model.model.lm_head.weight' is no half"),
    "one half": ({}, {f"base_model.model.{LAYER}mlp.up_proj.lora_A.weight": X}, "only one half"),
    "no place": (
        {},
        {f"base_model.model.{LAYER}mlp.foo.lora_{h}.weight": X for h in "AB"},
        "no place for 'model.layers.0.mlp.foo' in a 'llama' model",
    ),
    "shape": ({}, {f"base_model.model.{LAYER}mlp.up_proj.lora_{h}.weight": X for h in "AB"}, r"\[2, 2\], the base has"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, tmp_path):
    settings, tensors, message = REFUSED[case]
    folder = adapter(tmp_path / "a", matrices(6), tensors, **settings)
    with pytest.raises(GGUFError, match=message) as caught:
        gguftools.convert_lora(folder, tmp_path / "out.gguf", make(tmp_path / "base"))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out.gguf").exists()


def test_wrong_base(tmp_path):
    base = make(tmp_path / "base")
    lora = gguftools.convert_lora(adapter(tmp_path / "a", matrices(7)), tmp_path / "a.gguf", base).output
    with pytest.raises(GGUFError, match="it is of another model"):
        gguftools.merge_lora(gguftools.demo_model(), [lora], tmp_path / "out.gguf")
    with pytest.raises(GGUFError, match="is no LoRA adapter"):
        gguftools.merge_lora(gguftools.demo_model(), [gguftools.demo_model()], tmp_path / "out.gguf")
    with pytest.raises(GGUFError, match="name its folder with --base"):
        gguftools.convert_lora(tmp_path / "a")


def test_commands(tmp_path, capsys):
    base = make(tmp_path / "base")
    folder = adapter(tmp_path / "a", matrices(8))
    assert main(["convert", str(folder), "--base", str(base), "-o", str(tmp_path / "a.gguf")]) == 0
    assert "LoRA for llama: 3 matrices, rank 4" in capsys.readouterr().out
    assert main(["convert", str(base), "-o", str(tmp_path / "b.gguf"), "--outtype", "f32"]) == 0
    command = ["merge-lora", str(tmp_path / "b.gguf"), f"{tmp_path / 'a.gguf'}=0.5", "-o", str(tmp_path / "c.gguf")]
    assert main(command) == 0
    assert "3 tensors changed by 1 adapters" in capsys.readouterr().out
