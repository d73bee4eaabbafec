"""Figures of the engine: dispatch, building and planning, memory, reuse, fusion, threads.

    python recipes/engine_figures.py [MODEL.gguf]

On 2 cores of an x86-64 server (numba 0.68), the bundled model: see engine/README.md, "Figures".
"""

from __future__ import annotations

import statistics
import sys
import time

import numpy as np

import gguftools
from engine import ModelContext, ops
from engine.backends.cpu import CpuBackend
from engine.context import Context
from engine.graph import Graph
from engine.ops.op import F32
from engine.tensor import Flag


def best(function, repeats: int = 15) -> float:
    """Seconds of the fastest call."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return min(times)


def dispatch(threads: int, n: int = 1000) -> float:
    """Seconds a node of a chain of sums of 8 numbers."""
    ctx = Context(1 << 24)
    y = ctx.tensor(F32, 8)
    one = ctx.tensor(F32, 8)
    for t in (y, one):
        t.flags |= Flag.INPUT
    for _ in range(n):
        y = ops.add(ctx, y, one)
    backend = CpuBackend(threads)
    executable = backend.prepare(Graph(n + 1).expand(y))
    seconds = best(executable.run) / n
    backend.close()
    return seconds


def speeds(path, threads: int, type: str) -> tuple[float, float]:
    """Tokens a second of a prompt of 512, and of 64 single tokens behind it; the fastest of five."""
    session = gguftools.load(path, threads=threads)
    context = ModelContext(session, n_ctx=1024, type_k=type, type_v=type)
    prompt = np.random.default_rng(0).integers(10, session.n_vocab, 512).tolist()

    def read() -> None:
        context.memory.clear()
        context.process(prompt)

    def write() -> None:
        context.memory.remove(0, 512)
        for token in prompt[:64]:
            context.process([token])

    return 512 / best(read, 5), 64 / best(write, 5)


def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 1 else gguftools.demo_model()
    for threads in (1, 2):
        print(f"dispatch, {threads} thread(s): {dispatch(threads) * 1e6:.2f} us a node")
    for threads in (1, 2):
        for type in ("F32", "F16", "Q8_0"):
            read, write = speeds(path, threads, type)
            print(f"{threads} thread(s), cache {type}: prompt {read:.0f} tokens/s, generation {write:.0f} tokens/s")
    ids = np.arange(64)[None] + 300
    results = {}
    for fuse in (True, False):
        backend = CpuBackend(2, fuse=fuse)
        session = gguftools.load(path, backend)
        session.hidden(ids)  # kernels are compiled

        def build(session=session):
            session._prepared.clear()
            session.prepared_body(1, 64)

        seconds = best(build)
        executable = session.prepared_body(1, 64).executable
        nodes, plan = len(executable.graph.nodes), executable.plan
        run = statistics.median(best(lambda s=session: s.hidden(ids), 1) for _ in range(60))
        one = statistics.median(best(lambda s=session: s.hidden(ids[:, :1]), 1) for _ in range(60))
        results[fuse] = session.hidden(ids)
        print(
            f"fusion {'on ' if fuse else 'off'}: {nodes} nodes, {executable.program.fused} merged; built, planned and "
            f"lowered in {seconds * 1e3:.1f} ms; 64 tokens {run * 1e3:.2f} ms, one token {one * 1e3:.3f} ms"
        )
        if fuse:
            print(
                f"compute buffer {plan.size:,} of {plan.naive:,} bytes without reuse ({plan.size / plan.naive:.1%}); "
                f"{plan.reused} of {plan.allocated + plan.reused} tensors in place"
            )
            for memory in session.memory():
                print(f"  {memory.name}: {memory.bytes:,} bytes, {memory.lifetime}")
            print(f"graphs built {session.graphs_built}, reused {session.graphs_reused}")
        backend.close()
    print("same bits with and without fusion:", np.array_equal(*results.values()))


if __name__ == "__main__":
    main()
