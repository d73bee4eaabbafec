"""How fast one thread quantizes, ours beside ggml's: `python tests/bench/quantize.py --types Q4_K,IQ3_S --seconds 2`.

Both work on the same float32 matrix in the same run, turn by turn, warm; the best turn counts. MB/s are megabytes of
float32 input. Slow types get fewer rows, so that a turn takes a fraction of the time given.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from quant import FORMATS, get_format
from quant.quantize import quantize_into
from tests.quant import oracle

COLUMNS = 4096
ROWS = 4096
TURNS = 5  # turns of each side that fit into the time


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _ours(name: str, x: np.ndarray, importance: np.ndarray | None) -> Callable[[], None]:
    fmt = get_format(name)
    blocks = np.zeros((len(x), COLUMNS // fmt.block_size), fmt.block)
    return lambda: quantize_into(x, fmt, blocks, importance, threads=1)


def _theirs(name: str, x: np.ndarray, importance: np.ndarray | None) -> Callable[[], None]:
    fmt = get_format(name)
    out = np.zeros((len(x), fmt.row_size(COLUMNS)), np.uint8)
    w = None if importance is None else importance.ctypes.data
    chunk = oracle.library().ggml_quantize_chunk
    return lambda: chunk(fmt.ggml_type, x.ctypes.data, out.ctypes.data, 0, *x.shape, w)


def measure(name: str, x: np.ndarray, importance: np.ndarray | None, seconds: float) -> dict[str, float]:
    """MB/s of both sides, and their ratio."""
    few = x[:8]
    trials = [make(name, few, importance) for make in (_ours, _theirs)]
    for trial in trials:
        trial()  # compile, fill tables
    per_row = sum(min(_seconds(trial) for _ in range(3)) for trial in trials) / len(few)
    rows = max(len(few), min(len(x), int(seconds / TURNS / per_row)))
    sides = [make(name, x[:rows], importance) for make in (_ours, _theirs)]
    best = [math.inf, math.inf]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or math.inf in best:
        best = [min(t, _seconds(side)) for t, side in zip(best, sides, strict=True)]
    ours, theirs = (x[:rows].nbytes / 1e6 / t for t in best)
    return {"rows": rows, "ours": ours, "ggml": theirs, "ratio": ours / theirs}


def _ways(names: list[str]) -> list[tuple[str, bool]]:
    """(type, with importance or not) for all that both sides can write."""
    ways = []
    for name in names:
        fmt = FORMATS[name]
        if fmt.module is None or not fmt.is_quantized or name in ("Q8_1", "Q8_K"):
            continue
        ways += [(name, False)] if fmt.kernels.quantize is not None else []
        ways += [(name, True)] if fmt.kernels.quantize_weighted is not None else []
    return ways


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default=",".join(FORMATS), help="comma-separated; default: all")
    parser.add_argument("--seconds", type=float, default=2.0, help="time per type and way (default 2)")
    parser.add_argument("--json", action="store_true", help="one JSON object per line instead of a table")
    options = parser.parse_args()

    r = np.random.default_rng(0)
    x = r.standard_normal((ROWS, COLUMNS), np.float32)
    importance = (r.standard_normal(COLUMNS, np.float32) ** 2 + np.float32(0.01)).astype(np.float32)
    ratios = []
    if not options.json:
        print(f"{'type':<9} {'importance':<10} {'rows':>5} {'ours MB/s':>10} {'ggml MB/s':>10} {'ratio':>6}")
    for name, weighted in _ways([get_format(t).name for t in options.types.split(",")]):
        row = measure(name, x, importance if weighted else None, options.seconds)
        ratios.append(row["ratio"])
        if options.json:
            print(json.dumps({"type": name, "importance": weighted} | row), flush=True)
        else:
            rates = f"{row['ours']:>10.1f} {row['ggml']:>10.1f} {row['ratio']:>6.2f}"
            print(f"{name:<9} {'yes' if weighted else 'no':<10} {row['rows']:>5} {rates}", flush=True)
    if ratios and not options.json:
        print(f"geometric mean of the ratios: {math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f}")


if __name__ == "__main__":
    main()
