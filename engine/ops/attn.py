"""ATTENTION: scaled dot-product attention of grouped heads in one op, without a matrix of all scores in memory."""

from __future__ import annotations

import numpy as np

from engine.context import Context
from engine.ops.op import F32, Op, need, node, values
from engine.tensor import Tensor

QUERY_TILE = 64  # queries whose scores are held at a time


def attention(ctx: Context, q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """softmax(q k^T * scale + mask) v for every head and sequence (Vaswani et al. 2017, arXiv 1706.03762).

    q: [d, n_tokens, n_head, n_seq]; k: [d, n_kv, n_head_kv, n_seq]; v: [dv, n_kv, n_head_kv, n_seq], float32 rows of
    any strides; n_head is a multiple of n_head_kv. mask: float32 [n_kv, n_tokens], added to the scores; without one the
    attention is causal: token i sees keys 0 .. i + n_kv - n_tokens. Returns [dv, n_head, n_tokens, n_seq].
    """
    need(all(t.is_float_rows for t in (q, k, v)), "ATTENTION", "float32 rows only", q, k, v)
    need(q.ne[0] == k.ne[0] and k.ne[1:] == v.ne[1:], "ATTENTION", "keys do not fit", q, k, v)
    need(q.ne[2] % k.ne[2] == 0 and q.ne[3] == k.ne[3], "ATTENTION", "heads do not repeat", q, k)
    need(k.ne[1] >= q.ne[1], "ATTENTION", "fewer keys than queries", q, k)
    if mask is not None:
        need(mask.is_float_rows and mask.ne[:2] == (k.ne[1], q.ne[1]), "ATTENTION", "mask does not fit", mask, q, k)
    return node(ctx, "ATTENTION", F32, (v.ne[0], q.ne[2], q.ne[1], q.ne[3]), (q, k, v, mask), (float(scale),))


def _attention(n: Tensor) -> np.ndarray:
    q, k, v = (values(t) for t in n.src[:3])
    n_tokens, n_kv = q.shape[2], k.shape[2]
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scores = np.matmul(q, k.swapaxes(-1, -2)) * np.float32(n.params[0])
    if n.src[3] is not None:
        scores = scores + values(n.src[3])[0, 0]
    else:
        hidden = np.arange(n_kv)[None, :] > np.arange(n_tokens)[:, None] + (n_kv - n_tokens)
        scores = np.where(hidden, np.float32(-np.inf), scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.matmul(weights, v).swapaxes(1, 2)


def _scratch(n: Tensor, threads: int) -> int:
    return threads * min(QUERY_TILE, n.src[0].ne[1]) * n.src[1].ne[1] * 4


OPS = (Op("ATTENTION", _attention, "engine.kernels.attn:attention", scratch=_scratch),)
