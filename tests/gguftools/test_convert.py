"""Conversion: byte for byte the reference's files, and folders that lie."""

import hashlib
import json
import os
import shutil
import tracemalloc
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import gguftools.conversion.run as run
from engine import EngineError
from engine.tokenizer import from_metadata
from gguftools.commands.convert import convert as command
from gguftools.conversion.card import describe, read_card, sampling
from gguftools.conversion.names import ModelName, file_name, parse_name, size_label, title
from gguftools.conversion.run import convert, plan
from gguftools.errors import GGUFError
from gguftools.gguf import GGUF
from quant import QuantError

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("GGUFTOOLS_SHARED", ROOT.parent / "shared"))
TINY = ROOT / "gguftools" / "data" / "tiny"
GOLDEN = ROOT / "tests" / "data" / "tiny"

N_EMBD, N_FF, N_HEAD, N_HEAD_KV, D_HEAD, N_VOCAB = 64, 96, 4, 2, 16, 2048

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": N_EMBD,
    "intermediate_size": N_FF,
    "max_position_embeddings": 128,
    "num_attention_heads": N_HEAD,
    "num_hidden_layers": 1,
    "num_key_value_heads": N_HEAD_KV,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "vocab_size": N_VOCAB,
}

LAYER = "model.layers.0."


def weights(dtype="F32"):
    """Random tensors of CONFIG's shapes: name -> (safetensors type, array)."""
    rng = np.random.default_rng(1)
    shapes = {
        "model.embed_tokens.weight": (N_VOCAB, N_EMBD),
        "model.norm.weight": (N_EMBD,),
        LAYER + "input_layernorm.weight": (N_EMBD,),
        LAYER + "post_attention_layernorm.weight": (N_EMBD,),
        LAYER + "self_attn.q_proj.weight": (N_HEAD * D_HEAD, N_EMBD),
        LAYER + "self_attn.k_proj.weight": (N_HEAD_KV * D_HEAD, N_EMBD),
        LAYER + "self_attn.v_proj.weight": (N_HEAD_KV * D_HEAD, N_EMBD),
        LAYER + "self_attn.o_proj.weight": (N_EMBD, N_HEAD * D_HEAD),
        LAYER + "mlp.gate_proj.weight": (N_FF, N_EMBD),
        LAYER + "mlp.up_proj.weight": (N_FF, N_EMBD),
        LAYER + "mlp.down_proj.weight": (N_EMBD, N_FF),
    }
    return {name: stored(rng.standard_normal(shape).astype(np.float32), dtype) for name, shape in shapes.items()}


def stored(x, dtype):
    """A float32 array in a safetensors type; for BF16 the upper half of the bits."""
    if dtype == "BF16":
        return dtype, (x.view(np.uint32) >> 16).astype(np.uint16)
    return dtype, x.astype({"F32": np.float32, "F16": np.float16, "F64": np.float64}[dtype])


def loaded(dtype, x):
    """The float32 that a stored array stands for."""
    return (x.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else x.astype(np.float32)


def save(path, tensors):
    """Write a safetensors file by hand."""
    header, at = {}, 0
    for name, (dtype, x) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(x.shape), "data_offsets": [at, at + x.nbytes]}
        at += x.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(x.tobytes() for _, x in tensors.values()))


def make(folder, tensors=None, config=None, tokenizer=None, **files):
    """A model folder: weights and vocabulary as above unless given; files: name with _ for . -> JSON object or text."""
    folder.mkdir(parents=True, exist_ok=True)
    save(folder / "model.safetensors", weights() if tensors is None else tensors)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
    if tokenizer is None:
        shutil.copy(TINY / "tokenizer.json", folder)
    else:
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name, content in files.items():
        stem, _, suffix = name.rpartition("_")
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / f"{stem}.{suffix}").write_text(text)
    return folder


def tokenizer_json(**changes):
    return json.loads((TINY / "tokenizer.json").read_text(encoding="utf-8")) | changes


def digest(data):
    return hashlib.sha256(data).hexdigest()


