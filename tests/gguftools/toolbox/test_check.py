"""Every kind of finding, on the small model with one thing wrong."""

import json
import struct

import numpy as np
import pytest
from typer.testing import CliRunner

import gguftools
from gguftools import cli
from gguftools.errors import GGUFError
from gguftools.gguf import GGUF
from gguftools.toolbox.check import check, sarif

#: name -> (keys, tensors, types of keys, code of the finding, what it must say)
CASES = {
    "no architecture": ({"general.architecture": None}, {}, {}, "architecture", "general.architecture"),
    "layers that are not there": ({"llama.block_count": 7}, {}, {}, "missing-tensor", "blk.6."),
    "a tensor too few": ({}, {"output_norm.weight": None}, {}, "missing-tensor", "output_norm.weight"),
    "a tensor too many": ({}, {"extra.weight": np.zeros(4)}, {}, "extra-tensor", "extra.weight"),
    "a shape": ({}, {"output_norm.weight": np.ones(255)}, {}, "shape", r"\[255\], the keys imply \[256\]"),
    "nan": ({}, {"output_norm.weight": np.full(256, np.nan)}, {}, "not-finite", "row 0, column 0"),
    "infinity": ({}, {"output_norm.weight": [*[1.0] * 255, np.inf]}, {}, "not-finite", "row 0, column 255"),
    "zeros": ({}, {"blk.0.attn_q.weight": np.zeros((256, 256))}, {}, "zeros", "zero throughout"),
    "empty tensor": ({}, {"extra.weight": np.zeros((0, 4))}, {}, "empty-tensor", "no weights"),
    "odd rotation": ({"llama.rope.dimension_count": 63}, {}, {}, "rope", "even number"),
    "rotation wider than the head": ({"llama.rope.dimension_count": 128}, {}, {}, "rope", "up to 64"),
    "rope base": ({"llama.rope.freq_base": -1.0}, {}, {}, "rope", "positive"),
    "unknown scaling": ({"llama.rope.scaling.type": "magic"}, {}, {}, "rope", "there are none, linear, yarn"),
    "scaling without a factor": ({"llama.rope.scaling.type": "linear"}, {}, {}, "rope", "factor' is None"),
    "a factor without scaling": ({"llama.rope.scaling.factor": 4.0}, {}, {}, "rope", "type' is missing"),
    "longrope without factors": ({"llama.rope.scaling.type": "longrope"}, {}, {}, "rope", "rope_factors_long"),
    "rope factors": ({}, {"rope_freqs.weight": np.ones(16)}, {}, "rope", "32 rotations"),
    "no stop token": ({"tokenizer.ggml.eos_token_id": None}, {}, {}, "stop-token", "no stop token"),
    "stop token of the template": (
        {"tokenizer.chat_template": "{{ m }}<|im_end|>"},
        {},
        {},
        "stop-token",
        "ends turns with '<|im_end|>'",
    ),
    "special id": ({"tokenizer.ggml.bos_token_id": 2048}, {}, {}, "special-token", "2,048"),
    "bos without id": ({"tokenizer.ggml.bos_token_id": None}, {}, {}, "special-token", "bos_token_id' is missing"),
    "token types": ({"tokenizer.ggml.token_type": [1] * 5}, {}, {}, "vocabulary", "5 entries for 2,048"),
    "token type 9": ({"tokenizer.ggml.token_type": [9] * 2048}, {}, {}, "token-type", "there are 1 to 6"),
    "tokens as bytes": (
        {"tokenizer.ggml.tokens": [1, 2]},
        {},
        {"tokenizer.ggml.tokens": "uint8"},
        "vocabulary",
        "no array",
    ),
    "rows": ({"llama.vocab_size": 2047}, {}, {}, "vocabulary", "2047, there are 2,048"),
    "fewer rows": ({}, {"token_embd.weight": np.ones((2000, 256))}, {}, "embedding-rows", "2,000 rows for 2,048"),
    "more rows": ({}, {"token_embd.weight": np.ones((2050, 256))}, {}, "embedding-rows", "padded"),
    "text that is not UTF-8": ({"general.name": "a\udcff"}, {}, {}, "text", "not UTF-8"),
    "a number that is none": ({"odd": float("nan")}, {}, {}, "number", "nan"),
    "template syntax": ({"tokenizer.chat_template": "{% for %}"}, {}, {}, "template", "line 1"),
    "template attack": (
        {"tokenizer.chat_template": "{{ ''.__class__.__mro__ }}"},
        {},
        {},
        "unsafe-template",
        "hidden attribute '__mro__'",
    ),
    "template attack by filter": (
        {"tokenizer.chat_template": "{{ x|attr('y') }}"},
        {},
        {},
        "unsafe-template",
        "filter 'attr'",
    ),
    "template attack by text": (
        {"tokenizer.chat_template": "{{ x['__globals__'] }}"},
        {},
        {},
        "unsafe-template",
        "__globals__",
    ),
    "template attack by name": ({"tokenizer.chat_template": "{{ lipsum }}"}, {}, {}, "unsafe-template", "'lipsum'"),
    "template includes": ({"tokenizer.chat_template": "{% include 'x' %}"}, {}, {}, "unsafe-template", "include"),
    "template of others": ({"tokenizer.chat_template.tool": "<|tool|>"}, {}, {}, "template-token", r"<\|tool\|>"),
    "template nested": (
        {"tokenizer.chat_template": "{{ " + "(" * 3000 + ")" * 3000 + " }}"},
        {},
        {},
        "template",
        "chat_template",
    ),
    "shard alone": (
        {"split.count": 3, "split.no": 0},
        {},
        {"split.count": "uint16", "split.no": "uint16"},
        "split",
        "named",
    ),
}
NOTES = ("extra-tensor",)


