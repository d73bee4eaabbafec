"""The allocator: where things go, chunks, take-over, plans that are used again."""

import numpy as np
import pytest

from engine import EngineError, ops
from engine.alloc import MAX_CHUNKS, Allocator, BufferType, _Space, plan
from engine.backends import get_backend
from engine.context import Context
from engine.graph import Graph
from engine.ops.op import F32
from engine.tensor import Flag


def space(alignment=8, max_size=1 << 62):
    return _Space(BufferType("test", alignment, max_size))


def test_the_smallest_hole_that_fits_is_taken_and_holes_merge():
    s = space()
    at = [s.take(size)[1] for size in (16, 32, 16, 24, 8)]
    assert at == [0, 16, 48, 64, 88]
    s.give(0, 16, 32)
    s.give(0, 64, 24)
    assert s.take(20) == (0, 64)  # a hole of 24, not that of 32
    s.give(0, 64, 20)
    s.give(0, 48, 16)  # between two holes: three become one
    assert s.chunks[0].free[:-1] == [[16, 72]]
    assert s.take(72) == (0, 16)
    assert s.chunks[0].free[:-1] == []  # an exact fit leaves nothing
    assert s.chunks[0].size == 96


def test_sizes_are_padded_to_the_alignment():
    s = space(64)
    assert [s.take(n)[1] for n in (1, 64, 65, 1)] == [0, 64, 128, 256]


def test_chunks_have_a_largest_size_and_the_last_none():
    s = space(max_size=64)
    assert [s.take(48) for _ in range(3)] == [(0, 0), (1, 0), (2, 0)]
    assert s.take(16) == (0, 48)  # what is left over of a chunk
    assert s.take(200) == (3, 0)  # a chunk of its own, larger than the limit
    for i in range(4, MAX_CHUNKS):
        assert s.take(64) == (i, 0)
    assert s.take(1 << 30)[0] == MAX_CHUNKS - 1
    assert len(s.chunks) == MAX_CHUNKS


def test_the_end_that_grows_least_is_taken():
    s = space(max_size=100)
    s.take(64)
    s.take(96)  # a second chunk
    s.give(0, 0, 64)
    s.give(1, 0, 96)
    assert s.take(96) == (1, 0)  # nothing grows; the first would by 32
    s.give(1, 0, 96)
    assert s.take(56) == (0, 0)  # both suffice: least is left over in the first


def chain(n_ops=4, n=8, view=False):
    ctx = Context()
    x = y = ctx.tensor(F32, n, n, name="x")
    x.flags |= Flag.INPUT
    for _ in range(n_ops):
        y = ops.norm(ctx, y, 1e-5)  # never in place
        if view:
            y = ops.reshape(ctx, y, n * n)
            y = ops.reshape(ctx, y, n, n)
    y.flags |= Flag.OUTPUT
    return x, y, Graph().expand(y)


def test_a_chain_needs_two_places():
    for view in (False, True):
        _, _, graph = chain(9, view=view)
        found = plan(graph)
        assert found.size == 2 * 256
        assert found.naive == 10 * 256
        assert (found.allocated, found.reused) == (10, 0)


def test_a_view_of_the_whole_hands_its_root_over():
    ctx = Context()
    x = ctx.tensor(F32, 8, 8)
    x.flags |= Flag.INPUT
    y = ops.scale(ctx, ops.reshape(ctx, ops.norm(ctx, x, 1e-5), 16, 4), 2.0)
    graph = Graph().expand(y)
    found = plan(graph)
    assert found.places[graph.nodes[2]] == found.places[graph.nodes[0]]
    assert found.reused == 1


def test_what_is_left_of_a_larger_root_is_free_again():
    ctx = Context()
    x = ctx.tensor(F32, 16, 8)
    x.flags |= Flag.INPUT
    root = ops.norm(ctx, x, 1e-5)
    y = ops.scale(ctx, ops.view(ctx, root, (16, 4), (64,)), 2.0)
    graph = Graph().expand(ops.norm(ctx, y, 1e-5))
    found = plan(graph)
    node = graph.nodes
    assert found.places[node[2]] == found.places[node[0]]
    assert found.offsets[node[3]] in (0, found.offsets[node[0]] + 256)


