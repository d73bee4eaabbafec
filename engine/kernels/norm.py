"""Kernel of engine/ops/norm.py."""

import numpy as np

from engine.kernels.node import floats, n_rows, ne, param_f32, row_address, share


def rms_norm(node, ith, nth, chunks):
    lo, hi = share(n_rows(node), ith, nth)
    n, eps = ne(node, 0, 0), param_f32(node, 0)
    for row in range(lo, hi):
        y, x = floats(row_address(node, 0, row), n), floats(row_address(node, 1, row), n)
        total = np.float32(0)
        for i in range(n):
            total += x[i] * x[i]
        factor = np.float32(1) / np.sqrt(total / np.float32(n) + eps)
        for i in range(n):
            y[i] = x[i] * factor
