"""F64: double precision, read as float32 and never written. 64 bits per weight."""

import numpy as np

from quant.format import block_dtype
from quant.jit import kernel

BLOCK = block_dtype("F64", x="<f8")


@kernel
def dequantize(b, y):
    y[0] = np.float32(b["x"])


quantize = None
quantize_weighted = None
