"""What is held in memory does not grow with the model: a file of 6 GB under a limit of 1 GB."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gguftools.gguf import GGUF
from tests.conftest import ROOT
from tests.gguftools import small

LIMIT = 1_000_000_000  # bytes of private writable memory that the process may ask for
ALLOWED = 500_000_000  # bytes of anonymous memory that it may hold

_RUN = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
import gguftools
from quant.mixes import PlanOptions
result = gguftools.quantize(sys.argv[1], sys.argv[2], "Q4_0", options=PlanOptions(pure=True), threads=2)
print(json.dumps(result.file_bytes))
"""


def watch(arguments: list[str]) -> tuple[int, str, str]:
    """Peak anonymous memory of a process, bytes, and what it prints."""
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    peak = 0
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak = max(peak, int(status.split("RssAnon:")[1].split()[0]) * 1024)
        except (OSError, IndexError):
            pass
        time.sleep(0.01)
    return peak, *process.communicate()


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits and figures of Linux")
def test_six_gigabytes_under_a_limit_of_one(tmp_path):
    """With one tensor of 2 GB among them; F32 to Q4_0, so that the disk and the clock have little to do."""
    shapes = small.shapes(4, n=4096, n_ff=14336, n_vocab=131072, output=False)
    source = small.sparse(tmp_path / "large.gguf", shapes, small.keys(4), "F32")
    assert source.stat().st_size > 6_000_000_000
    command = [sys.executable, "-c", _RUN.replace("BYTES", str(LIMIT)), str(source), str(tmp_path / "q.gguf")]
    peak, output, errors = watch(command)
    assert output, errors
    assert json.loads(output) == (tmp_path / "q.gguf").stat().st_size
    print(f"peak anonymous memory {peak / 1e6:.0f} MB")
    assert peak < ALLOWED
    with GGUF(tmp_path / "q.gguf") as f:
        assert {t.format.name for t in f.tensors.values() if len(t.shape) > 1} == {"Q4_0"}
