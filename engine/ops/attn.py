"""ATTENTION: scaled dot-product attention of grouped heads in one op, without a matrix of all scores in memory.

The kernel goes through the keys in tiles and keeps, for each query, the largest score so far, the sum of exponentials
and the weighted sum of values; a larger score rescales them (online softmax: Milakov and Gimelshein 2018, arXiv
1805.02867; Dao et al. 2022, arXiv 2205.14135). The definition below does it at once.
"""

from __future__ import annotations

import numpy as np

from engine.context import Context
from engine.ops.op import F16, F32, Op, need, need_rows, node, values
from engine.ops.softmax import masked, weights
from engine.tensor import Tensor

QUERY_TILE, KEY_TILE = 64, 256  # scores that are held at a time
FEW = 4  # queries that are not worth a product of matrices: each key is decoded once for all heads that share it


def attention(
    ctx: Context,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    mask: Tensor | None = None,
    *,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
    max_bias: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(cap(q k^T * scale) + mask) v for every head and sequence (Vaswani et al. 2017, arXiv 1706.03762).

    q: float32 [d, n_tokens, n_head, n_seq]; k: [d, n_kv, n_head_kv, n_seq]; v: [dv, n_kv, n_head_kv, n_seq], rows of
    any format with any strides; n_head is a multiple of n_head_kv. Returns float32 [dv, n_head, n_tokens, n_seq].

    mask: float32 or float16 [n_kv, n_tokens or more, heads, sequences], added to the scores (times ALiBi's slope with
    max_bias); the last two axes repeat. Without a mask, `causal` token i, which is key i + n_kv - n_tokens, sees no
    later key, and with a window > 0 only the last `window` keys up to its own. softcap > 0 bounds scores:
    softcap * tanh(score / softcap). sinks: float32 [n_head], a further score in each sum that has no value.
    A query that sees nothing gives zeros.
    """
    need(q.is_float_rows and k.has_rows and v.has_rows, "ATTENTION", "whole rows, float32 queries", q, k, v)
    need(q.ne[0] == k.ne[0] and k.ne[1:] == v.ne[1:], "ATTENTION", "keys do not fit", q, k, v)
    need(q.ne[2] % k.ne[2] == 0 and q.ne[3] == k.ne[3], "ATTENTION", "heads do not repeat", q, k)
    if mask is not None:
        need(mask.format in (F32, F16) and mask.has_rows, "ATTENTION", "mask in float32 or float16", mask)
        need(mask.ne[0] == k.ne[1] and mask.ne[1] >= q.ne[1], "ATTENTION", "mask does not fit", mask, q, k)
        need(q.ne[2] % mask.ne[2] == 0 and q.ne[3] % mask.ne[3] == 0, "ATTENTION", "mask does not repeat", mask, q)
        need(window == 0, "ATTENTION", "a mask has its own window", mask)
        causal = False
    else:
        need(not causal or k.ne[1] >= q.ne[1], "ATTENTION", "fewer keys than queries", q, k)
        need(window == 0 or causal, "ATTENTION", "a window looks back from causal queries only; use a mask", q, k)
    need(window >= 0 and softcap >= 0, "ATTENTION", "negative window or cap", q)
    need(max_bias == 0 or mask is not None, "ATTENTION", "a bias needs a mask", q)
    if sinks is not None:
        need_rows("ATTENTION", sinks)
        need(sinks.ne[0] == q.ne[2], "ATTENTION", "one sink a head", q, sinks)
    params = (float(scale), int(causal), int(window), float(softcap), float(max_bias))
    return node(ctx, "ATTENTION", F32, (v.ne[0], q.ne[2], q.ne[1], q.ne[3]), (q, k, v, mask, sinks), params)


def visible(n_tokens: int, n_kv: int, window: int) -> np.ndarray:
    """Which keys each causal query sees: bool [n_tokens, n_kv]."""
    own = np.arange(n_tokens)[:, None] + (n_kv - n_tokens)
    key = np.arange(n_kv)[None, :]
    return (key <= own) & ((key > own - window) if window else True)


def _attention(n: Tensor) -> np.ndarray:
    q, k, v = (values(t) for t in n.src[:3])
    mask, sinks = n.src[3], n.src[4]
    scale, causal, window, softcap, max_bias = n.params
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scores = np.matmul(q, k.swapaxes(-1, -2)) * np.float32(scale)
    if softcap:
        scores = np.float32(softcap) * np.tanh(scores / np.float32(softcap))
    if causal:
        scores = np.where(visible(q.shape[2], k.shape[2], window), scores, np.float32(-np.inf))
    scores = masked(scores, mask, max_bias)
    found = weights(scores, None if sinks is None else values(sinks)[0, 0, 0])
    return np.matmul(found, v).swapaxes(1, 2)


def scratch_floats(n: Tensor) -> int:
    """float32 that one thread needs: a tile of scores, two numbers a query, and decoded tiles of keys and values where
    these are not float32; for few queries scores and numbers of a group of heads, and one decoded row."""
    q, k, v = n.src[:3]
    queries, keys = min(QUERY_TILE, q.ne[1]), min(KEY_TILE, k.ne[1])
    if q.ne[1] <= FEW:
        return q.ne[2] // k.ne[2] * (keys + 2) + max(k.ne[0], v.ne[0])
    decoded = sum(keys * t.ne[0] for t in (k, v) if t.format is not F32)
    return queries * keys + 2 * queries + decoded


OPS = (
    Op(
        "ATTENTION",
        _attention,
        "engine.kernels.attn:attention",
        scratch=lambda n, threads: threads * 4 * scratch_floats(n),
    ),
)
