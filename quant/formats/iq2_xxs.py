"""IQ2_XXS: x = d * (2 s + 1) / 8 * +-q, q points of 8 numbers 8, 25, 43, blocks of 256. 2.0625 bits per weight.

| field | bytes | content |
|---|---|---|
| d | 2 | scale, IEEE half |
| qs | 64 | two words per group of 32: 4 positions in the codebook of 8 bits; 4 sign codes of 7 bits, then s of 4 bits |

ggml's `block_iq2_xxs`; the codebook has 256 points; sign codes as in IQ3_XXS. Needs importance w. Searched by
`lattice.search_block`, with weights w * sqrt(mean x^2 + x^2).

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

BLOCK = block_dtype("IQ2_XXS", d="<u2", qs=("<u4", (8, 2)))

METHOD = lattice.Method(
    group=32,
    dims=8,
    even=True,
    eps=np.float32(1e-15),
    tries=13,
    step=np.float32(0.1),
    again=lattice.ALL,
    start=True,
)
_CODES = CODEBOOKS["IQ2_XXS"].codes


def tables():
    """Index and neighbour lists of the codebook (see `lattice.tables`)."""
    return lattice.tables("IQ2_XXS")


@kernel
def dequantize(b, y):
    d = half_to_float(b["d"])
    for k in range(32):
        positions = b["qs"][k // 4, 0]
        word = b["qs"][k // 4, 1]
        scale = d * (np.float32(0.5) + np.float32(word >> np.uint32(28))) * np.float32(0.25)
        code = np.int32(_CODES[(positions >> np.uint32(8 * (k % 4))) & np.uint32(255)])
        signs = even_signs(word >> np.uint32(7 * (k % 4)))
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
        for g in range(8):
            positions = np.int64(0)
            word = nearest_level(work.scales[g], inverse, 15) << 28
            for k in range(4):
                positions |= np.int64(index[work.codes[4 * g + k, 0]]) << (8 * k)
                word |= (np.int64(work.signs[4 * g + k]) & 127) << (7 * k)
            b["qs"][g, 0] = np.uint32(positions)
            b["qs"][g, 1] = np.uint32(word)
