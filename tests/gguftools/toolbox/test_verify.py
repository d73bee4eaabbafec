"""Whether a file derives from a base: to the byte, nearly, or not."""

import json

import numpy as np
import pytest

import gguftools
from gguftools import cli
from gguftools.errors import GGUFError
from gguftools.gguf import GGUF


def verdicts(found):
    return {t.name: t.verdict for t in found.tensors if t.verdict != "identical"}


@pytest.mark.parametrize("preset", ["Q4_K_M", "Q5_0", "Q2_K", "IQ4_XS", "COPY"])
def test_derived(preset, tiny, tmp_path):
    gguftools.quantize(tiny["bf16"], tmp_path / "q.gguf", preset)
    found = gguftools.verify(tmp_path / "q.gguf", tiny["bf16"])
    assert (found.verdict, found.keys, found.lost) == ("identical", (), ())
    assert len(found.tensors) == 56


def test_with_importance(tiny, tmp_path, data):
    imatrix = data / "tiny" / "imatrix.gguf"
    gguftools.quantize(tiny["bf16"], tmp_path / "q.gguf", "IQ2_XXS", imatrix)
    assert gguftools.verify(tmp_path / "q.gguf", tiny["bf16"], imatrix).verdict == "identical"
    with pytest.raises(GGUFError, match="give the one that was used"):
        gguftools.verify(tmp_path / "q.gguf", tiny["bf16"])
    gguftools.quantize(tiny["bf16"], tmp_path / "k.gguf", "Q4_K_M", imatrix)
    found = gguftools.verify(tmp_path / "k.gguf", tiny["bf16"])
    assert found.verdict == "close"
    worst = max(found.tensors, key=lambda t: t.ratio)
    assert 1 < worst.ratio <= 3
    assert worst.block is not None
    assert 0 < worst.differing <= worst.blocks


def test_tampered(q4, tiny, tmp_path):
    data = bytearray(q4.read_bytes())
    with GGUF(q4) as f:
        t = f.tensors["blk.3.ffn_down.weight"]
        at = f.data_offset + t.offset + 5 * t.format.type_size
        data[at + 8 : at + 100] = bytes(b ^ 0xFF for b in data[at + 8 : at + 100])
        norm = f.tensors["output_norm.weight"]
        place = f.data_offset + norm.offset
    data[place : place + 4] = np.float32(9).tobytes()
    (tmp_path / "bad.gguf").write_bytes(data)
    found = gguftools.verify(tmp_path / "bad.gguf", tiny["bf16"])
    assert found.verdict == "different"
    assert verdicts(found) == {"blk.3.ffn_down.weight": "far", "output_norm.weight": "far"}
    (block,) = [t for t in found.tensors if t.name == "blk.3.ffn_down.weight"]
    assert (block.differing, block.block) == (1, 5)
    assert block.distance > 3 * block.ours


def test_other_models(q4, tiny, changed, tmp_path):
    other = changed({"general.name": "Other"}, {"output_norm.weight": None, "new.weight": np.ones(4)})
    found = gguftools.verify(q4, other)
    assert found.verdict == "different"
    assert verdicts(found) == {"output_norm.weight": "missing"}
    assert found.lost == ("new.weight",)
    assert found.keys == ("general.name",)
    shaped = changed({}, {"output_norm.weight": np.ones(255)}, name="shaped.gguf")
    assert verdicts(gguftools.verify(q4, shaped)) == {"output_norm.weight": "shape"}


def test_any_store(q4, tiny, tmp_path):
    shards = gguftools.split(q4, tmp_path / "s", 20).shards
    gguftools.convert_endian(tiny["bf16"], tmp_path / "be.gguf", "big")
    assert gguftools.verify(shards[1].path, tmp_path / "be.gguf").verdict == "identical"


def test_command(q4, tiny, capsys):
    assert cli.main(["verify", str(q4), "--base", str(tiny["bf16"])]) == 0
    assert capsys.readouterr().out.strip().endswith("to the byte")
    assert cli.main(["verify", str(q4), "--base", str(tiny["f32"]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "identical"
    assert cli.main(["verify", str(tiny["bf16"]), "--base", str(q4)]) == 1
    assert "does not derive" in capsys.readouterr().out
