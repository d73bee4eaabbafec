"""One arrow only: quant <- engine <- gguftools; and what must not be imported for a quick start."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = {"quant": set(), "engine": {"quant"}, "gguftools": {"quant", "engine"}}
FORBIDDEN = {"torch", "transformers", "tensorflow"}


def imports(path: Path) -> set[str]:
    """Top-level names of everything that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


def offences(root: Path) -> list[str]:
    return [
        f"{path.relative_to(root)} imports {name}"
        for package, allowed in ALLOWED.items()
        for path in sorted((root / package).rglob("*.py"))
        for name in sorted(imports(path) & (ALLOWED.keys() | FORBIDDEN) - allowed - {package})
    ]


def test_the_arrow():
    assert offences(ROOT) == []


def test_the_arrow_is_seen(tmp_path):
    (tmp_path / "quant").mkdir()
    (tmp_path / "quant" / "bad.py").write_text("def f():\n    from engine import graph\n    import torch\n")
    assert offences(tmp_path) == ["quant/bad.py imports engine", "quant/bad.py imports torch"]


def test_libraries_keep_to_themselves():
    """quant and engine never open files of the user, print, exit, or read the environment."""
    for package in ("quant", "engine"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call):
                    assert ast.unparse(node.func) not in ("print", "exit", "sys.exit", "os.getenv"), path
                assert not (isinstance(node, ast.Attribute) and ast.unparse(node) == "os.environ"), path


@pytest.mark.parametrize(
    "code",
    [
        "import gguftools, quant, engine",
        "from gguftools.cli import main; main(['--help'])",
        "from gguftools.cli import main; main(['quantize', '--help'])",
    ],
)
def test_quick_start_loads_no_compiler(code):
    check = "import sys; loaded = {'numba', 'scipy'} & set(sys.modules); sys.exit(repr(loaded) if loaded else 0)"
    done = subprocess.run([sys.executable, "-c", f"{code}\n{check}"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
