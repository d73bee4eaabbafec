"""Headers, graph order, names, capacity; memory planning with its worked example."""

import shutil
import subprocess

import numpy as np
import pytest

from engine import EngineError, ops
from engine.alloc import Allocator, plan
from engine.backends import get_backend
from engine.backends.base import Executable
from engine.context import TENSOR_OVERHEAD, Context
from engine.graph import Graph
from engine.ops.op import F32, I32
from engine.tensor import Flag
from quant import FORMATS


def chain(ctx: Context, n: int = 2):
    """relu(W x + b)'s shape with the ops at hand: a product, a sum, a scaling."""
    w, x, b = ctx.tensor(F32, 3, n, name="W"), ctx.tensor(F32, 3, name="x"), ctx.tensor(F32, n, name="b")
    for leaf in (w, x, b):
        leaf.bind(np.zeros(leaf.nbytes, np.uint8))
    return ops.scale(ctx, ops.add(ctx, ops.mul_mat(ctx, w, x), b), 2.0)


def test_strides_are_ggmls():
    ctx = Context()
    t = ctx.tensor(F32, 3, 2)
    assert (t.ne, t.nb, t.shape) == ((3, 2, 1, 1), (4, 12, 24, 24), (1, 1, 2, 3))
    q = ctx.tensor(FORMATS["Q4_K"], 512, 3)
    assert q.nb == (144, 288, 864, 864)
    assert q.nbytes == 864
    with pytest.raises(EngineError, match="300 is not a multiple of 256"):
        ctx.tensor(FORMATS["Q4_K"], 300)


def test_views_point_to_the_root_and_share_its_data():
    ctx = Context()
    a = ctx.tensor(F32, 4, 6)
    a.bind(np.arange(24, dtype=np.float32).view(np.uint8))
    outer = ops.view(ctx, a, (4, 4), (16,), 16)
    inner = ops.view(ctx, outer, (2, 2), (16,), 8)
    assert inner.view_src is a
    assert inner.view_offs == 24
    inner.bind(a.buffer, inner.view_offs)
    assert inner.array()[0, 0].tolist() == [[6, 7], [10, 11]]


def test_expansion_is_depth_first_and_counts_uses():
    ctx = Context()
    out = chain(ctx)
    graph = Graph().expand(out)
    assert [n.op for n in graph.nodes] == ["MUL_MAT", "ADD", "SCALE"]
    assert [t.name for t in graph.leafs] == ["W", "x", "b"]
    assert [n.name for n in graph.nodes] == ["node_0", "node_1", "node_2"]
    assert [graph.use_counts.get(t, 0) for t in (*graph.leafs, *graph.nodes)] == [1, 1, 1, 1, 1, 0]
    twice = ops.add(ctx, out, out)
    graph.expand(twice)
    assert graph.use_counts[out] == 2
    assert len(graph.nodes) == 4


def test_dump_is_stable_and_uids_differ():
    one, two = (Graph().expand(chain(Context())) for _ in range(2))
    assert one.dump() == two.dump()
    assert one.uid != two.uid
    assert one.dump().splitlines()[1] == "%0 node_0: MUL_MAT(W, x) -> F32 2x1x1x1"


def test_deep_graphs_do_not_exhaust_the_stack():
    ctx = Context(1 << 24)
    t = ctx.tensor(F32, 1)
    for _ in range(5000):
        t = ops.scale(ctx, t, 1.0)
    assert len(Graph(5000).expand(t).nodes) == 5000
    with pytest.raises(EngineError, match="more than 4999 nodes"):
        Graph(4999).expand(t)


def test_context_counts_headers_and_ends():
    ctx = Context(2 * TENSOR_OVERHEAD)
    ctx.tensor(F32, 1)
    ctx.tensor(I32, 1)
    with pytest.raises(EngineError, match="needs 368 bytes, 0 of 736 are left"):
        ctx.tensor(F32, 1)
    ctx.reset()
    assert ctx.used == 0


