"""Examples in docstrings are executed."""

import doctest
import importlib
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for package in ("quant", "engine", "gguftools")
    for path in (ROOT / package).rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(importlib.import_module(name), verbose=False)
    assert result.attempted > 0
    assert result.failed == 0
    assert os.listdir(tmp_path) == []  # noqa: PTH208


def test_public_functions_have_examples():
    """Every function that the packages export shows its use."""
    for package in ("quant", "gguftools"):
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value) and not isinstance(value, type):
                assert ">>> " in (value.__doc__ or ""), f"{package}.{name} has no example"
