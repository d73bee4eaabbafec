"""F16: IEEE half, rounded half to even. 16 bits per weight."""

from quant.format import block_dtype
from quant.half import float_to_half, half_to_float
from quant.jit import kernel

BLOCK = block_dtype("F16", h="<u2")


@kernel
def dequantize(b, y):
    y[0] = half_to_float(b["h"])


@kernel
def quantize(x, blocks):
    for i in range(x.size):
        blocks[i]["h"] = float_to_half(x[i])


quantize_weighted = None
