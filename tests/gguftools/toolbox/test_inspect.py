"""The many ways to look at files: folded, as a tree, side by side, a bare key; folders, sets, safetensors; memory."""

import json
import shutil

import numpy as np
import pytest

import gguftools
from gguftools import cli
from gguftools.errors import GGUFError
from gguftools.gguf import Writer
from gguftools.toolbox.inspect import describe, fold, memory, models_in, ranges, tree


def shown(capsys, *arguments) -> str:
    assert cli.main(["inspect", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_layers_are_folded(tiny, q4, capsys):
    out = shown(capsys, tiny["bf16"])
    assert "6x     blk.[N].ffn_up.weight       0-5     [512, 256]   BF16  1,572,864" in out
    assert "blk.3." not in out
    mixed = [row for row in fold(describe(q4)["tensors"]) if row["name"] == "blk.[N].ffn_down.weight"]
    assert [(row["type"], row["layers"], row["count"]) for row in mixed] == [("Q4_K", "0-1,3-4", 4), ("Q6_K", "2,5", 2)]
    assert sum(row["bytes"] for row in fold(describe(q4)["tensors"])) == describe(q4)["tensor_bytes"]
    assert shown(capsys, tiny["bf16"], "--all").count("blk.") == 54


def test_experts_and_odd_names():
    names = [
        "blk.0.ffn_up.3.weight",
        "blk.1.ffn_up.3.weight",
        "v.blk.0.x",
        "v.blk.1.x",
        "a",
        "1",
        "x.1",
        "é.0.y",
        "é.1.y",
    ]
    rows = fold({"name": n, "shape": [1], "type": "F32", "weights": 1, "bytes": 4} for n in names)
    assert [row["name"] for row in rows] == ["blk.[N].ffn_up.3.weight", "v.blk.[N].x", "a", "1", "x.1", "é.[N].y"]
    assert ranges([]) == ""


def test_tree(tiny):
    found = describe(tiny["bf16"])
    lines = tree(found["tensors"])
    assert ("  [N]", 54, 7_090_176) in lines
    assert sum(size for name, _, size in lines if not name.startswith(" ")) == found["tensor_bytes"]
    clash = [
        {"name": n, "shape": [1], "type": "F32", "weights": 1, "bytes": 4} for n in ("a", "a.b", "a.b.c", "", ".", "..")
    ]
    assert tree(clash)


def test_keys_for_shells(tiny, capsys):
    assert shown(capsys, tiny["bf16"], "--key", "general.name") == "Tiny\n"
    assert (
        shown(capsys, tiny["bf16"], "--key", "llama.block_count", "--key", "tokenizer.ggml.add_bos_token")
        == "6\ntrue\n"
    )
    assert len(shown(capsys, tiny["bf16"], "--key", "tokenizer.ggml.tokens").splitlines()) >= 2048
    assert cli.main(["inspect", str(tiny["bf16"]), "--key", "absent"]) == 1
    assert "there is no key 'absent'" in capsys.readouterr().err


def test_some_tensors(tiny, capsys):
    out = shown(capsys, tiny["bf16"], "--tensors", "blk.[01].ffn_*")
    assert out.count("blk.") == 8
    assert "general." not in out
    assert cli.main(["inspect", str(tiny["bf16"]), "--tensors", "nothing*"]) == 1


def test_side_by_side(tiny, q4, capsys):
    out = shown(capsys, tiny["bf16"], q4)
    assert "general.file_type  32" in out
    assert "general.name" not in out, "what is the same is left out"
    assert "blk.[N].attn_q.weight       0-5      BF16 [256, 256]   Q4_K [256, 256]" in out
    assert "general.name" in shown(capsys, tiny["bf16"], q4, "--all")
    same = shown(capsys, q4, q4)
    assert "the keys are the same" in same
    assert "the tensors have the same types and shapes" in same
    assert len(json.loads(shown(capsys, tiny["bf16"], q4, "--json"))) == 2


def test_markdown(tiny, capsys):
    out = shown(capsys, tiny["bf16"], "--markdown")
    assert "| key | type | value |\n| --- | --- | --- |\n| general.architecture | string | 'llama' |" in out


def test_sets_and_folders(tiny, q4, tiny_folder, tmp_path, capsys):
    shards = gguftools.split(tiny["bf16"], tmp_path / "m", 20).shards
    whole, found = describe(tiny["bf16"]), describe(shards[1].path)
    assert found["tensors"][3]["name"] == whole["tensors"][3]["name"]
    assert (found["n_tensors"], found["weights"], found["n_keys"]) == (56, whole["weights"], whole["n_keys"])
    assert [shard["tensors"] for shard in found["shards"]] == [20, 20, 16]
    shutil.copy(q4, tmp_path / "q4.gguf")
    assert [p.name for p in models_in(tmp_path)] == ["m-00001-of-00003.gguf", "q4.gguf"]
    assert "m-00001-of-00003.gguf  q4.gguf" in shown(capsys, tmp_path)
    out = shown(capsys, tiny_folder)
    assert "model.layers.[N].mlp.up_proj.weight" in out
    assert "16.000 bits per weight" in out
    assert describe(tiny_folder / "model.safetensors")["types"][0]["type"] == "BF16"
    (tmp_path / "empty").mkdir()
    with pytest.raises(GGUFError, match=r"holds neither \*.gguf nor \*.safetensors"):
        models_in(tmp_path / "empty")


def keyed(path, **numbers):
    with Writer(path) as w:
        w.add("general.architecture", "x")
        for key, value in numbers.items():
            w.add("x." + key.replace("__", "."), value)
    return describe(path)


@pytest.mark.parametrize(
    ("numbers", "n_ctx", "types", "cache"),
    [
        # 2 layers x 4 heads x (64 + 64) x 2 bytes
        (
            {"attention__head_count": 8, "attention__head_count_kv": 4, "embedding_length": 512},
            100,
            ("F16", "F16"),
            204_800,
        ),
        ({"attention__head_count": 8, "embedding_length": 512}, 100, ("F16", "F16"), 409_600),
        (
            {"attention__head_count": 8, "attention__head_count_kv": 4, "embedding_length": 512},
            100,
            ("Q8_0", "Q4_0"),
            83_200,
        ),
        (
            {"attention__head_count": [8, 8], "attention__head_count_kv": [4, 0], "embedding_length": 512},
            10,
            ("F16", "F16"),
            10_240,
        ),
        (
            {"attention__head_count": 8, "attention__key_length": 16, "attention__value_length": 8},
            1,
            ("F32", "F32"),
            1536,
        ),
        (
            {"attention__head_count": 8, "attention__kv_lora_rank": 512, "rope__dimension_count": 64},
            1,
            ("F16", "F16"),
            2304,
        ),
    ],
)
def test_memory(numbers, n_ctx, types, cache, tmp_path):
    found = memory(keyed(tmp_path / "a.gguf", block_count=2, **numbers), n_ctx, *types)
    assert (found["cache"], found["weights"]) == (cache, 0)


@pytest.mark.parametrize(
    "numbers", [{}, {"block_count": 0}, {"block_count": 2**31}, {"block_count": 2}, {"block_count": "2"}]
)
def test_memory_of_files_that_do_not_say(numbers, tmp_path):
    with pytest.raises(GGUFError, match=r"cannot be sized|damaged"):
        memory(keyed(tmp_path / "a.gguf", **numbers), 100)


def test_memory_is_printed(tiny, capsys):
    out = shown(capsys, tiny["bf16"], "-c", 2048, "--cache-type-k", "q8_0")
    assert "memory for 2,048 tokens: weights 7.76 MiB + cache 4.59 MiB (Q8_0 keys, F16 values)" in out
    assert cli.main(["inspect", str(tiny["bf16"]), "-c", "2048", "--cache-type-k", "Q9"]) == 1


def test_steering_characters_are_escaped(tmp_path, capsys):
    with Writer(tmp_path / "a.gguf") as w:
        w.add("evil\x1b[2J", "x\x1b[31m")
        w.declare("t\x1b[0m", (2,), "F32")
        w.write("t\x1b[0m", np.zeros(2, np.float32))
    for options in ((), ("--all",), ("--tree",), ("--markdown",), ("--json",)):
        assert "\x1b" not in shown(capsys, tmp_path / "a.gguf", *options)