def check_against(path, golden):
    """Keys with types and values, tensors with types and bytes, as the reference's converter wrote them."""
    f = GGUF(path)
    assert list(f.fields) == list(golden["kv"])
    for key, expected in golden["kv"].items():
        field = f.fields[key]
        kinds = [field.type.name, *([field.element_type.name] if field.element_type is not None else [])]
        assert kinds == expected["type"], key
        if isinstance(expected["value"], dict):
            assert digest(json.dumps(list(field.value)).encode()) == expected["value"]["sha256_of_json"], key
        else:
            assert field.value == expected["value"], key
    assert list(f.tensors) == list(golden["tensors"])
    for name, expected in golden["tensors"].items():
        view = f.tensors[name]
        assert (list(view.ne), view.format.name) == (expected["ne"], expected["type"]), name
        assert digest(view.data) == expected["sha256"], name


# --- against the reference --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outtype", ["f32", "bf16", "f16", "q8_0"])
def test_tiny_is_the_reference_file(outtype, tmp_path):
    golden = json.loads((GOLDEN / f"convert-{outtype}.json").read_text(encoding="utf-8"))
    out = tmp_path / "out.gguf"
    convert(TINY, out, outtype)
    check_against(out, golden)
    assert digest(out.read_bytes()) == golden["sha256_of_file"]


@pytest.mark.parametrize("name", ["llama", "llama3-rope"])
def test_other_models_are_the_reference_files(name, tmp_path):
    folder = SHARED / "golden" / "arch" / name
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there")
    convert(folder, tmp_path / "out.gguf", "f32")
    check_against(tmp_path / "out.gguf", json.loads((folder / "reference.json").read_text(encoding="utf-8")))


def test_threads_and_pieces_do_not_matter(tmp_path, monkeypatch):
    convert(TINY, tmp_path / "a.gguf", "q8_0", threads=1)
    monkeypatch.setattr("gguftools.quantizing.source.PIECE", 1000)
    convert(TINY, tmp_path / "b.gguf", "q8_0", threads=3)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


# --- tensors ----------------------------------------------------------------------------------------------------------


def test_heads_are_interleaved(tmp_path):
    tensors = weights()
    tensors[LAYER + "self_attn.k_proj.bias"] = "F32", np.arange(N_HEAD_KV * D_HEAD, dtype=np.float32)
    convert(make(tmp_path / "m", tensors), tmp_path / "out.gguf", "f32")
    f = GGUF(tmp_path / "out.gguf")
    q = tensors[LAYER + "self_attn.q_proj.weight"][1]
    expected = q.reshape(N_HEAD, 2, D_HEAD // 2, N_EMBD).swapaxes(1, 2).reshape(q.shape)
    np.testing.assert_array_equal(f.tensors["blk.0.attn_q.weight"].dequantize(), expected)
    assert f.tensors["blk.0.attn_k.bias"].dequantize()[:6].tolist() == [0, 8, 1, 9, 2, 10]
    v = tensors[LAYER + "self_attn.v_proj.weight"][1]
    np.testing.assert_array_equal(f.tensors["blk.0.attn_v.weight"].dequantize(), v)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "F64"])
@pytest.mark.parametrize("outtype", ["f32", "f16", "bf16"])
def test_source_types(dtype, outtype, tmp_path):
    tensors = weights(dtype)
    convert(make(tmp_path / "m", tensors), tmp_path / "out.gguf", outtype)
    f = GGUF(tmp_path / "out.gguf")
    x = loaded(*tensors["model.embed_tokens.weight"])
    view = f.tensors["token_embd.weight"]
    assert view.format.name == outtype.upper()
    if outtype == "bf16":
        bits = x.view(np.uint32).astype(np.uint64)
        x = (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).astype(np.uint32).view(np.float32)
    elif outtype == "f16":
        x = x.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(view.dequantize(), x)
    norm = f.tensors["output_norm.weight"]
    assert norm.format.name == "F32"
    np.testing.assert_array_equal(norm.dequantize(), loaded(*tensors["model.norm.weight"]))


@pytest.mark.parametrize(("dtype", "expected"), [("F32", "F16"), ("F16", "F16"), ("BF16", "BF16"), ("F64", "F16")])
def test_auto_takes_the_type_of_the_source(dtype, expected, tmp_path):
    tensors = weights(dtype) | {"model.norm.weight": stored(np.ones(N_EMBD, np.float32), "F32")}
    assert plan(make(tmp_path / "m", tensors)).outtype == expected


