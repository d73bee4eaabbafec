"""Kernels of engine/ops/gather.py."""

import numpy as np
from numba import carray

from engine.kernels.node import by_format, data, element, floats, load_i32, load_i64, n_rows, nb, ne, pointer, share
from quant.kernels import dequantize_block, quantize_row


@by_format
def get_rows(tensor):
    format = tensor.src[0].format
    numbers = format.name == "I32"
    block, size = np.dtype("<u4") if numbers else format.block, format.block_size

    def kernel(node, ith, nth, chunks):
        lo, hi = share(n_rows(node), ith, nth)
        n, n1, n2 = ne(node, 0, 0), ne(node, 0, 1), ne(node, 0, 2)
        for row in range(lo, hi):
            i1, i2, i3 = row % n1, row // n1 % n2, row // (n1 * n2)
            index: int = load_i32(data(node, 2) + i1 * nb(node, 2, 0) + i2 * nb(node, 2, 1) + i3 * nb(node, 2, 2))
            out = element(node, 0, i1, i2, i3)
            blocks = carray(pointer(element(node, 1, index, i2, i3)), (n // size,), block)
            if numbers:
                y = carray(pointer(out), (n,), block)
                for j in range(n):
                    y[j] = blocks[j]
            else:
                y = floats(out, n)
                for j in range(n // size):
                    dequantize_block(blocks[j], y[j * size : (j + 1) * size])

    return kernel


@by_format
def set_rows(tensor):
    block, size, wide = tensor.format.block, tensor.format.block_size, tensor.src[1].format.name == "I64"

    def kernel(node, ith, nth, chunks):
        n, n1, n2 = ne(node, 1, 0), ne(node, 1, 1), ne(node, 1, 2)
        lo, hi = share(n1 * n2 * ne(node, 1, 3), ith, nth)
        for row in range(lo, hi):
            i1, i2, i3 = row % n1, row // n1 % n2, row // (n1 * n2)
            place = data(node, 2) + i1 * nb(node, 2, 0)
            place += i2 % ne(node, 2, 1) * nb(node, 2, 1) + i3 % ne(node, 2, 2) * nb(node, 2, 2)
            index: int = load_i64(place) if wide else load_i32(place)
            blocks = carray(pointer(element(node, 0, index, i2, i3)), (n // size,), block)
            quantize_row(floats(element(node, 1, i1, i2, i3), n), blocks, ())

    return kernel
