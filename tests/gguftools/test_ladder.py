"""Several outputs from one pass over the weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

import gguftools
from gguftools import Settings
from gguftools.cli import main
from gguftools.errors import GGUFError
from gguftools.quantizing import source
from quant import QuantError
from tests.conftest import DATA
from tests.gguftools import small

IMATRIX = DATA / "tiny" / "imatrix.gguf"
RUNGS = ["Q8_0", "Q6_K", "Q4_K_M", "IQ3_M", "IQ2_XS", "F16", "COPY"]


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("imatrix", [None, IMATRIX], ids=["without", "with"])
def test_rungs_equal_single_runs(tiny, tmp_path, imatrix):
    rungs = RUNGS if imatrix else [name for name in RUNGS if name != "IQ2_XS"]
    folder = tmp_path / "ladder"
    folder.mkdir()
    results = gguftools.ladder(tiny["bf16"], rungs, folder, imatrix)
    assert [result.preset for result in results] == rungs
    assert names(folder) == sorted(f"tiny-bf16-{name}.gguf" for name in rungs)
    for rung, result in zip(rungs, results):
        gguftools.quantize(tiny["bf16"], tmp_path / "single.gguf", rung, imatrix)
        assert result.output.read_bytes() == (tmp_path / "single.gguf").read_bytes(), rung
        assert result.output.stat().st_size == result.file_bytes


def test_command_and_options(tiny_folder, tmp_path):
    """From a folder, with options that hold for every rung."""
    options = ["--tensor-type", "ffn_up=Q5_1", "--output-tensor-type", "Q8_0"]
    assert main(["quantize", str(tiny_folder), "--ladder", "q4_0, IQ4_XS", "-o", str(tmp_path), *options]) == 0
    made = [path for path in tmp_path.iterdir() if path.suffix == ".gguf"]
    assert len(made) == 2
    for path in made:
        assert small.types(path)["blk.3.ffn_up.weight"] == "Q5_1"
        assert small.types(path)["token_embd.weight"] == "Q8_0"


def test_each_tensor_is_read_once(tiny, tmp_path, monkeypatch):
    """Apart from the look at all weights before: every row is dequantized once for all rungs."""
    read: Counter[str] = Counter()
    original = source.SourceTensor.read

    def counted(self, lo, hi):
        read[self.name] += hi - lo
        return original(self, lo, hi)

    monkeypatch.setattr(source.SourceTensor, "read", counted)
    gguftools.ladder(tiny["bf16"], ["Q8_0", "Q6_K", "Q4_0"], tmp_path)
    with gguftools.open(tiny["bf16"]) as f:
        rows = {t.name: t.size // t.shape[-1] for t in f.tensors.values() if len(t.shape) > 1}
    assert dict(read) == rows


def test_all_or_nothing_is_planned_first(tiny, tmp_path):
    with pytest.raises(QuantError, match="needs an importance matrix"):
        gguftools.ladder(tiny["bf16"], ["Q8_0", "IQ2_XS"], tmp_path)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("rungs", "message"),
    [
        ([], "a ladder needs presets"),
        (["Q4_K", "q4_k_m"], "names Q4_K_M twice"),
        (["Q8_0", "Q9"], "unknown preset 'Q9'"),
    ],
)
def test_ladders_that_cannot_be(tiny, tmp_path, capsys, rungs, message):
    assert main(["quantize", str(tiny["bf16"]), "--ladder", ",".join(rungs), "-o", str(tmp_path)]) == 1
    assert message in capsys.readouterr().err


def test_folder_is_missing(tiny, tmp_path):
    with pytest.raises(GGUFError, match="no such folder; make it first"):
        gguftools.ladder(tiny["bf16"], ["Q8_0"], tmp_path / "gone")


def test_room_for_all_rungs(tiny, tmp_path, monkeypatch):
    import shutil

    planned = gguftools.ladder(tiny["bf16"], ["Q8_0", "Q4_0"], tmp_path, dry_run=True)
    needed = sum(result.file_bytes for result in planned)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("gguftools.files.shutil.disk_usage", lambda path: usage._replace(free=needed - 1))
    with pytest.raises(GGUFError, match=f"needs {needed:,} bytes"):
        gguftools.ladder(tiny["bf16"], ["Q8_0", "Q4_0"], tmp_path)
    assert names(tmp_path) == []


def test_ladder_of_shards_keeps_them(tiny, tmp_path):
    gguftools.split(tiny["bf16"], tmp_path / "s", 20)
    first = tmp_path / "s-00001-of-00003.gguf"
    folder = tmp_path / "out"
    folder.mkdir()
    results = gguftools.ladder(first, ["Q8_0", "Q4_0"], folder, settings=replace(Settings(), keep_split=True))
    assert len(names(folder)) == 6
    for result in results:
        gguftools.merge(result.outputs[:1], tmp_path / f"{result.preset}.gguf")
        gguftools.quantize(tiny["bf16"], tmp_path / f"{result.preset}-1.gguf", result.preset)
        assert small.data(tmp_path / f"{result.preset}.gguf") == small.data(tmp_path / f"{result.preset}-1.gguf")
