"""The way back: exported and converted again, a model has the tensors, parameters and vocabulary that it had."""

import json
from pathlib import Path

import numpy as np
import pytest

import gguftools
from gguftools.cli import main
from gguftools.errors import GGUFError
from gguftools.gguf import GGUF, Writer
from gguftools.safetensors import open_checkpoint
from tests.gguftools.test_families import is_known

#: checkpoints that must come back; others may be refused, where a change or a setting has no way back yet
COME_BACK = {
    *("apertus", "cohere", "gemma2", "gemma3", "gptneox", "granite", "llama", "llama3-rope", "mistral-swa", "mixtral"),
    *("olmo2", "olmo3", "phi3", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "smollm3", "stablelm", "starcoder2"),
}


def pytest_generate_tests(metafunc):
    from tests.conftest import SHARED

    if "checkpoint" in metafunc.fixturenames:
        paths = sorted((SHARED / "golden" / "arch").glob("*"))
        found = {path.name: path for path in paths if path.is_dir() and is_known(path)}
        metafunc.parametrize("checkpoint", list(found.values()), ids=list(found))


def content(path):
    f = GGUF(path)
    tensors = {t.name: (t.format.name, t.shape, bytes(t.data)) for t in f.tensors.values()}
    keys = {
        key: f.metadata[key] for key in f.fields if key.startswith((f.metadata["general.architecture"], "tokenizer"))
    }
    return tensors, {k: v if isinstance(v, (int, float, str)) else list(v) for k, v in keys.items()}


def check_round_trip(source, folder, outtype="auto"):
    gguftools.export(source, folder / "back")
    again = gguftools.convert(folder / "back", folder / "again.gguf", outtype).output
    before, keys = content(source)
    after, keys_after = content(again)
    assert list(after) == list(before) or set(after) == set(before)
    for name, tensor in before.items():
        assert after[name] == tensor, name
    assert keys_after == keys


@pytest.mark.parametrize("outtype", ["f32", "f16", "bf16"])
def test_tiny(tmp_path, outtype):
    source = gguftools.convert(gguftools.demo_folder(), tmp_path / "tiny.gguf", outtype).output
    check_round_trip(source, tmp_path, outtype)


def test_the_folder_is_the_original(tmp_path):
    """From the 16-bit file of a folder comes that folder: the same tensors in the same types, bit for bit."""
    gguftools.export(gguftools.demo_model(), tmp_path / "back", max_shard_size=2_000_000)
    assert (tmp_path / "back" / "model.safetensors.index.json").is_file()
    before, after = open_checkpoint(gguftools.demo_folder()), open_checkpoint(tmp_path / "back")
    assert set(before) == set(after)
    for name, view in before.items():
        assert (after[name].dtype, after[name].shape, bytes(after[name].data)) == (
            view.dtype,
            view.shape,
            bytes(view.data),
        )
    old, new = (json.loads((Path(f) / "config.json").read_text()) for f in (gguftools.demo_folder(), tmp_path / "back"))
    for key in ("architectures", "model_type", "hidden_size", "num_key_value_heads", "rope_parameters", "dtype"):
        assert new[key] == old[key], key


def test_families(checkpoint, tmp_path):
    source = gguftools.convert(checkpoint, tmp_path / "model.gguf", "bf16").output
    try:
        gguftools.export(source, tmp_path / "probe", dry_run=True)
    except GGUFError as error:
        check_refused(checkpoint, source, str(error))
        return
    check_round_trip(source, tmp_path)
    before, after = open_checkpoint(checkpoint), open_checkpoint(tmp_path / "back")
    assert {name: v.shape for name, v in after.items()} == {name: before[name].shape for name in after}


def check_refused(checkpoint, source, message):
    """In one line that names the file, before anything is written."""
    assert checkpoint.name not in COME_BACK, message
    assert message.startswith(f"{source}: ")
    assert "\n" not in message
    assert [path.name for path in source.parent.iterdir()] == ["model.gguf"]


def test_the_card_comes_back(tmp_path):
    said = {
        "general.name": "My: Model",
        "general.license": "mit",
        "general.tags": ["a", "b"],
        "general.languages": ["no", "en"],
        "general.base_model.count": 1,
        "general.base_model.0.name": "Base",
        "general.base_model.0.organization": "Org",
        "general.base_model.0.repo_url": "https://huggingface.co/org/base",
        "general.sampling.temp": 0.6,
    }
    gguftools.export(changed(tmp_path / "m.gguf", said), tmp_path / "back")
    keys = GGUF(gguftools.convert(tmp_path / "back", tmp_path / "again.gguf").output).metadata
    for key, value in said.items():
        assert keys[key] == pytest.approx(value) if isinstance(value, float) else _plain(keys[key]) == value, key


def _plain(value):
    return value if isinstance(value, (str, int)) else list(value)


