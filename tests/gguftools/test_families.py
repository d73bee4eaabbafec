"""Every model family: tiny checkpoints as the original library writes them, converted, run, and compared with the
original's logits and with what the reference's converter writes."""

import hashlib
import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

import gguftools
from engine.errors import EngineError
from engine.models import ARCHS
from engine.pooling import normalize
from engine.session import Session
from gguftools.errors import GGUFError
from gguftools.gguf.reader import GGUF

#: folder -> keys whose value the reference has wrong, or that it lacks; see golden/README.md
KEYS_APART = {
    "hunyuan-dense": {"tokenizer.ggml.eos_token_id"},  # the reference goes by the config's `eod_token_id`
    "deepseek3": {"deepseek2.expert_gating_func"},  # the config does not say it, and the reference takes a softmax
    "mistral-swa": {"llama.attention.sliding_window"},  # the original has a window, the reference's graph none
    "starcoder2-window": {"starcoder2.attention.sliding_window"},  # the same
    "falcon-11b": {"falcon.context_length", "falcon.feed_forward_length"},  # the reference has the 7B model's for all
    "bert": {"tokenizer.ggml.pre", "tokenizer.ggml.cls_token_id"},  # nobody reads these of a WordPiece vocabulary
    "stablelm-half": {"stablelm.rope.freq_base"},  # the reference leaves it out, and its graph then has 10000
}
#: folders whose reference file is not compared at all, and why
NO_REFERENCE = {}
#: folder -> end of the names of tensors whose bytes are not compared, and why. Ours are e^x rounded correctly; the
#: reference's come from a library whose last bit is wrong for one value in a hundred
BYTES_APART = {"mamba": ".ssm_a", "falcon-mamba": ".ssm_a"}
TOLERANCE = 2e-3

_HERE = Path(__file__).parents[1] / "data" / "families"


def folders(shared):
    """name -> path of all checkpoints: shared ones, and those that are committed."""
    found = {path.name: path for path in sorted((shared / "golden" / "arch").glob("*")) if path.is_dir()}
    return found | {path.name: path for path in sorted(_HERE.glob("*")) if path.is_dir()}


def is_known(path):
    names = json.loads((path / "config.json").read_text())["architectures"]
    return any(name in arch.hf_names for arch in ARCHS.values() for name in names)


@pytest.fixture(scope="session")
def converted(tmp_path_factory):
    """Function folder -> file with float32 weights."""
    done = {}

    def convert(folder):
        if folder not in done:
            done[folder] = tmp_path_factory.mktemp(folder.name) / "f32.gguf"
            gguftools.convert(folder, done[folder], "f32")
        return done[folder]

    return convert


def pytest_generate_tests(metafunc):
    from tests.conftest import SHARED

    if "checkpoint" in metafunc.fixturenames:
        found = {name: path for name, path in folders(SHARED).items() if is_known(path)}
        metafunc.parametrize("checkpoint", list(found.values()), ids=list(found), indirect=True)


@pytest.fixture(scope="session")
def whole(tmp_path_factory, shared):
    """Function folder -> folder with weights: a variant's are those of the shared checkpoint that base.txt names."""
    done = {}

    def complete(folder):
        if not (folder / "base.txt").is_file():
            return folder
        if folder not in done:
            done[folder] = tmp_path_factory.mktemp("variant") / folder.name
            base = shared / "golden" / "arch" / (folder / "base.txt").read_text().strip()
            done[folder].mkdir()
            for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
                if (base / name).is_file():
                    shutil.copyfile(base / name, done[folder] / name)
            for path in folder.iterdir():
                shutil.copyfile(path, done[folder] / path.name)
        return done[folder]

    return complete


@pytest.fixture
def checkpoint(request, whole):
    """One model as a folder of the original library."""
    return whole(request.param)


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_logits(checkpoint, converted, backend):
    expected = np.load(checkpoint / "expected.npz")
    session = gguftools.load(converted(checkpoint), backend, threads=2)
    for n in (0, 1):
        ids = expected[f"ids{n}"]
        if f"hidden{n}" in expected:  # an encoder, which has no logits
            np.testing.assert_allclose(session.hidden(ids[None]), expected[f"hidden{n}"], atol=TOLERANCE, rtol=0)
            continue
        logits = session.logits(ids)
        np.testing.assert_allclose(logits[expected[f"rows{n}"]], expected[f"logits{n}"], atol=TOLERANCE, rtol=0)
        nll = -log_softmax(logits[:-1].astype(np.float64))[np.arange(len(ids) - 1), ids[1:]]
        np.testing.assert_allclose(nll, expected[f"nll{n}"], atol=TOLERANCE, rtol=0)


