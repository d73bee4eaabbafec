"""BF16: the upper half of a float32, rounded half to even. 16 bits per weight."""

from quant.format import block_dtype
from quant.half import bfloat_to_float, float_to_bfloat
from quant.jit import kernel

BLOCK = block_dtype("BF16", h="<u2")


@kernel
def dequantize(b, y):
    y[0] = bfloat_to_float(b["h"])


@kernel
def quantize(x, blocks):
    for i in range(x.size):
        blocks[i]["h"] = float_to_bfloat(x[i])


quantize_weighted = None
