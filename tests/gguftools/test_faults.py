"""Disks that are full, folders that are read-only, processes that are killed, files that shrink: inputs stay intact,
and no damaged file stands under a final name."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import gguftools
from gguftools import files
from gguftools.errors import GGUFError
from gguftools.gguf import GGUF

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and limits of POSIX")

#: writing commands: arguments, with {m} the model, {f} its folder, {t} a text, {q} a quantized one, {s} a shard,
#: {o} the output
COMMANDS = {
    "convert": ("convert", "{f}", "-o", "{o}"),
    "imatrix": ("imatrix", "{m}", "-f", "{t}", "-o", "{o}", "-c", "64", "--chunks", "2"),
    "quantize": ("quantize", "{m}", "{o}", "Q8_0"),
    "edit": ("edit", "{m}", "--set", "general.name=longer than it was before", "-o", "{o}"),
    "edit the file itself": ("edit", "{m}", "--set", "general.name=longer than it was before"),
    "split": ("split", "{m}", "{o}", "--split-max-tensors", "9"),
    "merge": ("merge", "{s}", "{o}"),
    "convert-endian": ("convert-endian", "{m}", "{o}", "big"),
    "dequantize": ("dequantize", "{q}", "{o}", "--type", "F32"),
}


@pytest.fixture
def place(tiny, tmp_path_factory):
    """A folder with a model, a quantized one and a set of shards, and a command's arguments there."""
    folder = tmp_path_factory.mktemp("faults")
    (folder / "model.gguf").write_bytes(tiny["bf16"].read_bytes())
    gguftools.quantize(tiny["bf16"], folder / "q.gguf", "Q8_0")
    gguftools.split(tiny["bf16"], folder / "set", 30)
    return folder


def arguments(name: str, folder: Path, output: Path | None = None) -> list[str]:
    places = {
        "f": gguftools.demo_folder(),
        "t": gguftools.demo_text("calibration"),
        "m": folder / "model.gguf",
        "q": folder / "q.gguf",
        "s": folder / "set-00001-of-00002.gguf",
        "o": output or folder / "out.gguf",
    }
    return [sys.executable, "-m", "gguftools", *(a.format(**places) for a in COMMANDS[name])]


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file() and not p.name.startswith(".")}


def check_all_whole(folder: Path, before: dict[str, bytes], name: str) -> None:
    """Files that were there are as they were (or, if the command was to change it, wholly new); new ones are sound."""
    for file, data in contents(folder).items():
        if before.get(file) == data:
            continue
        assert file not in before or (name == "edit the file itself" and file == "model.gguf"), file
        assert gguftools.check(folder / file, data=False).readable
        with GGUF(folder / file) as f:
            assert f.data_end == f.size