def test_windows_are_independent(checkpoint, converted):
    """Two sequences at once give what each gives alone."""
    expected = np.load(checkpoint / "expected.npz")
    session = gguftools.load(converted(checkpoint), threads=2)
    ids = expected["ids1"][:40]
    both = session.hidden(np.stack([ids[::-1], ids]))
    np.testing.assert_allclose(both[40:], session.hidden(ids[None]), atol=2e-4)
    np.testing.assert_allclose(session.hidden(np.stack([ids[::-1], ids]), 30, 40)[10:], both[70:], atol=2e-4)


#: preset -> greatest median and mean of the Kullback-Leibler divergence from float32. The mean leaves room for tokens
#: that go to another expert, because the router's choice was close.
PRESETS = {"Q8_0": (0.01, 0.05), "Q4_K_M": (0.5, 0.6)}

#: preset -> least cosine of an encoder's states
COSINES = {"Q8_0": 0.9995, "Q4_K_M": 0.98}


@pytest.mark.parametrize("preset", PRESETS)
def test_quantized(checkpoint, converted, preset, tmp_path):
    """The quantized file loads, and gives nearly the same probabilities, or states in the same direction."""
    gguftools.quantize(converted(checkpoint), tmp_path / "small.gguf", preset)
    ids = np.load(checkpoint / "expected.npz")["ids1"]
    before, after = (gguftools.load(path, threads=2) for path in (converted(checkpoint), tmp_path / "small.gguf"))
    if not before.arch.causal:
        x, y = (normalize(session.hidden(ids[None])) for session in (before, after))
        assert (x * y).sum(-1).min() > COSINES[preset]
        return
    exact, ours = (log_softmax(session.logits(ids).astype(np.float64)) for session in (before, after))
    assert np.isfinite(ours).all()
    divergence = (np.exp(exact) * (exact - ours)).sum(-1)
    median, mean = PRESETS[preset]
    assert np.median(divergence) < median
    assert divergence.mean() < mean


def test_what_the_reference_writes(checkpoint, converted):
    path = checkpoint / "reference.json"
    if not path.is_file() or checkpoint.name in NO_REFERENCE:
        pytest.skip(NO_REFERENCE.get(checkpoint.name, "the reference's converter refuses this folder"))
    reference = json.loads(path.read_text())
    with GGUF(converted(checkpoint)) as f:
        ours, theirs = {}, {}
        for key, entry in reference["kv"].items():
            theirs[key] = (entry["type"], entry["value"])
        for key, field in f.fields.items():
            ours[key] = (_types(field), _value(field.value))
        apart = KEYS_APART.get(checkpoint.name, set()) | {"general.name", "general.basename", "general.finetune"}
        assert {k: v for k, v in ours.items() if k not in apart} == {k: v for k, v in theirs.items() if k not in apart}
        tensors = {
            name: {
                "ne": list(t.ne),
                "type": t.format.name,
                "sha256": hashlib.sha256(np.ascontiguousarray(t.data).tobytes()).hexdigest(),
            }
            for name, t in f.tensors.items()
        }
        expected = dict(reference["tensors"])
        for name in tensors:
            if name.endswith(BYTES_APART.get(checkpoint.name, "/")):
                tensors[name]["sha256"] = expected[name]["sha256"]
        assert tensors == expected


def _types(field):
    kind = field.type.name
    return [kind, field.element_type.name] if kind == "ARRAY" else [kind]


def _value(value):
    if not isinstance(value, str) and hasattr(value, "__len__"):
        items = [v.item() if isinstance(v, np.generic) else v for v in value]
        if len(items) > 64:
            digest = hashlib.sha256(json.dumps(items).encode()).hexdigest()
            return {"len": len(items), "first": items[:5], "sha256_of_json": digest}
        return items
    return value


# --- the same model, described otherwise ------------------------------------------------------------------------------


def variant(checkpoint, folder, config, more=None):
    """A copy of the checkpoint with another config, and one more tensor of that name."""
    shutil.copytree(checkpoint, folder, copy_function=shutil.copyfile)
    (folder / "config.json").write_text(json.dumps(config))
    if more is not None:
        path = folder / "model.safetensors"
        (size,), data = struct.unpack("<Q", path.read_bytes()[:8]), path.read_bytes()
        header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
        header[more] = {"dtype": "F32", "shape": [2], "data_offsets": [len(body), len(body) + 8]}
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + body + bytes(8))
    return folder