def test_quantized_files_become_16_bits(tmp_path):
    source = tmp_path / "q8.gguf"
    gguftools.convert(gguftools.demo_folder(), source, "q8_0")
    done = gguftools.export(source, tmp_path / "back")
    assert done.dtype == "float16"
    again = gguftools.convert(tmp_path / "back", tmp_path / "again.gguf", "f32").output
    for name, tensor in GGUF(source).tensors.items():
        half = tensor.dequantize().astype(np.float16).astype(np.float32)
        np.testing.assert_array_equal(GGUF(again).tensors[name].dequantize(), half)


def test_shards_are_read(tmp_path):
    gguftools.split(gguftools.demo_model(), tmp_path / "part", max_tensors=30)
    gguftools.export(tmp_path / "part-00002-of-00002.gguf", tmp_path / "back")
    assert set(open_checkpoint(tmp_path / "back")) == set(open_checkpoint(gguftools.demo_folder()))


def test_sentencepiece_vocabularies(shared, tmp_path):
    """Ids of tokens, scores, types and flags come back from the SentencePiece file that is written."""
    from gguftools.conversion.vocab import vocab_keys
    from gguftools.exporting.run import _write
    from gguftools.exporting.vocabulary import vocabulary_of

    found = sorted((shared / "golden" / "vocab").glob("*.gguf"))
    done = 0
    for path in found:
        metadata = GGUF(path).metadata
        if metadata["tokenizer.ggml.model"] != "llama":
            continue
        done += 1
        folder = tmp_path / path.stem
        folder.mkdir()
        for name, data in vocabulary_of(metadata).items():
            _write(folder / name, data)
        keys = dict(vocab_keys(folder, {"vocab_size": len(metadata["tokenizer.ggml.tokens"])}))
        for key in ("tokens", "token_type", "scores"):
            assert list(keys[f"tokenizer.ggml.{key}"]) == list(metadata[f"tokenizer.ggml.{key}"]), (path.stem, key)
        texts = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        from engine.tokenizer import from_metadata

        tokenizer = from_metadata(keys)
        cases = texts["cases"] if isinstance(texts, dict) and "cases" in texts else texts
        for case in list(cases)[:20]:
            text, ids = (case["text"], case["ids"]) if isinstance(case, dict) else case
            assert tokenizer.tokenize(text, add_special=False) == ids, path.stem
    assert done


def changed(path, keys=(), tensors=None):
    """The demo model with other keys, and tensors renamed (None drops them)."""
    f = GGUF(gguftools.demo_model())
    with Writer(path) as w:
        for field in f.fields.values():
            w.add_field(field)
        for key, value in dict(keys).items():
            w.add(key, value)
        names = {name: (tensors or {}).get(name, name) for name in f.tensors}
        kept = [(new, f.tensors[old]) for old, new in names.items() if new is not None]
        for name, t in kept:
            w.declare(name, t.shape, t.format)
        for name, t in kept:
            w.write(name, t.data)
    return path


REFUSED = {
    "family": ({"general.architecture": "foo"}, None, "unknown model architecture: 'foo'"),
    "tensor is missing": ({}, {"blk.3.ffn_up.weight": None}, "tensor 'blk.3.ffn_up.weight' is missing"),
    "unknown tensor": ({}, {"blk.3.ffn_up.weight": "blk.3.foo.weight"}, "(is missing|no place for tensor)"),
    "vocabulary": ({"tokenizer.ggml.model": "t5"}, None, "of the kind 't5'; gpt2, llama can be exported"),
    "shape": ({"llama.feed_forward_length": 511}, None, r"has shape .*, the keys imply"),
    "no spelling": ({"llama.rope.scaling.attn_factor": 2.0}, None, "attn_factor' is 2.0: config.json has no place"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, tmp_path):
    keys, tensors, message = REFUSED[case]
    source = changed(tmp_path / "m.gguf", keys, tensors)
    with pytest.raises(ValueError, match=message) as caught:
        gguftools.export(source, tmp_path / "back")
    assert "\n" not in str(caught.value)
    assert str(source) in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "mine").write_text("mine")
    with pytest.raises(GGUFError, match="is there already"):
        gguftools.export(gguftools.demo_model(), tmp_path / "back")
    with pytest.raises(GGUFError, match="does not exist; make it first"):
        gguftools.export(gguftools.demo_model(), tmp_path / "no" / "back")
    with pytest.raises(GGUFError, match="unknown outtype"):
        gguftools.export(gguftools.demo_model(), tmp_path / "new", "q8_0")


def test_command(tmp_path, capsys):
    assert main(["export", str(gguftools.demo_model()), str(tmp_path / "x"), "--dry-run"]) == 0
    assert not (tmp_path / "x").exists()
    capsys.readouterr()
    assert main(["export", str(gguftools.demo_model()), str(tmp_path / "x"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["class"] == "LlamaForCausalLM"
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == [
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
