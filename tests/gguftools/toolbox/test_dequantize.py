"""Quantized files as files of floats."""

import numpy as np
import pytest

import gguftools
from gguftools import cli
from gguftools.errors import GGUFError
from gguftools.gguf import GGUF, Writer
from quant.errors import QuantError
from quant.quantize import dequantize, quantize


@pytest.mark.parametrize(("kind", "file_type"), [("F32", 0), ("f16", 1), ("BF16", 32)])
def test_weights(kind, file_type, q4, tmp_path):
    done = gguftools.dequantize(q4, tmp_path / "x.gguf", kind)
    assert (done.type, done.changed, done.tensors) == (kind.upper(), 43, 56)
    with GGUF(q4) as a, GGUF(tmp_path / "x.gguf") as b:
        assert b.metadata["general.file_type"] == file_type
        assert list(a.tensors) == list(b.tensors)
        for name, t in a.tensors.items():
            wanted = t.format.name if len(t.shape) == 1 else kind.upper()
            assert b.tensors[name].format.name == wanted
            x = t.dequantize()
            if wanted != "F32":
                x = dequantize(quantize(x.reshape(-1, x.shape[-1]), wanted), wanted).reshape(x.shape)
            np.testing.assert_array_equal(b.tensors[name].dequantize(), x)
        kept = [key for key in a.metadata if key != "general.file_type"]
        assert all(a.fields[key].raw == b.fields[key].raw for key in kept)
    assert gguftools.check(tmp_path / "x.gguf").is_clean


def test_all_of_a_set(q4, tmp_path):
    shards = gguftools.split(q4, tmp_path / "s", 20).shards
    gguftools.dequantize(shards[1].path, tmp_path / "a.gguf")
    gguftools.dequantize(q4, tmp_path / "b.gguf")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_refusals(q4, tmp_path):
    with pytest.raises(GGUFError, match="no type of plain floats"):
        gguftools.dequantize(q4, tmp_path / "x.gguf", "Q8_0")
    with pytest.raises(QuantError, match="unknown type"):
        gguftools.dequantize(q4, tmp_path / "x.gguf", "F17")
    with Writer(tmp_path / "big.gguf") as w:
        w.declare("x", (2, 32), "BF16")
        w.write("x", np.full(64, 0x7F00, np.uint16))  # 1.7e38
    with pytest.raises(QuantError, match="overflow F16; use BF16 or F32"):
        gguftools.dequantize(tmp_path / "big.gguf", tmp_path / "x.gguf")
    assert not (tmp_path / "x.gguf").exists()


def test_command(q4, tmp_path, capsys):
    assert cli.main(["dequantize", str(q4), str(tmp_path / "x.gguf"), "--type", "BF16"]) == 0
    assert "43 of 56 tensors became BF16" in capsys.readouterr().out
    assert cli.main(["dequantize", str(q4), str(q4)]) == 1
    assert "is the input file" in capsys.readouterr().err
