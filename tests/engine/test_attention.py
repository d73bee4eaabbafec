"""ATTENTION against the same thing written with single ops, and what its kernel asks for."""

import numpy as np
import pytest

from engine import ops
from engine.backends import get_backend
from engine.context import Context
from engine.graph import Graph
from engine.ops.attn import KEY_TILE, QUERY_TILE, scratch_floats, visible
from engine.ops.op import F16, F32
from engine.tensor import Flag

D, N_HEAD, N_HEAD_KV = 32, 6, 2


def heads(ctx, n, count, name):
    t = ctx.tensor(F32, D, n, count, name=name)
    t.flags |= Flag.INPUT
    return t


@pytest.mark.parametrize(("n_tokens", "n_kv"), [(1, 1), (1, 1000), (65, 65), (130, 700)])
@pytest.mark.parametrize("window", [0, 1, 40, 5000])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_online_softmax_equals_plain_softmax(n_tokens, n_kv, window, softcap):
    """Scores as a matrix, a mask, softmax, a product: in single ops on the same backend."""
    ctx = Context()
    q, k, v = heads(ctx, n_tokens, N_HEAD, "q"), heads(ctx, n_kv, N_HEAD_KV, "k"), heads(ctx, n_kv, N_HEAD_KV, "v")
    mask = ctx.tensor(F32, n_kv, n_tokens)
    mask.bind(np.where(visible(n_tokens, n_kv, window), 0, -np.inf).astype(np.float32).view(np.uint8).reshape(-1))
    fused = ops.attention(ctx, q, k, v, D**-0.5, window=window, softcap=softcap)
    scores = ops.mul_mat(ctx, k, ops.scale(ctx, q, D**-0.5))
    if softcap:
        scores = ops.scale(ctx, ops.tanh(ctx, ops.scale(ctx, scores, 1 / softcap)), softcap)
    found = ops.soft_max(ctx, scores, mask)
    columns = ops.cont(ctx, ops.transpose(ctx, v))
    plain = ops.cont(ctx, ops.permute(ctx, ops.mul_mat(ctx, columns, found), 0, 2, 1, 3))
    graph = Graph().expand(fused).expand(plain)
    for t in (fused, plain):
        t.flags |= Flag.OUTPUT
    executable = get_backend("cpu", 2).prepare(graph)
    rng = np.random.default_rng(n_kv)
    for t in (q, k, v):
        t.array()[...] = 3 * rng.standard_normal(t.shape)
    executable.run()
    np.testing.assert_allclose(fused.array(), plain.array(), atol=1e-4)


def test_scratch_does_not_grow_with_the_context():
    ctx = Context()
    q = ctx.tensor(F32, D, 4096, N_HEAD)

    def needed(n_kv, format=F32):
        k, v = (ctx.tensor(format, D, n_kv, N_HEAD_KV) for _ in range(2))
        return scratch_floats(ops.attention(ctx, q, k, v, 1.0))

    assert needed(4096) == needed(1 << 17) == QUERY_TILE * KEY_TILE + 2 * QUERY_TILE
    assert needed(4096, F16) == needed(4096) + 2 * KEY_TILE * D  # decoded tiles of keys and values
