"""IQ3_XXS: x = d * (2 s + 1) / 4 * +-q, q points of 4 numbers 4, 12, .. 52, 62, blocks of 256. 3.0625 bits per weight.

| field | bytes | content |
|---|---|---|
| d | 2 | scale, IEEE half |
| qs | 64 | byte k: position of point k in the codebook |
| signs | 32 | per group of 32: 4 sign codes of 7 bits, then s in the top 4 bits |

ggml's `block_iq3_xxs`; the codebook has 256 points. A sign code has bit i set where weight i of 8 is negative; the
eighth bit is not stored, it makes the number of ones even. Searched by `lattice.search_block`, with weights x^2 or w
* sqrt(2 * mean x^2 + x^2).

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
    mean_square,
    nearest_level,
    search_block,
    workspace,
)

BLOCK = block_dtype("IQ3_XXS", d="<u2", qs=("u1", 64), signs=("<u4", 8))

METHOD = lattice.Method(
    group=32,
    dims=4,
    even=True,
    eps=np.float32(1e-8),
    tries=31,
    step=np.float32(0.2),
    again=lattice.OFF_GRID,
    start=False,
)
_CODES = CODEBOOKS["IQ3_XXS"].codes


def tables():
    """Index and neighbour lists of the codebook (see `lattice.tables`)."""
    return lattice.tables("IQ3_XXS")


@kernel
def dequantize(b, y):
    d = half_to_float(b["d"])
    for k in range(64):
        word = b["signs"][k // 8]
        scale = d * (np.float32(0.5) + np.float32(word >> np.uint32(28))) * np.float32(0.5)
        code = np.int32(_CODES[b["qs"][k]])
        signs = even_signs(word >> np.uint32(7 * (k % 8 // 2))) >> np.int32(4 * (k % 2))
        for i in range(4):
            level = (code >> np.int32(3 * i)) & np.int32(7)
            q = np.float32(62) if level == 7 else np.float32(8) * np.float32(level) + np.float32(4)
            y[4 * k + i] = scale * (-q if (signs >> np.int32(i)) & np.int32(1) else q)


@kernel
def _quantize(x, w, blocks, tables):
    index = tables[0]
    work = workspace(METHOD)
    for i in range(blocks.size):
        b = blocks[i]
        block = x[256 * i : 256 * i + 256]
        importance = None if w is None else w[256 * i : 256 * i + 256]
        importance_weights(block, importance, mean_square(block, np.float32(2)), work.weight)
        largest = search_block(block, METHOD, tables, work)
        if largest == np.float32(0):
            work.codes[:] = 0
            work.signs[:] = 0
        d = largest / np.float32(31)
        inverse = np.float32(1) / d
        b["d"] = finite_half(d * np.float32(1.0125))
        for k in range(64):
            b["qs"][k] = index[work.codes[k, 0]]
        for g in range(8):
            word = nearest_level(work.scales[g], inverse, 15) << 28
            for k in range(4):
                word |= (np.int64(work.signs[4 * g + k]) & 127) << (7 * k)
            b["signs"][g] = np.uint32(word)


@kernel
def quantize(x, blocks, tables):
    _quantize(x, None, blocks, tables)


@kernel
def quantize_weighted(x, w, blocks, tables):
    _quantize(x, w, blocks, tables)
