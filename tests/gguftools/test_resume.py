"""Work that is not lost: runs that are killed at any moment go on where they were, unchanged tensors are taken over
from an older output where a record proves that they are the same."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import gguftools
from gguftools import Settings
from gguftools.cli import main
from gguftools.errors import GGUFError
from gguftools.gguf import GGUF
from gguftools.quantizing import pipeline
from gguftools.quantizing.partial import Partial
from gguftools.quantizing.record import sidecar_path
from quant.mixes import PlanOptions
from tests.conftest import DATA, ROOT
from tests.gguftools import small

IMATRIX = DATA / "tiny" / "imatrix.gguf"
posix = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def quantized(monkeypatch) -> Counter[str]:
    """Pieces that are quantized anew, by tensor."""
    found: Counter[str] = Counter()
    original = pipeline._blocks

    def counted(piece, place, rows, memory):
        found[piece.job.source.name] += 1
        return original(piece, place, rows, memory)

    monkeypatch.setattr(pipeline, "_blocks", counted)
    return found


class Stop(KeyboardInterrupt):
    pass


def stop_after(monkeypatch, n: int) -> None:
    """Writing is interrupted after n pieces."""
    left = [n]
    original = Partial.write

    def write(self, *arguments):
        if not left[0]:
            raise Stop
        left[0] -= 1
        original(self, *arguments)

    monkeypatch.setattr(Partial, "write", write)


# --- killed -----------------------------------------------------------------------------------------------------------

#: A process that has compiled everything and starts children, of which each quantizes and is killed after a while. It
#: prints what lay there then, and how many bytes of it the next run took over.
_KILLER = """
import json, os, random, signal, sys, time
from pathlib import Path
import gguftools
source, imatrix, folder, number = sys.argv[1:]
presets, folder, random = ["Q4_K_M", "Q3_K_M"], Path(folder), random.Random(17)

def run(where):
    return gguftools.ladder(source, presets, where, imatrix, threads=2)

def child(where, found=None):
    pid = os.fork()
    if pid:
        return pid
    results = run(where)
    if found:
        found.write_text(json.dumps([r.resumed for r in results]))
    os._exit(0)

(folder / "whole").mkdir()
run(folder / "whole")  # children have everything compiled
begin = time.monotonic()
os.waitpid(child(folder / "whole"), 0)
taken = time.monotonic() - begin
expected = {p.name: p.read_bytes() for p in (folder / "whole").iterdir()}
for i in range(int(number)):
    where = folder / str(i)
    where.mkdir()
    for _ in range(1 + i % 3):  # some are killed several times
        pid = child(where)
        time.sleep(taken * random.random())
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        there = {p.name: p.read_bytes() for p in where.iterdir() if not p.name.startswith(".")}
        assert all(expected[name] == data for name, data in there.items()), "a file under its name is whole"
    begun = sorted(p.name for p in where.iterdir())
    os.waitpid(child(where, folder / "found"), 0)
    resumed = json.loads((folder / "found").read_text())
    assert {p.name: p.read_bytes() for p in where.iterdir()} == expected, (i, begun)
    print(json.dumps([begun, resumed]))
