"""Kernels of engine/ops/recurrent.py. Threads share heads (and channels of a convolution); tokens run one after
another."""

import numpy as np

from engine.kernels.math import dot, exp, softplus
from engine.kernels.node import data, element, floats, load_f32, load_i32, nb, ne, param_f32, share
from quant.jit import fast_kernel


def ssm_conv(node, ith, nth, chunks):
    d_conv, d_inner, n_tokens = ne(node, 2, 0), ne(node, 2, 1), ne(node, 0, 1)
    lo, hi = share(d_inner, ith, nth)
    for sequence in range(ne(node, 0, 2)):
        for i in range(lo, hi):
            x, c = floats(element(node, 1, i, sequence, 0), ne(node, 1, 0)), floats(element(node, 2, i, 0, 0), d_conv)
            for t in range(n_tokens):
                floats(element(node, 0, t, sequence, 0), d_inner)[i] = dot(x[t : t + d_conv], c)


def ssm_scan(node, ith, nth, chunks):
    d_state, d_head, n_head = ne(node, 1, 0), ne(node, 1, 1), ne(node, 1, 2)
    n_tokens, n_seq, n_group = ne(node, 2, 2), ne(node, 2, 3), ne(node, 5, 1)
    one_decay = ne(node, 4, 0) == 1
    lo, hi = share(n_head * n_seq, ith, nth)
    y = floats(data(node, 0), d_head * n_head * n_tokens * n_seq)
    states = data(node, 0) + 4 * y.size
    for item in range(lo, hi):
        head, sequence = item % n_head, item // n_head
        which = np.int64(sequence)
        if data(node, 7) != 0:
            which = np.int64(load_i32(data(node, 7) + sequence * nb(node, 7, 0)))
        old = data(node, 1) + which * nb(node, 1, 3) + head * nb(node, 1, 2)
        size = d_state * d_head
        state, before = floats(states + 4 * size * item, size), floats(old, size)
        for i in range(size):
            state[i] = before[i]
        a = floats(element(node, 4, head, 0, 0), ne(node, 4, 0))
        group = head // (n_head // n_group)
        for t in range(n_tokens):
            x = floats(element(node, 2, head, t, sequence), d_head)
            b, c = (
                floats(element(node, 5, group, t, sequence), d_state),
                floats(element(node, 6, group, t, sequence), d_state),
            )
            step = softplus(
                load_f32(data(node, 3) + head * nb(node, 3, 0) + t * nb(node, 3, 1) + sequence * nb(node, 3, 2))
            )
            decay = exp(step * a[0])
            out = y[((sequence * n_tokens + t) * n_head + head) * d_head :]
            for i in range(d_head):
                row, drive = state[i * d_state : (i + 1) * d_state], x[i] * step
                for j in range(d_state):
                    row[j] = row[j] * (decay if one_decay else exp(step * a[j])) + b[j] * drive
                out[i] = dot(row, c)


def gated_delta_net(node, ith, nth, chunks):
    d, n_head, n_tokens, n_seq = ne(node, 3, 0), ne(node, 3, 1), ne(node, 3, 2), ne(node, 3, 3)
    lo, hi = share(n_head * n_seq, ith, nth)
    states = data(node, 0) + 4 * d * n_head * n_tokens * n_seq
    factor = np.float32(1) / np.sqrt(np.float32(d))
    for item in range(lo, hi):
        head, sequence = item % n_head, item // n_head
        state, before = floats(states + 4 * d * d * item, d * d), floats(element(node, 6, 0, head, sequence), d * d)
        for i in range(d * d):
            state[i] = before[i]
        for t in range(n_tokens):
            q = floats(element(node, 1, head % ne(node, 1, 1), t, sequence), d)
            k = floats(element(node, 2, head % ne(node, 2, 1), t, sequence), d)
            v, g = (
                floats(element(node, 3, head, t, sequence), d),
                floats(element(node, 4, head, t, sequence), ne(node, 4, 0)),
            )
            beta = floats(element(node, 5, head, t, sequence), 1)[0]
            out = floats(data(node, 0) + 4 * d * ((sequence * n_tokens + t) * n_head + head), d)
            whole = exp(g[0])
            for i in range(d):
                row = state[i * d : (i + 1) * d]
                for j in range(d):
                    row[j] *= whole if g.size == 1 else exp(g[j])
                delta = (v[i] - dot(row, k)) * beta
                for j in range(d):
                    row[j] += delta * k[j]
                out[i] = dot(row, q) * factor


