"""How checkpoints lie in folders: files and shards, indexes that lie, names with prefixes, models of several parts."""

import json

import numpy as np
import pytest

from gguftools.conversion.layouts import text_class
from gguftools.conversion.run import convert
from gguftools.errors import GGUFError
from gguftools.gguf import GGUF
from gguftools.safetensors import open_checkpoint
from tests.gguftools.test_convert import CONFIG, make, save, stored, weights

TENSORS = weights("BF16")
NAMES = list(TENSORS)
SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


def shards(folder, parts=SHARDS, **index):
    """A folder of three shards; index: changes to the weight_map, None takes an entry out."""
    make(folder, TENSORS)
    (folder / "model.safetensors").unlink()
    place = {name: SHARDS[i % 3] for i, name in enumerate(NAMES)}
    for part in parts:
        save(folder / part, {name: TENSORS[name] for name in NAMES if place[name] == part})
    place = {name: file for name, file in (place | index).items() if file is not None}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place}))
    return folder


def data_of(path):
    return {t.name: (t.format.name, t.shape, bytes(t.data)) for t in GGUF(path).tensors.values()}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    return data_of(convert(make(folder / "m", TENSORS), folder / "out.gguf").output)


def check(folder, expected):
    assert data_of(convert(folder, folder.parent / "out.gguf").output) == expected


def test_shards_and_leftovers(tmp_path, expected):
    folder = shards(tmp_path / "m")
    check(folder, expected)
    save(
        folder / "consolidated.safetensors",
        {"layers.0.attention.wq.weight": stored(np.ones((2, 2), np.float32), "F32")},
    )
    save(folder / "model.safetensors", TENSORS)  # the index decides
    check(folder, expected)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(
        GGUFError, match=r"is both in model-00001-of-00003.safetensors and in model.safetensors; remove"
    ):
        open_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    check(folder, expected)  # shards without an index
    (folder / SHARDS[1]).unlink()
    with pytest.raises(GGUFError, match=r"shards are missing: model-00002-of-00003.safetensors; download"):
        open_checkpoint(folder)


def test_consolidated_beside_a_single_file(tmp_path, expected):
    folder = make(tmp_path / "m", TENSORS)
    save(folder / "consolidated.safetensors", TENSORS)
    save(folder / "adapter_model.safetensors", {"a": TENSORS[NAMES[0]]})
    check(folder, expected)
    (folder / "model.safetensors").unlink()
    check(folder, expected)  # and alone


LIES = {
    "tensor that the shard lacks": (
        {"nowhere.weight": SHARDS[0]},
        r"lists tensors that the files lack: 'nowhere.weight'",
    ),
    "tensor in another shard": ({NAMES[0]: SHARDS[1]}, f"lists tensors that the files lack: '{NAMES[0]}'"),
    "tensor that the index lacks": ({NAMES[0]: None}, f"tensors that model.safetensors.index.json lacks: '{NAMES[0]}'"),
    "missing shard": ({"x": "model-00004-of-00004.safetensors"}, "lists files that are missing: model-00004-of-00004"),
    "path out of the folder": ({"x": "../m/model-00001-of-00003.safetensors"}, "not the name of a safetensors file"),
    "absolute path": ({"x": "/etc/passwd.safetensors"}, "not the name of a safetensors file"),
    "path of Windows": ({"x": "C:\\x.safetensors"}, "not the name of a safetensors file"),
    "other kind of file": ({"x": "pytorch_model.bin"}, "not the name of a safetensors file"),
    "no name": ({"x": 7}, "has no weight_map"),
}


@pytest.mark.parametrize("case", LIES)
def test_indexes_that_lie(case, tmp_path):
    index, message = LIES[case]
    folder = shards(tmp_path / "m", **index)
    with pytest.raises(GGUFError, match=message) as caught:
        convert(folder, tmp_path / "out.gguf")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "model.ckpt"])
def test_pickles_are_never_loaded(name, tmp_path):
    folder = make(tmp_path / "m", TENSORS)
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"\x80\x04cos\nsystem\n(S'echo boom'\ntR.")
    with pytest.raises(GGUFError, match=f"only pickled weights \\({name}\\), which are never loaded.*save_pretrained"):
        convert(folder, tmp_path / "out.gguf")


def renamed(rule):
    return {rule(name): tensor for name, tensor in TENSORS.items()}


RULES = {
    "language_model in front": lambda n: "language_model." + n,
    "language_model inside": lambda n: n.replace("model.", "model.language_model.", 1),
    "text_model": lambda n: n.replace("model.", "model.text_model.", 1),
    "decoder alone": lambda n: n.removeprefix("model."),
}


@pytest.mark.parametrize("rule", RULES)
def test_prefixes(rule, tmp_path, expected):
    check(make(tmp_path / "m", renamed(RULES[rule])), expected)


def test_multimodal_folder_gives_its_text_part(tmp_path, expected, caplog):
    text = {k: CONFIG[k] for k in CONFIG if k not in ("architectures", "tie_word_embeddings")} | {"model_type": "llama"}
    config = {**dict.fromkeys(text), "architectures": ["LlavaForConditionalGeneration"], "text_config": text}
    vision = {"vision_tower.patch.weight": stored(np.ones((4, 3), np.float32), "F32")}
    vision["model.multi_modal_projector.weight"] = vision["vision_tower.patch.weight"]
    folder = make(tmp_path / "m", renamed(RULES["language_model in front"]) | vision)
    (folder / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if v is not None} | CONFIG | config)
    )
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True, "vocab_size": 2048}))
    check(folder, expected)
    assert "2 tensors of parts that see or hear are left out" in caplog.text


def test_two_tensors_with_one_name(tmp_path):
    tensors = TENSORS | {"language_model." + NAMES[0]: TENSORS[NAMES[0]]}
    with pytest.raises(GGUFError, match=f"another tensor are both '{NAMES[0]}'"):
        convert(make(tmp_path / "m", tensors), tmp_path / "out.gguf")


def test_vision_alone(tmp_path):
    with pytest.raises(GGUFError, match="holds no language model"):
        convert(make(tmp_path / "m", {"vision_tower.x": TENSORS[NAMES[0]]}), tmp_path / "out.gguf")


def test_class_of_the_text_part():
    own = {"architectures": ["LlamaForCausalLM"], "text_config": {"architectures": ["Qwen3ForCausalLM"]}}
    assert text_class(own)["architectures"] == ["LlamaForCausalLM"]
    inner = {"architectures": ["Foo"], "text_config": {"architectures": ["Qwen3ForCausalLM"]}}
    assert text_class(inner)["architectures"] == ["Qwen3ForCausalLM"]
    assert text_class({"architectures": ["Foo"], "text_config": {"model_type": "bar"}})["architectures"] == ["Foo"]
