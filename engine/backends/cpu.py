"""The backend in numba: a graph becomes a flat program that resident threads run without Python between nodes.

`prepare` places the memory, compiles the kernels that the graph needs (once a process, cached on disk) and writes one
record a node (`engine/kernels/node.py`). `run` wakes the threads; between runs they sleep. An evaluation callback cuts
the program behind the nodes that it asks for.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from functools import lru_cache
from importlib import import_module

import numpy as np
import scipy.linalg.cython_blas as blas
from threadpoolctl import ThreadpoolController

from engine.backends.base import EvalCallback, place
from engine.graph import Graph
from engine.kernels import node as layout
from engine.ops.attn import QUERY_TILE
from engine.ops.matmul import tile_rows
from engine.ops.table import OPS
from engine.tensor import Tensor

_kernels: dict[tuple, object] = {}
_kernels_lock = threading.Lock()


class CpuBackend:
    """Threads that live as long as the backend. threads: None means all cores."""

    def __init__(self, threads: int | None = None):
        self.threads = max(1, threads or os.cpu_count() or 1)
        self._pool = _Pool(self.threads)

    def prepare(self, graph: Graph) -> CpuExecutable:
        return CpuExecutable(graph, self._pool)


class CpuExecutable:
    def __init__(self, graph: Graph, pool: _Pool):
        self.graph = graph
        self._pool = pool
        self.plan, self._arena = place(graph)
        self._nodes = [n for n in graph.nodes if not OPS[n.op].empty]
        needed = [OPS[n.op].scratch for n in self._nodes]
        sizes = [scratch(n, pool.threads) for scratch, n in zip(needed, self._nodes) if scratch is not None]
        # nodes run one after another, so they share one scratch: the largest request, not the sum
        self.scratch = np.empty(max(sizes, default=0) + 64 * pool.threads, np.uint8)
        self._records = np.zeros((len(self._nodes), layout.RECORD), np.int64)
        self._program = np.empty((len(self._nodes), 2), np.int64)
        self._keep = []
        for i, n in enumerate(self._nodes):
            compiled = _kernel(n)
            self._keep.append(compiled)
            self._fill(self._records[i], n)
            self._program[i] = compiled.address, self._records[i].ctypes.data

    def _fill(self, record: np.ndarray, n: Tensor) -> None:
        for which, tensor in enumerate((n, *n.src)):
            if tensor is not None:
                at = which * layout.TENSOR_SLOTS
                record[at : at + layout.TENSOR_SLOTS] = tensor.address, *tensor.ne, *tensor.nb
        params = n.params
        if n.op == "MUL_MAT":
            params = (tile_rows(n.ne[0], self._pool.threads),)
        elif n.op == "ATTENTION":
            params = (*params, min(QUERY_TILE, n.src[0].ne[1]))
        for i, value in enumerate(params):
            bits = np.float64(value).view(np.int64) if isinstance(value, float) else value
            record[layout.PARAMS + i] = bits
        record[layout.SCRATCH] = -(-self.scratch.ctypes.data // 64) * 64
        record[layout.SGEMM] = _sgemm_address()

    def run(self, callback: EvalCallback | None = None) -> None:
        if callback is None:
            self._pool.run(self._program)
            return
        start = 0
        for i, n in enumerate(self._nodes):
            if callback(n, True):
                self._pool.run(self._program[start : i + 1])
                start = i + 1
                callback(n, False)
        if start < len(self._nodes):
            self._pool.run(self._program[start:])


class _Pool:
    """Resident threads. Number 0 is the caller; the others wait for a program, run their part, and wait again."""

    def __init__(self, threads: int):
        self.threads = threads
        self._sync = np.zeros(layout.SYNC + 8, np.int64)
        self._address = -(-self._sync.ctypes.data // 64) * 64
        self._sync[(self._address - self._sync.ctypes.data) // 8 + layout.YIELD] = _yield_address()
        self._job = np.empty((0, 2), np.int64)
        self._wake = [threading.Semaphore(0) for _ in range(threads - 1)]
        self._done = threading.Semaphore(0)
        self._busy = threading.Lock()
        for i in range(1, threads):
            threading.Thread(target=self._work, args=(i,), daemon=True, name=f"gguftools-{i}").start()

    def run(self, program: np.ndarray) -> None:
        """Run a program on all threads; returns when the last node is done."""
        with self._busy, _single_threaded_blas():
            self._job = program
            for semaphore in self._wake:
                semaphore.release()
            try:
                layout.run_program(program, 0, self.threads, self._address)
            finally:
                for _ in self._wake:
                    self._done.acquire()

    def _work(self, ith: int) -> None:
        while True:
            self._wake[ith - 1].acquire()
            try:
                layout.run_program(self._job, ith, self.threads, self._address)
            finally:
                self._done.release()


def _kernel(n: Tensor):
    """The node's kernel, compiled now if this process has not needed it yet."""
    path = OPS[n.op].kernel
    assert path is not None, n.op
    module, name = path.split(":")
    function = getattr(import_module(module), name)
    special = getattr(function, "by_format", False)
    formats = tuple(s.format.name for s in n.src if s is not None) if special else ()
    key = (path, formats)
    with _kernels_lock:
        if key not in _kernels:
            if special:
                function = function(n)
                function.__qualname__ = f"{name}_{'_'.join(formats)}"  # compiled code is linked by name: one for each
            _kernels[key] = layout.compiled(function)
        return _kernels[key]


@lru_cache(maxsize=1)
def _blas_controller() -> ThreadpoolController:
    return ThreadpoolController()


def _single_threaded_blas():
    """Our threads each call BLAS: it must not start threads of its own."""
    return _blas_controller().limit(limits=1, user_api="blas")


@lru_cache(maxsize=1)
def _sgemm_address() -> int:
    """Address of Fortran's sgemm in the BLAS that SciPy carries."""
    capsule = blas.__pyx_capi__["sgemm"]
    api = ctypes.pythonapi
    api.PyCapsule_GetName.restype, api.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    return api.PyCapsule_GetPointer(capsule, api.PyCapsule_GetName(capsule))


@lru_cache(maxsize=1)
def _yield_address() -> int:
    """Address of the system's call that gives up the processor."""
    if sys.platform == "win32":
        function = ctypes.windll.kernel32.SwitchToThread
    else:
        function = ctypes.CDLL(None).sched_yield
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address