@pytest.mark.parametrize("name", COMMANDS)
def test_killed_at_any_moment(name, place):
    before = contents(place)
    begin = time.monotonic()
    subprocess.run(arguments(name, place), check=True, capture_output=True)
    taken = time.monotonic() - begin
    check_all_whole(place, before, name)
    dice = random.Random(name)
    for _ in range(6):
        for file in set(contents(place)) - set(before):
            (place / file).unlink()
        (place / "model.gguf").write_bytes(before["model.gguf"])
        process = subprocess.Popen(arguments(name, place), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(taken * dice.uniform(0.5, 1.0))  # most of the time is spent on imports
        process.kill()
        process.wait()
        check_all_whole(place, before, name)


RESUMED = ("convert", "quantize")  # they go on where they were


def stopped(name: str, place: Path, number: int, method: str, condition: str) -> subprocess.CompletedProcess:
    """Run a command that gets a signal once a method that writes has brought about a condition."""
    module, _, kind = method.rpartition(".")[0].rpartition(".")
    code = (
        f"import sys, os, {module} as w; from gguftools import cli; real = w.{kind}.write\n"
        "def write(self, *arguments):\n"
        "    real(self, *arguments)\n"
        f"    if {condition}: os.kill(os.getpid(), {int(number)})\n"
        f"w.{kind}.write = write; sys.exit(cli.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, *arguments(name, place)[3:]]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", [n for n in COMMANDS if n not in RESUMED])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_while_writing(number, name, place):
    """A signal in the middle of the output: nothing is left, not even hidden."""
    before = contents(place)
    done = stopped(name, place, number, "gguftools.gguf.writer.Writer.write", "len(self._pending) == 4")
    assert done.returncode == 128 + number, done.stderr
    assert contents(place) == before
    assert sorted(p.name for p in place.iterdir()) == sorted(before)


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_and_taken_up_again(number, name, place):
    """What is done stays, hidden, and the same command goes on with it."""
    before = contents(place)
    done = stopped(name, place, number, "gguftools.quantizing.partial.Partial.write", "len(self._done) == 9")
    assert done.returncode == 128 + number, done.stderr
    assert "the same command goes on with it" in done.stderr
    assert contents(place) == before
    assert sorted(p.name for p in place.iterdir()) == [".out.gguf.journal", ".out.gguf.partial", *sorted(before)]
    subprocess.run(arguments(name, place), check=True, capture_output=True)
    subprocess.run(arguments(name, place, place / "again.gguf"), check=True, capture_output=True)
    assert sorted(p.name for p in place.iterdir()) == sorted([*before, "again.gguf", "out.gguf"])
    assert (place / "out.gguf").read_bytes() == (place / "again.gguf").read_bytes()


@pytest.mark.parametrize("name", [n for n in COMMANDS if n != "imatrix"])  # its file is small
def test_full_disk(name, place):
    """A limit on the size of files stands for a full disk: the same error reaches the same code."""
    before = contents(place)
    code = (
        "import resource, signal, sys; from gguftools import cli\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (700_000, 700_000))\n"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, *arguments(name, place)[3:]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "make room or choose another disk" in done.stderr
    assert contents(place) == before
    assert sorted(p.name for p in place.iterdir()) == sorted(before)


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="needs users")
@pytest.mark.parametrize("name", [n for n in COMMANDS if n not in ("edit the file itself", "imatrix")])
def test_read_only_folder(name, place):
    """As a user who may read but not write there (root may always write, so it becomes nobody)."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "readonly"
        folder.mkdir()
        folder.parent.chmod(0o755)
        for file, data in contents(place).items():
            (folder / file).write_bytes(data)
        folder.chmod(0o555)
        before = contents(folder)
        from gguftools import cli

        cli.main(["inspect", str(folder / "model.gguf"), "--json"])
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)
        try:
            code = cli.main(arguments(name, folder)[3:])
        finally:
            if root:
                os.seteuid(0)
        assert code == 1
        assert contents(folder) == before
        folder.chmod(0o755)


def test_a_tiny_disk(place):
    """That there is too little room is said before anything is written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
        with pytest.raises(GGUFError, match=r"the disk has 1,000 free; make room"):
            gguftools.convert_endian(place / "model.gguf", place / "out.gguf", "big")
    assert not (place / "out.gguf").exists()


@pytest.mark.skipif(not hasattr(signal, "SIGBUS"), reason="no SIGBUS")
def test_a_file_that_shrinks_while_it_is_open(place):
    """The command ends with one line and exit code 1, not by a signal."""
    code = (
        "import sys, os; from gguftools.gguf.reader import GGUF; from gguftools import cli; real = GGUF.__init__\n"
        "def opened(self, path, *rest):\n"
        "    real(self, path, *rest)\n"
        "    if str(path) == sys.argv[2]: os.truncate(path, 70_000)\n"
        "GGUF.__init__ = opened; sys.exit(cli.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, *arguments("convert-endian", place)[3:]]
    before = sorted(p.name for p in place.iterdir())
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert sorted(p.name for p in place.iterdir()) == before
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == "error: a file was cut short while it was open; leave it alone and try again\n"


def test_the_guard_reaches_threads_without_the_lock(place):
    """Kernels run without Python's lock, on threads."""
    code = (
        "import sys, os; from gguftools.files import guard_maps; from gguftools.gguf import GGUF; guard_maps()\n"
        "f = GGUF(sys.argv[1]); t = f.tensors['token_embd.weight']; t.dequantize(2); os.truncate(sys.argv[1], 100)\n"
        "print(t.dequantize(2).sum())"
    )
    command = [sys.executable, "-c", code, str(place / "q.gguf")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (1, "")
    assert "cut short" in done.stderr
