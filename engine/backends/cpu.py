"""The backend in numba: a graph becomes a flat program that resident threads run without Python between nodes.

Lowering compiles the kernels that the nodes need (once a process, cached on disk) and writes one record a node
(`engine/kernels/node.py`). Neighbours that one kernel can do are fused (`engine/fusion.py`). A node that has no kernel
for its formats runs by its definition, between two native parts. An evaluation callback sees every node, unfused; it
cuts the program behind those that it asks for.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module

import numpy as np
import scipy.linalg.cython_blas as blas

from engine import fusion
from engine.alloc import Allocator, BufferType
from engine.backends.base import AbortCallback, EvalCallback, Executable, Status, Timing
from engine.backends.pool import POLL, Pool
from engine.backends.reference import compute
from engine.context import aligned
from engine.fusion import Fused
from engine.graph import Graph
from engine.kernels import node as layout
from engine.ops.matmul import tile_rows
from engine.ops.table import OPS
from engine.tensor import Flag, Tensor

CACHE_LINE = 64  # bytes

_kernels: dict[tuple, object] = {}
_kernels_lock = threading.Lock()


class CpuBackend:
    """Threads that live as long as the backend. threads: for graphs of one token, None means all cores; threads_batch:
    for larger ones, the same by default; fuse: merge neighbours; poll: how long idle threads look before they sleep."""

    name = "cpu"
    memory = BufferType("cpu", CACHE_LINE)

    def __init__(
        self, threads: int | None = None, threads_batch: int | None = None, fuse: bool = True, poll: int = POLL
    ):
        self.threads = max(1, threads or os.cpu_count() or 1)
        self.threads_batch = threads_batch or self.threads
        self.fuse = fuse
        self._pool = Pool(max(self.threads, self.threads_batch), poll)

    def supports(self, node: Tensor) -> bool:
        """Whether there is a kernel for the node's op and formats."""
        op = OPS.get(node.op)
        return op is not None and (op.empty or (op.kernel is not None and (op.covers is None or op.covers(node))))

    def compile(self, nodes: Sequence[Tensor], graph: Graph, threads: int | None = None) -> CpuProgram:
        """See `Backend`. threads: at most as many as the backend has; None means `threads_batch`."""
        return CpuProgram(nodes, graph, self, min(threads or self.threads_batch, self._pool.threads))

    def prepare(self, graph: Graph, threads: int | None = None, allocator: Allocator | None = None) -> Executable:
        """See `Backend`."""
        return Executable(graph, self, threads, allocator)

    def close(self) -> None:
        """End the threads."""
        self._pool.close()


def work_size(nodes: Sequence[Tensor], threads: int) -> int:
    """Bytes of scratch for a graph: nodes run one after another, so the largest request counts, not the sum; and a
    cache line a thread, so that no two write to one."""
    sizes = [scratch(n, threads) for n in nodes if n.op is not None and (scratch := OPS[n.op].scratch) is not None]
    largest = max(sizes, default=0)
    return largest + CACHE_LINE * threads if largest else 0


@dataclass(frozen=True)
class _Step:
    """nodes: what it computes; row: its line of the native program, or -1 if it runs by its definition."""

    nodes: tuple[Tensor, ...]
    row: int