@pytest.mark.parametrize("case", CASES)
def test_findings(case, changed):
    import re

    keys, tensors, types, code, says = CASES[case]
    result = check(changed(keys, tensors, types))
    found = [fault for fault in result.faults if fault.code == code]
    assert any(re.search(says, fault.message) for fault in found), result.faults
    assert result.is_clean == (code in NOTES)
    for fault in found:
        assert fault.remedy
        assert "\n" not in fault.message


def test_clean(tiny, q4):
    for path in (tiny["f32"], tiny["bf16"], q4):
        assert check(path).faults == []


def test_places_are_bytes_of_the_file(changed):
    path = changed({}, {"output_norm.weight": [*[1.0] * 100, np.nan, *[1.0] * 155]})
    (fault,) = check(path).faults
    data = path.read_bytes()
    assert np.isnan(struct.unpack_from("<f", data, fault.offset)[0])
    path = changed({"llama.rope.freq_base": -1.0})
    (fault,) = [f for f in check(path).faults if f.code == "rope"]
    assert struct.unpack_from("<f", path.read_bytes(), fault.offset)[0] == -1


def test_bad_scale_of_a_block(q4, tmp_path):
    data = bytearray(q4.read_bytes())
    with GGUF(q4) as f:
        t = f.tensors["blk.1.ffn_up.weight"]
        at = f.data_offset + t.offset + 7 * t.format.type_size
    data[at : at + 2] = b"\x00\x7c"  # infinity
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    (fault,) = check(path).faults
    assert (fault.code, fault.offset, fault.where) == ("not-finite", at, "blk.1.ffn_up.weight")
    assert check(path, data=False).faults == []


def test_several_faults_of_the_container_are_all_listed(model):
    data = bytearray(model.read_bytes())
    at = data.index(b"blk.0.ffn_up.weight")
    data[at : at + 3] = b"\xff\xfe\xfd"  # a name that is not UTF-8
    at = data.index(b"blk.1.attn_norm.weight") + len(b"blk.1.attn_norm.weight")
    struct.pack_into("<IqI", data, at, 1, 256, 144)  # a type of a fork
    data[data.index(b"tokenizer.ggml.add_bos_token") + 28 + 4] = 7  # neither true nor false
    model.write_bytes(data + b"tail")
    result = check(model)
    assert {"name-encoding", "type", "bool", "trailing-bytes", "missing-tensor"} <= {f.code for f in result.faults}
    named = [f for f in result.faults if f.code == "type"]
    assert "IQ4_KS" in named[0].message
    with pytest.raises(GGUFError, match="bool of value 7"):
        GGUF(model)


