"""Headers: the arena that counts them, moving to a buffer, views, flags."""

import numpy as np
import pytest

from engine import EngineError, ops
from engine.context import HEADER_SIZE, OBJECT_SIZE, TENSOR_OVERHEAD, Context, allocate
from engine.graph import DEFAULT_SIZE, Graph
from engine.ops.op import F32, I32, node
from engine.tensor import Flag, Tensor
from quant import FORMATS


def test_bytes_of_headers_and_graphs():
    ctx = Context()
    assert (OBJECT_SIZE, TENSOR_OVERHEAD) == (32, 368)
    assert (16 << 20) // TENSOR_OVERHEAD == 45590  # headers in the default arena
    for _ in range(290):
        ctx.tensor(F32, 1000, 1000)
    assert ctx.used == 290 * 368  # about 104 KiB, whatever the tensors hold
    graph = Graph(ctx=ctx)
    assert graph.size == DEFAULT_SIZE
    assert ctx.used == 290 * 368 + 32 + graph.overhead
    assert [e.kind for e in ctx.entries[-2:]] == ["tensor", "graph"]
    offsets = [e.offset for e in ctx.entries]
    assert offsets == sorted(offsets)
    assert all(o % 16 == 0 for o in offsets)


def test_data_in_the_arena():
    ctx = Context(4096, no_alloc=False)
    a = ctx.tensor(F32, 3, 2)
    a.array()[...] = np.arange(6).reshape(a.shape)
    t = ops.transpose(ctx, a)
    assert ctx.used == 2 * TENSOR_OVERHEAD + OBJECT_SIZE + 32  # a view has no data of its own
    np.testing.assert_array_equal(t.array()[0, 0], [[0, 3], [1, 4], [2, 5]])
    assert t.address == a.address
    with pytest.raises(EngineError, match="context full: a data needs"):
        ctx.tensor(F32, 1000)
    ctx.reset()
    assert (ctx.used, ctx.entries, ctx.tensors) == (0, [], [])


def test_only_headers_without_data():
    ctx = Context()
    t = ctx.tensor(FORMATS["Q4_K"], 1 << 16, 1 << 16)  # 2 GB of data that are nowhere
    assert t.buffer is None
    with pytest.raises(AssertionError, match="has no memory yet"):
        t.array()


@pytest.mark.parametrize("size", [0, -5])
def test_empty_contexts(size):
    with pytest.raises(EngineError, match="can hold nothing"):
        Context(size)


@pytest.mark.parametrize("ne", [(), (1, 2, 3, 4, 5), (-1,)])
def test_impossible_shapes(ne):
    with pytest.raises(EngineError, match="one to four sizes, none negative"):
        Context().tensor(F32, *ne)


def test_a_contexts_tensors_move_to_one_buffer():
    ctx = Context()
    a, b = ctx.tensor(F32, 5, name="a"), ctx.tensor(FORMATS["Q8_0"], 64, 2)
    v = ops.view(ctx, a, (2,), (), 8)
    c = ctx.tensor(I32, 1)
    own = np.zeros(4, np.uint8)
    c.bind(own)
    buffer = allocate(ctx, "cpu")
    assert buffer.size == 64 + 192
    assert (a.offset, b.offset, v.offset) == (0, 64, 8)
    assert c.buffer is own
    assert (a.backend, v.backend, c.backend) == ("cpu", "cpu", None)
    a.array()[...] = np.arange(5)
    assert v.array().ravel().tolist() == [2, 3]


def test_two_by_three():
    """The address of an element is data + i * nb[0] + j * nb[1]; a transpose only swaps."""
    ctx = Context(1024, no_alloc=False)
    m = ctx.tensor(F32, 3, 2)
    t = ops.transpose(ctx, m)
    assert (m.ne[:2], m.nb[:2], t.ne[:2], t.nb[:2]) == ((3, 2), (4, 12), (2, 3), (12, 4))
    assert m.address + 1 * m.nb[0] == t.address + 1 * t.nb[1] == m.address + 4


def test_views_reach_the_root_in_one_hop_and_stay_inside():
    ctx = Context()
    a = ctx.tensor(F32, 8, 8)
    v = a
    for _ in range(5):
        v = ops.view(ctx, v, (v.ne[0] - 1, v.ne[1]), (32,), 4)
    assert v.view_src is a
    assert v.view_offs == 20
    with pytest.raises(EngineError, match="leaves the tensor"):
        ops.view(ctx, v, (4, 8), (32,), 4)
    with pytest.raises(EngineError, match="negative"):
        ops.view(ctx, a, (4, 8), (-32,), 4)
    with pytest.raises(EngineError, match="not whole blocks"):
        ops.view(ctx, ctx.tensor(FORMATS["Q8_0"], 64, 2), (33,), ())


def test_in_place_results_are_views():
    ctx = Context()
    a = ctx.tensor(F32, 4)
    y = ops.scale(ctx, a, 2.0, inplace=True)
    assert (y.view_src, y.op, y.is_empty_op) == (a, "SCALE", False)
    graph = Graph().expand(y)
    assert graph.nodes == [y]


def test_params_are_sixteen_at_most():
    ctx = Context()
    with pytest.raises(AssertionError):
        node(ctx, "SCALE", F32, (1,), (), tuple(range(17)))
    with pytest.raises(AssertionError):
        node(ctx, "SCALE", F32, (1,), (None,) * 11)


def test_flags_have_their_numbers():
    assert [int(f) for f in (Flag.INPUT, Flag.OUTPUT, Flag.PARAM, Flag.LOSS, Flag.COMPUTE)] == [1, 2, 4, 8, 16]


def test_a_parameter_is_listed_among_the_nodes():
    ctx = Context()
    w, x = ctx.tensor(F32, 4, name="w"), ctx.tensor(F32, 4, name="x")
    w.flags |= Flag.PARAM
    graph = Graph().expand(ops.mul(ctx, x, w))
    assert [t.name for t in graph.leafs] == ["x"]
    assert [t.name for t in graph.nodes] == ["w", "node_1"]


def test_header_size_bounds_a_python_header():
    assert HEADER_SIZE == 336
    assert not hasattr(Tensor(F32, (1,)), "__dict__")  # slots only: thousands of headers stay small