@fast_kernel
def _state(node, which, d, n_head, tokens, item):
    """The state of one head of one sequence, in its place behind the outputs, filled from the old one."""
    size = d * d
    state = floats(data(node, 0) + 4 * (d * n_head * tokens + size * item), size)
    before = floats(data(node, which) + 4 * size * item, size)
    for i in range(size):
        state[i] = before[i]
    return state


def wkv6(node, ith, nth, chunks):
    d, n_head, tokens, n_seq = ne(node, 1, 0), ne(node, 1, 1), ne(node, 1, 2), ne(node, 6, 1)
    lo, hi = share(n_head * n_seq, ith, nth)
    length = tokens // n_seq
    for item in range(lo, hi):
        head, sequence = item % n_head, item // n_head
        state = _state(node, 6, d, n_head, tokens, item)
        first = floats(data(node, 5) + 4 * head * d, d)
        for t in range(sequence * length, (sequence + 1) * length):
            k, v = floats(element(node, 1, head, t, 0), d), floats(element(node, 2, head, t, 0), d)
            r, decay = floats(element(node, 3, head, t, 0), d), floats(element(node, 4, head, t, 0), d)
            out = floats(data(node, 0) + 4 * d * (t * n_head + head), d)
            out[:] = np.float32(0)
            for i in range(d):
                row = state[i * d : (i + 1) * d]
                for j in range(d):
                    pair = k[i] * v[j]
                    out[j] += r[i] * (first[i] * pair + row[j])
                    row[j] = decay[i] * row[j] + pair


def gated_linear(node, ith, nth, chunks):
    d, n_head, tokens, n_seq = ne(node, 1, 0), ne(node, 1, 1), ne(node, 1, 2), ne(node, 5, 1)
    factor = param_f32(node, 0)
    lo, hi = share(n_head * n_seq, ith, nth)
    length = tokens // n_seq
    for item in range(lo, hi):
        head, sequence = item % n_head, item // n_head
        state = _state(node, 5, d, n_head, tokens, item)
        for t in range(sequence * length, (sequence + 1) * length):
            k, v = floats(element(node, 1, head, t, 0), d), floats(element(node, 2, head, t, 0), d)
            q, g = floats(element(node, 3, head, t, 0), d), floats(element(node, 4, head, t, 0), d)
            out = floats(data(node, 0) + 4 * d * (t * n_head + head), d)
            out[:] = np.float32(0)
            for i in range(d):
                row = state[i * d : (i + 1) * d]
                for j in range(d):
                    row[j] = g[i] * row[j] + k[i] * v[j]
                    out[j] += row[j] * (q[i] * factor)


def wkv7(node, ith, nth, chunks):
    d, n_head, tokens, n_seq = ne(node, 1, 0), ne(node, 1, 1), ne(node, 1, 2), ne(node, 7, 1)
    lo, hi = share(n_head * n_seq, ith, nth)
    length = tokens // n_seq
    for item in range(lo, hi):
        head, sequence = item % n_head, item // n_head
        state = _state(node, 7, d, n_head, tokens, item)
        for t in range(sequence * length, (sequence + 1) * length):
            r, w = floats(element(node, 1, head, t, 0), d), floats(element(node, 2, head, t, 0), d)
            k, v = floats(element(node, 3, head, t, 0), d), floats(element(node, 4, head, t, 0), d)
            a, b = floats(element(node, 5, head, t, 0), d), floats(element(node, 6, head, t, 0), d)
            out = floats(data(node, 0) + 4 * d * (t * n_head + head), d)
            for i in range(d):
                row = state[i * d : (i + 1) * d]
                seen = dot(row, a)
                for j in range(d):
                    row[j] = row[j] * w[j] + v[i] * k[j] + seen * b[j]
                out[i] = dot(row, r)
