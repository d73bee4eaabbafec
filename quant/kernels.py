"""Loops shared by every format. A block's dtype names its format; numba resolves the format's kernel when it compiles.

`dequantize_block` and friends are the seam: kernels of the engine call them too, so that one copy of each loop serves
all formats and is cached on disk (passing kernels as arguments would recompile in every process).
"""

from types import ModuleType

import numpy as np
from numba import types
from numba.extending import overload

from quant.formats import FORMATS
from quant.half import bits_of
from quant.jit import kernel


def _module_of(block) -> ModuleType | None:
    """The kernels for a numba type, if it is the record type of one of our blocks."""
    if not isinstance(block, types.Record):
        return None
    title = next(iter(block.fields.values())).title
    return FORMATS[title].kernels if title in FORMATS else None


def dequantize_block(b, y):
    """y[block_size] = the weights of block b."""
    raise NotImplementedError("compiled code only")


def quantize_row(x, blocks, tables):
    """blocks[n / block_size] = the row x[n]; tables: those of the format (`Format.tables`)."""
    raise NotImplementedError("compiled code only")


def quantize_row_weighted(x, w, blocks, tables):
    """The same with importance w[n]."""
    raise NotImplementedError("compiled code only")


@overload(dequantize_block, inline="never")
def _dequantize_block(b, y):
    if (module := _module_of(b)) is not None:
        function = module.dequantize
        return lambda b, y: function(b, y)


@overload(quantize_row)
def _quantize_row(x, blocks, tables):
    if (module := _module_of(getattr(blocks, "dtype", None))) is not None:
        function = module.quantize
        if len(tables):
            return lambda x, blocks, tables: function(x, blocks, tables)
        return lambda x, blocks, tables: function(x, blocks)


@overload(quantize_row_weighted)
def _quantize_row_weighted(x, w, blocks, tables):
    if (module := _module_of(getattr(blocks, "dtype", None))) is not None:
        function = module.quantize_weighted
        if len(tables):
            return lambda x, w, blocks, tables: function(x, w, blocks, tables)
        return lambda x, w, blocks, tables: function(x, w, blocks)


@kernel
def dequantize_rows(blocks, y):
    """blocks [rows, n / size] -> y float32 [rows, n]."""
    size = y.shape[1] // blocks.shape[1]
    for i in range(blocks.shape[0]):
        for j in range(blocks.shape[1]):
            dequantize_block(blocks[i, j], y[i, j * size : (j + 1) * size])


@kernel
def quantize_rows(x, blocks, tables):
    """x float32 [rows, n] -> blocks [rows, n / size]; tables: those of the format (`Format.tables`)."""
    for i in range(x.shape[0]):
        quantize_row(x[i], blocks[i], tables)


@kernel
def quantize_rows_weighted(x, w, blocks, tables):
    """The same with importance w float32 [n]."""
    for i in range(x.shape[0]):
        quantize_row_weighted(x[i], w, blocks[i], tables)


@kernel
def first_nonfinite(x):
    """Flat index of the first NaN or infinity in a 2-D float32 array, or -1."""
    for i in range(x.shape[0]):
        largest = np.int32(0)  # of the bits without sign: infinity's are above all numbers', NaN's above them
        for j in range(x.shape[1]):
            largest = max(largest, np.int32(bits_of(x[i, j]) & np.uint32(0x7FFFFFFF)))
        if largest >= np.int32(0x7F800000):
            for j in range(x.shape[1]):
                if not np.isfinite(x[i, j]):
                    return i * x.shape[1] + j
    return -1