def test_rows_that_do_not_fit_become_f16(tmp_path, caplog):
    tensors = weights()
    for name, shape in (("gate", (80, N_EMBD)), ("up", (80, N_EMBD)), ("down", (N_EMBD, 80))):
        tensors[f"{LAYER}mlp.{name}_proj.weight"] = "F32", np.ones(shape, np.float32)
    made = convert(make(tmp_path / "m", tensors, {"intermediate_size": 80}), tmp_path / "out.gguf", "q8_0")
    assert made.fallbacks == ("blk.0.ffn_down.weight",)
    assert "blk.0.ffn_down.weight" in caplog.text
    f = GGUF(tmp_path / "out.gguf")
    assert f.tensors["blk.0.ffn_down.weight"].format.name == "F16"
    assert f.tensors["blk.0.ffn_up.weight"].format.name == "Q8_0"


def test_shards_and_untied_head(tmp_path):
    tensors = weights("BF16") | {"lm_head.weight": stored(np.ones((N_VOCAB, N_EMBD), np.float32), "BF16")}
    tensors[LAYER + "self_attn.rotary_emb.inv_freq"] = "F32", np.ones(8, np.float32)  # no weight: left out
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    folder = make(tmp_path / "m", config={"tie_word_embeddings": False})
    (folder / "model.safetensors").unlink()
    for file, part in parts.items():
        save(folder / file, {name: tensors[name] for name in reversed(part)})
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    convert(folder, tmp_path / "shards.gguf", "q8_0")
    convert(make(tmp_path / "one", tensors, {"tie_word_embeddings": False}), tmp_path / "one.gguf", "q8_0")
    shards, one = GGUF(tmp_path / "shards.gguf"), GGUF(tmp_path / "one.gguf")
    assert set(shards.tensors) == set(one.tensors) >= {"output.weight"}
    for name, view in one.tensors.items():
        assert bytes(view.data) == bytes(shards.tensors[name].data), name
    first = [name for name in parts["model-00001-of-00002.safetensors"] if "inv_freq" not in name]
    order = {t.name: run.plan(folder).items[i].rows.name for i, t in enumerate(shards.tensors.values())}
    assert list(order.values())[: len(first)] == first  # file by file, by name within each


def test_memory_does_not_grow_with_the_tensor(tmp_path):
    n_vocab = 1 << 16
    tensors = weights("BF16") | {"model.embed_tokens.weight": ("BF16", np.zeros((n_vocab, 1024), np.uint16))}
    for name, (dtype, x) in tensors.items():
        if name != "model.embed_tokens.weight":
            tensors[name] = dtype, np.zeros([1024 if n == N_EMBD else n for n in x.shape], np.uint16)
    for name in ("q", "k", "v"):
        rows = (N_HEAD_KV if name != "q" else N_HEAD) * 256
        tensors[f"{LAYER}self_attn.{name}_proj.weight"] = "BF16", np.zeros((rows, 1024), np.uint16)
    tensors[LAYER + "self_attn.o_proj.weight"] = "BF16", np.zeros((1024, 1024), np.uint16)
    folder = make(tmp_path / "m", tensors, {"hidden_size": 1024, "vocab_size": n_vocab})
    del tensors
    planned = plan(folder, tmp_path / "out.gguf", "f32")
    run.write(planned)  # compiles what is needed
    tracemalloc.start()
    run.write(planned)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert planned.n_bytes > 256 << 20
    assert peak < 48 << 20


def test_progress_counts_every_byte(tmp_path):
    done = Counter()

    @contextmanager
    def progress(what, total):
        yield lambda n: done.update({what: n})
        assert done[what] == total

    made = convert(make(tmp_path / "m"), tmp_path / "out.gguf", "q8_0", progress=progress)
    assert done["converting"] == made.n_bytes == sum(t.nbytes for t in GGUF(made.output).tensors.values())
    assert list(done) == ["scanning", "converting", "verifying"]


# --- refusals ---------------------------------------------------------------------------------------------------------


def changed(name, at, value, dtype="F32"):
    tensors = weights()
    x = stored(tensors[name][1], dtype)[1].copy()
    x[at] = value
    return tensors | {name: (dtype, x)}


DOWN, EMBED = LAYER + "mlp.down_proj.weight", "model.embed_tokens.weight"

