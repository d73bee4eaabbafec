"""Fusion: what is merged, what is not, and that results are the same bits."""

import numpy as np
import pytest

from engine import ops
from engine.backends.cpu import CpuBackend
from engine.context import Context
from engine.graph import Graph
from engine.ops.op import F32
from engine.tensor import Flag


@pytest.fixture(scope="module")
def backends():
    pair = {fuse: CpuBackend(2, fuse=fuse) for fuse in (True, False)}
    yield pair
    for backend in pair.values():
        backend.close()


class Inputs:
    def __init__(self):
        self.ctx, self.rng, self.values = Context(), np.random.default_rng(3), []

    def __call__(self, *ne):
        t = self.ctx.tensor(F32, *ne)
        t.flags |= Flag.INPUT
        self.values.append((t, self.rng.standard_normal(t.shape).astype(np.float32)))
        return t


def norm_weight(i, rows=1):
    return ops.mul(i.ctx, ops.rms_norm(i.ctx, i(96, 7), 1e-5), i(96, rows))


def sum_norm_weight(i):
    total = ops.add(i.ctx, i(96, 7), i(96, 7))
    return ops.add(i.ctx, ops.mul(i.ctx, ops.rms_norm(i.ctx, total, 1e-5), i(96)), total)  # the sum is read later too


def residual_in_place(i):
    total = ops.add(i.ctx, ops.scale(i.ctx, i(96, 7), 2.0), i(96, 7))
    return ops.mul(i.ctx, ops.rms_norm(i.ctx, total, 1e-5), i(96))


def gated(kind):
    return lambda i: ops.mul(i.ctx, ops.unary(i.ctx, kind, i(96, 7)), i(96, 7))


FUSED = {
    "norm and weight": (norm_weight, 1),
    "norm and a full factor": (lambda i: norm_weight(i, 7), 1),
    "weight first": (lambda i: (lambda w, n: ops.mul(i.ctx, w, n))(i(96, 7), ops.rms_norm(i.ctx, i(96, 7), 1e-5)), 1),
    "sum, norm and weight": (sum_norm_weight, 2),
    "sum in place": (residual_in_place, 2),
    **{f"{kind} and up": (gated(kind), 1) for kind in ("silu", "gelu", "relu", "gelu_erf", "gelu_quick")},
}


def marked(i):
    n = ops.rms_norm(i.ctx, i(96, 7), 1e-5)
    n.flags |= Flag.OUTPUT
    return ops.mul(i.ctx, n, i(96))


def read_twice(i):
    n = ops.rms_norm(i.ctx, i(96, 7), 1e-5)
    return ops.add(i.ctx, ops.mul(i.ctx, n, i(96)), n)


def apart(i):
    n = ops.rms_norm(i.ctx, i(96, 7), 1e-5)
    return ops.mul(i.ctx, n, ops.scale(i.ctx, i(96), 2.0))


SINGLE = {
    "the norm is an output": marked,
    "the norm is read twice": read_twice,
    "another node between": apart,
    "one number a row": lambda i: ops.mul(i.ctx, ops.rms_norm(i.ctx, i(96, 7), 1e-5), i(1, 7)),
    "the norm by itself": lambda i: (lambda n: ops.mul(i.ctx, n, n))(ops.rms_norm(i.ctx, i(96, 7), 1e-5)),
    "a view between": lambda i: ops.mul(
        i.ctx, ops.reshape(i.ctx, ops.rms_norm(i.ctx, i(96, 4), 1e-5), 48, 8), i(48, 8)
    ),
    "no gate": lambda i: ops.mul(i.ctx, ops.unary(i.ctx, "abs", i(96, 7)), i(96, 7)),
}


def run(backend, build):
    inputs = Inputs()
    result = build(inputs)
    result.flags |= Flag.OUTPUT
    executable = backend.prepare(Graph().expand(result))
    for tensor, values in inputs.values:
        tensor.array()[...] = values
    executable.run()
    return result.array().copy(), executable.program.fused


@pytest.mark.parametrize("name", FUSED)
def test_fused_and_single_give_the_same_bits(backends, name):
    build, merged = FUSED[name]
    (got, count), (want, none) = run(backends[True], build), run(backends[False], build)
    assert (count, none) == (merged, 0)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", SINGLE)
def test_what_must_not_be_merged(backends, name):
    (got, count), (want, _) = run(backends[True], SINGLE[name]), run(backends[False], SINGLE[name])
    assert count == 0
    np.testing.assert_array_equal(got, want)


def test_memory_that_overlaps_is_not_merged(backends):
    """Without in-place reuse the product may lie where the norm's source was, at another offset."""
    from engine.alloc import Allocator
    from engine.backends.base import Executable

    results = {}
    for inplace in (True, False):
        i = Inputs()
        big = ops.norm(i.ctx, ops.pad(i.ctx, i(96, 7), 0, 9), 1e-5)
        x = ops.view(i.ctx, big, (96, 7), (384,), 384 * 3)
        y = ops.mul(i.ctx, ops.rms_norm(i.ctx, x, 1e-5), i(96))
        y.flags |= Flag.OUTPUT
        cpu = backends[True]
        executable = Executable(Graph().expand(y), cpu, allocator=Allocator((cpu.memory,), inplace))
        for tensor, values in i.values:
            tensor.array()[...] = values
        executable.run()
        results[inplace] = y.array().copy()
    np.testing.assert_array_equal(results[True], results[False])


def test_callbacks_see_every_node(backends):
    inputs = Inputs()
    result = sum_norm_weight(inputs)
    executable = backends[True].prepare(Graph().expand(result))
    for tensor, values in inputs.values:
        tensor.array()[...] = values
    seen = []
    executable.run(lambda node, ask: ask or seen.append(node.op))
    assert seen == ["ADD", "RMS_NORM", "MUL", "ADD"]


def test_a_model_is_fused_and_gives_the_same_logits(tiny):
    import gguftools

    ids = list(range(300, 340))
    logits = []
    for fuse in (True, False):
        session = gguftools.load(tiny["bf16"], CpuBackend(2, fuse=fuse))
        logits.append(session.logits(ids))
        fused = session.prepared_body(1, len(ids)).executable.program.fused
        # two norms a layer and one at the end, each but the first with the sum before it unless memory is in the way
        most = (2 * session.hparams.n_layer + 1) * 2 - 1
        assert most - 2 <= fused <= most if fuse else fused == 0
    np.testing.assert_array_equal(*logits)
