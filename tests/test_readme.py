"""The README is executed: its commands, its Python, its table of formats."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gguftools
from gguftools.conversion.sources import METHODS
from quant import FORMATS
from tests.gguftools.families_table import SHARED as SHARED_CHECKPOINTS
from tests.gguftools.families_table import checkpoints
from tests.gguftools.families_table import table as family_table

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
SHELL = [body for language, body in BLOCKS if language == "sh"]
PYTHON = [body for language, body in BLOCKS if language == "python"]


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"} | more


def test_there_is_something_to_execute():
    assert len(SHELL) == 4
    assert len(PYTHON) == 1
    assert "pip install . && gguftools demo\n" in SHELL[0]
    assert "pip install '.[test]' && pytest\n" in SHELL[3]


def adapter(folder: Path) -> Path:
    """A LoRA adapter for the demo model, as PEFT saves it."""
    path = folder / "adapter"
    path.mkdir()
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    halves = {"A": [2, 256], "B": [256, 2]}
    header = {
        name.format(half): {"dtype": "F32", "shape": shape, "data_offsets": [2048 * i, 2048 * (i + 1)]}
        for i, (half, shape) in enumerate(halves.items())
    }
    text = json.dumps(header).encode()
    (path / "adapter_model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4096))
    (path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 4}')
    return path


@pytest.mark.slow
def test_commands(tmp_path):
    """Every `gguftools` line, in order, in one folder, as a user's shell would run them."""
    lines = [line for body in SHELL[1:3] for line in body.splitlines() if line.startswith("gguftools ")]
    assert len(lines) >= 16
    script = "set -eu\n" + "\n".join(lines)
    files = {"MODEL": gguftools.demo_folder(), "TEXT": gguftools.demo_text("valid"), "ADAPTER": adapter(tmp_path)}
    names = environment(**{name: str(path) for name, path in files.items()})
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, env=names, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Final estimate: PPL = " in done.stdout
    assert {"imatrix.gguf", "model.gguf", "q4.gguf"} <= {p.name for p in tmp_path.iterdir()}


def test_every_command_is_shown():
    from gguftools.cli import app

    shown = {line.split()[1] for body in SHELL for line in body.splitlines() if line.startswith("gguftools ")}
    names = {command.name for command in app.registered_commands}
    assert names - {"demo"} <= shown, "and demo stands beside the installation"


@pytest.mark.slow
def test_demo_prints_the_table(tmp_path):
    """The figures in the README are those that the command prints."""
    done = subprocess.run(
        [sys.executable, "-m", "gguftools", "demo"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    table = next(body for language, body in BLOCKS if language == "" and body.startswith("type "))
    for want, got in zip(table.splitlines(), done.stdout.splitlines(), strict=True):
        cells, found = want.split(), got.split()
        assert len(cells) == len(found)
        for a, b in zip(cells, found):
            if re.fullmatch(r"\d+\.\d{4,}", a):  # the last digits depend on the processor's vector width
                assert float(b) == pytest.approx(float(a), rel=0.02, abs=2e-5)
            elif re.fullmatch(r"\d+\.\d\d", a) and "%" in cells:
                assert float(b) == pytest.approx(float(a), abs=0.5)
            else:
                assert a == b


def test_python(tmp_path):
    for body in PYTHON:
        done = subprocess.run([sys.executable, "-c", body], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) == 4


def format_table() -> str:
    """The README's table of formats."""
    rows = ["| type | bits per weight | read | written | with importance |", "|---|---|---|---|---|"]
    for fmt in FORMATS.values():
        if fmt.module is None:
            continue
        kernels = fmt.kernels
        weighted, plain = kernels.quantize_weighted is not None, kernels.quantize is not None
        use = "needed" if weighted and not plain else "used" if weighted else "ignored" if plain else ""
        rows.append(f"| {fmt} | {fmt.bpw:g} | yes | {'yes' if weighted or plain else 'no'} | {use} |")
    return "\n".join(rows)


def test_table_of_formats():
    found = re.search(r"<!-- formats:[^\n]*-->\n(.*?)\n\n", README, re.DOTALL)
    assert found, "the marker of the table is gone"
    assert found[1] == format_table(), "run `python -m tests.test_readme` and paste its output below the marker"


#: method of quantization -> tests of `test_sources.py` that pack it by hand
PROOFS = {
    "": "test_all_codes_of_8_bit_floats",
    "fp8": "test_fp8 test_fp8_of_experts_in_one_tensor",
    "mxfp4": "test_mxfp4_keeps_its_bits",
    "gptq": "test_gptq test_three_bits_cross_words test_settings_beside_the_config",
    "awq": "test_awq",
    "bitsandbytes": "test_bitsandbytes_of_4_bits test_bitsandbytes_of_8_bits",
    "compressed-tensors": "test_compressed_floats test_compressed_int8 test_compressed_packed_integers "
    "test_compressed_groups_of_different_widths test_nvfp4_of_compressed_tensors test_mxfp4_of_compressed_tensors",
    "modelopt": "test_fp8_of_modelopt test_nvfp4_of_modelopt",
}


def source_table() -> str:
    """The README's table of number formats that are converted."""
    rows = ["| `quant_method` | what is read | proven by |", "|---|---|---|"]
    plain = "F64, F32, F16, BF16; FP8 without scales"
    for names, what in [(("",), plain), *((method.names, method.row) for method in METHODS)]:
        spelled = ", ".join(f"`{name}`" for name in names if name) or "none"
        proofs = ", ".join(f"`{test.removeprefix('test_')}`" for test in PROOFS[names[0]].split())
        rows.append(f"| {spelled} | {what} | {proofs} |")
    return "\n".join(rows)


def test_table_of_sources():
    tests = (ROOT / "tests" / "gguftools" / "test_sources.py").read_text(encoding="utf-8")
    for test in " ".join(PROOFS.values()).split():
        assert f"\ndef {test}(" in tests, test
    found = re.search(r"<!-- sources:[^\n]*-->\n(.*?)\n\n", README, re.DOTALL)
    assert found, "the marker of the table is gone"
    assert found[1] == source_table(), "run `python -m tests.test_readme` and paste its output below the marker"


def test_table_of_families(shared):
    for name, those in checkpoints().items():
        assert those, f"nothing is proven for {name}"
    here = {folder: has for those in SHARED_CHECKPOINTS.values() for folder, has in those.items()}
    there = {p.name: (p / "reference.json").is_file() for p in (shared / "golden" / "arch").iterdir() if p.is_dir()}
    assert here == there
    found = re.search(r"<!-- families:[^\n]*-->\n(.*?)\n\n", README, re.DOTALL)
    assert found, "the marker of the table is gone"
    assert found[1] == family_table(), "run `python -m tests.test_readme` and paste its output below the marker"


if __name__ == "__main__":
    print(format_table())
    print(family_table())
    print(source_table())
