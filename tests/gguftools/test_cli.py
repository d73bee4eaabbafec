"""The command line as a user meets it: results, exit codes, and one line for everything that can go wrong."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import gguftools
from gguftools.cli import main
from gguftools.gguf.writer import Writer
from gguftools.imatrix_file import read_imatrix, write_imatrix
from tests.conftest import DATA

TEXT = gguftools.demo_text("valid")

posix = pytest.mark.skipif(sys.platform == "win32", reason="signals, links and limits of POSIX")


def run(*arguments: object, **options) -> subprocess.CompletedProcess:
    """`gguftools ...` in a process of its own."""
    command = [sys.executable, "-m", "gguftools", *map(str, arguments)]
    options = {"capture_output": True, "text": True, "encoding": "utf-8", "check": False} | options
    return subprocess.run(command, **options)


def fails(capsys, *arguments: object, code: int = 1) -> str:
    """Run in this process; returns the one line on stderr."""
    assert main(list(map(str, arguments))) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("error: ")
    assert "Traceback" not in captured.err
    return lines[0]


def leftovers(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.fixture
def files(tiny, tmp_path):
    """A folder with a model, a damaged copy, a foreign file, and a text."""
    shutil.copy(tiny["bf16"], tmp_path / "m.gguf")
    data = tiny["bf16"].read_bytes()
    (tmp_path / "short.gguf").write_bytes(data[: len(data) // 2])
    (tmp_path / "foreign.gguf").write_bytes(b"\x7fELF" + bytes(100))
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "short.txt").write_text("Too short.")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 1000)
    return tmp_path


READERS = {
    "inspect": lambda f, m: ("inspect", m),
    "quantize": lambda f, m: ("quantize", m, f / "out.gguf", "Q8_0"),
    "perplexity": lambda f, m: ("perplexity", m, "-f", TEXT),
    "imatrix": lambda f, m: ("imatrix", m, "-f", TEXT, "-o", f / "out.gguf"),
    "demo": lambda f, m: ("demo", "--model", m),
}


@pytest.mark.parametrize("command", READERS)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.gguf", "no such file"),
        ("short.gguf", "truncated: tensor '"),
        ("foreign.gguf", "not a GGUF file"),
        ("empty.gguf", "the file is empty"),
    ],
)
def test_unreadable_models(files, capsys, command, name, message):
    before = leftovers(files)
    line = fails(capsys, *READERS[command](files, files / name))
    assert message in line
    assert name in line
    assert leftovers(files) == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.txt", "No such file"),
        ("empty.txt", "the text is empty"),
        ("latin.txt", "is not UTF-8 text (byte 3)"),
        ("short.txt", "two contexts of 512 are needed"),
    ],
)
@pytest.mark.parametrize("command", ["perplexity", "imatrix"])
def test_unreadable_texts(files, capsys, command, name, message):
    before = leftovers(files)
    more = ("-o", files / "out.gguf") if command == "imatrix" else ()
    assert message in fails(capsys, command, files / "m.gguf", "-f", files / name, *more)
    assert leftovers(files) == before


def test_context_beyond_the_model(files, capsys):
    line = fails(capsys, "perplexity", files / "m.gguf", "-f", TEXT, "-c", "2048")
    assert "beyond the 1024 tokens" in line


@posix
@pytest.mark.parametrize("link", ["same", "relative", "symbolic", "hard"])
@pytest.mark.parametrize("command", ["quantize", "imatrix"])
def test_output_is_the_input(files, capsys, command, link, monkeypatch):
    model = files / "m.gguf"
    before = model.read_bytes()
    target = files / "link.gguf"
    if link == "symbolic":
        target.symlink_to(model)
    elif link == "hard":
        target.hardlink_to(model)
    elif link == "relative":
        monkeypatch.chdir(files)
        target = Path("./m.gguf")
    else:
        target = model
    arguments = (
        (command, model, target, "Q8_0") if command == "quantize" else (command, model, "-f", TEXT, "-o", target)
    )
    assert "is the input file" in fails(capsys, *arguments)
    assert model.read_bytes() == before


def test_output_folder_is_missing(files, capsys):
    line = fails(capsys, "quantize", files / "m.gguf", files / "nowhere" / "out.gguf", "Q8_0")
    assert "does not exist; make it first" in line


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "config.json"),
        (lambda f: (f / "config.json").write_text("{"), "config.json"),
        (lambda f: (f / "tokenizer.json").unlink(), "tokenizer"),
        (lambda f: (f / "model.safetensors").unlink(), "safetensors"),
        (lambda f: (f / "model.safetensors").write_bytes(bytes(7)), "model.safetensors"),
        (lambda f: os.truncate(f / "model.safetensors", 5_000_000), "model.safetensors"),
    ],
)
def test_damaged_folders(tiny_folder, tmp_path, capsys, change, message):
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    change(folder)
    assert message in fails(capsys, "convert", folder, "-o", tmp_path / "out.gguf")
    assert leftovers(tmp_path) == ["model"]


def test_unknown_architecture(tiny_folder, tmp_path, capsys):
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["UnheardOfForCausalLM"]}))
    line = fails(capsys, "convert", folder, "-o", tmp_path / "out.gguf")
    assert "unsupported model class UnheardOfForCausalLM; this version has: " in line


def test_unknown_type_names_the_nearest(files, capsys):
    line = fails(capsys, "quantize", files / "m.gguf", files / "out.gguf", "Q4_KM")
    assert "unknown preset 'Q4_KM'; did you mean Q4_K_M?" in line


def test_quantized_source(files, capsys):
    assert main(["quantize", str(files / "m.gguf"), str(files / "q8.gguf"), "q8_0"]) == 0
    capsys.readouterr()
    line = fails(capsys, "quantize", files / "q8.gguf", files / "out.gguf", "Q4_0")
    assert "--allow-requantize" in line
    assert not (files / "out.gguf").exists()


def test_weights_that_are_not_finite(files, capsys):
    with gguftools.open(files / "m.gguf") as f:
        view = f.tensors["blk.2.ffn_up.weight"]
        at = f.data_offset + view.offset + 2 * (256 * 7 + 3)  # row 7, column 3
    with (files / "m.gguf").open("r+b") as file:
        file.seek(at)
        file.write(np.uint16(0x7FC0).tobytes())
    line = fails(capsys, "quantize", files / "m.gguf", files / "out.gguf", "Q4_0")
    assert "blk.2.ffn_up.weight: row 7, column 3 is nan" in line
    assert "out.gguf" not in leftovers(files)


@posix
def test_full_disk(files):
    """A file size limit stands for a full disk: the write fails in the middle."""
    import resource

    before = (files / "m.gguf").read_bytes()
    names = leftovers(files)
    done = run(
        "quantize", files / "m.gguf", files / "out.gguf", "Q8_0",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)),
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("error: ")
    assert "out.gguf: cannot be written" in line
    assert "Traceback" not in done.stderr
    assert leftovers(files) == names
    assert (files / "m.gguf").read_bytes() == before


def test_wrong_usage_is_2():
    assert run("quantize", "only-one").returncode == 2
    assert run("no-such-command").returncode == 2
    assert run("inspect", "--no-such-option", "x").returncode == 2


@posix
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_leaves_what_was_there(files, name, code):
    """Stopped in the middle of writing: the old file stays, beside it at most what the same command goes on with."""
    (files / "out.gguf").write_bytes(b"old")
    before = leftovers(files)
    command = [sys.executable, "-m", "gguftools", "quantize", "m.gguf", "out.gguf", "Q2_K"]
    process = subprocess.Popen(command, cwd=files, stderr=subprocess.PIPE, text=True)
    while leftovers(files) == before:
        assert process.poll() is None, "it was done before it could be stopped"
        time.sleep(0.001)
    process.send_signal(getattr(signal, name))
    _, errors = process.communicate()
    assert process.returncode == code
    lines = [line for line in errors.splitlines() if line]
    kept = [line for line in lines if "the same command goes on with it" in line]
    assert [line for line in lines if line not in kept] == ["interrupted"] * (name == "SIGINT")
    assert set(leftovers(files)) - set(before) <= {".out.gguf.partial", ".out.gguf.journal"}
    assert (files / "out.gguf").read_bytes() == b"old"
    assert run(*command[3:], cwd=files).returncode == 0
    assert leftovers(files) == before
    gguftools.quantize(files / "m.gguf", files / "again.gguf", "Q2_K")
    assert (files / "out.gguf").read_bytes() == (files / "again.gguf").read_bytes()


@posix
def test_what_nohup_ignores_stays_ignored():
    code = (
        "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); from gguftools import cli\n"
        "with cli._stop_by_exception(): assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@posix
@pytest.mark.parametrize("stream", ["<&-", ">&-", "2>&-"])
def test_closed_streams(files, stream):
    command = f'"{sys.executable}" -m gguftools quantize m.gguf out.gguf Q8_0 {stream}'
    done = subprocess.run(["sh", "-c", command], cwd=files, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert (files / "out.gguf").stat().st_size > 4_000_000


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("arguments", [("--version",), ("inspect", "m.gguf"), ("inspect", "m.gguf", "--json")])
def test_full_stdout(files, arguments):
    with Path("/dev/full").open("wb") as full:
        done = run(*arguments, cwd=files, capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr == "error: standard output: cannot be written: No space left on device\n"


def test_verbose_shows_the_traceback_and_keeps_the_code(tmp_path):
    done = run("-v", "inspect", tmp_path / "absent.gguf")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert run("-v", "quantize", "only-one").returncode == 2


def test_names_cannot_steer_the_terminal(tmp_path, capsys):
    assert r"no\x1b[31m\nsuch" in fails(capsys, "inspect", tmp_path / "no\x1b[31m\nsuch")


@pytest.fixture
def no_cache(tmp_path):
    """An environment in which nothing can be kept: a file stands where the cache folder would be."""
    (tmp_path / "file").touch()
    return os.environ | {"HOME": str(tmp_path / "file"), "NUMBA_CACHE_DIR": str(tmp_path / "file" / "kernels")} | {
        name: str(tmp_path / "file") for name in ("XDG_CACHE_HOME", "LOCALAPPDATA")
    } | {"TMPDIR": str(tmp_path)}  # fmt: skip


def test_without_a_cache(files, no_cache, tmp_path):
    """Kernels are compiled anew, in a folder that goes with the process, and the user is told."""
    done = run("quantize", files / "m.gguf", files / "out.gguf", "Q8_0", env=no_cache)
    assert done.returncode == 0, done.stderr
    assert "kernels cannot be written" in done.stderr
    assert [name for name in leftovers(tmp_path) if name.startswith("gguftools")] == []
    code = "import gguftools; path = gguftools.demo_model(); assert path.is_file(); print(path)"
    done = subprocess.run([sys.executable, "-c", code], env=no_cache, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not Path(done.stdout.strip()).exists()


@posix
def test_closed_pipe_is_quiet(tiny):
    command = f'"{sys.executable}" -m gguftools inspect "{tiny["bf16"]}" | head -1'
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 1


def test_version_and_completion():
    assert run("--version").stdout == f"gguftools {gguftools.__version__}\n"
    shown = run("--show-completion", env=os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"})
    assert shown.returncode in (0, 2)
    complete = os.environ | {"_GGUFTOOLS_COMPLETE": "complete_bash", "COMP_WORDS": "gguftools in", "COMP_CWORD": "1"}
    assert "inspect" in run(env=complete).stdout


def test_json_everywhere(files, capsys, tiny_folder):
    model = str(files / "m.gguf")
    for arguments in (
        ("convert", str(tiny_folder), "-o", str(files / "c.gguf")),
        ("inspect", model),
        ("quantize", model, str(files / "q.gguf"), "Q4_0"),
        ("imatrix", model, "-f", str(TEXT), "-o", str(files / "i.gguf"), "-c", "64", "--chunks", "2"),
        ("perplexity", model, "-f", str(TEXT), "-c", "64", "--chunks", "2", "--kl-divergence", model),
        ("demo", "--types", "Q8_0", "--chunks", "2"),
    ):
        assert main([*arguments, "--json"]) == 0, arguments
        found = json.loads(capsys.readouterr().out)
        assert found
    assert [rung["type"] for rung in found] == ["BF16", "Q8_0"]
    assert found[0]["divergence"]["mean_kld"] == {"value": 0.0, "error": 0.0}


def test_demo_keeps_its_files(tmp_path, capsys):
    assert main(["demo", "--types", "q8_0,Q4_0", "--chunks", "2", "--out", str(tmp_path / "d")]) == 0
    assert leftovers(tmp_path / "d") == ["imatrix.gguf", "tiny-Q4_0.gguf", "tiny-Q8_0.gguf", "tiny.gguf"]
    assert "bits/weight" in capsys.readouterr().out


def test_demo_refuses_unknown_types_first(tmp_path, capsys):
    assert "Q9_9" in fails(capsys, "demo", "--types", "Q8_0,Q9_9", "--out", tmp_path / "d")
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("text", "message"), [("absent.txt", "No such file"), ("short.txt", "two contexts of 256 are needed")]
)
def test_demo_refuses_unusable_texts_first(files, capsys, text, message):
    assert main(["demo", "--types", "Q8_0", "--text", str(files / text), "--out", str(files / "d")]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert message in line
    assert text in line
    assert not (files / "d" / "imatrix.gguf").exists()


def rewritten(source: Path, target: Path, values: dict, tensors: bool = True) -> Path:
    """A copy of a GGUF file with other keys; tensors=False leaves the tensors out."""
    with gguftools.open(source) as f, Writer(target) as w:
        for field in f.fields.values():
            w.add_field(field)
        for key, (value, kind) in values.items():
            w.add(key, value, kind)
        views = list(f.tensors.values()) if tensors else []
        for view in views:
            w.declare(view.name, view.shape, view.format)
        for view in views:
            w.write(view.name, view.data)
    return target


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"llama.block_count": (float("nan"), "float32")}, "'llama.block_count' is nan, expected a whole number"),
        ({"llama.block_count": (float("inf"), "float32")}, "'llama.block_count' is inf, expected a whole number"),
        ({"llama.block_count": ("six", "string")}, "'llama.block_count' is 'six', expected a whole number"),
        ({"split.count": (3, "uint16")}, "is one of 3 shards, but not named as one"),
    ],
)
@pytest.mark.parametrize("command", ["quantize", "perplexity", "imatrix"])
def test_keys_that_cannot_be(files, capsys, command, values, message):
    if command != "quantize" and "split.count" in values:
        pytest.skip("all tensors are in the file, so it can be run")
    odd = rewritten(files / "m.gguf", files / "odd.gguf", values)
    line = fails(capsys, *READERS[command](files, odd))
    assert message in line
    assert "odd.gguf" in line
    assert "out.gguf" not in leftovers(files)


def test_vocabulary_alone(files, capsys):
    vocab = rewritten(files / "m.gguf", files / "vocab.gguf", {}, tensors=False)
    assert "vocab.gguf: has no tensors" in fails(capsys, "quantize", vocab, files / "out.gguf", "Q4_0")
    assert "'token_embd.weight' is missing" in fails(capsys, "perplexity", vocab, "-f", TEXT)


IMATRIX = DATA / "tiny" / "imatrix.gguf"


def test_importance_as_model(files, capsys):
    line = fails(capsys, "quantize", IMATRIX, files / "out.gguf", "Q4_0")
    assert "is an importance matrix, not a model" in line
    assert "imatrix.gguf: unknown model architecture" in fails(capsys, "perplexity", IMATRIX, "-f", TEXT)


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("imatrix.datasets", 5, "uint32"),
        ("imatrix.datasets", [1, 2], "uint32"),
        ("imatrix.chunk_count", "x", "string"),
        ("imatrix.chunk_count", 1 << 40, "uint64"),
        ("imatrix.chunk_size", -4, "int32"),
    ],
)
def test_damaged_importance(files, capsys, key, value, kind):
    odd = rewritten(IMATRIX, files / "odd.gguf", {key: (value, kind)})
    line = fails(capsys, "quantize", files / "m.gguf", files / "out.gguf", "Q4_0", "--imatrix", odd)
    assert "odd.gguf" in line
    assert "the file is damaged" in line


def test_importance_of_another_model(files, capsys):
    matrix = read_imatrix(IMATRIX)
    matrix.entries = {f"other.{name}": entry for name, entry in matrix.entries.items()}
    write_imatrix(files / "i.gguf", matrix)
    for preset in ("Q4_0", "IQ2_XS"):  # the second needs importance: that is not what is wrong here
        line = fails(capsys, "quantize", files / "m.gguf", files / "out.gguf", preset, "--imatrix", files / "i.gguf")
        assert "belongs to another model" in line


@pytest.mark.skipif(sys.platform != "linux", reason="file names are text elsewhere")
def test_names_that_are_not_text(files):
    name = os.fsdecode(b"i\xff.gguf")
    shutil.copy(IMATRIX, files / name)
    done = run("quantize", "m.gguf", "out.gguf", "Q4_0", "--imatrix", name, cwd=files)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="there is no /dev/zero")
def test_a_device_is_no_text(files, capsys):
    assert "is a device, expected a text file" in fails(capsys, "perplexity", files / "m.gguf", "-f", "/dev/zero")


def test_long_names(files):
    name = "n" * 245 + ".gguf"
    assert main(["quantize", str(files / "m.gguf"), str(files / name), "Q8_0"]) == 0
    assert name in leftovers(files)