def config_of(checkpoint):
    return json.loads((checkpoint / "config.json").read_text())


#: folders whose settings for two kinds of layers had another form, as (keys that newer files have besides)
NESTED = {"olmo3": {"olmo2.rope.freq_base_swa"}, "olmo3-yarn": {"olmo2.rope.freq_base_swa"}, "gemma3": set()}


def test_old_spelling_of_the_config(checkpoint, converted, tmp_path):
    """rope_theta and rope_scaling at the top instead of `rope_parameters`: the same file."""
    config = config_of(checkpoint)
    rope = config.pop("rope_parameters", None)
    if rope and checkpoint.name in NESTED:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    if not rope or any(isinstance(v, dict) for v in rope.values()):
        pytest.skip("the model has no rotary settings that the old form could hold")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type", "default")
    if kind != "default":
        config["rope_scaling"] = {"type": kind, **rope}
    elif rope:
        config |= rope  # such as partial_rotary_factor
    folder = variant(checkpoint, tmp_path / checkpoint.name, config)
    gguftools.convert(folder, tmp_path / "old.gguf", "f32")
    if checkpoint.name not in NESTED:
        assert (tmp_path / "old.gguf").read_bytes() == converted(checkpoint).read_bytes()
        return
    with GGUF(tmp_path / "old.gguf") as old, GGUF(converted(checkpoint)) as new:
        assert {k: _value(v) for k, v in new.metadata.items() if k not in NESTED[checkpoint.name]} == {
            k: _value(v) for k, v in old.metadata.items()
        }
    ids = np.load(checkpoint / "expected.npz")["ids1"]
    ours, theirs = (gguftools.load(path, threads=2) for path in (tmp_path / "old.gguf", converted(checkpoint)))
    np.testing.assert_array_equal(ours.logits(ids), theirs.logits(ids))


#: folder -> keys of newer configs and what older ones call them
OLD_NAMES = {
    "gpt2": {"n_positions": "n_ctx"},
    "gptneox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
    "falcon": {"num_attention_heads": "n_head", "num_hidden_layers": "n_layer", "num_kv_heads": "n_head_kv"},
    "gemma": {"hidden_act": "hidden_activation"},
    "gemma2": {"layer_types": None},
    "gemma3": {"layer_types": None},
}


@pytest.mark.parametrize("name", OLD_NAMES)
def test_old_names_of_settings(name, shared, converted, tmp_path):
    checkpoint = folders(shared)[name]
    config = config_of(checkpoint)
    if "rope_theta" in OLD_NAMES[name]:
        config |= config.pop("rope_parameters")
    for new, old in OLD_NAMES[name].items():
        value = config.pop(new)
        if old is not None:
            config[old] = value
    gguftools.convert(variant(checkpoint, tmp_path / name, config), tmp_path / "old.gguf", "f32")
    assert (tmp_path / "old.gguf").read_bytes() == converted(checkpoint).read_bytes()


#: folder -> (what older configs of the model say otherwise: new key, old key and its value)
FIRST = {
    "stablelm": {"layer_norm_eps": ("norm_eps", 1e-5), "rope_parameters": ("rope_pct", 0.25)},
    "minimax-m2": {"rope_parameters": ("rope_theta", 5000000)},
}


@pytest.mark.parametrize("name", FIRST)
def test_config_of_the_first_release(name, shared, converted, tmp_path):
    checkpoint = folders(shared)[name]
    config = config_of(checkpoint)
    for new, (old, value) in FIRST[name].items():
        del config[new]
        config[old] = value
    gguftools.convert(variant(checkpoint, tmp_path / name, config), tmp_path / "old.gguf", "f32")
    assert (tmp_path / "old.gguf").read_bytes() == converted(checkpoint).read_bytes()


def test_config_of_the_first_llama(converted, tmp_path):
    """The class name with other capitals, no number of key heads, and another name for the context."""
    checkpoint = _HERE / "llama1"
    config = config_of(checkpoint)
    for key in ("num_key_value_heads", "rope_parameters", "attention_bias", "mlp_bias", "head_dim", "pretraining_tp"):
        config.pop(key, None)
    config["max_sequence_length"] = config.pop("max_position_embeddings")
    config["architectures"] = ["LLaMAForCausalLM"]
    gguftools.convert(variant(checkpoint, tmp_path / "llama1", config), tmp_path / "old.gguf", "f32")
    ids = np.load(checkpoint / "expected.npz")["ids1"]
    ours, theirs = (gguftools.load(path, threads=2) for path in (tmp_path / "old.gguf", converted(checkpoint)))
    assert ours.n_ctx_train == theirs.n_ctx_train
    np.testing.assert_array_equal(ours.logits(ids), theirs.logits(ids))