"""


@posix
@pytest.mark.slow
def test_killed_at_20_random_moments(tiny, tmp_path):
    """Two outputs at once, killed by a signal that nothing can catch: the next run gives the same bytes."""
    command = [sys.executable, "-c", _KILLER, str(tiny["bf16"]), str(IMATRIX), str(tmp_path), "20"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rounds = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rounds) == 20
    assert sum(any(name.endswith(".partial") for name in begun) for begun, _ in rounds) >= 5, "most were in the middle"
    assert sum(sum(resumed) > 0 for _, resumed in rounds) >= 5, "and their work was taken over"


@pytest.mark.parametrize("pieces", [1, 7, 40])
def test_only_the_rest_is_done(tiny, tmp_path, monkeypatch, quantized, pieces):
    out = tmp_path / "q.gguf"
    gguftools.quantize(tiny["bf16"], tmp_path / "whole.gguf", "Q4_K_M")
    total = quantized.total()
    with monkeypatch.context() as patch:
        stop_after(patch, pieces)
        with pytest.raises(Stop):
            gguftools.quantize(tiny["bf16"], out, "Q4_K_M", threads=1)
    assert names(tmp_path) == [".q.gguf.journal", ".q.gguf.partial", "whole.gguf"]
    journal = (tmp_path / ".q.gguf.journal").read_bytes().splitlines()
    assert len(journal) == 1 + pieces
    quantized.clear()
    result = gguftools.quantize(tiny["bf16"], out, "Q4_K_M")
    assert out.read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    assert names(tmp_path) == ["q.gguf", "whole.gguf"]
    assert result.resumed == sum(json.loads(line)[1] for line in journal[1:])
    assert total - pieces <= quantized.total() <= total - (pieces > 1), "some of the pieces were copies"


@pytest.mark.parametrize(
    "change",
    ["preset", "options", "imatrix", "source", "damaged data", "damaged journal", "cut journal", "shorter", "nothing"],
)
def test_what_was_begun_is_believed_only_if_it_is_the_same(tiny, tmp_path, monkeypatch, change):
    """Another request, another source, or bytes that are not those that were noted: nothing wrong is taken over."""
    source, out = tmp_path / "m.gguf", tmp_path / "q.gguf"
    shutil.copy(tiny["bf16"], source)
    with monkeypatch.context() as patch:
        stop_after(patch, 30)
        with pytest.raises(Stop):
            gguftools.quantize(source, out, "Q4_0", threads=1)
    partial, journal = tmp_path / ".q.gguf.partial", tmp_path / ".q.gguf.journal"
    preset, options, imatrix = "Q4_0", PlanOptions(), None
    content = bytearray(partial.read_bytes())
    lines = journal.read_bytes().splitlines(keepends=True)
    if change == "preset":
        preset = "IQ4_NL"  # of the same size
    elif change == "options":
        options = PlanOptions(pure=True)
    elif change == "imatrix":
        imatrix = IMATRIX
    elif change == "source":
        with GGUF(source) as f:
            at = f.data_offset
        with source.open("r+b") as file:
            file.seek(at)
            file.write(np.uint16([0x3F80] * 64).tobytes())
    elif change == "damaged data":
        offset, length, *_ = json.loads(lines[9])
        content[offset + length // 2] ^= 1
        partial.write_bytes(content)
    elif change == "damaged journal":
        lines[5:7] = [b"\x00garbage\n", b"[1]\n"]
        journal.write_bytes(b"".join(lines))
    elif change == "cut journal":
        journal.write_bytes(b"".join(lines)[:-7])
    elif change == "shorter":
        partial.write_bytes(content[:-1])
    result = gguftools.quantize(source, out, preset, imatrix, options)
    gguftools.quantize(source, tmp_path / "whole.gguf", preset, imatrix, options)
    assert out.read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    noted = sum(json.loads(line)[1] for line in lines[1:] if line.startswith(b"[") and len(line) > 8)
    if change == "nothing":
        assert result.resumed == noted
    elif change in ("damaged data", "damaged journal", "cut journal"):
        assert 0 < result.resumed < sum(len(x) for x in small.data(out).values())
    else:
        assert result.resumed == 0
    assert names(tmp_path) == ["m.gguf", "q.gguf", "whole.gguf"]


def test_measured_errors_survive(tiny, tmp_path, monkeypatch):
    """What quantizing again adds is noted with each piece."""
    gguftools.quantize(tiny["bf16"], tmp_path / "q8.gguf", "Q8_0")
    whole = gguftools.quantize(tmp_path / "q8.gguf", tmp_path / "a.gguf", "Q2_K", allow_requantize=True)
    with monkeypatch.context() as patch:
        stop_after(patch, 20)
        with pytest.raises(Stop):
            gguftools.quantize(tmp_path / "q8.gguf", tmp_path / "b.gguf", "Q2_K", allow_requantize=True)
    again = gguftools.quantize(tmp_path / "q8.gguf", tmp_path / "b.gguf", "Q2_K", allow_requantize=True)
    assert again.resumed
    assert again.errors == pytest.approx(whole.errors)


def test_two_processes_and_one_output(tiny, tmp_path):
    with Partial(tmp_path / "q.gguf", [], 100, "x"):
        with pytest.raises(GGUFError, match="another process is writing it"):
            gguftools.quantize(tiny["bf16"], tmp_path / "q.gguf", "Q4_0")
        assert names(tmp_path) == [".q.gguf.journal", ".q.gguf.partial"]


@posix
def test_full_disk_keeps_what_is_done(tiny, tmp_path, monkeypatch):
    write = Partial.write
    left = [25]

    def full(self, *arguments):
        left[0] -= 1
        if left[0] == 0:
            raise OSError(28, "No space left on device")
        write(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Partial, "write", full)
        with pytest.raises(GGUFError, match="No space left on device; make room"):
            gguftools.quantize(tiny["bf16"], tmp_path / "q.gguf", "Q4_0")
    assert names(tmp_path) == [".q.gguf.journal", ".q.gguf.partial"]
    result = gguftools.quantize(tiny["bf16"], tmp_path / "q.gguf", "Q4_0")
    assert result.resumed > 0


def test_damaged_input_leaves_nothing(tmp_path):
    """An error that the same command would meet again: an overflow that only quantizing can see."""
    weights = small.weights(small.shapes(2))
    weights["blk.1.ffn_up.weight"][:] = 3e38
    source = small.write(tmp_path / "m.gguf", weights, small.keys(2), "F32")
    with pytest.raises(ValueError, match=r"blk\.1\.ffn_up\.weight: row 0, column 0: values up to 3e\+38 overflow F16"):
        gguftools.quantize(source, tmp_path / "q.gguf", "F16")
    assert names(tmp_path) == ["m.gguf"]


# --- taken over -------------------------------------------------------------------------------------------------------


def make(source: Path, out: Path, how: str = "record", options: PlanOptions | None = None, imatrix=IMATRIX, **more):
    settings = Settings(record=how == "record", sidecar=how == "sidecar", **more)
    return gguftools.quantize(source, out, "Q4_K_M", imatrix, options, settings=settings)


@pytest.mark.parametrize("how", ["record", "sidecar"])
def test_records_prove_what_was_made_of_what(tiny, tmp_path, how):
    out = tmp_path / "q.gguf"
    make(tiny["bf16"], out, how)
    data, sources = small.data(out), small.data(tiny["bf16"])
    with GGUF(out) as f:
        if how == "record":
            columns = [f.metadata[f"gguftools.record.{name}"] for name in ("source", "importance", "result")]
            rows = dict(zip(f.tensors, zip(*columns)))
        else:
            told = json.loads(sidecar_path(out).read_text(encoding="utf-8"))
            assert told["version"] == gguftools.__version__
            assert told["recipe"].startswith('name = "Q4_K_M"')
            rows = {name: tuple(row.values()) for name, row in told["tensors"].items()}
            golden = json.loads((DATA / "tiny" / "presets.json").read_text(encoding="utf-8"))["Q4_K_M"]
            assert hashlib.sha256(out.read_bytes()).hexdigest() == golden["with_imatrix"]["sha256"], "OUT stays plain"
    assert rows.keys() == data.keys()
    for name, (source, importance, result) in rows.items():
        assert result == hashlib.sha256(data[name]).hexdigest()
        assert len(source) == len(importance) == 64
        assert (importance == "0" * 64) == (name == "token_embd.weight" or "norm" in name)
    assert len({row[0] for row in rows.values()}) == len(sources)


@pytest.mark.parametrize("how", ["record", "sidecar"])
def test_unchanged_tensors_are_taken_over(tiny, tmp_path, quantized, how):
    old, out = tmp_path / "old.gguf", tmp_path / "new.gguf"
    make(tiny["bf16"], old, how)
    quantized.clear()
    options = PlanOptions(tensor_types=((r"blk\.[01]\.attn_q", "Q5_K"),))
    result = make(tiny["bf16"], out, "", options, reuse=old)
    assert set(quantized) == {"blk.0.attn_q.weight", "blk.1.attn_q.weight"}
    assert len(result.reused) == 41
    make(tiny["bf16"], tmp_path / "whole.gguf", "", options)
    assert out.read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_only_what_changed_is_made_anew(tiny, tmp_path, quantized):
    """Other importance for some tensors, another source for one."""
    from gguftools.imatrix_file import read_imatrix, write_imatrix

    make(tiny["bf16"], tmp_path / "old.gguf")
    matrix = read_imatrix(IMATRIX)
    matrix.entries["blk.2.attn_q.weight"].squares[:, 3] *= 2
    write_imatrix(tmp_path / "i.gguf", matrix)
    source = tmp_path / "m.gguf"
    shutil.copy(tiny["bf16"], source)
    with GGUF(source) as f:
        at = f.data_offset + f.tensors["blk.4.ffn_up.weight"].offset
    with source.open("r+b") as file:
        file.seek(at)
        file.write(np.uint16([0x3F80]).tobytes())
    quantized.clear()
    make(source, tmp_path / "new.gguf", "", imatrix=tmp_path / "i.gguf", reuse=tmp_path / "old.gguf")
    assert set(quantized) == {"blk.2.attn_q.weight", "blk.4.ffn_up.weight"}
    make(source, tmp_path / "whole.gguf", "", imatrix=tmp_path / "i.gguf")
    assert (tmp_path / "new.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_reuse_from_a_folder_and_for_a_ladder(tiny_folder, tiny, tmp_path):
    """The same weights, whatever file they come from: bf16 safetensors and the GGUF of them."""
    old = tmp_path / "old.gguf"
    make(tiny["bf16"], old)
    settings = Settings(reuse=old)
    folder = tmp_path / "ladder"
    folder.mkdir()
    results = gguftools.ladder(tiny_folder, ["Q4_K_S", "Q4_K_M"], folder, IMATRIX, settings=settings)
    assert [len(result.reused) > 20 for result in results] == [True, True]
    gguftools.quantize(tiny["bf16"], tmp_path / "s.gguf", "Q4_K_S", IMATRIX)
    assert results[0].output.read_bytes() == (tmp_path / "s.gguf").read_bytes()


def test_reuse_that_is_not_proven(tiny, tmp_path, capsys):
    plain, old, other = (tmp_path / f"{name}.gguf" for name in ("plain", "old", "other"))
    make(tiny["bf16"], plain, "")
    make(tiny["bf16"], old)
    small.model(other, kind="BF16")

    def fails(*arguments):
        assert main(["quantize", *map(str, arguments)]) == 1
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
        assert not (tmp_path / "q.gguf").exists()
        return line

    line = fails(tiny["bf16"], tmp_path / "q.gguf", "Q4_K_M", "--reuse", plain)
    assert "has no record of its sources, so nothing proves" in line
    assert "none of its tensors was made from this source" in fails(
        other, tmp_path / "q.gguf", "Q4_K_M", "--reuse", old
    )
    assert "is the input file" in fails(tiny["bf16"], old, "Q4_K_M", "--reuse", old)
    content = old.read_bytes().replace(gguftools.__version__.encode(), b"9" * len(gguftools.__version__), 1)
    (tmp_path / "newer.gguf").write_bytes(content)
    assert "was made by version 9" in fails(
        tiny["bf16"], tmp_path / "q.gguf", "Q4_K_M", "--reuse", tmp_path / "newer.gguf"
    )
    content = bytearray(old.read_bytes())
    content[-1000] ^= 1
    (tmp_path / "damaged.gguf").write_bytes(content)
    line = fails(
        tiny["bf16"], tmp_path / "q.gguf", "Q4_K_M", "--imatrix", IMATRIX, "--reuse", tmp_path / "damaged.gguf"
    )
    assert "is not what its record says: damaged" in line


@pytest.mark.parametrize("content", ["{}", "[]", "{", '{"schema": "gguftools.record/1", "tensors": {"a": 1}}'])
def test_sidecars_that_are_none(tiny, tmp_path, content):
    make(tiny["bf16"], tmp_path / "old.gguf", "")
    sidecar_path(tmp_path / "old.gguf").write_text(content)
    with pytest.raises(GGUFError, match=r"old\.gguf\.record\.json") as raised:
        make(tiny["bf16"], tmp_path / "q.gguf", "", reuse=tmp_path / "old.gguf")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "q.gguf").exists()


def test_values_that_became_zero_are_another_source(tmp_path):
    """A repaired source has a digest of its own: nothing of it passes for the unrepaired one, or the reverse."""
    weights = small.weights(small.shapes(1))
    clean = {name: x.copy() for name, x in weights.items()}
    weights["blk.0.ffn_up.weight"][3, 7] = np.nan
    clean["blk.0.ffn_up.weight"][3, 7] = 0
    broken = small.write(tmp_path / "broken.gguf", weights, small.keys(1))
    whole = small.write(tmp_path / "whole.gguf", clean, small.keys(1))
    settings = Settings(record=True, on_nonfinite="zero")
    gguftools.quantize(broken, tmp_path / "a.gguf", "Q4_0", settings=settings)
    result = gguftools.quantize(whole, tmp_path / "b.gguf", "Q4_0", settings=Settings(reuse=tmp_path / "a.gguf"))
    assert "blk.0.ffn_up.weight" not in result.reused
    assert "blk.0.ffn_gate.weight" in result.reused
    again = gguftools.quantize(
        broken, tmp_path / "c.gguf", "Q4_0", settings=Settings(on_nonfinite="zero", reuse=tmp_path / "a.gguf")
    )
    assert "blk.0.ffn_up.weight" in again.reused
    assert small.data(tmp_path / "b.gguf") == small.data(tmp_path / "c.gguf")
