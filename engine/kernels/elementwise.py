"""Kernels of engine/ops/elementwise.py, and CONT's."""

from engine.kernels.math import silu
from engine.kernels.node import floats, load_f32, n_rows, nb, ne, param_f32, row_address, share


def add(node, ith, nth, chunks):
    lo, hi = share(n_rows(node), ith, nth)
    n, period = ne(node, 0, 0), ne(node, 2, 0)
    for row in range(lo, hi):
        out, a, b = row_address(node, 0, row), row_address(node, 1, row), row_address(node, 2, row)
        for start in range(0, n, period):
            y, v, w = floats(out + 4 * start, period), floats(a + 4 * start, period), floats(b, period)
            for i in range(period):
                y[i] = v[i] + w[i]


def mul(node, ith, nth, chunks):
    lo, hi = share(n_rows(node), ith, nth)
    n, period = ne(node, 0, 0), ne(node, 2, 0)
    for row in range(lo, hi):
        out, a, b = row_address(node, 0, row), row_address(node, 1, row), row_address(node, 2, row)
        for start in range(0, n, period):
            y, v, w = floats(out + 4 * start, period), floats(a + 4 * start, period), floats(b, period)
            for i in range(period):
                y[i] = v[i] * w[i]


def scale(node, ith, nth, chunks):
    lo, hi = share(n_rows(node), ith, nth)
    n, factor = ne(node, 0, 0), param_f32(node, 0)
    for row in range(lo, hi):
        y, v = floats(row_address(node, 0, row), n), floats(row_address(node, 1, row), n)
        for i in range(n):
            y[i] = v[i] * factor


def swiglu(node, ith, nth, chunks):
    lo, hi = share(n_rows(node), ith, nth)
    n = ne(node, 0, 0)
    for row in range(lo, hi):
        y = floats(row_address(node, 0, row), n)
        gate, up = floats(row_address(node, 1, row), n), floats(row_address(node, 2, row), n)
        for i in range(n):
            y[i] = silu(gate[i]) * up[i]


def cont(node, ith, nth, chunks):
    lo, hi = share(n_rows(node), ith, nth)
    n, step = ne(node, 0, 0), nb(node, 1, 0)
    for row in range(lo, hi):
        y, a = floats(row_address(node, 0, row), n), row_address(node, 1, row)
        for i in range(n):
            y[i] = load_f32(a + i * step)
