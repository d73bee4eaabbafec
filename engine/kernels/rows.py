"""Rows of any format to float32, for kernels that go through many short ones."""

import numpy as np
from numba import types
from numba.extending import overload

from quant.half import float_of
from quant.jit import fast_kernel
from quant.kernels import dequantize_block


def decode_row(blocks, y):
    """y[n] = the row of blocks. Halves go without branches, many at a time."""
    raise NotImplementedError("compiled code only")


@overload(decode_row)
def _decode_row(blocks, y):
    title = next(iter(blocks.dtype.fields.values())).title if isinstance(blocks.dtype, types.Record) else None
    if title == "F16":
        return lambda blocks, y: _half(blocks, y)
    if title == "BF16":
        return lambda blocks, y: _bfloat(blocks, y)

    def decode(blocks, y):
        size = y.size // max(1, blocks.size)
        for i in range(blocks.size):
            dequantize_block(blocks[i], y[i * size : (i + 1) * size])

    return decode


@fast_kernel
def _bfloat(blocks, y):
    for i in range(y.size):
        y[i] = float_of(np.uint32(blocks[i]["h"]) << np.uint32(16))


@fast_kernel
def _half(blocks, y):
    """See `quant.half.half_to_float`; the largest exponent is infinity or NaN."""
    for i in range(y.size):
        bits = np.uint32(blocks[i]["h"])
        magnitude = (bits & np.uint32(0x7FFF)) << np.uint32(13)
        scaled = float_of(magnitude) * np.float32(2.0**112)
        value = scaled if magnitude < np.uint32(0x0F800000) else float_of(magnitude | np.uint32(0x7F800000))
        y[i] = -value if bits >= np.uint32(0x8000) else value
