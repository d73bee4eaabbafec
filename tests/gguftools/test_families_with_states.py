"""Families whose layers have a state: other forms of their configs and checkpoints, and settings that cannot be."""

import json
import struct

import numpy as np
import pytest

import gguftools
from gguftools.gguf.reader import GGUF
from tests.gguftools.test_families import (  # noqa: F401
    config_of,
    converted,
    folders,
    refused,
    variant,
    whole,
)


def rewritten(checkpoint, folder, config, change):
    """A copy whose tensors are `change(name -> (dtype, shape, bytes))`."""
    variant(checkpoint, folder, config)
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    header.pop("__metadata__", None)
    tensors = {name: (t["dtype"], t["shape"], data[slice(*t["data_offsets"])]) for name, t in header.items()}
    header, parts, at = {}, [], 0
    for name, (dtype, shape, part) in sorted(change(tensors).items()):
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(part)]}
        parts.append(part)
        at += len(part)
    text = json.dumps(header).encode()
    path.unlink()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))
    return folder


def assert_same(ours, theirs):
    """The same keys, tensors, and bytes, in whatever order of tensors."""
    with GGUF(ours) as a, GGUF(theirs) as b:
        for key in ("general.name", "general.basename"):
            assert key in a.metadata or key not in b.metadata
        assert set(a.tensors) == set(b.tensors)
        assert all(np.array_equal(np.asarray(a.tensors[n].data), np.asarray(b.tensors[n].data)) for n in a.tensors)
        own = [k for k in b.metadata if not k.startswith(("general.", "tokenizer."))]
        assert all(np.array_equal(a.metadata[k], b.metadata[k]) for k in own)


def named_as_before(config):
    """Granite's layers as its first configs call them."""
    names = {"linear_attention": "mamba", "full_attention": "attention"}
    return config | {"layer_types": [names.get(kind, kind) for kind in config["layer_types"]]}


def as_pattern(config):
    """Nemotron-H's layers as letters, and the older name of the size of a head."""
    letters = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-", "moe": "E"}
    pattern = "".join(letters[kind] for kind in config["layers_block_type"])
    old = {
        "hybrid_override_pattern": pattern,
        "attention_head_dim": config["head_dim"],
        "num_hidden_layers": len(pattern),
    }
    return {k: v for k, v in config.items() if k not in ("layers_block_type", "head_dim")} | old


