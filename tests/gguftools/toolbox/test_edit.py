"""Edits: what they change, what they leave alone, and how they reach the file."""

import json

import numpy as np
import pytest

import gguftools
from gguftools import cli
from gguftools.errors import GGUFError
from gguftools.files import journal_path
from gguftools.gguf import GGUF
from gguftools.toolbox import edit as module
from gguftools.toolbox.edit import COPIED, IN_PLACE, JOURNALED, UNCHANGED, Edits, edit, restore


def state(path):
    with GGUF(path) as f:
        fields = {key: (str(x.type), str(x.element_type), bytes(x.raw)) for key, x in f.fields.items()}
        return fields, {t.name: (t.shape, t.format.name, t.raw.tobytes()) for t in f.tensors.values()}


@pytest.mark.parametrize("value", ["", "a much longer name than before " * 50, "ü\n\t", "x"])
def test_set_keeps_all_else_and_the_order(value, model):
    keys, tensors = state(model)
    edit(model, Edits(set={"general.name": value}))
    new_keys, new_tensors = state(model)
    assert GGUF(model).metadata["general.name"] == value
    assert list(new_keys) == list(keys)
    assert {k: v for k, v in new_keys.items() if k != "general.name"} == {
        k: v for k, v in keys.items() if k != "general.name"
    }
    assert new_tensors == tensors


@pytest.mark.parametrize(
    "kind",
    ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float32", "float64", "bool", "string"],
)
def test_every_type(kind, model):
    value = {"bool": True, "string": "7"}.get(kind, 7)
    edit(model, Edits(set={"new.key": (value, kind), "new.array": ([value] * 3, kind)}))
    with GGUF(model) as f:
        assert (str(f.fields["new.key"].type), f.metadata["new.key"]) == (kind, value)
        assert (str(f.fields["new.array"].element_type), f.metadata["new.array"]) == (kind, [value] * 3)


def test_types_are_kept(model):
    edit(model, Edits(set={"llama.rope.freq_base": 5, "tokenizer.ggml.add_bos_token": False}))
    with GGUF(model) as f:
        assert (str(f.fields["llama.rope.freq_base"].type), f.metadata["llama.rope.freq_base"]) == ("float32", 5.0)
        assert f.metadata["tokenizer.ggml.add_bos_token"] is False


@pytest.mark.parametrize(
    ("edits", "says"),
    [
        (Edits(set={"llama.block_count": "six"}), "type str cannot be written as uint32"),
        (Edits(set={"llama.block_count": [1, 2]}), "is uint32, the new value is not"),
        (Edits(set={"tokenizer.ggml.tokens": "x"}), "is an array of string"),
        (Edits(set={"llama.block_count": -1}), "out of the range"),
        (Edits(set={"": 1}), "may not be empty"),
        (Edits(set={"general.alignment": (24, "uint32")}), "power of two"),
        (Edits(delete=["general.nam"]), "did you mean 'general.name'"),
        (Edits(rename={"general.name": "general.type"}), "is there already"),
        (Edits(entries={("tokenizer.ggml.tokens", 5000): "x"}), "has 2,048 entries"),
        (Edits(entries={("general.name", 0): "x"}), "not an array"),
        (Edits(special={"eot": "<|none|>"}), "no token"),
        (Edits(special={"end": "<|none|>"}), "unknown special token 'end'"),
        (Edits(rename_tensors={"absent": "x"}), "no tensor 'absent'"),
        (Edits(rename_tensors={"output_norm.weight": "token_embd.weight"}), "is there already"),
        (Edits(rename_tensors={"output_norm.weight": "n" * 64}), "at most 63"),
        (Edits(drop_tensors=["blk.9.*"]), "no tensor is called"),
        (Edits(add_tensors={"output_norm.weight": np.zeros(3)}), "is there already"),
        (Edits(add_tensors={"c": np.zeros(3, complex)}), "no tensor type"),
    ],
)
def test_refusals_change_nothing(edits, says, model):
    before = model.read_bytes()
    with pytest.raises(ValueError, match=says):
        edit(model, edits)
    assert model.read_bytes() == before
    assert [p.name for p in model.parent.iterdir()] == ["model.gguf"]


def test_entries_and_special_tokens(model):
    edits = Edits(
        entries={("tokenizer.ggml.tokens", 7): "<|new|>", ("tokenizer.ggml.token_type", 7): 3},
        special={"eot": "<|new|>"},
    )
    done = edit(model, edits)
    assert len(done.changes) == 3
    with GGUF(model) as f:
        assert f.metadata["tokenizer.ggml.tokens"][7] == "<|new|>"
        assert f.metadata["tokenizer.ggml.token_type"][6:9] == [1, 3, 1]
        assert f.metadata["tokenizer.ggml.eot_token_id"] == 7
    assert gguftools.check(model).is_clean


def test_tensors(model):
    keys, tensors = state(model)
    edits = Edits(
        rename_tensors={"output_norm.weight": "norm.weight"},
        drop_tensors=["blk.[12].attn_?.weight"],
        add_tensors={"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": (np.ones((2, 32), np.float32), "Q8_0")},
    )
    edit(model, edits)
    new_keys, new = state(model)
    assert new_keys == keys
    assert new["norm.weight"] == tensors["output_norm.weight"]
    assert set(tensors) - set(new) == {
        "output_norm.weight",
        *(f"blk.{i}.attn_{x}.weight" for i in (1, 2) for x in "qkv"),
    }
    with GGUF(model) as f:
        assert f.tensors["a"].dequantize().tolist() == [[0, 1, 2], [3, 4, 5]]
        np.testing.assert_allclose(f.tensors["b"].dequantize(), 1, rtol=1e-3)


