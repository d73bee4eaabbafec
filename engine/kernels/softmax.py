"""Kernel of engine/ops/softmax.py."""

import numpy as np
from numba import carray

from engine.kernels.math import exp, row_max, slope
from engine.kernels.node import by_format, data, floats, load_f32, n_rows, ne, param_f32, pointer, row_address, share
from engine.ops.op import F32
from quant.kernels import dequantize_block


@by_format
def soft_max(tensor):
    mask = tensor.src[1]
    block = (F32 if mask is None else mask.format).block

    def kernel(node, ith, nth, chunks):
        lo, hi = share(n_rows(node), ith, nth)
        n, factor, max_bias = ne(node, 0, 0), param_f32(node, 0), param_f32(node, 1)
        n1, n_head = ne(node, 0, 1), ne(node, 0, 2)
        extra = np.empty(1, np.float32)
        for row in range(lo, hi):
            y, x = floats(row_address(node, 0, row), n), floats(row_address(node, 1, row), n)
            head = row // n1 % n_head
            for i in range(n):
                y[i] = x[i] * factor
            if data(node, 2) != 0:
                m, weight = carray(pointer(row_address(node, 2, row)), (n,), block), slope(head, n_head, max_bias)
                for i in range(n):
                    dequantize_block(m[i], extra)
                    y[i] += weight * extra[0]
            top, sink = row_max(y), np.float32(-np.inf)
            if data(node, 3) != 0:
                sink = load_f32(data(node, 3) + 4 * head)
                top = max(top, sink)
            if top == np.float32(-np.inf):
                top = np.float32(0)
            total = exp(sink - top)
            for i in range(n):
                e = exp(y[i] - top)
                y[i] = e
                total += e
            scale = np.float32(1) / total if total > np.float32(0) else np.float32(0)
            for i in range(n):
                y[i] *= scale

    return kernel
