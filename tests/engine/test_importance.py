"""What the collector sees of a graph: plain products, weights of several matrices, experts."""

from types import SimpleNamespace

import numpy as np

from engine.session import _observing
from quant.imatrix import IMatrix


def product(op: str, weight_ne: tuple[int, ...], x: np.ndarray, ids: np.ndarray | None = None):
    """A node as the evaluation callback gets it, with arrays in NumPy's order."""
    weight = SimpleNamespace(name="blk.0.w.weight", ne=weight_ne, op=None)
    inputs = SimpleNamespace(ne=x.shape[::-1], array=lambda: x)
    sources = [weight, inputs] + ([] if ids is None else [SimpleNamespace(array=lambda: ids)])
    return SimpleNamespace(op=op, src=sources)


def seen(node) -> IMatrix:
    m = IMatrix()

    def observe(name, x, ids=None, n_mat=1):
        if ids is None:
            m.observe(name, x, n_mat)
        else:
            m.observe_experts(name, x, ids, n_mat)

    callback = _observing(observe)
    assert callback(node, True)
    assert not m.entries, "a question is not an answer"
    assert callback(node, False)
    return m


X = np.random.default_rng(5).standard_normal((2, 3, 5, 8)).astype(np.float32)


def test_plain_products_flatten_their_inputs():
    entry = seen(product("MUL_MAT", (8, 4, 1, 1), X)).entries["blk.0.w.weight"]
    assert entry.counts.tolist() == [30]
    np.testing.assert_allclose(entry.squares[0], np.square(X.astype(float)).sum((0, 1, 2)), rtol=1e-6)


def test_weights_of_several_matrices():
    entry = seen(product("MUL_MAT", (8, 4, 3, 1), X)).entries["blk.0.w.weight"]
    assert entry.counts.tolist() == [10, 10, 10]
    np.testing.assert_allclose(entry.squares, np.square(X.astype(float)).sum((0, 2)), rtol=1e-6)


def test_experts():
    x, ids = X[:1, :, :2], np.array([[[[0, 3], [3, 1], [0, 1]]]], np.int32)  # three tokens of two slots, four experts
    entry = seen(product("MUL_MAT_ID", (8, 4, 4, 1), x, ids)).entries["blk.0.w.weight"]
    assert entry.counts.tolist() == [2, 2, 0, 2]
    want = np.square(x[0, 0, 1].astype(float)) + np.square(x[0, 1, 0].astype(float))
    np.testing.assert_allclose(entry.squares[3], want, rtol=1e-6)


def test_other_nodes_are_left_alone():
    node = product("MUL_MAT", (8, 4, 1, 1), X)
    node.src[0].op = "RESHAPE"  # no weight
    assert not _observing(lambda *_: None)(node, True)
    assert not _observing(lambda *_: None)(SimpleNamespace(op="ADD", src=[None]), True)
