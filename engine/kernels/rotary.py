"""Kernel of engine/ops/rotary.py. Threads share the tokens; sines and cosines are computed once a token."""

import numpy as np
from numba import carray

from engine.kernels.node import data, floats, nb, ne, param, param_f32, pointer, share


def rope(node, ith, nth, chunks):
    n_tokens, n_head = ne(node, 0, 2), ne(node, 0, 1)
    n, n_rot = ne(node, 0, 0), param(node, 0)
    base, freq_scale, neox = np.float64(param_f32(node, 1)), param_f32(node, 2), param(node, 3)
    half = n_rot // 2
    step, second = (1, half) if neox else (2, 1)
    positions = carray(pointer(data(node, 2)), (n_tokens,), np.int32)
    factors = data(node, 3)
    inverse = np.empty(half, np.float32)
    for i in range(half):
        inverse[i] = np.float32(1.0 / base ** (np.float64(2 * i) / n_rot))
        if factors != 0:
            inverse[i] /= floats(factors, half)[i]
        inverse[i] *= freq_scale
    cos, sin = np.empty(half, np.float32), np.empty(half, np.float32)
    lo, hi = share(n_tokens * ne(node, 0, 3), ith, nth)
    for item in range(lo, hi):
        token, sequence = item % n_tokens, item // n_tokens
        for i in range(half):
            angle = np.float32(positions[token]) * inverse[i]
            cos[i], sin[i] = np.cos(angle), np.sin(angle)
        for head in range(n_head):
            y = floats(data(node, 0) + head * nb(node, 0, 1) + token * nb(node, 0, 2) + sequence * nb(node, 0, 3), n)
            x = floats(data(node, 1) + head * nb(node, 1, 1) + token * nb(node, 1, 2) + sequence * nb(node, 1, 3), n)
            for i in range(half):
                a, b = x[i * step], x[i * step + second]
                y[i * step] = a * cos[i] - b * sin[i]
                y[i * step + second] = a * sin[i] + b * cos[i]
            for i in range(n_rot, n):
                y[i] = x[i]
