"""Kernels of engine/ops/norms.py, and RMS_NORM fused with its neighbours (engine/fusion.py)."""

import numpy as np

from engine.kernels.math import dot
from engine.kernels.node import data, floats, n_rows, ne, param, param_f32, row_address, share
from quant.jit import fast_inline, kernel


@kernel
def _product(x, factor, w):
    """(x * factor) * w, rounded twice, as the two ops would."""
    return x * factor * w


@kernel
def _sum(a, b):
    return a + b


def rms_norm(node, ith, nth, chunks):
    """Sources: x; then, where ops are fused, the weight; the addend; and the place of x + addend, which is a result
    too. One compiled function for all, so that fused and single ops agree to the last bit."""
    lo, hi = share(n_rows(node), ith, nth)
    n, eps = ne(node, 0, 0), param_f32(node, 0)
    for row in range(lo, hi):
        y, source = floats(row_address(node, 0, row), n), row_address(node, 1, row)
        if data(node, 3) != 0:
            x, addend = floats(source, n), floats(row_address(node, 3, row), n)
            source = row_address(node, 4, row)
            total = floats(source, n)
            for i in range(n):
                total[i] = _sum(x[i], addend[i])
        x = floats(source, n)
        factor = np.float32(1) / np.sqrt(dot(x, x) / np.float32(n) + eps)
        if data(node, 2) == 0:
            for i in range(n):
                y[i] = x[i] * factor
        else:
            w = floats(row_address(node, 2, row), n)
            for i in range(n):
                y[i] = _product(x[i], factor, w[i])


@fast_inline
def _total(x):
    total = np.float32(0)
    for i in range(x.size):
        total += x[i]
    return total


def norm(node, ith, nth, chunks):
    lo, hi = share(n_rows(node), ith, nth)
    n, eps = ne(node, 0, 0), param_f32(node, 0)
    for row in range(lo, hi):
        y, x = floats(row_address(node, 0, row), n), floats(row_address(node, 1, row), n)
        mean = _total(x) / np.float32(n)
        for i in range(n):
            y[i] = x[i] - mean
        factor = np.float32(1) / np.sqrt(dot(y, y) / np.float32(n) + eps)
        for i in range(n):
            y[i] *= factor


def l2_norm(node, ith, nth, chunks):
    lo, hi = share(n_rows(node), ith, nth)
    n, eps = ne(node, 0, 0), param_f32(node, 0)
    for row in range(lo, hi):
        y, x = floats(row_address(node, 0, row), n), floats(row_address(node, 1, row), n)
        factor = np.float32(1) / max(np.sqrt(dot(x, x)), eps)
        for i in range(n):
            y[i] = x[i] * factor


def group_norm(node, ith, nth, chunks):
    groups, eps = param(node, 0), param_f32(node, 1)
    n, n1, depth = ne(node, 0, 0), ne(node, 0, 1), ne(node, 0, 2) // groups
    lo, hi = share(groups * ne(node, 0, 3), ith, nth)
    rows = n1 * depth
    for item in range(lo, hi):
        first = item * rows  # rows of a group lie one after another in the order of rows
        total = np.float64(0)
        for row in range(first, first + rows):
            total += np.float64(_total(floats(row_address(node, 1, row), n)))
        mean = np.float32(total / (rows * n))
        total = np.float64(0)
        for row in range(first, first + rows):
            y, x = floats(row_address(node, 0, row), n), floats(row_address(node, 1, row), n)
            for i in range(n):
                y[i] = x[i] - mean
            total += np.float64(dot(y, y))
        factor = np.float32(1) / np.sqrt(np.float32(total / (rows * n)) + eps)
        for row in range(first, first + rows):
            y = floats(row_address(node, 0, row), n)
            for i in range(n):
                y[i] *= factor