def renamed(path, change):
    """Give tensors of a safetensors file other names."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = {change(name): entry for name, entry in json.loads(data[8 : 8 + size]).items()}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def old_bert(name):
    for new, old in (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")):
        name = name.replace(new, old)
    return "bert." + name if name.startswith(("embeddings", "encoder")) else name


#: folder -> (what other releases call its tensors, one that they have besides)
OTHER_NAMES = {
    "gpt2": (lambda name: name.removeprefix("transformer."), "h.0.attn.bias"),
    "bert": (old_bert, "cls.predictions.bias"),
}


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_other_names_of_tensors(name, shared, converted, tmp_path):
    checkpoint = folders(shared)[name]
    change, more = OTHER_NAMES[name]
    folder = variant(checkpoint, tmp_path / name, config_of(checkpoint), more)
    renamed(folder / "model.safetensors", change)
    gguftools.convert(folder, tmp_path / "other.gguf", "f32")
    with GGUF(tmp_path / "other.gguf") as other, GGUF(converted(checkpoint)) as same:
        assert set(other.tensors) == set(same.tensors)
        for name, tensor in other.tensors.items():
            np.testing.assert_array_equal(tensor.data, same.tensors[name].data)


@pytest.mark.parametrize("outer", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_text_part_of_a_model_that_sees(name, outer, shared, converted, tmp_path):
    """The same weights inside a larger model, whose config has the text part's settings apart."""
    checkpoint = folders(shared)[name]
    config = config_of(checkpoint)
    (kind,) = config.pop("architectures")
    config = {"architectures": [kind.replace("CausalLM", "ConditionalGeneration")], "text_config": config}
    folder = variant(checkpoint, tmp_path / name, config, "model.vision_tower.patches.weight")
    seen = "model.vision_tower."
    renamed(
        folder / "model.safetensors",
        lambda name: outer + name.removeprefix("model.") if name.startswith("model.") and seen not in name else name,
    )
    gguftools.convert(folder, tmp_path / "text.gguf", "f32")
    ids = np.load(checkpoint / "expected.npz")["ids1"]
    ours, theirs = (gguftools.load(path, threads=2) for path in (tmp_path / "text.gguf", converted(checkpoint)))
    np.testing.assert_array_equal(ours.logits(ids), theirs.logits(ids))


# --- configs and checkpoints that do not fit --------------------------------------------------------------------------

#: keys that name an activation, in whatever family
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "activation", "mlp_hidden_act", "ffn_act")
WIDTHS = ("hidden_size", "n_embd", "d_model")


def refused(folder, tmp_path, *words):
    """Conversion fails with one line that has these words, and leaves nothing behind."""
    with pytest.raises((GGUFError, EngineError)) as caught:
        gguftools.convert(folder, tmp_path / "out.gguf", "f32")
    text = str(caught.value)
    assert "\n" not in text
    assert all(word in text for word in words), text
    assert not (tmp_path / "out.gguf").exists()


def test_unknown_kind_of_rope(checkpoint, tmp_path):
    config = config_of(checkpoint)
    rope = config.get("rope_parameters")
    if not rope:
        pytest.skip("the model has no rotary settings")
    for settings in [v for v in rope.values() if isinstance(v, dict)] or [rope]:
        settings |= {"rope_type": "spiral", "factor": 2.0}
    refused(variant(checkpoint, tmp_path / "m", config), tmp_path, "rope_type", "'spiral'")


def test_unknown_activation(checkpoint, tmp_path):
    config = config_of(checkpoint)
    named = [key for key in ACTIVATIONS if config.get(key) is not None]
    if not named:
        pytest.skip("the config names no activation")
    for key in named:
        folder = variant(checkpoint, tmp_path / key, config | {key: "wavelet"})
        refused(folder, tmp_path, f"'{key}'", "'wavelet'")


def test_contradicting_shapes(checkpoint, tmp_path):
    config = config_of(checkpoint)
    key = next(key for key in WIDTHS if key in config)
    folder = variant(checkpoint, tmp_path / "m", config | {key: 2 * config[key]})
    refused(folder, tmp_path, "rope_parameters" if "long_factor" in str(config) else "tensor '", "config.json")


def test_a_tensor_without_a_place(checkpoint, tmp_path):
    name = "model.layers.0.oddity.weight"
    refused(variant(checkpoint, tmp_path / "m", config_of(checkpoint), name), tmp_path, f"'{name}'")


