"""Kernel of engine/ops/attn.py. Threads take tiles of queries of one head until none is left; BLAS multiplies
straight from the strided heads."""

import numpy as np

from engine.kernels.math import softmax
from engine.kernels.node import SCRATCH, SGEMM, data, floats, nb, ne, next_chunk, param, param_f32, sgemm, slot


def attention(node, ith, nth, chunks):
    d, n_tokens, n_head, n_seq = ne(node, 1, 0), ne(node, 1, 1), ne(node, 1, 2), ne(node, 1, 3)
    n_kv, group, dv = ne(node, 2, 1), n_head // ne(node, 2, 2), ne(node, 3, 0)
    scale, tile, mask = param_f32(node, 0), param(node, 1), data(node, 4)
    tiles = (n_tokens + tile - 1) // tile
    scores = slot(node, SCRATCH) + ith * tile * n_kv * 4
    chunk = ith
    while chunk < tiles * n_head * n_seq:
        lo = chunk % tiles * tile
        rows = min(n_tokens, lo + tile) - lo
        head, sequence = chunk // tiles % n_head, chunk // (tiles * n_head)
        q = data(node, 1) + lo * nb(node, 1, 1) + head * nb(node, 1, 2) + sequence * nb(node, 1, 3)
        k = data(node, 2) + head // group * nb(node, 2, 2) + sequence * nb(node, 2, 3)
        v = data(node, 3) + head // group * nb(node, 3, 2) + sequence * nb(node, 3, 3)
        out = data(node, 0) + head * nb(node, 0, 1) + lo * nb(node, 0, 2) + sequence * nb(node, 0, 3)
        past = n_kv - n_tokens
        seen = n_kv if mask != 0 else past + lo + rows  # keys that some query of the tile may look at
        sgemm(
            slot(node, SGEMM), 1, seen, rows, d, scale, k, nb(node, 2, 1) // 4, q, nb(node, 1, 1) // 4, scores, seen
        )
        for i in range(rows):
            row = scores + i * seen * 4
            if mask != 0:
                s, extra = floats(row, seen), floats(mask + (lo + i) * nb(node, 4, 1), seen)
                for j in range(seen):
                    s[j] += extra[j]
                softmax(row, seen)
            else:
                visible = past + lo + i + 1
                softmax(row, visible)
                floats(row + visible * 4, seen - visible)[:] = np.float32(0)
        sgemm(
            slot(node, SGEMM), 0, dv, rows, seen, np.float32(1), v, nb(node, 3, 1) // 4, scores, seen,
            out, nb(node, 0, 2) // 4,
        )  # fmt: skip
        chunk = next_chunk(chunks)
