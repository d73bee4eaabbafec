"""Kernels that turn rows of logits into per-token scores."""

import numpy as np

from engine.kernels.math import exp, row_max
from quant.jit import fast_inline, fast_kernel, kernel


@fast_inline
def log_sum_exp(x):
    """(max, log of the sum of e^(x - max)): exponentials in float32, their sum in float64."""
    top = row_max(x)
    total = 0.0
    for i in range(x.size):
        total += np.float64(exp(x[i] - top))
    return top, np.log(total)


@fast_kernel
def score_rows(logits, targets, nll):
    """nll[i] = -log softmax(logits[i])[targets[i]]; logits float32 [n, n_vocab], targets int, nll float64 [n]."""
    for i in range(logits.shape[0]):
        top, rest = log_sum_exp(logits[i])
        nll[i] = np.float64(top - logits[i, targets[i]]) + rest


_PIECE = 1024


@kernel
def _terms(p, q, shift, limit, offset, out):
    """out = e^(p - shift) * (p - q - offset) where p is above the limit, else 0; strict, so that p = q gives 0."""
    for j in range(p.size):
        weight = exp(p[j] - shift) if p[j] > limit else np.float32(0)
        out[j] = np.float64(weight) * (np.float64(p[j] - q[j]) - offset)


@fast_inline
def _sum(x):
    total = 0.0
    for j in range(x.size):
        total += x[j]
    return total


@kernel
def diverge_rows(base, logits, normalized, kld, same):
    """kld[i] = KL(softmax(base[i]) || softmax(logits[i])), same[i] = do both have the same most likely token.

    normalized: base[i] is a log-probability as it stands. Terms whose base log-probability is below -16 are left out,
    as the reference does. Equal rows give exactly 0.
    """
    n = base.shape[1]
    terms = np.empty(_PIECE, np.float64)
    for i in range(base.shape[0]):
        p, q = base[i], logits[i]
        top_p, rest_p = log_sum_exp(p)
        top_q, rest_q = log_sum_exp(q)
        norm = 0.0 if normalized else np.float64(top_p) + rest_p
        offset = norm - (np.float64(top_q) + rest_q)
        total = 0.0
        for lo in range(0, n, _PIECE):
            hi = min(n, lo + _PIECE)
            _terms(p[lo:hi], q[lo:hi], np.float32(norm), np.float32(norm - 16.0), offset, terms)
            total += _sum(terms[: hi - lo])
        kld[i] = total
        same[i] = _first_max(p, top_p) == _first_max(q, top_q)


@kernel
def _first_max(x, top):
    for j in range(x.size):
        if x[j] == top:
            return j
    return 0


@kernel
def encode_rows(logits, records):
    """Logits float32 [n, n_vocab] -> records uint16 [n, 4 + n_vocab (+ 1)] of llama.cpp's file of logits.

    A record is float32 scale, float32 smallest log-probability (16 below the largest logit at most), and per token
    round((x - smallest) / scale): log-probability = scale * q + smallest.
    """
    for i in range(logits.shape[0]):
        x = logits[i]
        top, rest = log_sum_exp(x)
        low = x[0]
        for j in range(x.size):
            low = min(low, x[j])
        low = max(low, np.float32(top - np.float32(16)))
        spread = np.float32(top - low)
        scale = np.float32(spread / np.float32(65535))
        smallest = np.float32(np.float32(low - top) - np.float32(rest))
        head = records[i, :4].view(np.float32)
        head[0] = scale
        head[1] = smallest
        inverse = np.float32(1) / scale if scale > 0 else np.float32(0)
        for j in range(x.size):
            above = np.float32(x[j] - low)
            records[i, 4 + j] = np.uint16(np.rint(np.float32(inverse * above))) if above > 0 else np.uint16(0)


@fast_kernel
def decode_rows(records, out):
    """Records as `encode_rows` writes them -> log-probabilities float32 [n, n_vocab]."""
    for i in range(out.shape[0]):
        head = records[i, :4].view(np.float32)
        scale, smallest = head[0], head[1]
        for j in range(out.shape[1]):
            out[i, j] = np.float32(scale * np.float32(records[i, 4 + j])) + smallest
