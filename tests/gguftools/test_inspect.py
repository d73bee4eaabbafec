"""What `inspect` says, as a dict, a table and JSON; and that it starts without the compiler."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from gguftools import report
from gguftools.commands.inspect import inspect
from gguftools.errors import GGUFError
from gguftools.gguf import Writer
from gguftools.toolbox.inspect import describe

SHARED = Path(os.environ.get("GGUFTOOLS_SHARED", Path(__file__).resolve().parents[3] / "shared"))
app = typer.Typer()
app.command()(inspect)


@pytest.fixture
def model(tmp_path) -> Path:
    path = tmp_path / "model.gguf"
    with Writer(path) as w:
        w.add("general.architecture", "llama")
        w.add("llama.rope.freq_base", 1_000_000)
        w.add("tokenizer.ggml.tokens", [f"t{i}" for i in range(100)])
        w.add("tokenizer.ggml.token_type", [1] * 5)
        w.add("tokenizer.ggml.add_bos_token", True)
        w.add("tokenizer.chat_template", "x" * 100)
        w.add("odd.text", "a\x1b[31m\n\udcff ü")
        w.add("odd.number", float("nan"))
        w.declare("token_embd.weight", (4, 64), "Q8_0")
        w.declare("blk.0.attn_norm.weight", (64,), "F32")
        w.declare("output_norm.weight", (64,), "F32")
        w.write("token_embd.weight", np.zeros(4 * 68, np.uint8))
        w.write("blk.0.attn_norm.weight", np.zeros(64, np.float32))
        w.write("output_norm.weight", np.zeros(64, np.float32))
    return path


def test_describe(model):
    found = describe(model)
    assert (found["size"], found["version"], found["n_keys"], found["n_tensors"]) == (model.stat().st_size, 3, 8, 3)
    assert found["metadata"]["general.architecture"] == {"type": "string", "value": "llama"}
    tokens = found["metadata"]["tokenizer.ggml.tokens"]
    assert (tokens["type"], tokens["element_type"], tokens["count"], len(tokens["value"])) == (
        "array",
        "string",
        100,
        16,
    )
    assert found["metadata"]["tokenizer.ggml.token_type"]["value"] == [1] * 5
    assert found["tensors"][0] == {
        "name": "token_embd.weight",
        "shape": [4, 64],
        "ne": [64, 4],
        "type": "Q8_0",
        "weights": 256,
        "bytes": 272,
        "offset": 0,
    }
    assert found["tensors"][1]["offset"] == 288
    assert found["types"] == [
        {"type": "F32", "tensors": 2, "weights": 128, "bytes": 512, "share": 512 / 784},
        {"type": "Q8_0", "tensors": 1, "weights": 256, "bytes": 272, "share": 272 / 784},
    ]
    assert found["bpw"] == 8 * 784 / 384


def test_table(model):
    result = CliRunner().invoke(app, [str(model)])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert "GGUF version 3, 8 keys, 3 tensors" in lines[0]
    cells = {line.split("  ")[0]: re.split(r"\s{2,}", line)[1:] for line in lines}
    assert cells["llama.rope.freq_base"] == ["float32", "1000000"]
    assert cells["tokenizer.ggml.tokens"] == ["string[100]", "['t0', 't1', 't2', 't3', 't4', 't5', ...]"]
    assert cells["tokenizer.ggml.token_type"] == ["int32[5]", "[1, 1, 1, 1, 1]"]
    assert cells["tokenizer.ggml.add_bos_token"] == ["bool", "true"]
    assert cells["tokenizer.chat_template"] == ["string", "'" + "x" * 60 + "'..."]
    assert cells["odd.text"] == ["string", r"'a\x1b[31m\n\udcff ü'"]
    assert re.search(r"^ +0  token_embd.weight +\[4, 64\] +Q8_0 +272 +0$", result.stdout, re.M)
    assert re.search(r"^F32 +2 +128 +512 +65.3%$", result.stdout, re.M)
    assert lines[-1] == "384 weights in 784 B (784 bytes): 16.333 bits per weight"


def test_json(model):
    result = CliRunner().invoke(app, [str(model), "--json"])
    found = json.loads(result.stdout, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert found["metadata"]["odd.number"]["value"] == "NaN"
    assert found["metadata"]["odd.text"]["value"] == "a\x1b[31m\n\udcff ü"
    assert found["tensors"] == describe(model)["tensors"]
    assert len(found["metadata"]["tokenizer.chat_template"]["value"]) == 100


def test_file_without_tensors(tmp_path):
    with Writer(tmp_path / "vocab.gguf") as w:
        w.add("general.architecture", "llama")
    assert describe(tmp_path / "vocab.gguf")["bpw"] is None
    assert CliRunner().invoke(app, [str(tmp_path / "vocab.gguf")]).stdout.endswith("no weights\n")


def test_not_a_model(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"nonsense")
    with pytest.raises(GGUFError, match="not a GGUF file"):
        describe(tmp_path / "a.gguf")


def test_starts_without_the_compiler(model):
    code = (
        "import sys; from pathlib import Path; from gguftools.commands.inspect import inspect;"
        "inspect([Path(sys.argv[1])]);"
        "print([m for m in ('numba', 'scipy') if m in sys.modules])"
    )
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}  # what it cannot show is escaped
    done = subprocess.run(
        [sys.executable, "-c", code, model], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.splitlines()[-1] == "[]"
    assert r"\xfc" in done.stdout


def test_real_file():
    path = SHARED / "golden" / "tiny" / "tiny-bf16.gguf"
    if not path.exists():
        pytest.skip(f"{path} is absent")
    found = describe(path)
    assert (found["n_keys"], found["n_tensors"]) == (26, 56)
    assert {total["type"] for total in found["types"]} == {"BF16", "F32"}
    assert sum(total["bytes"] for total in found["types"]) == found["tensor_bytes"] < found["size"]


def test_tables_are_never_cut_in_a_pipe(capsys):
    report.table(("name", "n"), [("x" * 500, 1), ("y", 1_000_000)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("x" * 500)
    assert lines[2] == "y" + " " * 499 + "  1,000,000"


def test_tables_on_a_terminal_are_folded_not_cut(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    report.table(("name", "n"), [("[bold]" + "x" * 100, 1)], title="title")
    out = capsys.readouterr().out
    assert out.count("x") == 100
    assert "[bold]" in out