#: name -> (folder, changes of the config, words of the error)
HOSTILE = {
    "linear without its factor": ("llama", {"rope_parameters": {"rope_type": "linear"}}, ("factor", "missing")),
    "yarn with multipliers": (
        "llama",
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 0.7}, "rope_parameters": None},
        ("mscale' is 0.7", "'llama' here has none such"),
    ),
    "yarn in layers with a window": (
        "olmo3",
        {"rope_parameters": {"sliding_attention": {"rope_type": "yarn", "factor": 2.0}, "full_attention": {}}},
        ("sliding_attention.rope_type", "'yarn'"),
    ),
    "pattern too short": ("olmo3", {"layer_types": ["full_attention"]}, ("window_pattern", "1 values for 4 layers")),
    "window on request": ("qwen2", {"use_sliding_window": True}, ("'use_sliding_window' is True", "a sliding window")),
    "layers without experts": ("qwen2moe", {"mlp_only_layers": [0]}, ("'mlp_only_layers'", "without experts")),
    "no experts": ("qwen3moe", {"num_local_experts": 0, "num_experts_per_tok": 0}, ("expert_count",)),
    "more used than there are": ("qwen2moe", {"num_experts_per_tok": 5}, ("num_experts_per_tok", "is 5")),
    "weights of experts": ("qwen3moe", {"norm_topk_prob": False}, ("'norm_topk_prob' is False",)),
    "limits of queries": ("olmoe", {"clip_qkv": 8.0}, ("'clip_qkv' is 8.0",)),
    "other layers without positions": ("smollm3", {"no_rope_layers": [1, 0, 1, 0]}, ("'no_rope_layers'",)),
    "an odd part of the head": ("stablelm", {"rope_parameters": {"partial_rotary_factor": 0.2}}, ("is 3", "even")),
    "not the last of six": (
        "gemma4",
        {"num_kv_shared_layers": 3},
        ("shared_kv_layers", "is 3 of 6"),
    ),
    "fewer kinds than layers": (
        "gemma4",
        {"layer_types": ["full_attention"]},
        ("'layer_types'", "each of the 6 layers"),
    ),
    "another kind of layer": ("gemma2", {"layer_types": ["chunked_attention"] * 4}, ("'layer_types'", "4 layers")),
    "heads of no size": ("gpt2", {"n_head": 5}, ("64 is no multiple of the 5 heads",)),
    "heads of a sentence": ("bert", {"num_attention_heads": 5}, ("64 is no multiple of the 5 heads",)),
    "layers of their own": (
        "gemma4",
        {"per_layer_config": {"5": {"head_dim": 64}, "0": {"head_dim": 16}}},
        ("'per_layer_config'", "more than one"),
    ),
    "ALiBi": ("falcon", {"alibi": True}, ("'alibi' is True", "ALiBi")),
    "feed-forward behind": ("falcon", {"parallel_attn": False}, ("'parallel_attn' is False",)),
    "heads in no groups": ("falcon", {"num_kv_heads": 3}, ("n_head_kv", "is 3")),
    "scores by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, ("'scale_attn_by_inverse_layer_idx'",)),
    "both ways": ("gemma3", {"use_bidirectional_attention": True}, ("'use_bidirectional_attention'",)),
    "relative positions": ("bert", {"position_embedding_type": "relative_key"}, ("'position_embedding_type'",)),
    "another interval": ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 2}, ("_interval' is 2",)),
    "a norm of each head": ("minimax-m2", {"qk_norm_type": "per_head"}, ("'qk_norm_type' is 'per_head'",)),
    "another score": ("minimax-m2", {"scoring_func": "softmax"}, ("'scoring_func' is 'softmax'",)),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_settings_that_cannot_be(case, shared, tmp_path):
    name, changes, words = HOSTILE[case]
    checkpoint = folders(shared)[name]
    refused(variant(checkpoint, tmp_path / "m", config_of(checkpoint) | changes), tmp_path, *words)


@pytest.mark.parametrize("value", ["x", b"", -1, 1.5, float("nan"), ["a"] * 4, [True]])
def test_damaged_pattern_of_windows(value, shared, converted):
    with GGUF(converted(folders(shared)["olmo3"])) as f:
        damaged = dict(f.metadata) | {"olmo2.attention.sliding_window_pattern": value}
        with pytest.raises(EngineError, match=r"sliding_window_pattern' (is|has) "):
            Session(damaged, f.tensors, "cpu", 1)
