"""Kernel of engine/ops/gather.py."""

import numpy as np
from numba import carray

from engine.kernels.node import by_format, data, floats, nb, ne, pointer, share
from quant.kernels import dequantize_block


@by_format
def get_rows(tensor):
    block, size = tensor.src[0].format.block, tensor.src[0].format.block_size

    def kernel(node, ith, nth, chunks):
        lo, hi = share(ne(node, 0, 1), ith, nth)
        n = ne(node, 0, 0)
        rows = carray(pointer(data(node, 2)), (ne(node, 2, 0),), np.int32)
        for i in range(lo, hi):
            y = floats(data(node, 0) + i * nb(node, 0, 1), n)
            blocks = carray(pointer(data(node, 1) + rows[i] * nb(node, 1, 1)), (n // size,), block)
            for j in range(n // size):
                dequantize_block(blocks[j], y[j * size : (j + 1) * size])

    return kernel