def test_ways(model, monkeypatch):
    inode = model.stat().st_ino
    assert edit(model, Edits(set={"general.name": "Tiny"})).way == UNCHANGED
    assert edit(model, Edits(set={"llama.rope.freq_base": 5000.0})).way == IN_PLACE
    assert edit(model, Edits(set={"general.name": "tINY"})).way == IN_PLACE
    assert model.stat().st_ino == inode
    assert edit(model, Edits(set={"general.name": "Tiny, but longer"}), dry_run=True).way == COPIED
    assert GGUF(model).metadata["general.name"] == "tINY"
    assert edit(model, Edits(set={"general.name": "Tiny2"}), in_place=True).way == JOURNALED
    assert model.stat().st_ino == inode
    assert GGUF(model).metadata["general.name"] == "Tiny2"
    assert not journal_path(model).exists()
    assert edit(model, Edits(set={"general.name": "Tiny, but longer"})).way == COPIED
    assert model.stat().st_ino != inode
    with pytest.raises(GGUFError, match="does not fit in place"):
        edit(model, Edits(set={"general.name": "x" * 5000}), in_place=True)
    assert gguftools.check(model).is_clean


def test_an_interrupted_edit_in_place_is_undone(model, monkeypatch):
    before = model.read_bytes()

    def half(path, at, data):
        original(path, at, data[: len(data) // 2])
        raise KeyboardInterrupt

    original = module._put
    monkeypatch.setattr(module, "_put", half)
    with pytest.raises(KeyboardInterrupt):
        edit(model, Edits(set={"general.name": "Tiny2"}), in_place=True)
    monkeypatch.undo()
    assert model.read_bytes() != before
    with pytest.raises(GGUFError, match="an edit was interrupted"):
        GGUF(model)
    assert restore(model)
    assert model.read_bytes() == before
    assert not restore(model)


def test_output_leaves_the_source(model, tmp_path):
    before = model.read_bytes()
    edit(model, Edits(delete=["general.name"]), tmp_path / "out.gguf")
    assert model.read_bytes() == before
    assert "general.name" not in GGUF(tmp_path / "out.gguf").metadata
    with pytest.raises(GGUFError, match="is the input file"):
        edit(model, Edits(delete=["general.name"]), model)


def test_a_wrong_copy_is_not_accepted(model, monkeypatch):
    """What is read back differs from what was written: the original stays."""
    import zlib

    from gguftools.gguf import writer

    before = model.read_bytes()
    calls = iter(range(10**6))
    monkeypatch.setattr(writer.zlib, "crc32", lambda *a, crc=zlib.crc32: crc(*a) ^ (next(calls) == 70))
    with pytest.raises(GGUFError, match="reads differently"):
        edit(model, Edits(set={"general.name": "longer than before"}))
    assert model.read_bytes() == before
    assert [p.name for p in model.parent.iterdir()] == ["model.gguf"]


def test_permissions_are_kept(model):
    model.chmod(0o640)
    edit(model, Edits(set={"general.name": "longer than before"}))
    assert model.stat().st_mode & 0o777 == 0o640


def test_command(model, tmp_path, capsys):
    (tmp_path / "t.jinja").write_text("{{ messages }}<|end_of_text|>\n")
    np.save(tmp_path / "x.npy", np.ones((2, 32), np.float32))
    arguments = ["edit", str(model), "--set", "general.name=7", "--set", "my.number=7", "--set", "my.text:string=7"]
    arguments += ["--set", "my.list=[1, 2]", "--set", 'my.words:string=["a", "b"]', "--set", "my.flag=true"]
    arguments += ["--set-file", f"tokenizer.chat_template={tmp_path / 't.jinja'}", "--delete", "general.type"]
    arguments += [
        "--set",
        "tokenizer.ggml.tokens[9]=nine",
        "--special-token",
        "pad=nine",
        "--rename",
        "llama.vocab_size=n",
    ]
    arguments += ["--add-tensor", f"x:Q8_0={tmp_path / 'x.npy'}", "--drop-tensor", "blk.5.*"]
    assert cli.main([*arguments, "--dry-run"]) == 0
    assert "would be written as a copy" in capsys.readouterr().out
    assert cli.main([*arguments, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["changes"]) == 21
    with GGUF(model) as f:
        m = f.metadata
        assert (m["general.name"], m["my.number"], m["my.text"], m["my.list"]) == ("7", 7, "7", [1, 2])
        assert (m["my.words"], m["my.flag"], m["tokenizer.chat_template"]) == (
            ["a", "b"],
            True,
            "{{ messages }}<|end_of_text|>",
        )
        assert m["tokenizer.ggml.tokens"][9] == "nine"
        assert m["tokenizer.ggml.padding_token_id"] == 9
        assert "general.type" not in m
        assert f.tensors["x"].format.name == "Q8_0"
        assert not any(name.startswith("blk.5.") for name in f.tensors)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--set", "general.name"],
        ["--set", "=x"],
        ["--set", "llama.block_count=six"],
        ["--set-file", "general.name=absent.txt"],
        ["--add-tensor", "x=absent.npy"],
        ["--rename", "a"],
    ],
)
def test_command_refuses(arguments, model, capsys):
    before = model.read_bytes()
    assert cli.main(["edit", str(model), *arguments]) == 1
    assert capsys.readouterr().err.startswith("error: ")
    assert model.read_bytes() == before
