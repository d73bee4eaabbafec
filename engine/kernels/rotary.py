"""Kernel of engine/ops/rotary.py. Threads share the tokens; sines and cosines are computed once a token."""

import numpy as np

from engine.kernels.node import data, element, floats, ints, ne, param, param_f32, share
from engine.ops import kinds
from quant.jit import kernel


@kernel
def _frequency(i, n_rot, base, freq_scale, low, high, share_of_ramp, factor):
    """Radians a position of pair i (see `frequencies` in engine/ops/rotary.py)."""
    inverse = np.float32(1.0 / base ** (2.0 * i / n_rot)) / factor
    ramp = 1.0 - min(1.0, max(0.0, (i - low) / max(0.001, high - low)))
    mix = np.float32(ramp * share_of_ramp)
    return inverse * (freq_scale * (np.float32(1) - mix) + mix)


@kernel
def _axis(i, kind, s0, s1, s2, s3):
    """Which of the four positions pair i takes."""
    if kind != kinds.ROPE_MROPE and kind != kinds.ROPE_IMROPE:
        return 0
    sector = i % (s0 + s1 + s2 + s3)
    if kind == kinds.ROPE_IMROPE:
        turn = sector % 3
        return turn if sector < 3 * (s0 if turn == 0 else s1 if turn == 1 else s2) else 3
    return 0 if sector < s0 else 1 if sector < s0 + s1 else 2 if sector < s0 + s1 + s2 else 3


def rope(node, ith, nth, chunks):
    n_tokens, n_head, n = ne(node, 0, 2), ne(node, 0, 1), ne(node, 0, 0)
    n_rot, kind, offset, factor = param(node, 0), param(node, 3), param(node, 4), param_f32(node, 8)
    half = n_rot // 2
    step, second = (2, 1) if kind == kinds.ROPE_NORMAL else (1, half)
    positions = ints(data(node, 2), ne(node, 2, 0))
    inverse, axis = np.empty(half, np.float32), np.empty(half, np.int64)
    for i in range(half):
        divisor = floats(data(node, 3), half)[i] if data(node, 3) != 0 else np.float32(1)
        inverse[i] = _frequency(
            i, n_rot, np.float64(param_f32(node, 1)), param_f32(node, 2), np.float64(param_f32(node, 5)),
            np.float64(param_f32(node, 6)), np.float64(param_f32(node, 7)), divisor,
        )  # fmt: skip
        axis[i] = _axis(i, kind, param(node, 9), param(node, 10), param(node, 11), param(node, 12))
    cos, sin = np.empty(half, np.float32), np.empty(half, np.float32)
    lo, hi = share(n_tokens * ne(node, 0, 3), ith, nth)
    for item in range(lo, hi):
        token, sequence = item % n_tokens, item // n_tokens
        for i in range(half):
            angle = np.float32(positions[token + axis[i] * n_tokens]) * inverse[i]
            cos[i], sin[i] = np.cos(angle) * factor, np.sin(angle) * factor
        for head in range(n_head):
            y, x = (
                floats(element(node, 0, head, token, sequence), n),
                floats(element(node, 1, head, token, sequence), n),
            )
            for i in range(offset):
                y[i] = x[i]
            for i in range(half):
                first = offset + i * step
                a, b = x[first], x[first + second]
                y[first] = a * cos[i] - b * sin[i]
                y[first + second] = a * sin[i] + b * cos[i]
            for i in range(offset + n_rot, n):
                y[i] = x[i]
