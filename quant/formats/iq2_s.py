"""IQ2_S: x = d * (2 s + 1) / 8 * +-q, q points of 8 numbers 8, 25, 43, blocks of 256. 2.5625 bits per weight.

| field | bytes | content |
|---|---|---|
| d | 2 | scale, IEEE half |
| qs | 32 | byte k: low bits of the position of point k in the codebook |
| signs | 32 | bit i of byte k: weight 8 k + i is negative |
| qh | 8 | bits 2 (k % 4) of byte k / 4: high bits of the position of point k |
| scales | 8 | byte g / 2: s, the even group's in the low nibble |

ggml's `block_iq2_s` (where signs are the second half of qs); a group is 16 weights, the codebook has 1024 points.
Searched by `lattice.search_block`, with weights mean x^2 / 2 + x^2, or w * sqrt(2 * mean x^2 + x^2).

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
    finite_half,
    importance_weights,
    iq2_value,
    mean_square,
    nearest_level,
    search_block,
    workspace,
)

BLOCK = block_dtype("IQ2_S", d="<u2", qs=("u1", 32), signs=("u1", 32), qh=("u1", 8), scales=("u1", 8))

METHOD = lattice.Method(
    group=16,
    dims=8,
    even=False,
    eps=np.float32(1e-8),
    tries=19,
    step=np.float32(0.1),
    again=lattice.OFF_GRID,
    start=False,
)
_CODES = CODEBOOKS["IQ2_S"].codes


def tables():
    """Index and neighbour lists of the codebook (see `lattice.tables`)."""
    return lattice.tables("IQ2_S")


@kernel
def dequantize(b, y):
    d = half_to_float(b["d"])
    for k in range(32):
        s = (np.int32(b["scales"][k // 4]) >> np.int32(4 * (k % 4 // 2))) & np.int32(15)
        scale = d * (np.float32(0.5) + np.float32(s)) * np.float32(0.25)
        high = (np.int32(b["qh"][k // 4]) >> np.int32(2 * (k % 4))) & np.int32(3)
        code = np.int32(_CODES[np.int32(b["qs"][k]) | (high << np.int32(8))])
        signs = np.int32(b["signs"][k])
        for i in range(8):
            y[8 * k + i] = scale * iq2_value(code, signs, i)


@kernel
def _quantize(x, w, blocks, tables):
    index = tables[0]
    work = workspace(METHOD)
    for i in range(blocks.size):
        b = blocks[i]
        block = x[256 * i : 256 * i + 256]
        sigma2 = mean_square(block, np.float32(2))
        if w is None:
            for j in range(256):
                work.weight[j] = np.float32(0.25) * sigma2 + block[j] * block[j]
        else:
            importance_weights(block, w[256 * i : 256 * i + 256], sigma2, work.weight)
        d = search_block(block, METHOD, tables, work) / np.float32(31)
        inverse = np.float32(1) / d
        b["d"] = finite_half(d * np.float32(0.9875))
        for g in range(8):
            high = np.int32(0)
            for k in range(4):
                position = index[work.codes[4 * g + k, 0]]
                b["qs"][4 * g + k] = position & 255
                b["signs"][4 * g + k] = work.signs[4 * g + k]
                high |= (position >> 8) << (2 * k)
            b["qh"][g] = high
            low = nearest_level(work.scales[2 * g], inverse, 15)
            b["scales"][g] = low | (nearest_level(work.scales[2 * g + 1], inverse, 15) << 4)


@kernel
def quantize(x, blocks, tables):
    _quantize(x, None, blocks, tables)


@kernel
def quantize_weighted(x, w, blocks, tables):
    _quantize(x, w, blocks, tables)
