"""Kernels of engine/ops/copies.py."""

from typing import Any

import numpy as np
from numba import carray

from engine.kernels.node import (
    by_format,
    element,
    floats,
    n_rows,
    nb,
    ne,
    param,
    pointer,
    row_address,
    scratch,
    share,
)  # fmt: skip
from quant.jit import fast_kernel
from quant.kernels import dequantize_block, quantize_row

_INTEGERS: dict[str, np.dtype] = {"I32": np.dtype("<i4"), "I64": np.dtype("<i8")}
_BYTES: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@fast_kernel
def _place(node, which, index, block):
    """Address of element number `index` in the order of elements; a multiple of `block`."""
    n0, n1, n2 = ne(node, which, 0), ne(node, which, 1), ne(node, which, 2)
    row = index // n0
    i1, i2, i3 = row % n1, row // n1 % n2, row // (n1 * n2)
    return element(node, which, i1, i2, i3) + index % n0 // block * nb(node, which, 0)


@fast_kernel
def _common(a, b):
    """Greatest common divisor: the longest piece that is within a row of both."""
    while b:
        a, b = b, a % b
    return a


@by_format
def copy(tensor):
    """Elements in order, piece by piece; formats meet in float32."""
    source, target = tensor.src[0].format, tensor.format
    if source is target:
        return _plain(source)
    read, write = _INTEGERS.get(source.name), _INTEGERS.get(target.name)
    in_block = np.dtype("u1") if read else source.block
    out_block = np.dtype("u1") if write else target.block
    in_size, out_size, in_type, out_type = (
        source.block_size,
        target.block_size,
        read or np.dtype("i4"),
        write or np.dtype("i4"),
    )
    reads, writes, block_rows = read is not None, write is not None, target.block_size > 1

    def kernel(node, ith, nth, chunks):
        n = _common(ne(node, 1, 0), ne(node, 0, 0))
        total = n_rows(node) * ne(node, 0, 0)
        lo, hi = share(total // n, ith, nth)
        held = floats(scratch(node, ith, 4 * n), n)
        in_step, out_step = nb(node, 1, 0), nb(node, 0, 0)
        for piece in range(lo, hi):
            a, y = _place(node, 1, piece * n, in_size), _place(node, 0, piece * n, out_size)
            for j in range(n // in_size):
                if reads:
                    held[j] = carray(pointer(a + j * in_step), (1,), in_type)[0]
                else:
                    dequantize_block(
                        carray(pointer(a + j * in_step), (1,), in_block)[0], held[j * in_size : (j + 1) * in_size]
                    )
            if writes:
                for j in range(n):
                    carray(pointer(y + j * out_step), (1,), out_type)[0] = int(held[j])
            elif block_rows:
                quantize_row(held, carray(pointer(y), (n // out_size,), out_block), ())
            else:
                for j in range(n):
                    quantize_row(held[j : j + 1], carray(pointer(y + j * out_step), (1,), out_block), ())

    return kernel


def _plain(format):
    """A copy that keeps the format: bytes move."""
    block, size = format.block_size, format.type_size
    unit = _BYTES.get(size, np.uint8)
    count = 1 if size in _BYTES else size

    def kernel(node, ith, nth, chunks):
        n = _common(ne(node, 1, 0), ne(node, 0, 0))
        total = n_rows(node) * ne(node, 0, 0)
        lo, hi = share(total // n, ith, nth)
        units = n // block * count
        in_step, out_step = nb(node, 1, 0), nb(node, 0, 0)
        for piece in range(lo, hi):
            a, y = _place(node, 1, piece * n, block), _place(node, 0, piece * n, block)
            if in_step == size and out_step == size:
                x, out = carray(pointer(a), (units,), unit), carray(pointer(y), (units,), unit)
                for j in range(units):
                    out[j] = x[j]
            else:
                for j in range(units):
                    carray(pointer(y + j * out_step), (1,), unit)[0] = carray(pointer(a + j * in_step), (1,), unit)[0]

    return kernel


def repeat(node, ith, nth, chunks):
    lo, hi = share(n_rows(node), ith, nth)
    n, period = ne(node, 0, 0), ne(node, 1, 0)
    for row in range(lo, hi):
        y, x = floats(row_address(node, 0, row), n), floats(row_address(node, 1, row), period)
        for i in range(n):
            y[i] = x[i % period]


def concat(node, ith, nth, chunks):
    lo, hi = share(n_rows(node), ith, nth)
    n, axis = ne(node, 0, 0), param(node, 0)
    n1, n2 = ne(node, 0, 1), ne(node, 0, 2)
    first = ne(node, 1, 0)
    for row in range(lo, hi):
        y = floats(row_address(node, 0, row), n)
        i1, i2, i3 = row % n1, row // n1 % n2, row // (n1 * n2)
        if axis == 0:
            x, rest = floats(element(node, 1, i1, i2, i3), first), floats(element(node, 2, i1, i2, i3), n - first)
            for i in range(first):
                y[i] = x[i]
            for i in range(n - first):
                y[first + i] = rest[i]
            continue
        place = i1 if axis == 1 else i2 if axis == 2 else i3
        if place < ne(node, 1, axis):
            x = floats(element(node, 1, i1, i2, i3), n)
        else:
            back = ne(node, 1, axis)
            x = floats(
                element(node, 2, i1 - back * (axis == 1), i2 - back * (axis == 2), i3 - back * (axis == 3)), n
            )  # fmt: skip
        for i in range(n):
            y[i] = x[i]


def pad(node, ith, nth, chunks):
    lo, hi = share(n_rows(node), ith, nth)
    n, m, n1, n2 = ne(node, 0, 0), ne(node, 1, 0), ne(node, 0, 1), ne(node, 0, 2)
    start = param(node, 0)
    for row in range(lo, hi):
        y = floats(row_address(node, 0, row), n)
        i1, i2, i3 = row % n1 - param(node, 1), row // n1 % n2 - param(node, 2), row // (n1 * n2) - param(node, 3)
        y[:] = np.float32(0)
        if 0 <= i1 < ne(node, 1, 1) and 0 <= i2 < ne(node, 1, 2) and 0 <= i3 < ne(node, 1, 3):
            x = floats(element(node, 1, i1, i2, i3), m)
            for i in range(m):
                y[start + i] = x[i]


def tri(node, ith, nth, chunks):
    lo, hi = share(n_rows(node), ith, nth)
    n, lower, diagonal = ne(node, 0, 0), param(node, 0), param(node, 1)
    for row in range(lo, hi):
        y, x = floats(row_address(node, 0, row), n), floats(row_address(node, 1, row), n)
        i1 = row % ne(node, 0, 1)
        for i in range(n):
            keep = (i < i1) if lower != 0 else (i > i1)
            y[i] = x[i] if keep or (i == i1 and diagonal != 0) else np.float32(0)


def diag_mask_inf(node, ith, nth, chunks):
    lo, hi = share(n_rows(node), ith, nth)
    n, past = ne(node, 0, 0), param(node, 0)
    for row in range(lo, hi):
        y, x = floats(row_address(node, 0, row), n), floats(row_address(node, 1, row), n)
        last = row % ne(node, 0, 1) + past
        for i in range(n):
            y[i] = x[i] if i <= last else np.float32(-np.inf)