def test_worked_example():
    """8 bytes each for W x, W x + b and the result: without in-place reuse the third sits where the first was."""
    graph = Graph().expand(chain(Context()))
    placed = plan(graph, alignment=8, inplace=False)
    assert [placed.offsets[n] for n in graph.nodes] == [0, 8, 0]
    assert (placed.size, placed.naive) == (16, 24)
    assert plan(graph, alignment=8).size == 8  # both sums can overwrite their source


def test_outputs_are_kept_and_not_overwritten():
    ctx = Context()
    a = ctx.tensor(F32, 4)
    a.flags |= Flag.INPUT
    first = ops.scale(ctx, a, 2.0)
    first.flags |= Flag.OUTPUT
    last = ops.scale(ctx, ops.scale(ctx, first, 3.0), 5.0)
    last.flags |= Flag.OUTPUT
    for name in ("reference", "cpu"):
        executable = get_backend(name, 1).prepare(Graph().expand(last))
        a.array()[...] = 1
        executable.run()
        assert first.array().ravel().tolist() == [2] * 4
        assert last.array().ravel().tolist() == [30] * 4


def lifetimes(graph):
    """(first, last) node index at which each planned root is alive."""
    index = {n: i for i, n in enumerate(graph.nodes)}
    alive = {}
    for i, node in enumerate(graph.nodes):
        for t in (node, *[s for s in node.src if s is not None]):
            root = t.view_src or t
            born = -1 if root.op is None else index[root]
            alive[root] = (born, max(alive.get(root, (0, i))[1], i))
    return alive


def test_no_two_live_tensors_share_memory():
    """On random graphs with views, in both modes: whatever is alive at the same time lies apart."""
    rng = np.random.default_rng(5)
    for trial in range(60):
        ctx = Context()
        pool = [ctx.tensor(F32, 8, 6) for _ in range(3)]
        for _ in range(30):
            a, b = (pool[rng.integers(len(pool))] for _ in range(2))
            kind = rng.integers(5)
            if kind == 0:
                pool.append(
                    ops.add(ctx, a, b) if a.ne == b.ne and a.is_contiguous and b.is_contiguous else ops.cont(ctx, a)
                )
            elif kind == 1:
                pool.append(ops.scale(ctx, a, 2.0) if a.is_float_rows else ops.cont(ctx, a))
            elif kind == 2:
                pool.append(ops.permute(ctx, a, 0, 2, 1, 3))
            elif kind == 3:
                pool.append(ops.cont(ctx, a))
            else:
                pool.append(ops.reshape(ctx, a, *a.ne) if a.is_contiguous else ops.cont(ctx, a))
        graph = Graph().expand(pool[-1])
        pool[-1].flags |= Flag.OUTPUT
        placed = plan(graph, 16, inplace=bool(trial % 2))
        alive = lifetimes(graph)
        roots = [t for t in alive if t in placed.offsets]
        for i, a in enumerate(roots):
            for b in roots[:i]:
                lo, hi = max(alive[a][0], alive[b][0]), min(alive[a][1], alive[b][1])
                apart = (
                    placed.offsets[a] + a.nbytes <= placed.offsets[b]
                    or placed.offsets[b] + b.nbytes <= placed.offsets[a]
                )
                # one may take over the other's memory at the node where the first is read last
                handed_over = placed.offsets[a] == placed.offsets[b] and lo == hi and trial % 2
                assert apart or lo > hi or handed_over, (trial, a, b)
        assert placed.size <= placed.naive


def test_threads_agree_over_many_nodes():
    """Chunks of one node must never be taken in the next: a race here shows as a wrong row, sooner or later."""
    wants = None
    for threads in (1, 2, 4):
        ctx = Context(1 << 24)
        x = start = ctx.tensor(F32, 64, 48)
        for _ in range(60):
            w = ctx.tensor(F32, 64, 64)
            w.bind((np.eye(64, dtype=np.float32) + 0.001).view(np.uint8).reshape(-1))
            x = ops.rms_norm(ctx, ops.mul_mat(ctx, w, x), 1e-5)
        x.flags |= Flag.OUTPUT
        executable = get_backend("cpu", threads).prepare(Graph(4096).expand(x))
        values = np.random.default_rng(4).standard_normal((48, 64)).astype(np.float32)
        for _ in range(30):
            start.array()[...] = values
            executable.run()
            got = x.array().copy()
            wants = got if wants is None else wants
            np.testing.assert_allclose(got, wants, rtol=1e-4, atol=1e-5)


