"""Resident threads: many runs, naps, thread counts, ending a run, exceptions, scratch."""

import threading
import time

import pytest

from engine import EngineError, ops
from engine.backends import Status, get_backend
from engine.backends.cpu import CpuBackend, work_size
from engine.context import Context
from engine.graph import Graph
from engine.ops.op import F32
from engine.tensor import Flag
from quant import FORMATS


def chain(n=64, length=20):
    ctx = Context()
    x = y = ctx.tensor(F32, n, n)
    x.flags |= Flag.INPUT
    for _ in range(length):
        y = ops.scale(ctx, y, 1.0, 1.0)
    y.flags |= Flag.OUTPUT
    return x, y, Graph().expand(y)


@pytest.mark.parametrize("poll", [0, 1, 100])
def test_runs_and_naps(poll):
    """Workers that look, yield or sleep when the next run comes: none is missed, none counts twice."""
    backend = CpuBackend(3, poll=poll)
    x, y, graph = chain()
    executable = backend.prepare(graph)
    for i in range(120):
        x.array()[...] = i
        assert executable.run() is Status.SUCCESS
        assert (y.array() == i + 20).all()
        if i % 40 == 39:
            time.sleep(0.05)  # long enough to fall asleep
    backend.close()


def test_threads_live_as_long_as_the_backend():
    before = threading.active_count()
    backend = CpuBackend(4)
    assert threading.active_count() == before + 3
    x, _, graph = chain()
    executable = backend.prepare(graph)
    x.array()[...] = 0
    for _ in range(5):
        executable.run()
    assert threading.active_count() == before + 3
    backend.close()
    assert threading.active_count() == before
    with pytest.raises(EngineError, match="the backend was closed"):
        executable.run()


def test_two_thread_counts():
    backend = CpuBackend(1, threads_batch=3)
    x, y, graph = chain()
    one, many = backend.prepare(graph, 1), backend.prepare(chain()[2])
    assert (one.program.threads, many.program.threads) == (1, 3)
    for _ in range(20):
        x.array()[...] = 1
        one.run()
        assert (y.array() == 21).all()
        many.run()
    backend.close()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_a_run_can_be_ended(name, threads):
    backend = get_backend(name, threads, poll=0)
    x, y, graph = chain()
    executable = backend.prepare(graph)
    asked = []

    def abort():
        asked.append(1)
        return len(asked) == 7

    x.array()[...] = 0
    assert executable.run(abort=abort) is Status.ABORTED
    assert len(asked) == 7
    assert (y.array() == 7).all()  # in place: as many additions as nodes were done
    x.array()[...] = 0
    assert executable.run(abort=lambda: False) is Status.SUCCESS
    assert (y.array() == 20).all()


def test_slow_peers_finish_the_node_at_which_a_run_ends():
    """Thread 0 may set the end while its peers have not yet begun the node: all must stop at the same one."""
    backend = CpuBackend(4, poll=1)
    x, y, graph = chain()
    executable = backend.prepare(graph)
    for i in range(300):
        x.array()[...] = 0
        assert executable.run(abort=lambda: True) is Status.ABORTED
        assert (y.array() == 1).all(), i
    backend.close()


def test_an_exception_ends_a_run_and_is_raised():
    x, _, graph = chain()
    executable = get_backend("cpu", 2).prepare(graph)
    x.array()[...] = 0

    def abort():
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        executable.run(abort=abort)
    assert executable.run() is Status.SUCCESS


def test_timings_cover_every_step():
    for name in ("cpu", "reference"):
        x, _, graph = chain()
        executable = get_backend(name, 2).prepare(graph)
        x.array()[...] = 0
        timings = []
        executable.run(timings=timings)
        assert [t.nodes for t in timings] == [(n,) for n in graph.nodes]
        assert all(t.nanoseconds >= 0 for t in timings)


def test_scratch_is_the_largest_request_not_the_sum():
    ctx = Context()
    x = ctx.tensor(F32, 256, 40)
    nodes = [ops.mul_mat(ctx, ctx.tensor(FORMATS["Q8_0"], 256, n), x) for n in (100, 700, 300)]
    alone = [work_size([n], 4) for n in nodes]
    assert work_size(nodes, 4) == max(alone) < sum(alone)
    assert alone[0] == 64 * 4 + 4 * 16 * 256 * 4  # a cache line and 16 decoded rows of 256 for each of 4 threads
    assert work_size([ops.add(ctx, x, x), ops.rms_norm(ctx, x, 1e-5)], 4) == 0


@pytest.mark.parametrize("options", [{"threads": 513}, {"threads": 2, "poll": 101}])
def test_bad_pools(options):
    with pytest.raises(EngineError, match=r"not possible|poll is 0"):
        get_backend("cpu", **options)
