"""A small model file, quantized files of it, and a way to make any file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import gguftools
from gguftools.gguf import GGUF, Writer
from quant.formats import FORMATS


@pytest.fixture(scope="session")
def q4(tiny, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("toolbox") / "q4.gguf"
    gguftools.quantize(tiny["bf16"], path, "Q4_K_M")
    return path


@pytest.fixture
def model(tiny, tmp_path) -> Path:
    """A copy that a test may change."""
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny["bf16"].read_bytes())
    return path


@pytest.fixture
def changed(tiny, tmp_path) -> Callable[..., Path]:
    """The small model with other keys (None: without the key) and tensors (None: without; an array: F32)."""

    def make(keys=None, tensors=None, types=None, name="changed.gguf") -> Path:
        path = tmp_path / name
        keys, tensors, types = keys or {}, tensors or {}, types or {}
        with GGUF(tiny["bf16"]) as f, Writer(path) as w:
            for key, field in f.fields.items():
                if key not in keys:
                    w.add_field(field)
            for key, value in keys.items():
                if value is not None:
                    w.add(key, value, types.get(key))
            kept = {n: (t.shape, t.format, t.data) for n, t in f.tensors.items()}
            arrays = {n: np.asarray(x, np.float32) for n, x in tensors.items() if x is not None}
            new = {n: (x.shape, FORMATS["F32"], x) for n, x in arrays.items()}
            parts = {n: p for n, p in (kept | new).items() if tensors.get(n, p) is not None}
            for n, (shape, fmt, _) in parts.items():
                w.declare(n, shape, fmt)
            for n, (_, _, data) in parts.items():
                w.write(n, data)
        return path

    return make
