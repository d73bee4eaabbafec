"""Strict kernels stay strict, whoever compiles them first; processes that fill the cache together do not mix it up."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from quant.jit import WITHOUT_KERNELS, cache_folder, config, fast_kernel, kernel
from tests.conftest import ROOT


@kernel
def _cancel(x):
    return (x + np.float32(1e8)) - np.float32(1e8)


@fast_kernel
def _fast_cancel(x):
    return (x + np.float32(1e8)) - np.float32(1e8)


@fast_kernel
def _through_fast(x):
    return _cancel(x)


def test_strict_function_called_from_a_fast_one():
    one = np.float32(1)
    assert _fast_cancel(one) == 1  # what reordering makes of it: else this test shows nothing
    assert _through_fast(one) == 0
    assert _cancel(one) == 0


_WORKER = """
import sys
from concurrent.futures import ThreadPoolExecutor
import numpy as np
import quant
golden = np.load(sys.argv[1])
for name in sys.argv[2:]:
    found = quant.quantize(golden["x"], name, threads=1)
    assert np.array_equal(found, golden[name].reshape(found.shape)), name
    assert np.isfinite(quant.dequantize(found, name)).all(), name
"""


@pytest.mark.slow
def test_processes_that_fill_an_empty_cache_together(data, tmp_path):
    """All formats go through the same loops, and so through one index: every process must still get its own code."""
    formats = ["Q4_0", "Q8_0", "Q4_1", "Q5_0", "F16", "BF16", "TQ2_0", "Q2_0"]
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}

    def start(names):
        command = [sys.executable, "-c", _WORKER, str(data / "quant.npz"), *names]
        return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

    workers = [start(formats[i:] + formats[:i]) for i in range(0, len(formats), 2)]
    for worker in [*workers, start(formats)]:
        _, errors = worker.communicate()
        assert worker.returncode == 0, errors
    names = {p.name for p in tmp_path.rglob("*.nbc")}
    assert len(names) > len(formats)
    assert not any(name.split(".")[-2].isdecimal() and len(name.split(".")[-2]) < 4 for name in names)
    assert cache_folder("quant") != cache_folder("engine")


@pytest.mark.parametrize("folder", WITHOUT_KERNELS)
def test_folders_that_do_not_count_have_no_kernels(folder):
    for path in (ROOT / folder).rglob("*.py"):
        text = path.read_text()
        assert "numba" not in text, path
        assert "quant.jit" not in text, path


def test_threads_that_make_kernels_at_once():
    """The folder is a setting of all of numba: for a moment, and for one thread at a time."""
    before = config.CACHE_DIR

    def make(_):
        return kernel(_cancel.py_func)._cache.cache_path

    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(make, range(400)))
    assert len(found) == 1
    assert before == config.CACHE_DIR
