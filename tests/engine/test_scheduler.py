"""One graph over two backends: assignment, splits, copies, the ring of inputs, fallback."""

import numpy as np
import pytest

import gguftools
from engine import EngineError, ops
from engine.backends import Status, get_backend
from engine.context import Context
from engine.graph import Graph
from engine.ops.op import F32
from engine.scheduler import Scheduler, by_layer
from engine.tensor import Flag


@pytest.fixture(scope="module")
def cpu():
    return get_backend("cpu", 2)


@pytest.fixture
def both(cpu):
    return Scheduler([cpu, get_backend("reference")])


def weight(ctx, *ne, backend=None, seed=0):
    t = ctx.tensor(F32, *ne)
    t.bind(np.random.default_rng(seed).standard_normal(t.shape).astype(np.float32).view(np.uint8).reshape(-1))
    t.backend = backend
    return t


def chain(backends, n=8):
    """A product for each name, with a weight that lives there; then a sum with the input."""
    ctx = Context()
    x = y = ctx.tensor(F32, n, 4, name="x")
    x.flags |= Flag.INPUT
    for i, backend in enumerate(backends):
        y = ops.scale(ctx, ops.mul_mat(ctx, weight(ctx, n, n, backend=backend, seed=i), y), 0.5)
    y = ops.add(ctx, y, x)
    y.flags |= Flag.OUTPUT
    return x, y, Graph().expand(y)


def answer(x, backends):
    y, n = x, x.shape[-1]
    for i in range(len(backends)):
        w = np.random.default_rng(i).standard_normal((n, n)).astype(np.float32)
        y = y @ w.T * np.float32(0.5)
    return y + x


def test_nodes_follow_their_weights_and_neighbours(both):
    _, _, graph = chain(["cpu", "reference"])
    where = both.assign(graph)
    assert [where[n] for n in graph.nodes] == [0, 0, 1, 1, 1]
    splits = both.split(graph, where)
    assert [(s.backend, s.first, s.last) for s in splits] == [(0, 0, 2), (1, 2, 5)]
    assert [[t.name for t in s.inputs] for s in splits] == [["x"], ["node_1"]]


@pytest.mark.parametrize("backends", [["cpu", "reference"], ["reference", "cpu"], ["cpu", "reference", "cpu"], [None]])
def test_results_do_not_depend_on_the_split(both, backends):
    x, y, graph = chain(backends)
    schedule = both.allocate(graph)
    for seed in range(3):
        values = np.random.default_rng(seed).standard_normal((4, 8)).astype(np.float32)
        x.array()[...] = values
        assert schedule.run() is Status.SUCCESS
        np.testing.assert_allclose(y.array()[0, 0], answer(values, backends), rtol=1e-5, atol=1e-5)


def test_unplaced_weights_leave_one_split(both):
    """What everybody reads goes to the backend of highest priority; only the input comes from the last one."""
    _, _, graph = chain([None, None])
    schedule = both.allocate(graph)
    assert [s.backend for s in schedule.splits] == [0]
    assert [t.name for t in schedule.splits[0].inputs] == ["x"]


def test_a_caller_can_say_where(both):
    _, _, graph = chain([None, None])
    both.set_backend(graph.nodes[2], "reference")
    assert both.assign(graph)[graph.nodes[2]] == 1
    both.reset()
    assert both.assign(graph)[graph.nodes[2]] == 0
    with pytest.raises(EngineError, match="no backend 'cuda' in this scheduler; it has: cpu, reference"):
        both.set_backend(graph.nodes[2], "cuda")


def test_graphs_of_one_shape_share_a_plan(both):
    for _ in range(3):
        _, _, graph = chain(["cpu", "reference"])
        both.allocate(graph)
    allocator = both._allocator
    assert (allocator.planned, allocator.reapplied) == (1, 2)


class Narrow:
    """A backend that lacks an op."""

    def __init__(self, inner, lacks):
        self.name, self.memory, self.compile = "narrow", inner.memory, inner.compile
        self._inner, self._lacks = inner, lacks

    def supports(self, node):
        return node.op != self._lacks and self._inner.supports(node)


def test_an_op_that_a_backend_lacks_runs_elsewhere(cpu):
    scheduler = Scheduler([Narrow(cpu, "SCALE"), get_backend("reference")])
    x, y, graph = chain([None, None])
    schedule = scheduler.allocate(graph)
    assert [schedule.where[n] for n in graph.nodes[:2]] == [0, 1]
    x.array()[...] = 1
    schedule.run()
    np.testing.assert_allclose(y.array()[0, 0], answer(np.ones((4, 8), np.float32), [0, 0]), rtol=1e-5)
    with pytest.raises(EngineError, match="no backend of narrow can compute"):
        Scheduler([Narrow(cpu, "SCALE")]).allocate(chain([None])[2])


def test_inputs_can_be_written_while_a_run_is_under_way(cpu):
    scheduler = Scheduler([cpu, get_backend("reference")], parallel=True)
    x, _, graph = chain(["reference", "cpu"])
    schedule = scheduler.allocate(graph)
    names = [c.name for c in schedule._slots[2].copies[0].values()]
    assert names == ["reference#x#2"]
    got = []
    for value in range(1, 9):
        x.array()[...] = value
        schedule.run_async(lambda node, ask: (not ask and got.append(node.array().copy())) or node.op == "ADD")
        x.array()[...] = np.nan  # the run has its own copy
    assert schedule.synchronize() is Status.SUCCESS
    for value, result in zip(range(1, 9), got, strict=True):
        np.testing.assert_allclose(result[0, 0], answer(np.full((4, 8), value, np.float32), [0, 0]), rtol=1e-5)


def test_errors_and_ends_of_a_run_in_the_background(cpu):
    scheduler = Scheduler([cpu, get_backend("reference")])
    x, _, graph = chain(["reference", "cpu"])
    schedule = scheduler.allocate(graph)
    x.array()[...] = 1
    schedule.run_async(abort=lambda: True)
    assert schedule.synchronize() is Status.ABORTED

    def fail(node, ask):
        raise KeyError("observer")

    schedule.run_async(fail)
    with pytest.raises(KeyError, match="observer"):
        schedule.synchronize()


@pytest.mark.parametrize("order", [("cpu", "reference"), ("reference", "cpu")])
def test_half_a_model_on_each_backend(tiny, data, cpu, order):
    expected = np.load(data / "tiny" / "expected.npz")
    backends = {"cpu": cpu, "reference": get_backend("reference")}
    session = gguftools.load(tiny["f32"], backend=Scheduler([backends[name] for name in order]))
    rule = by_layer(order)
    for name, tensor in session.weights.items():
        tensor.backend = rule(name, session.hparams.n_layer)
    seen = []
    logits = session.logits(expected["ids0"])
    np.testing.assert_allclose(logits[expected["rows0"]], expected["logits0"], atol=1e-4)
    session.hidden(expected["ids0"][None], observe=lambda name, x: seen.append(name))
    assert len(seen) == 7 * session.hparams.n_layer
    schedule = session.prepared_body(1, len(expected["ids0"])).executable
    used = [schedule.scheduler.backends[s.backend].name for s in schedule.splits]
    assert set(used) == {"cpu", "reference"}
    assert len(used) <= 4
    assert schedule.copied > 0


def test_bad_schedulers(cpu):
    with pytest.raises(EngineError, match="needs 1 to 16 backends"):
        Scheduler([])
    with pytest.raises(EngineError, match="two backends have one name"):
        Scheduler([cpu, cpu])