def test_truncated_tensors_are_listed(model):
    data = model.read_bytes()
    model.write_bytes(data[:-3_000_000])
    faults = [f for f in check(model).faults if f.code == "truncated"]
    assert len(faults) > 5
    assert all(f.offset == len(data) - 3_000_000 for f in faults)


def test_gaps_are_reported_and_refused(model):
    """The reference refuses gaps, so the reader does; `check` says where they are."""
    data = bytearray(model.read_bytes())
    at = data.index(b"blk.2.attn_norm.weight") + len(b"blk.2.attn_norm.weight") + 4 + 8 + 4
    offset = struct.unpack_from("<Q", data, at)[0]
    struct.pack_into("<Q", data, at, offset + 32)
    model.write_bytes(data)
    assert "offset" in {f.code for f in check(model).faults}
    with pytest.raises(GGUFError, match="expected"):
        GGUF(model)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"GGUF" + struct.pack("<Iqq", 1, 0, 0), "version 1 is no longer read"),
        (b"GGUF" + struct.pack("<Iqq", 3, 0, 2**62), "more than the file can hold"),
        (b"GGU", "not a GGUF file"),
        (struct.pack("<Q", 50) + b"{}", "truncated"),
    ],
)
def test_unreadable(content, says, tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    result = check(path)
    assert not result.is_clean
    assert says in result.faults[0].message
    assert result.faults[0].offset is not None


def test_no_such_file(tmp_path):
    with pytest.raises(GGUFError, match="no such file"):
        check(tmp_path / "absent.gguf")


def test_safetensors(tiny_folder, tmp_path):
    source = tiny_folder / "model.safetensors"
    assert check(source).faults == []
    data = bytearray(source.read_bytes())
    data[-2:] = b"\x80\x7f"  # infinity in bfloat16
    (tmp_path / "bad.safetensors").write_bytes(data)
    (fault,) = check(tmp_path / "bad.safetensors").faults
    assert fault.code == "not-finite"


def test_command(model, changed, capsys):
    assert cli.main(["check", str(model)]) == 0
    assert capsys.readouterr().out.endswith("clean\n")
    bad = changed({"tokenizer.ggml.eos_token_id": None})
    assert cli.main(["check", str(model), str(bad)]) == 1
    out = capsys.readouterr().out
    assert "stop-token" in out
    assert "not clean (1 error)" in out
    assert cli.main(["check", str(bad), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["findings"][0]["code"] == "stop-token"
    assert cli.main(["check", str(bad), "--sarif"]) == 1
    run = json.loads(capsys.readouterr().out)["runs"][0]
    assert run["tool"]["driver"]["rules"] == [{"id": "stop-token"}]
    assert run["results"][0]["level"] == "error"


def test_sarif_places(changed):
    result = check(changed({"llama.rope.freq_base": -1.0}))
    place = sarif([result])["runs"][0]["results"][0]["locations"][0]
    assert place["physicalLocation"]["region"]["byteOffset"] == result.faults[0].offset
    assert place["logicalLocations"] == [{"fullyQualifiedName": "llama.rope.freq_base"}]


def test_help_has_an_example():
    for command in (
        "check",
        "edit",
        "diff",
        "hash",
        "verify",
        "split",
        "merge",
        "convert-endian",
        "dequantize",
        "inspect",
    ):
        shown = CliRunner().invoke(cli.app, [command, "--help"])
        assert shown.exit_code == 0
        assert f"Example: gguftools {command}" in " ".join(shown.stdout.replace("│", " ").split())


def test_self_test_of_the_tokenizer(tmp_path):
    """Probe texts that a converted file carries must give the ids that it carries with them."""
    path = tmp_path / "m.gguf"
    gguftools.convert(gguftools.demo_folder(), path, selftest=True)
    assert gguftools.check(path).faults == []
    gguftools.edit(path, gguftools.Edits(entries={("gguftools.tokenizer.selftest.ids", 3): 7}))
    found = gguftools.check(path).faults
    assert [f.code for f in found] == ["tokenizer"]
    assert "self-test: " in found[0].message
