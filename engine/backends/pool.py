"""Resident threads: they wait for a program, run their part of every node, and wait again. None is started for a run.

A waiting worker first looks at the kick-off counter without pause, then gives up the processor between looks, and at
last sleeps. A run publishes its program, then the counter (runs << 16 | threads that take part), then wakes sleepers.
A worker says that it sleeps before it looks a last time, so that a kick-off in between cannot be missed.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import weakref
from functools import lru_cache

import numpy as np
from threadpoolctl import ThreadpoolController

from engine.backends.base import AbortCallback, Status
from engine.context import aligned
from engine.errors import EngineError
from engine.kernels import node as layout

POLL = 50  # how long a worker looks before it sleeps, 0 to 100


class _Shared:
    """What workers and pool have in common; workers hold no reference to the pool, so that it can be let go."""

    def __init__(self, threads: int, poll: int):
        self.sync = aligned(8 * layout.SYNC).view(np.int64)
        self.address = self.sync.ctypes.data
        self.sync[layout.YIELD] = _yield_address()
        self.sync[layout.CLOCK] = _clock_address()
        self.poll = poll
        self.wake = [threading.Semaphore(0) for _ in range(threads)]
        self.closed = False

    def sleeping(self, ith: int) -> int:
        return self.address + 8 * (layout.SLEEPING + ith)

    def rouse(self, threads: int) -> None:
        for i in range(1, threads):
            if self.sync[layout.SLEEPING + i] and layout.swap(self.sleeping(i), 0):
                self.wake[i].release()


class Pool:
    """`threads` threads, number 0 of which is the caller. poll: see POLL."""

    def __init__(self, threads: int, poll: int = POLL):
        if not 1 <= threads <= layout.MAX_THREADS:
            raise EngineError(f"{threads} threads are not possible; use 1 to {layout.MAX_THREADS}")
        if not 0 <= poll <= 100:
            raise EngineError(f"poll is 0 (sleep at once) to 100, not {poll}")
        self.threads = threads
        self._shared = shared = _Shared(threads, poll)
        self._busy = threading.Lock()
        self._runs = 0
        workers = [
            threading.Thread(target=_work, args=(shared, i), daemon=True, name=f"gguftools-{i}")
            for i in range(1, threads)
        ]
        for worker in workers:
            worker.start()
        self._close = weakref.finalize(self, _close, shared, workers)

    def close(self) -> None:
        """End the threads. A closed pool runs nothing."""
        self._close()

    def run(
        self,
        program: np.ndarray,
        threads: int,
        abort: AbortCallback | None = None,
        times: np.ndarray | None = None,
    ) -> Status:
        """Run a program (int64 [n, 2], see `run_program`) on the first `threads` threads; returns when it is done.

        times: int64 [n + 1], gets the clock in nanoseconds before the first node and behind each.
        """
        if len(program) == 0:
            return Status.SUCCESS
        if self._shared.closed:
            raise EngineError("the backend was closed; make a new one")
        failure: list[BaseException] = []
        callback = None if abort is None else _c_callback(abort, failure)
        sync = self._shared.sync
        with self._busy, _single_threaded_blas():
            sync[layout.PROGRAM], sync[layout.LENGTH] = program.ctypes.data, len(program)
            sync[layout.TIMES] = 0 if times is None else times.ctypes.data
            sync[layout.ABORT] = 0 if callback is None else ctypes.cast(callback, ctypes.c_void_p).value or 0
            sync[layout.ABORTED] = 0
            self._runs += 1
            if threads > 1:
                layout.publish(self._shared.address + 8 * layout.KICKOFF, (self._runs << 16) | threads)
                self._shared.rouse(threads)
            layout.run_program(0, threads, self._shared.address)
            aborted = bool(sync[layout.ABORTED])
        if failure:
            raise failure[0]
        return Status.ABORTED if aborted else Status.SUCCESS


def _work(shared: _Shared, ith: int) -> None:
    seen = 0
    while not shared.closed:
        seen = layout.work(ith, seen, shared.poll, shared.address)
        layout.swap(shared.sleeping(ith), 1)
        missed = shared.closed or layout.peek(shared.address + 8 * layout.KICKOFF) != seen
        if missed and layout.swap(shared.sleeping(ith), 0):
            continue
        shared.wake[ith].acquire()


def _close(shared: _Shared, workers: list[threading.Thread]) -> None:
    shared.closed = True
    layout.publish(shared.address + 8 * layout.KICKOFF, -(1 << 16))  # a run in which nobody takes part
    for i in range(1, len(workers) + 1):
        shared.wake[i].release()
    for worker in workers:
        worker.join(timeout=1)


def _c_callback(abort: AbortCallback, failure: list[BaseException]):
    """`abort` as a C function; an exception in it ends the run, and is raised behind it."""

    def ask() -> int:
        try:
            return int(bool(abort()))
        except BaseException as error:
            failure.append(error)
            return 1

    return ctypes.CFUNCTYPE(ctypes.c_int)(ask)


_clock = ctypes.CFUNCTYPE(ctypes.c_int64)(time.perf_counter_ns)


def _clock_address() -> int:
    return ctypes.cast(_clock, ctypes.c_void_p).value or 0


@lru_cache(maxsize=1)
def _blas_controller() -> ThreadpoolController:
    return ThreadpoolController()


def _single_threaded_blas():
    """Our threads each call BLAS: it must not start threads of its own."""
    return _blas_controller().limit(limits=1, user_api="blas")


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