def test_outputs_weights_and_second_readers_are_not_taken_over():
    ctx = Context()
    x = ctx.tensor(F32, 8)
    x.bind(np.zeros(32, np.uint8))
    a = ops.scale(ctx, x, 2.0)
    b = ops.scale(ctx, a, 2.0)
    c = ops.add(ctx, a, b)
    a.flags |= Flag.OUTPUT
    found = plan(Graph().expand(c))
    assert x not in found.places
    assert found.places[a] not in (found.places[b], found.places[c])


def test_a_plan_serves_graphs_of_the_same_shape_and_smaller():
    allocator = Allocator()
    for n in (8, 8, 6, 4):
        _, _, graph = chain(5, n)
        allocator.allocate(graph)
    assert (allocator.planned, allocator.reapplied) == (1, 3)
    allocator.allocate(chain(5, 12)[2])  # larger
    allocator.allocate(chain(6, 4)[2])  # more nodes
    assert (allocator.planned, allocator.reapplied) == (3, 3)


def test_reserve_makes_the_first_allocation_free():
    allocator = Allocator()
    allocator.reserve(chain(5, 16)[2])
    held = allocator.size
    allocator.allocate(chain(5, 3)[2])
    assert (allocator.planned, allocator.reapplied, allocator.size) == (1, 1, held)


def wired(first, second):
    """Three sums whose sources differ: whether a plan may be used again depends on who reads what."""
    ctx = Context()
    x = ctx.tensor(F32, 8, name="x")
    x.flags |= Flag.INPUT
    a = ops.norm(ctx, x, 1e-5)
    b = ops.norm(ctx, a, 1e-5)
    c = ops.norm(ctx, b, 1e-5)
    d = ops.norm(ctx, {"a": a, "b": b, "c": c}[first], 1e-5)
    e = ops.concat(ctx, d, {"a": a, "b": b, "c": c}[second], 1)
    e.flags |= Flag.OUTPUT
    graph = Graph()
    for t in (a, b, c, e):
        graph.expand(t)
    return graph


def test_a_plan_does_not_serve_a_graph_that_reads_later():
    allocator = Allocator()
    allocator.allocate(wired("c", "c"))
    allocator.allocate(wired("c", "a"))  # the same ops and sizes, but `a` has to live longer
    assert (allocator.planned, allocator.reapplied) == (2, 0)
    allocator.allocate(wired("c", "a"))
    assert allocator.reapplied == 1


def test_weights_are_not_moved_by_a_plan_that_is_used_again():
    allocator = Allocator()
    for bound in (False, True):
        x, _, graph = chain(3)
        memory = np.zeros(x.nbytes, np.uint8)
        if bound:
            x.bind(memory)
        allocator.allocate(graph)
        assert (x.buffer is memory) == bound
    assert allocator.planned == 2


def test_results_after_a_plan_was_used_again():
    cpu = get_backend("cpu", 2)
    allocator = Allocator((cpu.memory,))
    from engine.backends.base import Executable

    for n in (8, 6, 8):
        x, y, graph = chain(5, n)
        executable = Executable(graph, cpu, allocator=allocator)
        x.array()[...] = np.random.default_rng(n).standard_normal(x.shape)
        executable.run()
        np.testing.assert_allclose(y.array().mean(-1), 0, atol=1e-6)
        np.testing.assert_allclose(y.array().std(-1), 1, atol=1e-3)


def test_too_many_holes_are_an_error():
    ctx = Context(1 << 24)
    x = ctx.tensor(F32, 16)
    parts = [ops.norm(ctx, x, 1e-5) for _ in range(600)]
    graph = Graph(4000)
    for i, part in enumerate(parts):
        part.flags |= Flag.OUTPUT if i % 2 else Flag.NONE
        graph.expand(part)
    for i in range(0, 600, 2):
        graph.expand(ops.sum_rows(ctx, parts[i]))
    with pytest.raises(EngineError, match="more than 256 free blocks"):
        plan(graph, 8)