def by_numbers(config):
    """LFM2's layers of attention by their numbers."""
    found = [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"]
    return {k: v for k, v in config.items() if k != "layer_types"} | {"full_attn_idxs": found}


def by_interval(config):
    """Layers of attention by the interval that is the default."""
    return {k: v for k, v in config.items() if k != "layer_types"}


def unlimited(config):
    """Infinity as Python's JSON writes it."""
    return config | {"time_step_limit": [0.0, float("inf")]}


OLDER = {
    "granitehybrid": named_as_before,
    "nemotron_h": as_pattern,
    "nemotron_h_moe": as_pattern,
    "lfm2": by_numbers,
    "mamba2": unlimited,
}


@pytest.mark.parametrize("name", OLDER)
def test_older_configs(name, shared, converted, tmp_path):  # noqa: F811
    checkpoint = folders(shared)[name]
    config = OLDER[name](config_of(checkpoint))
    gguftools.convert(variant(checkpoint, tmp_path / name, config), tmp_path / "old.gguf", "f32")
    assert_same(tmp_path / "old.gguf", converted(checkpoint))


def test_layers_by_interval(shared, converted, tmp_path):  # noqa: F811
    """A file without the list of layers gives the same logits."""
    checkpoint = folders(shared)["qwen3next"]
    gguftools.convert(
        variant(checkpoint, tmp_path / "m", by_interval(config_of(checkpoint))), tmp_path / "o.gguf", "f32"
    )
    with GGUF(tmp_path / "o.gguf") as f:
        assert "qwen3next.attention.recurrent_layers" not in f.metadata
    ids = np.load(checkpoint / "expected.npz")["ids1"]
    ours, theirs = (
        gguftools.load(path, threads=2).logits(ids) for path in (tmp_path / "o.gguf", converted(checkpoint))
    )
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", ["qwen35", "qwen35moe"])
def test_text_model_within_a_larger_one(name, shared, converted, tmp_path):  # noqa: F811
    """Names and config as where the model can see; what sees, and what predicts further tokens, is left out."""
    checkpoint = folders(shared)[name]
    text = config_of(checkpoint)
    config = {
        "architectures": [text["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration")],
        "model_type": "qwen3_5",
        "text_config": {k: v for k, v in text.items() if k != "architectures"},
        "tie_word_embeddings": text["tie_word_embeddings"],
    }

    def change(tensors):
        found = {n.replace("model.", "model.language_model.", 1): t for n, t in tensors.items()}
        return found | {n: ("BF16", [2], bytes(4)) for n in ("model.visual.merger.norm.weight", "mtp.norm.weight")}

    gguftools.convert(rewritten(checkpoint, tmp_path / name, config, change), tmp_path / "o.gguf", "f32")
    assert_same(tmp_path / "o.gguf", converted(checkpoint))


def test_experts_in_one_tensor(shared, converted, tmp_path):  # noqa: F811
    checkpoint = folders(shared)["qwen35moe"]
    n_expert = config_of(checkpoint)["num_experts"]

    def change(tensors):
        found = {n: t for n, t in tensors.items() if ".experts." not in n}
        for layer in range(2):
            prefix = f"model.layers.{layer}.mlp.experts."
            parts = {
                k: [tensors[f"{prefix}{e}.{k}_proj.weight"] for e in range(n_expert)] for k in ("gate", "up", "down")
            }
            (rows, columns), (rows_down, columns_down) = parts["gate"][0][1], parts["down"][0][1]
            wide = b"".join(g[2] + u[2] for g, u in zip(parts["gate"], parts["up"]))
            found[prefix + "gate_up_proj"] = ("BF16", [n_expert, 2 * rows, columns], wide)
            down = b"".join(d[2] for d in parts["down"])
            found[prefix + "down_proj"] = ("BF16", [n_expert, rows_down, columns_down], down)
        return found

    gguftools.convert(rewritten(checkpoint, tmp_path / "m", config_of(checkpoint), change), tmp_path / "o.gguf", "f32")
    assert_same(tmp_path / "o.gguf", converted(checkpoint))


def test_a_missing_expert_is_named(shared, tmp_path):
    checkpoint = folders(shared)["qwen35moe"]
    lost = "model.layers.0.mlp.experts.1.up_proj.weight"

    def change(tensors):
        return {n: t for n, t in tensors.items() if n != lost}

    refused(rewritten(checkpoint, tmp_path / "m", config_of(checkpoint), change), tmp_path, lost, "missing")


#: name -> (folder, changes of the config, words of the error)
HOSTILE = {
    "a convolution of one": ("mamba", {"conv_kernel": 1}, ("convolution over 1", "d_conv")),
    "a short convolution of one": ("lfm2", {"conv_L_cache": 1}, ("convolution over 1",)),
    "limits of the time step": ("mamba2", {"time_step_limit": [0.0, 0.1]}, ("'time_step_limit'", "0.1")),
    "biases": ("mamba", {"use_bias": True}, ("'use_bias' is True",)),
    "inner norms": ("falcon-mamba", {"mixer_rms_eps": 1e-4}, ("'mixer_rms_eps'",)),
    "groups that divide nothing": ("mamba2", {"n_groups": 3}, ("n_group", "is 3")),
    "no groups": ("granitehybrid", {"mamba_n_groups": 0}, ("n_group", "is 0")),
    "an unknown kind of layer": (
        "nemotron_h",
        {"layers_block_type": ["mamba", "mlp", "rnn", "attention"]},
        ("layers_block_type", "'rnn'"),
    ),
    "too few kinds": ("granitehybrid", {"layer_types": ["mamba"]}, ("1 values for 4 layers",)),
    "too few kinds of LFM2": ("lfm2", {"layer_types": ["conv"]}, ("1 values for 3 layers",)),
    "too few kinds of Qwen": ("qwen35", {"layer_types": ["linear_attention"]}, ("1 values for 4 layers",)),
    "no kinds": ("granitehybrid", {"layer_types": None}, ("'n_head_kv'",)),
    "values unlike keys": ("qwen35", {"linear_value_head_dim": 32}, ("'linear_value_head_dim'",)),
    "heads that do not repeat": ("qwen3next", {"linear_num_key_heads": 3}, ("'linear_num_key_heads'",)),
    "no key heads": ("qwen3next", {"linear_num_key_heads": 0}, ("linear_num_key_heads",)),
    "an interval of none": ("qwen3next", {"full_attention_interval": 0, "layer_types": None}, ("recurrent",)),
    "a norm before the gate": (
        "falcon-h1",
        {"mamba_rms_norm": True, "mamba_norm_before_gate": True},
        ("'mamba_norm_before_gate'",),
    ),
    "too few factors": ("falcon-h1", {"ssm_multipliers": [1.0]}, ("'ssm_multipliers'", "5")),
    "a factor of experts": ("lfm2moe", {"routed_scaling_factor": 2.5}, ("'routed_scaling_factor' is 2.5",)),
    "learned positions": ("granitehybrid", {"position_embedding_type": "learned"}, ("'position_embedding_type'",)),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_settings_that_cannot_be(case, shared, tmp_path):
    name, changes, words = HOSTILE[case]
    checkpoint = folders(shared)[name]
    refused(variant(checkpoint, tmp_path / "m", config_of(checkpoint) | changes), tmp_path, *words)