def test_unknown_backend():
    with pytest.raises(EngineError, match="there are: cpu, reference"):
        get_backend("cuda")


def test_unused_branches_keep_their_place_and_rest():
    """Whichever branch is chosen, the graph has the same nodes, and one plan serves both."""
    cpu = get_backend("cpu", 1)
    allocator = Allocator((cpu.memory,))
    for choice, want in ((0, 5), (1, 10), (0, 5)):
        ctx, graph = Context(), Graph()
        x = ctx.tensor(F32, 4)
        x.flags |= Flag.INPUT
        chosen = graph.select([ops.scale(ctx, x, 1.0), ops.scale(ctx, x, 2.0)], choice)
        result = ops.scale(ctx, chosen, 5.0)
        result.flags |= Flag.OUTPUT
        graph.expand(result)
        assert [bool(n.flags & Flag.COMPUTE) for n in graph.nodes] == [choice == 0, choice == 1, True]
        executable = Executable(graph, cpu, allocator=allocator)
        assert [t for step in executable.program.steps for t in step.nodes] == [chosen, result]
        x.array()[...] = 1
        executable.run()
        assert result.array().ravel().tolist() == [want] * 4
    assert (allocator.planned, allocator.reapplied) == (1, 2)


def test_sources_can_be_visited_from_the_right():
    ctx = Context()
    a, b = (ctx.tensor(F32, 4, name=n) for n in "ab")
    total = ops.add(ctx, ops.scale(ctx, a, 1.0), ops.relu(ctx, b))
    assert [n.op for n in Graph().expand(total).nodes] == ["SCALE", "UNARY", "ADD"]
    assert [n.op for n in Graph(right_first=True).expand(total).nodes] == ["UNARY", "SCALE", "ADD"]


def test_leafs_are_bounded_too():
    ctx = Context()
    leafs = [ctx.tensor(F32, 4) for _ in range(3)]
    with pytest.raises(EngineError, match="more than 2 leafs"):
        Graph(2).expand(ops.add(ctx, ops.add(ctx, leafs[0], leafs[1]), leafs[2]))


def test_a_part_keeps_nodes_and_counts():
    graph = Graph().expand(chain(Context()))
    part = graph.part(1, 3)
    assert part.nodes == graph.nodes[1:]
    assert part.use_counts is graph.use_counts
    assert part.uid != graph.uid


def test_graphviz():
    ctx = Context()
    out = ops.scale(ctx, ops.reshape(ctx, chain(ctx, 4), 2, 2), 3.0)
    out.flags |= Flag.OUTPUT
    out.name = 'the "end"'
    text = Graph().expand(out).dot()
    assert text.startswith("digraph graph_ {")
    assert text.count("->") == 2 + 2 + 1 + 1 + 1
    assert '\\"end\\"' in text
    assert text.count("peripheries=2") == 1
    if dot := shutil.which("dot"):
        drawn = subprocess.run([dot, "-Tsvg"], input=text, capture_output=True, text=True, check=True).stdout
        assert "the &quot;end&quot;" in drawn


def test_leaf_data_may_change_between_runs():
    """Nothing is rebuilt when only numbers change; before a run there are none."""
    ctx = Context()
    w = ctx.tensor(F32, 2)
    w.bind(np.ones(2, np.float32).view(np.uint8))
    y = ops.scale(ctx, w, 3.0)
    y.flags |= Flag.OUTPUT
    assert y.buffer is None
    executable = get_backend("cpu", 1).prepare(Graph().expand(y))
    for value in (1, 7):
        w.array()[...] = value
        executable.run()
        assert y.array().ravel().tolist() == [3 * value] * 2
