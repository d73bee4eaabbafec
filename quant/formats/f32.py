"""F32: the value itself. 32 bits per weight."""

import numpy as np

from quant.format import block_dtype
from quant.jit import kernel

BLOCK = block_dtype("F32", x="<f4")


@kernel
def dequantize(b, y):
    y[0] = b["x"]


@kernel
def quantize(x, blocks):
    for i in range(x.size):
        blocks[i]["x"] = np.float32(x[i])


quantize_weighted = None
