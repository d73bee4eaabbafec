"""Families whose checkpoints come in more than one form, and files with parts that do not run here."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import gguftools
from engine.errors import EngineError
from engine.models import ARCHS
from engine.session import Session
from gguftools.conversion.hf import normalize, read_hparams
from gguftools.conversion.mapping import mapped
from gguftools.conversion.transforms import Rows, rows_of, rows_of_array
from gguftools.errors import GGUFError
from gguftools.gguf.reader import GGUF
from gguftools.gguf.writer import Writer
from gguftools.safetensors import open_checkpoint
from quant import quantize
from quant.formats import FORMATS

BLOCKS = FORMATS["MXFP4"]


def as_blocks(rows, turned):
    """An expert matrix of gpt-oss as one of MXFP4 blocks, whose rows are outputs."""
    x = rows.read(0, rows.n_rows).reshape(rows.shape).swapaxes(1, 2) if turned else rows.read(0, rows.n_rows)
    flat = np.ascontiguousarray(x.reshape(-1, x.shape[-1]))
    data = quantize(flat, "MXFP4").view(BLOCKS.block).reshape(len(flat), -1)
    return rows_of_array(rows.name, "MXFP4", x.shape, data)


def mapped_gpt_oss(folder, change):
    config = normalize(json.loads((folder / "config.json").read_text()))
    arch = ARCHS["gpt-oss"]
    h = read_hparams(config, arch)[0]
    return mapped(folder, {name: change(rows_of(v)) for name, v in open_checkpoint(folder).items()}, arch, config, h)


def test_experts_in_blocks(shared):
    """gpt-oss: what is stored as MXFP4 keeps its bytes, row by row the same weights as from the turned bf16 form."""
    folder = shared / "golden" / "arch" / "gpt-oss"
    is_expert = lambda rows: rows.name.endswith(("gate_up_proj", "down_proj"))  # noqa: E731
    plain = mapped_gpt_oss(folder, lambda rows: rows)
    blocks = mapped_gpt_oss(folder, lambda rows: as_blocks(rows, True) if is_expert(rows) else rows)
    for name in ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"):
        ours, theirs = blocks[f"blk.1.{name}.weight"], plain[f"blk.1.{name}.weight"]
        assert (ours.dtype, theirs.dtype) == ("MXFP4", "BF16")
        assert ours.shape == theirs.shape
        exact = theirs.read(0, theirs.n_rows)
        np.testing.assert_array_equal(
            np.ascontiguousarray(ours.fetch(0, ours.n_rows)).view(np.uint8).reshape(len(exact), -1),
            quantize(exact, "MXFP4"),
        )
        np.testing.assert_array_equal(ours.read(5, 9), ours.read(0, ours.n_rows)[5:9])
        np.testing.assert_array_equal(theirs.read(95, 102), exact[95:102])


def test_experts_turned_the_wrong_way(shared):
    folder = shared / "golden" / "arch" / "gpt-oss"

    def turned(rows):
        if not rows.name.endswith("layers.1.mlp.experts.gate_up_proj"):
            return rows
        e, a, b = rows.shape
        return Rows(rows.name, rows.dtype, (e, b, a), rows.fetch)

    with pytest.raises(GGUFError, match=r"layers\.1\.mlp\.experts\.gate_up_proj.*config\.json implies"):
        mapped_gpt_oss(folder, turned)


def test_layers_that_predict_further_tokens(shared, tmp_path):
    """GLM 4.5: files made elsewhere hold one layer more; it is not run, and the others are."""
    folder = shared / "golden" / "arch" / "glm4moe"
    gguftools.convert(folder, tmp_path / "plain.gguf", "f32")
    with GGUF(tmp_path / "plain.gguf") as f, Writer(tmp_path / "more.gguf", []) as w:
        for key, field in f.fields.items():
            value = field.value + 1 if key == "glm4moe.block_count" else field.value
            w.add(key, value, field.element_type or field.type)
        w.add("glm4moe.nextn_predict_layers", 1)
        more = np.ones((64, 128), np.float32)
        for name, t in f.tensors.items():
            w.declare(name, t.shape, t.format)
        w.declare("blk.3.nextn.eh_proj.weight", more.shape, FORMATS["F32"])
        for name, t in f.tensors.items():
            w.write(name, np.asarray(t.data))
        w.write("blk.3.nextn.eh_proj.weight", more)
    ids = np.load(folder / "expected.npz")["ids0"]
    plain, ours = (gguftools.load(tmp_path / name, threads=2) for name in ("plain.gguf", "more.gguf"))
    np.testing.assert_array_equal(ours.logits(ids), plain.logits(ids))


DATA = Path(__file__).parents[1] / "data" / "families"


def changed(folder, target, change):
    """A copy of a checkpoint with another config."""
    shutil.copytree(folder, target, copy_function=shutil.copyfile)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_long_contexts_are_not_dropped(tmp_path):
    """Whether a config says the original context at the top, among the rotary settings, or in both places."""
    folder = DATA / "phi3-longrope"
    gguftools.convert(folder, tmp_path / "both.gguf", "f32")
    for place in ("top", "rope"):

        def without(config, place=place):
            (config if place == "rope" else config["rope_parameters"]).pop("original_max_position_embeddings")

        gguftools.convert(changed(folder, tmp_path / place, without), tmp_path / f"{place}.gguf", "f32")
        with GGUF(tmp_path / f"{place}.gguf") as ours, GGUF(tmp_path / "both.gguf") as theirs:
            own = {key: ours.metadata[key] for key in ours.metadata if key.startswith("phi3.")}
            assert own == {key: theirs.metadata[key] for key in own}
            assert own["phi3.rope.scaling.original_context_length"] == 64
            assert list(ours.tensors) == list(theirs.tensors)
            assert {"rope_factors_long.weight", "rope_factors_short.weight"} <= set(ours.tensors)


def _no_type(config):
    config["rope_parameters"].pop("rope_type")


def _no_context(config):
    config.pop("original_max_position_embeddings")
    config["rope_parameters"].pop("original_max_position_embeddings")


def _short_list(config):
    config["rope_parameters"]["long_factor"].pop()


def _negative(config):
    config["rope_parameters"]["short_factor"][2] = -1.0


def _unequal(config):
    config["rope_parameters"]["mscale"] = 0.5


def _no_key(key):
    return lambda config: config.pop(key)


def _value(key, value):
    return lambda config: config.update({key: value})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("phi3-longrope", _no_type, "long_factor"),
        ("phi3-longrope", _no_context, "original_max_position_embeddings"),
        ("phi3-longrope", _short_list, "long_factor"),
        ("phi3-longrope", _negative, "short_factor"),
        ("deepseek3", _unequal, "mscale"),
        ("deepseek3", _value("kv_lora_rank", 2**31), "kv_lora_rank|kv_a|config.json implies"),
        ("deepseek3", _value("v_head_dim", 2**31), "kv_b_proj.*config.json implies"),
        ("deepseek3", _value("n_group", 3), "8 experts cannot be 3 groups"),
        ("deepseek3", _value("topk_method", "dice"), "topk_method"),
        ("deepseek3", _value("rope_interleave", False), "rope_interleave"),
        ("deepseek3", _no_key("kv_lora_rank"), "n_embd_head_k|kv_lora_rank"),
        ("deepseek3", _value("num_experts_per_tok", 0), "expert"),
        ("deepseek3", _value("num_attention_heads", [4, 4]), "num_attention_heads"),
        ("hunyuan-dense", lambda config: config["rope_parameters"].pop("alpha"), "alpha"),
        ("phimoe", _value("num_experts_per_tok", 1), "expert"),
        ("phimoe", _value("router_jitter_noise", 0.5), "router_jitter_noise"),
        ("phimoe", lambda config: config["rope_parameters"].update(long_mscale=2.0), "mscale"),
        ("exaone4", _value("layer_types", ["sliding_attention"]), "window_pattern"),
        ("phi2", _value("qk_layernorm", True), "qk_layernorm"),
    ],
)
def test_settings_that_cannot_be(name, change, message, tmp_path):
    with pytest.raises((GGUFError, EngineError), match=message) as caught:
        gguftools.convert(changed(DATA / name, tmp_path / name, change), tmp_path / "out.gguf", "f32")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("gpt-oss", "rope.freq_base", 1.0),
        ("gpt-oss", "rope.scaling.factor", -1.0),
        ("gpt-oss", "rope.scaling.original_context_length", 0),
        ("gpt-oss", "rope.scaling.yarn_beta_fast", 0.0),
        ("gpt-oss", "attention.head_count", [4, 4, 4, 4]),
        ("gpt-oss", "expert_used_count", 0),
        ("deepseek2", "attention.key_length", 64),
        ("deepseek2", "attention.key_length_mla", 8),
        ("deepseek2", "attention.kv_lora_rank", 2**31),
        ("deepseek2", "expert_group_count", 3),
        ("deepseek2", "expert_gating_func", 9),
        ("deepseek2", "nextn_predict_layers", 3),
        ("glm4moe", "leading_dense_block_count", 0),
    ],
)
def test_files_that_cannot_be(name, key, value, shared, tmp_path):
    """One line, and no allocation that a file's number would size."""
    gguftools.convert(shared / "golden" / "arch" / name, tmp_path / "a.gguf", "f32")
    with GGUF(tmp_path / "a.gguf") as f:
        metadata = {**f.metadata, f"{f.metadata['general.architecture']}.{key}": value}
        with pytest.raises(EngineError) as caught:
            Session(metadata, f.tensors, threads=1).logits([1, 2])
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_groups_that_cannot_be():
    arch = ARCHS["deepseek2"]
    values = {"n_layer": 2, "n_layer_dense": 1, "n_layer_nextn": 0, "n_expert": 8, "n_expert_used": 6}
    for groups, used in ((3, 1), (4, 0), (4, 5), (4, 1)):
        with pytest.raises(EngineError, match="experts cannot be"):
            arch.check(SimpleNamespace(**values, n_expert_groups=groups, n_group_used=used))
