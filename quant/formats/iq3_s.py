"""IQ3_S: x = d * (2 s + 1) * +-q, q points of 4 numbers 1, 3, .. 15, blocks of 256. 3.4375 bits per weight.

| field | bytes | content |
|---|---|---|
| d | 2 | scale, IEEE half |
| qs | 64 | byte k: low bits of the position of point k in the codebook |
| qh | 8 | bit k of byte g: high bit of the k-th point of group g |
| signs | 32 | bit i of byte k: weight 8 k + i is negative |
| scales | 4 | byte g / 2: s, the even group's in the low nibble |

ggml's `block_iq3_s`; a group is 32 weights, the codebook has 512 points. Searched by `lattice.search_block`, with
weights x^2 or w * sqrt(2 * mean x^2 + x^2).

The reference has a fault that is kept for the sake of equal bytes: behind a group of zeros it writes the points and
signs of the block's other groups one group too early, so that they decode to something else. Where it aborts or stores
an infinite scale we do not: a scale beyond the half's range is stored as the largest; a group whose sums leave the
range of float32 is stored like one of zeros.
"""

import numpy as np

from quant import lattice
from quant.codebooks import CODEBOOKS
from quant.format import block_dtype
from quant.half import half_to_float
from quant.jit import kernel
from quant.lattice import finite_half, importance_weights, mean_square, nearest_level, search_block, workspace

BLOCK = block_dtype("IQ3_S", d="<u2", qs=("u1", 64), qh=("u1", 8), signs=("u1", 32), scales=("u1", 4))

METHOD = lattice.Method(
    group=32,
    dims=4,
    even=False,
    eps=np.float32(0),
    tries=19,
    step=np.float32(0.2),
    again=lattice.ALL_IF_ANY,
    start=False,
)
_CODES = CODEBOOKS["IQ3_S"].codes


def tables():
    """Index and neighbour lists of the codebook (see `lattice.tables`)."""
    return lattice.tables("IQ3_S")


@kernel
def dequantize(b, y):
    d = half_to_float(b["d"])
    for k in range(64):
        g = k // 8
        scale = d * np.float32(1 + 2 * np.int32((b["scales"][g // 2] >> (4 * (g % 2))) & 15))
        high = (np.int32(b["qh"][g]) >> np.int32(k % 8)) & np.int32(1)
        code = np.int32(_CODES[np.int32(b["qs"][k]) | (high << np.int32(8))])
        signs = np.int32(b["signs"][k // 2]) >> np.int32(4 * (k % 2))
        for i in range(4):
            q = np.float32(2) * np.float32((code >> np.int32(3 * i)) & np.int32(7)) + np.float32(1)
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
        d = search_block(block, METHOD, tables, work) / np.float32(31)
        inverse = np.float32(1) / d
        b["d"] = finite_half(d * np.float32(1.033))
        b["qs"][:] = 0
        b["qh"][:] = 0
        b["signs"][:] = 0
        place = 0
        for g in range(8):
            if not np.any(block[32 * g : 32 * g + 32]):
                continue  # see the docstring: the next group takes its place
            high = np.int32(0)
            for k in range(8):
                position = index[work.codes[8 * g + k, 0]]
                b["qs"][8 * place + k] = position & 255
                high |= (position >> 8) << k
            b["qh"][g] = high
            for k in range(4):
                b["signs"][4 * place + k] = work.signs[4 * g + k]
            place += 1
        for g in range(4):
            low = nearest_level(work.scales[2 * g], inverse, 15)
            b["scales"][g] = low | (nearest_level(work.scales[2 * g + 1], inverse, 15) << 4)


@kernel
def quantize(x, blocks, tables):
    _quantize(x, None, blocks, tables)


@kernel
def quantize_weighted(x, w, blocks, tables):
    _quantize(x, w, blocks, tables)
