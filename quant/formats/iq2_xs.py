"""IQ2_XS: x = d * (2 s + 1) / 8 * +-q, q points of 8 numbers 8, 25, 43, blocks of 256. 2.3125 bits per weight.

| field | bytes | content |
|---|---|---|
| d | 2 | scale, IEEE half |
| qs | 64 | 16 bits per point: position in the codebook (9 bits), sign code (7 bits) |
| scales | 8 | byte g / 2: s, the even group's in the low nibble |

ggml's `block_iq2_xs`; a group is 16 weights, the codebook has 512 points; sign codes as in IQ3_XXS. Needs importance
w. Searched by `lattice.search_block`, with weights w * sqrt(mean x^2 + x^2).

Where the reference aborts or stores an infinite scale: a scale beyond the half's range is stored as the largest; a
group whose sums leave the range of float32 is stored as zeros.
"""

import numpy as np

from quant import lattice
from quant.codebooks import CODEBOOKS
from quant.format import block_dtype
from quant.half import half_to_float
from quant.jit import kernel
from quant.lattice import (
    even_signs,
    finite_half,
    importance_weights,
    iq2_value,
    mean_square,
    nearest_level,
    search_block,
    workspace,
)

BLOCK = block_dtype("IQ2_XS", d="<u2", qs=("<u2", 32), scales=("u1", 8))

METHOD = lattice.Method(
    group=16,
    dims=8,
    even=True,
    eps=np.float32(1e-15),
    tries=19,
    step=np.float32(0.1),
    again=lattice.OFF_GRID,
    start=False,
)
_CODES = CODEBOOKS["IQ2_XS"].codes


def tables():
    """Index and neighbour lists of the codebook (see `lattice.tables`)."""
    return lattice.tables("IQ2_XS")


@kernel
def dequantize(b, y):
    d = half_to_float(b["d"])
    for k in range(32):
        s = (np.int32(b["scales"][k // 4]) >> np.int32(4 * (k % 4 // 2))) & np.int32(15)
        scale = d * (np.float32(0.5) + np.float32(s)) * np.float32(0.25)
        point = np.int32(b["qs"][k])
        code = np.int32(_CODES[point & np.int32(511)])
        signs = even_signs(point >> np.int32(9))
        for i in range(8):
            y[8 * k + i] = scale * iq2_value(code, signs, i)


quantize = None


@kernel
def quantize_weighted(x, w, blocks, tables):
    index = tables[0]
    work = workspace(METHOD)
    for i in range(blocks.size):
        b = blocks[i]
        block = x[256 * i : 256 * i + 256]
        importance_weights(block, w[256 * i : 256 * i + 256], mean_square(block, np.float32(1)), work.weight)
        largest = search_block(block, METHOD, tables, work)
        if largest == np.float32(0):
            work.codes[:] = 0
            work.signs[:] = 0
        d = largest / np.float32(31)
        inverse = np.float32(1) / d
        b["d"] = finite_half(d)
        for k in range(32):
            b["qs"][k] = index[work.codes[k, 0]] | ((np.int32(work.signs[k]) & 127) << 9)
        for g in range(8):
            low = nearest_level(work.scales[2 * g], inverse, 15)
            b["scales"][g] = low | (nearest_level(work.scales[2 * g + 1], inverse, 15) << 4)
