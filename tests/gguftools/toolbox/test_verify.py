"""Whether a file derives from a base: to the byte, nearly, or not."""

import json

import numpy as np
import pytest

import gguftools
from gguftools import cli
from gguftools.errors import GGUFError
from gguftools.gguf import GGUF
from gguftools.imatrix_file import read_imatrix, write_imatrix
from quant import QuantError
from quant.mixes import PlanOptions


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


def test_types_of_a_recipe(tiny, q4, tmp_path, capsys):
    """Named by the user: a preset, or a file."""
    found = gguftools.verify(q4, tiny["bf16"], recipe="Q4_K_M")
    assert (found.verdict, found.recipe) == ("identical", "Q4_K_M")
    found = gguftools.verify(q4, tiny["bf16"], recipe="q4_k_s")
    assert found.verdict == "different"
    odd = {t.name: (t.type, t.wanted) for t in found.tensors if t.verdict == "type"}
    assert odd["blk.5.attn_v.weight"] == ("Q6_K", "Q4_K")
    assert verdicts(found).keys() == odd.keys()
    (tmp_path / "r.toml").write_text('extends = "Q4_K_M"\n[[rule]]\nname = "ffn_up"\ntype = "Q5_K"')
    assert cli.main(["verify", str(q4), "--base", str(tiny["bf16"]), "--recipe", str(tmp_path / "r.toml")]) == 1
    text = capsys.readouterr().out
    assert "Q4_K, not Q5_K" in text
    assert "6 tensors have another type than the recipe" in text
    (tmp_path / "r.toml").write_text('extends = "Q4_K_M"\n[[rule]]\nname = "gone"\ntype = "Q5_K"\nrequired = true')
    assert cli.main(["verify", str(q4), "--base", str(tiny["bf16"]), "--recipe", str(tmp_path / "r.toml")]) == 1
    assert "matches no tensor" in capsys.readouterr().err


def test_recipe_in_the_file(tiny, tmp_path, data, capsys):
    """A file that tells how it was made is held against that."""
    imatrix = data / "tiny" / "imatrix.gguf"
    options = PlanOptions(tensor_types=(("attn_k", "IQ4_NL"),))
    record = gguftools.Settings(record=True)
    gguftools.quantize(tiny["bf16"], tmp_path / "q.gguf", "IQ3_XXS", imatrix, options, settings=record)
    found = gguftools.verify(tmp_path / "q.gguf", tiny["bf16"], imatrix)
    assert (found.verdict, found.recipe, found.keys) == ("identical", "IQ3_XXS", ())
    assert cli.main(["verify", str(tmp_path / "q.gguf"), "--base", str(tiny["bf16"]), "--imatrix", str(imatrix)]) == 0
    assert "types are those of the recipe IQ3_XXS" in capsys.readouterr().out
    content = (tmp_path / "q.gguf").read_bytes()
    assert content.count(b'type = "IQ4_NL"') == 1
    (tmp_path / "lies.gguf").write_bytes(content.replace(b'type = "IQ4_NL"', b'type = "IQ4_XS"'))
    found = gguftools.verify(tmp_path / "lies.gguf", tiny["bf16"], imatrix)
    assert {name.split(".")[2] for name in verdicts(found)} == {"attn_k"}
    (tmp_path / "odd.gguf").write_bytes(content.replace(b'type = "IQ4_NL"', b'type = "IQ9_NL"'))
    with pytest.raises(QuantError, match=r"odd\.gguf: gguftools\.recipe: rule 1: unknown type 'IQ9_NL'"):
        gguftools.verify(tmp_path / "odd.gguf", tiny["bf16"], imatrix)


def test_importance_that_another_weight_lends(tiny, tmp_path, data):
    """As when it was quantized: gate and up see the same input."""
    matrix = read_imatrix(data / "tiny" / "imatrix.gguf")
    del matrix.entries["blk.2.ffn_gate.weight"]
    write_imatrix(tmp_path / "i.gguf", matrix)
    gguftools.quantize(tiny["bf16"], tmp_path / "q.gguf", "IQ2_XS", tmp_path / "i.gguf")
    assert gguftools.verify(tmp_path / "q.gguf", tiny["bf16"], tmp_path / "i.gguf").verdict == "identical"


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
