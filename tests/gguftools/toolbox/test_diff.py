"""Two models side by side, in any store."""

import json
import shutil

import numpy as np
import pytest

import gguftools
from gguftools import cli
from gguftools.errors import GGUFError


def test_same(tiny, tmp_path):
    assert gguftools.diff(tiny["bf16"], tiny["bf16"]).is_same
    shards = gguftools.split(tiny["bf16"], tmp_path / "s", 20).shards
    gguftools.convert_endian(tiny["bf16"], tmp_path / "be.gguf", "big")
    assert gguftools.diff(shards[2].path, tmp_path / "be.gguf").is_same


def test_between_quants(tiny, q4):
    found = gguftools.diff(tiny["bf16"], q4)
    assert [k.key for k in found.keys] == ["general.file_type"]
    assert (found.keys[0].a, found.keys[0].b) == (32, 15)
    t = next(t for t in found.tensors if t.name == "blk.0.ffn_up.weight")
    with gguftools.open(tiny["bf16"]) as f, gguftools.open(q4) as g:
        x = f.tensors[t.name].dequantize().astype(np.float64)
        y = g.tensors[t.name].dequantize().astype(np.float64)
    assert t.rmse == pytest.approx(np.sqrt(np.mean((x - y) ** 2)))
    assert t.relative == pytest.approx(t.rmse / np.sqrt(np.mean(x**2)))
    assert t.cosine == pytest.approx((x * y).sum() / np.sqrt((x**2).sum() * (y**2).sum()))
    assert t.largest == pytest.approx(np.abs(x - y).max())
    assert (t.a, t.b, t.identical) == ("BF16", "Q4_K", False)


def test_safetensors_through_the_name_map(tiny, tiny_folder, tmp_path):
    found = gguftools.diff(tiny["f32"], tiny_folder)
    assert len(found.tensors) == 56
    assert all(t.identical and t.largest == 0 for t in found.tensors), "queries and keys are permuted back"
    assert all(t.identical for t in gguftools.diff(tiny_folder / "model.safetensors", tiny["f32"]).tensors)
    both = gguftools.diff(tiny_folder / "model.safetensors", tiny_folder / "model.safetensors")
    assert {t.name for t in both.tensors} >= {"model.norm.weight", "model.embed_tokens.weight"}
    assert both.is_same
    shutil.copy(tiny_folder / "model.safetensors", tmp_path / "alone.safetensors")
    with pytest.raises(GGUFError, match="name the model's folder"):
        gguftools.diff(tmp_path / "alone.safetensors", tiny["f32"])


def test_what_is_missing_or_shaped_otherwise(tiny, changed):
    other = changed({"new": 1, "general.name": None}, {"output_norm.weight": np.ones(3), "more": np.ones(2)})
    found = gguftools.diff(tiny["bf16"], other)
    assert {k.key: (k.a, k.b) for k in found.keys} == {"general.name": ("Tiny", None), "new": (None, 1)}
    notes = {t.name: t.note for t in found.tensors if t.note}
    assert notes == {"output_norm.weight": "shapes differ", "more": "not in a"}
    assert {t.name: t.note for t in gguftools.diff(other, tiny["bf16"]).tensors if t.note}["more"] == "not in b"


def test_values_that_are_not_finite(tiny, changed):
    other = changed({}, {"output_norm.weight": np.full(256, np.nan)})
    (t,) = [t for t in gguftools.diff(tiny["bf16"], other).tensors if not t.identical]
    assert (t.rmse, t.note) == (None, "holds values that are not finite")


def test_header_only(tiny, q4):
    found = gguftools.diff(tiny["bf16"], q4, data=False)
    assert sum(t.rmse is None for t in found.tensors) == 43


def test_command(tiny, q4, capsys):
    assert cli.main(["diff", str(tiny["bf16"]), str(tiny["bf16"])]) == 0
    assert "0 keys differ; 56 of 56 tensors are identical" in capsys.readouterr().out
    assert cli.main(["diff", str(tiny["bf16"]), str(q4)]) == 1
    assert "38 BF16 -> Q4_K" in capsys.readouterr().out
    assert cli.main(["diff", str(tiny["bf16"]), str(q4), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["same"], len(found["tensors"])) == (False, 56)
    assert cli.main(["diff", str(tiny["bf16"]), "absent.gguf"]) == 1
    assert "no such file" in capsys.readouterr().err
