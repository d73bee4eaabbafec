"""Kernel of engine/ops/matmul.py.

Threads take tiles of rows of the weight until none is left; a tile is decoded into the thread's scratch and multiplied
by BLAS. One activation row alone is not worth that: each weight row is decoded and reduced while it is in the cache.
"""

import numpy as np
from numba import carray

from engine.kernels.node import SCRATCH, SGEMM, by_format, data, floats, nb, ne, next_chunk, param, pointer, sgemm, slot
from quant.jit import fast_inline
from quant.kernels import dequantize_block


@fast_inline
def dot(a, b):
    """Sum of a[i] * b[i]."""
    total = np.float32(0)
    for i in range(a.size):
        total += a[i] * b[i]
    return total


@by_format
def mul_mat(tensor):
    weight = tensor.src[0]
    block, size, is_float = weight.format.block, weight.format.block_size, weight.format.name == "F32"

    def kernel(node, ith, nth, chunks):
        k, n, m = ne(node, 1, 0), ne(node, 1, 1), ne(node, 0, 1)
        n2, n3 = ne(node, 0, 2), ne(node, 0, 3)
        if (
            ne(node, 1, 2) * ne(node, 1, 3) == 1
            and nb(node, 2, 2) == m * nb(node, 2, 1)
            and nb(node, 2, 3) == n2 * nb(node, 2, 2)
        ):
            m, n2, n3 = m * n2 * n3, 1, 1  # one matrix for all: its rows are decoded once
        tile = param(node, 0)
        tiles = (n + tile - 1) // tile
        scratch = slot(node, SCRATCH) + ith * (1 if m == 1 else tile) * k * 4
        chunk = ith
        while chunk < tiles * n2 * n3:
            lo = chunk % tiles * tile
            hi = min(n, lo + tile)
            i2, i3 = chunk // tiles % n2, chunk // (tiles * n2)
            w = (
                data(node, 1)
                + i2 * ne(node, 1, 2) // ne(node, 0, 2) * nb(node, 1, 2)
                + i3 * ne(node, 1, 3) // ne(node, 0, 3) * nb(node, 1, 3)
            )
            x = data(node, 2) + i2 * nb(node, 2, 2) + i3 * nb(node, 2, 3)
            out = data(node, 0) + i2 * nb(node, 0, 2) + i3 * nb(node, 0, 3)
            step = 1 if m == 1 else hi - lo
            for first in range(lo, hi, step):
                rows, stride = w + first * nb(node, 1, 1), nb(node, 1, 1)
                if not is_float:
                    for i in range(step):
                        y = floats(scratch + i * k * 4, k)
                        blocks = carray(pointer(rows + i * stride), (k // size,), block)
                        for j in range(k // size):
                            dequantize_block(blocks[j], y[j * size : (j + 1) * size])
                    rows, stride = scratch, k * 4
                if m == 1:
                    floats(out, n)[first] = dot(floats(rows, k), floats(x, k))
                else:
                    sgemm(
                        slot(node, SGEMM), 1, step, m, k, np.float32(1), rows, stride // 4,
                        x, nb(node, 2, 1) // 4, out + first * 4, nb(node, 0, 1) // 4,
                    )  # fmt: skip
            chunk = next_chunk(chunks)

    return kernel
