"""SOFT_MAX: of whole rows of scores, for graphs that hold them; ATTENTION does the same without holding them."""

from __future__ import annotations

import numpy as np

from engine.context import Context
from engine.ops.op import F16, F32, Op, need, need_rows, node, values
from engine.tensor import Tensor


def soft_max(
    ctx: Context,
    a: Tensor,
    mask: Tensor | None = None,
    scale: float = 1.0,
    max_bias: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(a * scale + slope * mask) along axis 0.

    a: [n, m, n_head, n_seq]; mask: float32 or float16 [n, m or more, b2, b3], repeated over heads and sequences;
    max_bias: 0, or the exponent of ALiBi, which gives each head its slope (Press et al. 2021, arXiv 2108.12409);
    sinks: float32 [n_head], a further score in each row's sum, without a column of its own.
    """
    need_rows("SOFT_MAX", a, sinks)
    if mask is not None:
        need(mask.format in (F32, F16) and mask.has_rows, "SOFT_MAX", "mask in float32 or float16", mask)
        need(mask.ne[0] == a.ne[0] and mask.ne[1] >= a.ne[1], "SOFT_MAX", "mask does not fit", a, mask)
        need(a.ne[2] % mask.ne[2] == 0 and a.ne[3] % mask.ne[3] == 0, "SOFT_MAX", "mask does not repeat", a, mask)
    need(max_bias == 0 or mask is not None, "SOFT_MAX", "a bias needs a mask", a)
    need(sinks is None or sinks.ne[0] == a.ne[2], "SOFT_MAX", "one sink a head", a, *([sinks] if sinks else []))
    return node(ctx, "SOFT_MAX", F32, a.ne, (a, mask, sinks), (float(scale), float(max_bias)))


def slopes(n_head: int, max_bias: float) -> np.ndarray:
    """ALiBi's factors of the mask, one a head: powers of 2^(-max_bias / n) for the largest power of two n <= n_head,
    and for the rest odd powers of its square root. All 1 without a bias. float32 [n_head]."""
    if max_bias <= 0:
        return np.ones(n_head, np.float32)
    n = 1 << (n_head.bit_length() - 1)
    head = np.arange(n_head)
    base, half = np.float32(2.0 ** (-max_bias / n)), np.float32(2.0 ** (-max_bias / 2 / n))
    return np.where(head < n, base ** (head + 1), half ** (2 * (head - n) + 1)).astype(np.float32)


def weights(scores: np.ndarray, sinks: np.ndarray | None) -> np.ndarray:
    """Softmax of the last axis of [n_seq, n_head, m, n]; a row that sees nothing gives zeros; sinks: [n_head]."""
    top = scores.max(-1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks[:, None, None])
    top = np.where(np.isinf(top), np.float32(0), top)
    e = np.exp(scores - top)
    total = e.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None] - top)
    return np.divide(e, total, out=np.zeros_like(e), where=total > 0)


def masked(scores: np.ndarray, mask: Tensor | None, max_bias: float) -> np.ndarray:
    """scores [n_seq, n_head, m, n] plus the mask, repeated, times each head's slope."""
    if mask is None:
        return scores
    extra = values(mask)[:, :, : scores.shape[2]]
    extra = np.tile(extra, (scores.shape[0] // extra.shape[0], scores.shape[1] // extra.shape[1], 1, 1))
    return scores + slopes(scores.shape[1], max_bias)[:, None, None] * extra


def _soft_max(n: Tensor) -> np.ndarray:
    a, mask, sinks = n.src
    scale, max_bias = n.params
    scores = masked(values(a) * np.float32(scale), mask, max_bias)
    return weights(scores, None if sinks is None else values(sinks)[0, 0, 0])


OPS = (Op("SOFT_MAX", _soft_max, "engine.kernels.softmax:soft_max", inplace=True),)
