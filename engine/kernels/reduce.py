"""Kernels of engine/ops/reduce.py. Sums run in float64."""

import numpy as np

from engine.kernels.node import data, element, floats, ints, n_rows, ne, param, row_address, scratch, share
from engine.ops.reduce import DESCENDING
from quant.jit import fast_inline, fast_kernel


@fast_inline
def _wide_sum(x):
    total = 0.0
    for i in range(x.size):
        total += np.float64(x[i])
    return total


def sum_rows(node, ith, nth, chunks):
    lo, hi = share(n_rows(node), ith, nth)
    for row in range(lo, hi):
        floats(row_address(node, 0, row), 1)[0] = _wide_sum(floats(row_address(node, 1, row), ne(node, 1, 0)))


def mean(node, ith, nth, chunks):
    lo, hi = share(n_rows(node), ith, nth)
    n = ne(node, 1, 0)
    for row in range(lo, hi):
        floats(row_address(node, 0, row), 1)[0] = _wide_sum(floats(row_address(node, 1, row), n)) / n


def sum_all(node, ith, nth, chunks):
    if ith != 0:
        return
    total = 0.0
    for i3 in range(ne(node, 1, 3)):
        for i2 in range(ne(node, 1, 2)):
            for i1 in range(ne(node, 1, 1)):
                total += _wide_sum(floats(element(node, 1, i1, i2, i3), ne(node, 1, 0)))
    floats(data(node, 0), 1)[0] = total


def cumsum(node, ith, nth, chunks):
    lo, hi = share(n_rows(node), ith, nth)
    n = ne(node, 0, 0)
    for row in range(lo, hi):
        y, x = floats(row_address(node, 0, row), n), floats(row_address(node, 1, row), n)
        total = 0.0
        for i in range(n):
            total += np.float64(x[i])
            y[i] = total


def argmax(node, ith, nth, chunks):
    rows, n = ne(node, 1, 1), ne(node, 1, 0)
    lo, hi = share(rows, ith, nth)
    out = ints(data(node, 0), rows)
    for row in range(lo, hi):
        x = floats(element(node, 1, row, 0, 0), n)
        best = 0
        for i in range(1, n):
            if x[i] > x[best]:
                best = i
        out[row] = best


@fast_kernel
def _merge_sort(x, order, spare, descending):
    """order = places of x's elements, stable; `spare` is as long."""
    n = x.size
    for i in range(n):
        order[i] = i
    width = 1
    while width < n:
        for lo in range(0, n, 2 * width):
            mid, hi = min(lo + width, n), min(lo + 2 * width, n)
            left, right = lo, mid
            for i in range(lo, hi):
                take_left = right >= hi
                if left < mid and right < hi:
                    a, b = x[order[left]], x[order[right]]
                    take_left = a >= b if descending else a <= b
                if take_left:
                    spare[i] = order[left]
                    left += 1
                else:
                    spare[i] = order[right]
                    right += 1
        for i in range(n):
            order[i] = spare[i]
        width *= 2


def argsort(node, ith, nth, chunks):
    lo, hi = share(n_rows(node), ith, nth)
    n, descending = ne(node, 0, 0), param(node, 0) == DESCENDING
    spare = ints(scratch(node, ith, 4 * n), n)
    for row in range(lo, hi):
        _merge_sort(floats(row_address(node, 1, row), n), ints(row_address(node, 0, row), n), spare, descending)


@fast_kernel
def _keep_best(x, best):
    """best = places of the largest elements of x, largest first, equals as they lie: insertion into a sorted list."""
    k, held = best.size, 0
    for i in range(x.size):
        if held == k and not x[i] > x[best[k - 1]]:
            continue
        at = held if held < k else k - 1
        while at > 0 and x[i] > x[best[at - 1]]:
            best[at] = best[at - 1]
            at -= 1
        best[at] = i
        held = min(k, held + 1)


def top_k(node, ith, nth, chunks):
    lo, hi = share(n_rows(node), ith, nth)
    k, n = ne(node, 0, 0), ne(node, 1, 0)
    for row in range(lo, hi):
        _keep_best(floats(row_address(node, 1, row), n), ints(row_address(node, 0, row), k))