class CpuProgram:
    """Two forms of the same nodes: one step a node for callbacks, and one with fused steps for all other runs."""

    def __init__(self, nodes: Sequence[Tensor], graph: Graph, backend: CpuBackend, threads: int):
        self._pool, self.threads = backend._pool, threads
        active = [n for n in nodes if not n.is_empty_op and n.flags & Flag.COMPUTE]
        native = [n for n in active if backend.supports(n)]
        self.scratch_size = work_size(native, threads)
        self._scratch = aligned(max(1, self.scratch_size))
        singles: list[_Step] = []
        fused: list[_Step] = []
        lowered: list[tuple[object, Fused]] = []
        rows: dict[Tensor, int] = {}
        for n in active:
            if backend.supports(n):
                rows[n] = len(lowered)
                assert n.op is not None
                lowered.append((_kernel(n), Fused(n.op, n, n.src, n.params)))
            singles.append(_Step((n,), rows.get(n, -1)))
        at = 0
        while at < len(active):
            found = fusion.match(active, at, graph.use_counts) if backend.fuse and active[at] in rows else None
            if found is None:
                fused.append(singles[at])
                at += 1
                continue
            pattern, merged = found
            fused.append(_Step(tuple(active[at : at + len(pattern.ops)]), len(lowered)))
            lowered.append((_kernel(_as_node(merged)), merged))
            at += len(pattern.ops)
        self._records = np.zeros((len(lowered), layout.RECORD), np.int64)
        self._lines = np.empty((len(lowered), 2), np.int64)
        self._keep = [kernel for kernel, _ in lowered]
        for i, (kernel, what) in enumerate(lowered):
            self._fill(self._records[i], what)
            self._lines[i] = kernel.address, self._records[i].ctypes.data  # type: ignore[attr-defined]
        self._singles, self.steps = singles, fused
        self._parts = _parts(fused, self._lines)

    @property
    def fused(self) -> int:
        """Nodes that were merged into others."""
        return sum(len(step.nodes) - 1 for step in self.steps)

    def _fill(self, record: np.ndarray, what: Fused) -> None:
        for which, tensor in enumerate((what.result, *what.src)):
            if tensor is not None:
                at = which * layout.TENSOR_SLOTS
                record[at : at + layout.TENSOR_SLOTS] = tensor.address, *tensor.ne, *tensor.nb
        for i, value in enumerate(what.params):
            bits = np.float64(value).view(np.int64) if isinstance(value, float) else value
            record[layout.PARAMS + i] = bits
        record[layout.SCRATCH] = self._scratch.ctypes.data
        record[layout.SGEMM] = _sgemm_address()
        if what.op in ("MUL_MAT", "MUL_MAT_ID"):
            record[layout.CHOSEN] = tile_rows(what.src[0].ne[1], self.threads)

    def run(
        self,
        callback: EvalCallback | None = None,
        abort: AbortCallback | None = None,
        timings: list[Timing] | None = None,
    ) -> Status:
        """See `Executable.run`."""
        if callback is None:
            return self._run(self._parts, abort, timings)
        held: list[_Step] = []
        for step in self._singles:
            wanted = callback(step.nodes[0], True)
            held.append(step)
            if wanted or step is self._singles[-1]:
                status = self._run(_parts(held, self._lines), abort, timings)
                if status is not Status.SUCCESS:
                    return status
                held = []
            if wanted:
                callback(step.nodes[0], False)
        return Status.SUCCESS

    def _run(self, parts: Sequence[_Part], abort: AbortCallback | None, timings: list[Timing] | None) -> Status:
        for part in parts:
            if part.program is None:
                started = time.perf_counter_ns()
                compute(part.steps[0].nodes[0])
                if timings is not None:
                    timings.append(Timing(part.steps[0].nodes, time.perf_counter_ns() - started))
                status = Status.SUCCESS
            else:
                times = None if timings is None else np.zeros(len(part.steps) + 1, np.int64)
                status = self._pool.run(part.program, self.threads, abort, times)
                if timings is not None and times is not None:
                    timings += [Timing(s.nodes, int(t)) for s, t in zip(part.steps, np.diff(times))]
            if status is Status.SUCCESS and abort is not None and part is not parts[-1] and abort():
                status = Status.ABORTED
            if status is not Status.SUCCESS:
                return status
        return Status.SUCCESS


@dataclass(frozen=True)
class _Part:
    """Steps that run as one native program, or one step that runs by its definition (program None)."""

    steps: tuple[_Step, ...]
    program: np.ndarray | None


def _parts(steps: Sequence[_Step], lines: np.ndarray) -> list[_Part]:
    parts: list[_Part] = []
    held: list[_Step] = []
    for step in (*steps, None):
        if step is not None and step.row >= 0:
            held.append(step)
            continue
        if held:
            parts.append(_Part(tuple(held), np.ascontiguousarray(lines[[s.row for s in held]])))
            held = []
        if step is not None:
            parts.append(_Part((step,), None))
    return parts


def _as_node(merged: Fused) -> Tensor:
    """A header of the merged op, which kernels are chosen by."""
    node = Tensor(merged.result.format, merged.result.ne, merged.result.nb)
    node.op, node.src, node.params = merged.op, merged.src, merged.params
    return node


def _kernel(n: Tensor):
    """The node's kernel, compiled now if this process has not needed it yet."""
    path = OPS[n.op].kernel
    assert path is not None, n.op
    module, name = path.split(":")
    function = getattr(import_module(module), name)
    variant = getattr(function, "variant", None)
    key: tuple = (path,)
    if variant is not None:
        key = (path, n.format.name, *(s and s.format.name for s in n.src), *variant(n))
    with _kernels_lock:
        if key not in _kernels:
            if variant is not None:
                function = function(n)
                # compiled code is linked by name, also across what several processes put into the cache: one for each
                function.__qualname__ = re.sub(r"\W+", "_", "_".join((name, *map(str, key[1:]))))
            _kernels[key] = layout.compiled(function)
        return _kernels[key]


@lru_cache(maxsize=1)
def _sgemm_address() -> int:
    """Address of Fortran's sgemm in the BLAS that SciPy carries."""
    capsule = blas.__pyx_capi__["sgemm"]
    api = ctypes.pythonapi
    api.PyCapsule_GetName.restype, api.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    return api.PyCapsule_GetPointer(capsule, api.PyCapsule_GetName(capsule))
