"""Kernels of engine/ops/matmul.py.

Threads take tiles of rows of the weight until none is left; a tile is decoded into the thread's scratch and multiplied
by BLAS. One activation row alone is not worth that: each weight row is decoded and reduced while it is in the cache.
"""

import numpy as np
from numba import carray

from engine.kernels.math import dot
from engine.kernels.node import (
    CHOSEN,
    SGEMM,
    by_format,
    data,
    floats,
    load_i32,
    nb,
    ne,
    next_chunk,
    pointer,
    scratch,
    sgemm,
    slot,
)  # fmt: skip
from engine.ops.matmul import ROWS
from quant.kernels import dequantize_block


@by_format
def mul_mat(tensor):
    weight = tensor.src[0]
    block, size, is_float = weight.format.block, weight.format.block_size, weight.format.name == "F32"

    def kernel(node, ith, nth, chunks):
        k, n, m = ne(node, 1, 0), ne(node, 1, 1), ne(node, 0, 1)
        n2, n3 = ne(node, 0, 2), ne(node, 0, 3)
        whole = nb(node, 2, 2) == m * nb(node, 2, 1) and nb(node, 2, 3) == n2 * nb(node, 2, 2)
        if ne(node, 1, 2) * ne(node, 1, 3) == 1 and whole:
            m, n2, n3 = m * n2 * n3, 1, 1  # one matrix for all: its rows are decoded once
        tile = slot(node, CHOSEN)
        tiles = (n + tile - 1) // tile
        held = scratch(node, ith, 4 * k * (1 if m == 1 else tile))
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
                        y = floats(held + i * k * 4, k)
                        blocks = carray(pointer(rows + i * stride), (k // size,), block)
                        for j in range(k // size):
                            dequantize_block(blocks[j], y[j * size : (j + 1) * size])
                    rows, stride = held, k * 4
                if m == 1:
                    floats(out, n)[first] = dot(floats(rows, k), floats(x, k))
                else:
                    sgemm(
                        slot(node, SGEMM), 1, step, m, k, np.float32(1), rows, stride // 4, x, nb(node, 2, 1) // 4,
                        np.float32(0), out + first * 4, nb(node, 0, 1) // 4,
                    )  # fmt: skip
            chunk = next_chunk(chunks)

    return kernel


@by_format
def mul_mat_id(tensor):
    weight = tensor.src[0]
    block, size = weight.format.block, weight.format.block_size

    def kernel(node, ith, nth, chunks):
        k, n, n_expert = ne(node, 1, 0), ne(node, 1, 1), ne(node, 1, 2)
        n_used, n_tokens, m = ne(node, 0, 1), ne(node, 0, 2), ne(node, 2, 1)
        tile = slot(node, CHOSEN)
        tiles = (n + tile - 1) // tile
        total = n_used * n_tokens
        floats_needed = (tile + ROWS) * k + ROWS * tile
        lists = scratch(node, ith, 4 * floats_needed + 8 * (n_expert + 1 + total))
        ends = carray(pointer(lists), (n_expert + 1,), np.int64)
        order = carray(pointer(lists + 8 * (n_expert + 1)), (total,), np.int64)
        held = lists + 8 * (n_expert + 1 + total)
        gathered, product = held + 4 * tile * k, held + 4 * (tile + ROWS) * k
        # every thread lists the rows of each expert for itself: ends[e - 1]..ends[e] of `order`
        ends[:] = 0
        for row in range(total):
            expert = load_i32(data(node, 3) + row % n_used * nb(node, 3, 0) + row // n_used * nb(node, 3, 1))
            if 0 <= expert < n_expert:
                ends[expert + 1] += 1
            elif ith == 0:
                floats(data(node, 0) + row % n_used * nb(node, 0, 1) + row // n_used * nb(node, 0, 2), n)[:] = (
                    np.float32(0)
                )
        for expert in range(n_expert):
            ends[expert + 1] += ends[expert]
        for row in range(total):
            expert = load_i32(data(node, 3) + row % n_used * nb(node, 3, 0) + row // n_used * nb(node, 3, 1))
            if 0 <= expert < n_expert:
                order[ends[expert]] = row
                ends[expert] += 1
        chunk = ith
        while chunk < tiles * n_expert:
            expert, lo = chunk // tiles, chunk % tiles * tile
            begin, end = ends[expert - 1] if expert > 0 else 0, ends[expert]
            step = min(n, lo + tile) - lo
            if begin < end:
                for i in range(step):
                    w = data(node, 1) + expert * nb(node, 1, 2) + (lo + i) * nb(node, 1, 1)
                    y, blocks = floats(held + 4 * i * k, k), carray(pointer(w), (k // size,), block)
                    for j in range(k // size):
                        dequantize_block(blocks[j], y[j * size : (j + 1) * size])
            for part in range(begin, end, ROWS):
                count = min(ROWS, end - part)
                for i in range(count):
                    used, token = order[part + i] % n_used, order[part + i] // n_used
                    x = floats(data(node, 2) + used % m * nb(node, 2, 1) + token * nb(node, 2, 2), k)
                    y = floats(gathered + 4 * i * k, k)
                    for j in range(k):
                        y[j] = x[j]
                sgemm(
                    slot(node, SGEMM), 1, step, count, k, np.float32(1), held, k, gathered, k,
                    np.float32(0), product, step,
                )  # fmt: skip
                for i in range(count):
                    used, token = order[part + i] % n_used, order[part + i] // n_used
                    y = floats(data(node, 0) + used * nb(node, 0, 1) + token * nb(node, 0, 2) + 4 * lo, step)
                    x = floats(product + 4 * i * step, step)
                    for j in range(step):
                        y[j] = x[j]
            chunk = next_chunk(chunks)

    return kernel
