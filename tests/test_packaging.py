"""What is installed: the three packages with their data and the recipes, and nothing else of the repository."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("gguftools", "quant", "engine")
FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", ".ci", ".gitignore")


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the wheel and the sdist."""
    copy = tmp_path_factory.mktemp("repository")
    for name in (*PACKAGES, *FILES, "tests", "recipes"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        elif name != ".gitignore" or (ROOT / name).exists():
            shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-m", "build", "-o", str(copy / "dist"), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "No matching distribution found for setuptools" in done.stdout + done.stderr:
        pytest.skip("no package index is in reach: the build needs setuptools")
    assert done.returncode == 0, done.stderr[-2000:]
    return copy / "dist"


def sources() -> set[str]:
    """Every file of the packages, as the wheel names it."""
    return {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    } | {f"gguftools/recipes/{path.name}" for path in (ROOT / "recipes").iterdir() if path.is_file()}


@pytest.mark.slow
def test_wheel(built):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
        installed = {name for name in names if ".dist-info/" not in name}
        assert installed == sources()
        assert {name.split("/")[0].split("-")[0] for name in names} == set(PACKAGES)


@pytest.mark.slow
def test_sdist_can_test_itself(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert names >= {"CHANGELOG.md", "LICENSE", "tests/conftest.py", "tests/data/quant.npz", "recipes/README.md"}
    assert names >= {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    assert not [name for name in names if "__pycache__" in name]
