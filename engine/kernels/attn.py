"""Kernel of engine/ops/attn.py. Threads take tiles of queries of one head until none is left; BLAS multiplies straight
from the strided heads, or from decoded tiles where keys and values are not float32. A few queries take another way: for
each key and value head, row after row is decoded and multiplied with all queries of the group."""

import numpy as np
from numba import carray

from engine.kernels.math import dot, exp, row_max, slope, tanh
from engine.kernels.node import (
    SGEMM,
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
from engine.kernels.rows import decode_row
from engine.ops.attn import FEW, KEY_TILE, QUERY_TILE
from engine.ops.op import F32


def _by_queries(factory):
    """As `by_format`; few queries and many have their own kernels."""
    factory.variant = lambda node: ("few" if _is_few(node) else "tiled",)
    return factory


@_by_queries
def attention(tensor):
    """The kernel for a node; see `engine/kernels/node.py`."""
    return _few(tensor) if _is_few(tensor) else _tiled(tensor)


def _is_few(tensor):
    return tensor.src[0].ne[1] <= FEW


def _tiled(tensor):
    """Products of tiles."""
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
        extra = np.empty(KEY_TILE, np.float32)
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
                if data(node, 4) != 0:
                    blind = True
                    for i in range(rows):
                        place = element(node, 4, lo + i, head % ne(node, 4, 2), sequence % ne(node, 4, 3))
                        y = floats(scores + 4 * i * seen, seen)
                        decode_row(carray(pointer(place + start * nb(node, 4, 0)), (seen,), mask_block), y)
                        blind = blind and row_max(y) == np.float32(-np.inf)
                    if blind:
                        continue
                if not k_plain:
                    for j in range(seen):
                        blocks = carray(pointer(k + j * k_step), (d // k_size,), k_block)
                        decode_row(blocks, floats(k_tile + 4 * j * d, d))
                    k, k_step = k_tile, 4 * d
                if not v_plain:
                    for j in range(seen):
                        v_blocks = carray(pointer(v + j * v_step), (dv // v_size,), v_block)
                        decode_row(v_blocks, floats(v_tile + 4 * j * dv, dv))
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
                        place = element(node, 4, lo + i, head % ne(node, 4, 2), sequence % ne(node, 4, 3))
                        decode_row(carray(pointer(place + start * nb(node, 4, 0)), (seen,), mask_block), extra[:seen])
                        for j in range(seen):
                            s[j] += bias * extra[j]
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


def _few(tensor):
    """At most FEW queries: a chunk is one query of all heads that share a key and value head."""
    k_format, v_format = tensor.src[1].format, tensor.src[2].format
    k_block, k_size, v_block, v_size = k_format.block, k_format.block_size, v_format.block, v_format.block_size
    mask_block = (F32 if tensor.src[3] is None else tensor.src[3].format).block

    def kernel(node, ith, nth, chunks):
        d, n_tokens, n_seq = ne(node, 1, 0), ne(node, 1, 1), ne(node, 1, 3)
        n_kv, heads, dv = ne(node, 2, 1), ne(node, 2, 2), ne(node, 3, 0)
        group = ne(node, 1, 2) // heads
        factor, causal, window, cap = param_f32(node, 0), param(node, 1), param(node, 2), param_f32(node, 3)
        keys = min(KEY_TILE, n_kv)
        scores = scratch(node, ith, 4 * (group * (keys + 2) + max(d, dv)))
        best, total = floats(scores + 4 * group * keys, group), floats(scores + 4 * group * (keys + 1), group)
        held = scores + 4 * group * (keys + 2)
        extra = np.zeros(KEY_TILE, np.float32)
        chunk = ith
        while chunk < n_tokens * heads * n_seq:
            token, kv, sequence = chunk % n_tokens, chunk // n_tokens % heads, chunk // (n_tokens * heads)
            own = n_kv - n_tokens + token
            first = max(0, own - window + 1) if window != 0 else 0
            last = own + 1 if causal != 0 else n_kv
            for g in range(group):
                best[g], total[g] = np.float32(-np.inf), np.float32(0)
                floats(element(node, 0, kv * group + g, token, sequence), dv)[:] = np.float32(0)
            for start in range(first, last, keys):
                seen = min(last - start, keys)
                if data(node, 4) != 0:
                    place = element(node, 4, token, kv * group % ne(node, 4, 2), sequence % ne(node, 4, 3))
                    decode_row(carray(pointer(place + start * nb(node, 4, 0)), (seen,), mask_block), extra[:seen])
                    if row_max(extra[:seen]) == np.float32(-np.inf) and ne(node, 4, 2) == 1:
                        continue
                for j in range(seen):
                    if extra[j] == np.float32(-np.inf) and ne(node, 4, 2) == 1:
                        for g in range(group):
                            floats(scores + 4 * (g * keys + j), 1)[0] = np.float32(-np.inf)
                        continue
                    k = element(node, 2, start + j, kv, sequence)
                    decode_row(carray(pointer(k), (d // k_size,), k_block), floats(held, d))
                    for g in range(group):
                        q = element(node, 1, token, kv * group + g, sequence)
                        floats(scores + 4 * (g * keys + j), 1)[0] = factor * dot(floats(q, d), floats(held, d))
                for g in range(group):
                    s, head = floats(scores + 4 * g * keys, seen), kv * group + g
                    if cap != np.float32(0):
                        for j in range(seen):
                            if s[j] > np.float32(-np.inf):
                                s[j] = cap * tanh(s[j] / cap)
                    if data(node, 4) != 0:
                        if ne(node, 4, 2) > 1:
                            place = element(node, 4, token, head % ne(node, 4, 2), sequence % ne(node, 4, 3))
                            decode_row(
                                carray(pointer(place + start * nb(node, 4, 0)), (seen,), mask_block), extra[:seen]
                            )
                        bias = slope(head, group * heads, param_f32(node, 4))
                        for j in range(seen):
                            s[j] += bias * extra[j]
                    top = max(best[g], row_max(s))
                    safe = top if top > np.float32(-np.inf) else np.float32(0)
                    shrink = exp(best[g] - safe)
                    added = np.float32(0)
                    for j in range(seen):
                        e = exp(s[j] - safe)
                        s[j] = e
                        added += e
                    best[g], total[g] = top, total[g] * shrink + added
                    if shrink != np.float32(1) and start > first:
                        y = floats(element(node, 0, head, token, sequence), dv)
                        for j in range(dv):
                            y[j] *= shrink
                for j in range(seen):
                    most = np.float32(0)
                    for g in range(group):
                        most = max(most, floats(scores + 4 * (g * keys + j), 1)[0])
                    if most == np.float32(0):
                        continue
                    v = element(node, 3, start + j, kv, sequence)
                    x = floats(held, dv)
                    decode_row(carray(pointer(v), (dv // v_size,), v_block), x)
                    for g in range(group):
                        y = floats(element(node, 0, kv * group + g, token, sequence), dv)
                        e = floats(scores + 4 * (g * keys + j), 1)[0]
                        for i in range(dv):
                            y[i] += e * x[i]
            for g in range(group):
                head, norm = kv * group + g, np.float32(1)
                if data(node, 5) != 0:
                    sink = floats(data(node, 5), group * heads)[head]
                    top = max(best[g], sink)
                    norm = exp(best[g] - top)
                    total[g] = total[g] * norm + exp(sink - top)
                norm = norm / total[g] if total[g] > np.float32(0) else np.float32(0)
                y = floats(element(node, 0, head, token, sequence), dv)
                for j in range(dv):
                    y[j] *= norm
            chunk = next_chunk(chunks)

    return kernel