REFUSED = {
    "NaN": ({"tensors": changed(DOWN, (3, 5), np.nan)}, r"blk\.0\.ffn_down.*row 3, column 5 is nan"),
    "infinity": ({"tensors": changed(EMBED, (2047, 63), -np.inf)}, r"token_embd.*row 2047, column 63 is -inf"),
    "double overflow": ({"tensors": changed(DOWN, (1, 2), 1e300, "F64")}, r"ffn_down.*row 1, column 2"),
    "half overflow": ({"tensors": changed(EMBED, (2000, 7), 70000)}, r"token_embd.*row 2000, column 7.*F16"),
    "norm NaN": ({"tensors": changed("model.norm.weight", 9, np.nan)}, r"output_norm.*column 9 is nan"),
    "missing tensor": ({"tensors": {k: v for k, v in weights().items() if k != DOWN}}, f"'{DOWN}' is missing"),
    "missing head": ({"config": {"tie_word_embeddings": False}}, "'lm_head.weight' is missing"),
    "unknown tensor": ({"tensors": weights() | {"model.extra": stored(np.ones(3), "F32")}}, "'model.extra'"),
    "wrong shape": ({"config": {"intermediate_size": 97}}, r"mlp.gate_proj.weight' has shape \(96, 64\).*\(97, 64\)"),
    "integers": ({"tensors": weights() | {DOWN: ("I32", np.ones((N_EMBD, N_FF), np.int32))}}, "I32"),
    "more layers than tensors": ({"config": {"num_hidden_layers": 4_000_000_000}}, "is 4000000000, expected 1 to 512"),
    "no layers": ({"config": {"num_hidden_layers": 0}}, "'num_hidden_layers' is 0"),
    "odd heads": (
        {"config": {"num_attention_heads": 64, "num_key_value_heads": 32, "head_dim": 1}},
        "is 1, expected even",
    ),
    "activation": ({"config": {"hidden_act": "gelu"}}, "'hidden_act' is 'gelu'"),
    "rope": ({"config": {"rope_scaling": {"type": "dynamic", "factor": 4.0}}}, "'rope_scaling.type' is 'dynamic'"),
    "quantized": ({"config": {"quantization_config": {"quant_method": "exl3"}}}, "exl3"),
    "class": ({"config": {"architectures": ["FooForCausalLM"]}}, "FooForCausalLM.*LlamaForCausalLM"),
    "no size": ({"config": {"hidden_size": None}}, "hidden_size"),
    "size is text": ({"config": {"hidden_size": "64"}}, "'hidden_size' is '64'"),
    "size is a bool": ({"config": {"hidden_size": True}}, "'hidden_size' is True"),
    "eps is infinite": ({"config": {"rms_norm_eps": float("inf")}}, "'rms_norm_eps'"),
    "vocabulary": ({"config": {"vocab_size": 2000}}, "2000"),
    "sampling": ({"generation_config_json": {"top_k": "many"}}, "'top_k' is 'many'"),
    "config is no object": ({"config_json": "[1]"}, "config.json"),
    "config is no JSON": ({"config_json": "{"}, "config.json"),
    "merges": ({"tokenizer": tokenizer_json(model=tokenizer_json()["model"] | {"merges": ["a b", 7]})}, "[mM]erge"),
    "no merges": ({"tokenizer": tokenizer_json(model=tokenizer_json()["model"] | {"merges": []})}, "merges"),
    "added token": ({"tokenizer": tokenizer_json(added_tokens=[{"content": "x"}])}, "added token"),
    "Unigram": ({"tokenizer": tokenizer_json(model={"type": "Unigram", "vocab": []})}, "Unigram"),
    "byte fallback": (
        {"tokenizer": tokenizer_json(model={"type": "BPE", "byte_fallback": True, "vocab": {}})},
        "merges",
    ),
    "normalizer": ({"tokenizer": tokenizer_json(normalizer={"type": "Lowercase"})}, "Lowercase"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, tmp_path):
    changes, message = REFUSED[case]
    folder = make(tmp_path / "m", **changes)
    with pytest.raises((GGUFError, EngineError, QuantError), match=message) as caught:
        convert(folder, tmp_path / "out.gguf", "f16")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_refused_folders(tmp_path):
    with pytest.raises(GGUFError, match=r"config\.json"):
        convert(tmp_path)
    with pytest.raises(GGUFError, match=r"'f17'.*q8_0"):
        convert(TINY, tmp_path / "x.gguf", "f17")
    folder = make(tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(GGUFError, match=r"no tokenizer\.json"):
        plan(folder)
    (folder / "tokenizer.model").write_bytes(b"\n\x0e")
    with pytest.raises(GGUFError, match="SentencePiece"):
        plan(folder)
    with pytest.raises(GGUFError, match="is the input"):
        convert(make(tmp_path / "m"), folder / "model.safetensors")


# --- vocabulary -------------------------------------------------------------------------------------------------------


def keys_of(folder, **options):
    return dict(plan(folder, **options).keys)


def test_unknown_pre_tokenizer_names_the_nearest(tmp_path):
    found = tokenizer_json()
    split = found["pre_tokenizer"]["pretokenizers"][0]
    split["pattern"]["Regex"] = split["pattern"]["Regex"].replace("{1,3}", "{1,4}")
    folder = make(tmp_path / "m", tokenizer=found)
    with pytest.raises(GGUFError, match=r"nearest are .*llama-bpe.*--pre"):
        plan(folder)
    assert keys_of(folder, pre="qwen2")["tokenizer.ggml.pre"] == "qwen2"
    with pytest.raises(GGUFError, match=r"'qwen3'.*qwen2"):
        plan(folder, pre="qwen3")


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
STRUCTURES = {
    "gpt-2": BYTES,
    "smollm": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTES]},
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_pre_tokenizer_is_found_by_structure(name, tmp_path):
    model = tokenizer_json()["model"] | {"ignore_merges": False}
    found = tokenizer_json(pre_tokenizer=STRUCTURES[name], model=model)
    assert keys_of(make(tmp_path / "m", tokenizer=found))["tokenizer.ggml.pre"] == name


def test_prefix_space_is_refused(tmp_path):
    found = tokenizer_json(pre_tokenizer=BYTES | {"add_prefix_space": True})
    with pytest.raises(GGUFError, match="nearest"):
        plan(make(tmp_path / "m", tokenizer=found))


def test_wrong_pre_tokenizer_is_noticed(tmp_path, caplog):
    """What is cut differently from tokenizer.json cannot slip through unseen."""
    keys_of(make(tmp_path / "m"), pre="smollm")
    assert "tokenizes differently" in caplog.text


def test_types_of_added_tokens(tmp_path):
    found = tokenizer_json()

    def token(i, text, special):
        return {"id": i, "content": text, "special": special, "normalized": False} | dict.fromkeys(
            ("single_word", "lstrip", "rstrip"), False
        )

    found["added_tokens"] += [token(2048, "<tool>", True), token(2049, "<|x|>", False), token(2050, "a▁b", False)]
    tensors = weights() | {"model.embed_tokens.weight": stored(np.ones((2053, N_EMBD), np.float32), "F32")}
    folder = make(tmp_path / "m", tensors, {"vocab_size": 2053}, found)
    keys = keys_of(folder)
    assert keys["tokenizer.ggml.tokens"][2047:] == [
        keys["tokenizer.ggml.tokens"][2047],
        *("<tool>", "<|x|>", "a b", "[PAD2051]", "[PAD2052]"),
    ]
    assert keys["tokenizer.ggml.token_type"][2048:] == [3, 3, 4, 5, 5]
    t = from_metadata(keys)
    assert t.tokenize("a b", add_special=False) == [2050]


def test_pairs_as_merges(tmp_path):
    model = tokenizer_json()["model"]
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    texts = [" ".join(pair) for pair in pairs]
    for name, merges in (("pairs", pairs), ("texts", texts)):
        folder = make(tmp_path / name, tokenizer=tokenizer_json(model=model | {"merges": merges}))
        assert keys_of(folder)["tokenizer.ggml.merges"] == texts


def test_special_tokens(tmp_path):
    begin, end = "<|begin_of_text|>", "<|end_of_text|>"
    plain = tokenizer_json(post_processor=BYTES)
    settings = {"bos_token": {"content": begin}, "eos_token": end, "pad_token": "absent", "add_bos_token": True}
    keys = keys_of(make(tmp_path / "a", {**weights()}, {"eos_token_id": 7, "pad_token_id": -1}, plain,
                        tokenizer_config_json=settings))  # fmt: skip
    assert keys["tokenizer.ggml.bos_token_id"] == 0
    assert keys["tokenizer.ggml.eos_token_id"] == 1  # the text counts more than config.json
    assert keys["tokenizer.ggml.add_bos_token"] is False  # tokenizer.json counts more
    assert "tokenizer.ggml.padding_token_id" not in keys
    keys = keys_of(make(tmp_path / "b", config={"eos_token_id": 5, "bos_token_id": [1, 2]}))
    assert keys["tokenizer.ggml.eos_token_id"] == 5
    assert "tokenizer.ggml.bos_token_id" not in keys
    special = {name: {"SpecialToken": {"id": name, "type_id": 0}} for name in (begin, end)}
    a, b = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    template = {
        "type": "TemplateProcessing",
        "single": [special[begin], a, special[end]],
        "pair": [special[begin], a, special[begin], b, special[end]],
        "special_tokens": {n: {"id": n, "ids": [i], "tokens": [n]} for i, n in enumerate((begin, end))},
    }
    keys = keys_of(make(tmp_path / "c", tokenizer=tokenizer_json(post_processor=template),
                        tokenizer_config_json={"bos_token": begin, "eos_token": end}))  # fmt: skip
    flags = [keys[f"tokenizer.ggml.add_{name}_token"] for name in ("bos", "eos", "sep")]
    assert flags == [True, True, False]
    assert from_metadata(keys).tokenize("")[0:] == [0, 1]


def test_chat_templates(tmp_path):
    one = keys_of(make(tmp_path / "a", tokenizer_config_json={"chat_template": "{{ x }}"}))
    assert one["tokenizer.chat_template"] == "{{ x }}"
    named = [{"name": "default", "template": "D"}, {"name": "tool use", "template": "T"}]
    several = keys_of(make(tmp_path / "b", tokenizer_config_json={"chat_template": named}))
    assert several["tokenizer.chat_template"] == "D"
    assert several["tokenizer.chat_template.tool_use"] == "T"
    assert several["tokenizer.chat_templates"] == ["tool_use"]
    assert keys_of(make(tmp_path / "c", chat_template_jinja="J"))["tokenizer.chat_template"] == "J"
    assert "tokenizer.chat_template" not in keys_of(make(tmp_path / "d"))


# --- keys -------------------------------------------------------------------------------------------------------------


def test_keys_of_the_config(tmp_path):
    keys = keys_of(make(tmp_path / "m", config={"rope_scaling": {"type": "linear", "factor": 2}}))
    assert keys["llama.rope.scaling.type"] == "linear"
    assert keys["llama.rope.scaling.factor"] == 2.0
    assert keys["llama.rope.dimension_count"] == D_HEAD
    assert "llama.attention.key_length" not in keys  # only where the config has it
    rope = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
    planned = plan(make(tmp_path / "n", config={"rope_scaling": rope}))
    assert planned.items[0].name == "rope_freqs.weight"
    factors = planned.items[0].rows.read(0, D_HEAD // 2).reshape(-1)
    assert factors[0] == 1.0
    assert factors[-1] == 8.0
    assert (np.diff(factors) >= 0).all()


def test_sampling_keys():
    found = sampling({"temperature": 0.5, "top_k": 40.0, "repetition_penalty": 1.1, "min_p": None})
    assert found == [
        ("general.sampling.top_k", 40),
        ("general.sampling.temp", 0.5),
        ("general.sampling.penalty_repeat", 1.1),
    ]


def test_keys_of_the_card(tmp_path):
    folder = tmp_path / "Some-Model-7B-Chat"
    folder.mkdir()
    (folder / "README.md").write_text(
        "---\nlicense: [mit, apache-2.0]\nlanguage:\n- no\n- en\ntags:\n- a\npipeline_tag: text-generation\n"
        "model_creator: Ann\nversion: 1.5\nbase_model: org/Base-v2\ndatasets:\n- https://huggingface.co/o/d\n"
        "description:\n  nested: not a text\n---\n# Title\n"
    )
    name, pairs = describe(folder, {}, {"a": (7, 1_000_000_000)})
    assert name == ModelName("Some Model 7B Chat", None, "Some-Model", "Chat", "1.5", "7B")
    assert pairs == [
        ("general.name", "Some Model 7B Chat"),
        ("general.author", "Ann"),
        ("general.version", "1.5"),
        ("general.finetune", "Chat"),
        ("general.basename", "Some-Model"),
        ("general.size_label", "7B"),
        ("general.license", "mit,apache-2.0"),
        ("general.base_model.count", 1),
        ("general.base_model.0.name", "Base v2"),
        ("general.base_model.0.version", "v2"),
        ("general.base_model.0.organization", "Org"),
        ("general.base_model.0.repo_url", "https://huggingface.co/org/Base-v2"),
        ("general.dataset.count", 1),
        ("general.dataset.0.name", "D"),
        ("general.dataset.0.organization", "O"),
        ("general.dataset.0.repo_url", "https://huggingface.co/o/d"),
        ("general.tags", ["a", "text-generation"]),
        ("general.languages", ["no", "en"]),
    ]


@pytest.mark.parametrize("text", ["", "# Title\n", "---\na: [\n---\n", "---\n- list\n---\n", "---\na: 1\n"])
def test_cards_without_use(text, tmp_path):
    (tmp_path / "README.md").write_text(text)
    assert read_card(tmp_path / "README.md") == {}


NAMES = [
    *("mistralai/Mixtral-8x7B-Instruct-v0.1", "Qwen2-57B-A14B-Instruct", "Phi-3-mini-4k-instruct", "bloom-7b1-petals"),
    *("Mistral-Nemo-Instruct-2407", "llama-161M-100B", "meta-llama/Llama-2-7b-hf", "tiny", "./folder", "a/b/c-7B"),
    *("SmolLM2-135M-Instruct", "Meta-Llama-3.1-8B-Instruct", "model-bf16", "--a--b", "a-v1", "3-llama", "x-XL-7B"),
    *("two words", "7B-first", "gemma-2-9b-it", "v1-2", "x-1_5B-Q4_K", "lora-1", ""),
]


@pytest.mark.parametrize("n_params", [0, 161_000_000, 4_000_000_000, 46_000_000_000])
def test_names_are_read_as_gguf_py_reads_them(n_params):
    from gguf.metadata import Metadata

    for name in NAMES:
        found = parse_name(name, n_params)
        expected = Metadata.get_model_id_components(name, n_params)
        parts = (found.name, found.organization, found.basename, found.finetune, found.version, found.size_label)
        assert parts == expected, name
        assert title(name) == Metadata.id_to_title(name)


def test_sizes_and_file_names():
    from gguf.utility import naming_convention
    from gguf.utility import size_label as expected

    for n in (1, 999, 1000, 12_345, 999_999, 1_000_001, 4_066_560, 8_030_261_312, 405_000_000_000, 1_500_000_000_000):
        assert size_label(n) == expected(n, 0, 0, 0), n
    parts = ModelName("A B/c", None, None, "x y", "v 1", "7B")
    assert file_name(parts, "Q8_0") == naming_convention("A B/c", None, "x y", "v 1", "7B", "Q8_0") + ".gguf"


# --- outputs ----------------------------------------------------------------------------------------------------------


def test_names_of_outputs(tmp_path):
    folder = make(tmp_path / "my-model")
    label = size_label(plan(folder).n_weights)
    assert plan(folder).output == folder / f"My-Model-{label}-F16.gguf"
    assert plan(folder, tmp_path, "q8_0").output == tmp_path / f"My-Model-{label}-Q8_0.gguf"
    assert plan(folder, tmp_path / "x-{ftype}-{OUTTYPE}.gguf", "q8_0").output == tmp_path / "x-q8_0-Q8_0.gguf"
    assert convert(folder).output.is_file()
    assert convert(folder).output.is_file()  # again: the old file is no input


def test_command(tmp_path):
    app = typer.Typer()
    app.command()(command)
    out = tmp_path / "out.gguf"
    result = CliRunner().invoke(app, [str(TINY), "-o", str(out), "--outtype", "bf16", "--json"])
    assert result.exit_code == 0
    summary = json.loads(result.stdout)
    assert summary["output"] == str(out)
    assert summary["pre"] == "llama-bpe"
    assert summary["weights"] == 4_066_560
    golden = json.loads((GOLDEN / "convert-bf16.json").read_text(encoding="utf-8"))
    assert digest(out.read_bytes()) == golden["sha256_of_file"]
    shown = CliRunner().invoke(app, [str(TINY), "-o", str(out)]).stdout
    assert str(out) in shown
    assert "BF16" in shown
