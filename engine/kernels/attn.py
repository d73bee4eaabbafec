"""Kernel of engine/ops/attn.py. Threads take tiles of queries of one head until none is left; BLAS multiplies straight
from the strided heads, or from decoded tiles where keys and values are not float32."""

import numpy as np
from numba import carray

from engine.kernels.math import exp, row_max, slope, tanh
from engine.kernels.node import (
    SGEMM,
    by_format,
    data,
    element,
    floats,
    nb,
    ne,
    next_chunk,
    param,
    param_f32,
    pointer,
    scratch,
    sgemm,
    slot,
)  # fmt: skip
from engine.ops.attn import KEY_TILE, QUERY_TILE
from engine.ops.op import F32
from quant.kernels import dequantize_block


@by_format
def attention(tensor):
    k_format, v_format = tensor.src[1].format, tensor.src[2].format
    k_block, k_size, k_plain = k_format.block, k_format.block_size, k_format is F32
    v_block, v_size, v_plain = v_format.block, v_format.block_size, v_format is F32
    mask_block = (F32 if tensor.src[3] is None else tensor.src[3].format).block

    def kernel(node, ith, nth, chunks):
        d, n_tokens, n_head, n_seq = ne(node, 1, 0), ne(node, 1, 1), ne(node, 1, 2), ne(node, 1, 3)
        n_kv, group, dv = ne(node, 2, 1), n_head // ne(node, 2, 2), ne(node, 3, 0)
        factor, causal, window, cap = param_f32(node, 0), param(node, 1), param(node, 2), param_f32(node, 3)
        tile, keys = min(QUERY_TILE, n_tokens), min(KEY_TILE, n_kv)
        tiles = (n_tokens + tile - 1) // tile
        size = tile * keys + 2 * tile + (0 if k_plain else keys * d) + (0 if v_plain else keys * dv)
        scores = scratch(node, ith, 4 * size)
        best, total = floats(scores + 4 * tile * keys, tile), floats(scores + 4 * tile * (keys + 1), tile)
        k_tile = scores + 4 * tile * (keys + 2)
        v_tile = k_tile + (0 if k_plain else 4 * keys * d)
        extra = np.empty(1, np.float32)
        past = n_kv - n_tokens
        chunk = ith
        while chunk < tiles * n_head * n_seq:
            lo = chunk % tiles * tile
            rows = min(n_tokens, lo + tile) - lo
            head, sequence = chunk // tiles % n_head, chunk // (tiles * n_head)
            q = element(node, 1, lo, head, sequence)
            out, out_step = element(node, 0, head, lo, sequence), nb(node, 0, 2)
            bias = slope(head, n_head, param_f32(node, 4))
            first = max(0, past + lo - window + 1) if window != 0 else 0
            last = past + lo + rows if causal != 0 else n_kv  # keys that some query of the tile sees
            for i in range(rows):
                best[i], total[i] = np.float32(-np.inf), np.float32(0)
                floats(out + i * out_step, dv)[:] = np.float32(0)
            for start in range(first, last, keys):
                seen = min(last - start, keys)
                k, k_step = element(node, 2, start, head // group, sequence), nb(node, 2, 1)
                v, v_step = element(node, 3, start, head // group, sequence), nb(node, 3, 1)
                if not k_plain:
                    for j in range(seen):
                        y, blocks = (
                            floats(k_tile + 4 * j * d, d),
                            carray(pointer(k + j * k_step), (d // k_size,), k_block),
                        )
                        for b in range(d // k_size):
                            dequantize_block(blocks[b], y[b * k_size : (b + 1) * k_size])
                    k, k_step = k_tile, 4 * d
                if not v_plain:
                    for j in range(seen):
                        y, blocks = (
                            floats(v_tile + 4 * j * dv, dv),
                            carray(pointer(v + j * v_step), (dv // v_size,), v_block),
                        )
                        for b in range(dv // v_size):
                            dequantize_block(blocks[b], y[b * v_size : (b + 1) * v_size])
                    v, v_step = v_tile, 4 * dv
                sgemm(
                    slot(node, SGEMM), 1, seen, rows, d, factor, k, k_step // 4, q, nb(node, 1, 1) // 4,
                    np.float32(0), scores, seen,
                )  # fmt: skip
                for i in range(rows):
                    s = floats(scores + 4 * i * seen, seen)
                    if cap != np.float32(0):
                        for j in range(seen):
                            s[j] = cap * tanh(s[j] / cap)
                    if data(node, 4) != 0:
                        row = element(node, 4, lo + i, head % ne(node, 4, 2), sequence % ne(node, 4, 3))
                        mask = carray(pointer(row), (n_kv,), mask_block)
                        for j in range(seen):
                            dequantize_block(mask[start + j], extra)
                            s[j] += bias * extra[0]
                    if causal != 0:
                        own = past + lo + i
                        for j in range(max(0, own + 1 - start), seen):
                            s[j] = np.float32(-np.inf)
                        if window != 0:
                            for j in range(min(seen, max(0, own - window + 1 - start))):
                                s[j] = np.float32(-np.inf)
                    top = max(best[i], row_max(s))
                    safe = top if top > np.float32(-np.inf) else np.float32(0)
                    shrink = exp(best[i] - safe)
                    added = np.float32(0)
                    for j in range(seen):
                        e = exp(s[j] - safe)
                        s[j] = e
                        added += e
                    best[i], total[i] = top, total[i] * shrink + added
                    if shrink != np.float32(1) and start > first:
                        y = floats(out + i * out_step, dv)
                        for j in range(dv):
                            y[j] *= shrink
                sgemm(
                    slot(node, SGEMM), 0, dv, rows, seen, np.float32(1), v, v_step // 4, scores, seen,
                    np.float32(1), out, out_step // 4,
                )  # fmt: skip
            for i in range(rows):
                y, norm = floats(out + i * out_step, dv), np.float32(1)
                if data(node, 5) != 0:
                    sink = floats(data(node, 5), n_head)[head]
                    top = max(best[i], sink)
                    norm = exp(best[i] - top)
                    total[i] = total[i] * norm + exp(sink - top)
                norm = norm / total[i] if total[i] > np.float32(0) else np.float32(0)
                for j in range(dv):
                    y[j] *= norm
            chunk = next_chunk(chunks)

    return kernel
