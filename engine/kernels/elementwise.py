"""Kernels of engine/ops/elementwise.py. `kind` is a constant when a kernel is compiled: one branch remains."""

import math

import numpy as np

from engine.kernels.math import exp, gelu, gelu_erf, sigmoid, silu, softplus, tanh
from engine.kernels.node import (
    by_kind,
    data,
    floats,
    load_i32,
    n_rows,
    nb,
    ne,
    param,
    param_f32,
    row_address,
    share,
)  # fmt: skip
from engine.ops import kinds
from quant.jit import kernel


@kernel
def _times(a, b):
    """a * b, not merged with what made a and b: fused and single ops agree to the last bit."""
    return a * b


@by_kind
def binary(tensor):
    kind = tensor.params[0]

    def run(node, ith, nth, chunks):
        lo, hi = share(n_rows(node), ith, nth)
        n, period = ne(node, 0, 0), ne(node, 2, 0)
        for row in range(lo, hi):
            out, a, b = row_address(node, 0, row), row_address(node, 1, row), row_address(node, 2, row)
            if period == 1:  # one number a row: a vector loop over the row
                y, v, single = floats(out, n), floats(a, n), floats(b, 1)[0]
                for i in range(n):
                    if kind == kinds.ADD:
                        y[i] = v[i] + single
                    elif kind == kinds.SUB:
                        y[i] = v[i] - single
                    elif kind == kinds.MUL:
                        y[i] = v[i] * single
                    else:
                        y[i] = v[i] / single
                continue
            for start in range(0, n, period):
                y, v, w = floats(out + 4 * start, period), floats(a + 4 * start, period), floats(b, period)
                for i in range(period):
                    if kind == kinds.ADD:
                        y[i] = v[i] + w[i]
                    elif kind == kinds.SUB:
                        y[i] = v[i] - w[i]
                    elif kind == kinds.MUL:
                        y[i] = v[i] * w[i]
                    else:
                        y[i] = v[i] / w[i]

    return run


def add_id(node, ith, nth, chunks):
    lo, hi = share(n_rows(node), ith, nth)
    n, n_used = ne(node, 0, 0), ne(node, 0, 1)
    for row in range(lo, hi):
        y, a = floats(row_address(node, 0, row), n), floats(row_address(node, 1, row), n)
        ids = data(node, 3) + row % n_used * nb(node, 3, 0) + row // n_used * nb(node, 3, 1)
        b = floats(data(node, 2) + load_i32(ids) * nb(node, 2, 1), n)
        for i in range(n):
            y[i] = a[i] + b[i]


def scale(node, ith, nth, chunks):
    lo, hi = share(n_rows(node), ith, nth)
    n, factor, bias = ne(node, 0, 0), param_f32(node, 0), param_f32(node, 1)
    for row in range(lo, hi):
        y, v = floats(row_address(node, 0, row), n), floats(row_address(node, 1, row), n)
        for i in range(n):
            y[i] = v[i] * factor + bias


def clamp(node, ith, nth, chunks):
    lo, hi = share(n_rows(node), ith, nth)
    n, low, high = ne(node, 0, 0), param_f32(node, 0), param_f32(node, 1)
    for row in range(lo, hi):
        y, v = floats(row_address(node, 0, row), n), floats(row_address(node, 1, row), n)
        for i in range(n):
            y[i] = min(max(v[i], low), high)


def fill(node, ith, nth, chunks):
    lo, hi = share(n_rows(node), ith, nth)
    n, value = ne(node, 0, 0), param_f32(node, 0)
    for row in range(lo, hi):
        y = floats(row_address(node, 0, row), n)
        for i in range(n):
            y[i] = value


@by_kind
def unary(tensor):
    kind = tensor.params[0]

    def run(node, ith, nth, chunks):
        lo, hi = share(n_rows(node), ith, nth)
        n = ne(node, 0, 0)
        one, two, three, four = param_f32(node, 1), param_f32(node, 2), param_f32(node, 3), param_f32(node, 4)
        for row in range(lo, hi):
            y, v = floats(row_address(node, 0, row), n), floats(row_address(node, 1, row), n)
            for i in range(n):
                x = v[i]
                if kind == kinds.ABS:
                    y[i] = abs(x)
                elif kind == kinds.SGN:
                    y[i] = np.float32(1) if x > 0 else np.float32(-1) if x < 0 else np.float32(0)
                elif kind == kinds.NEG:
                    y[i] = -x
                elif kind == kinds.STEP:
                    y[i] = np.float32(1) if x > 0 else np.float32(0)
                elif kind == kinds.TANH:
                    y[i] = tanh(x)
                elif kind == kinds.ELU:
                    y[i] = x if x > 0 else math.expm1(x)
                elif kind == kinds.RELU:
                    y[i] = max(x, np.float32(0))
                elif kind == kinds.SIGMOID:
                    y[i] = sigmoid(x)
                elif kind == kinds.GELU:
                    y[i] = gelu(x)
                elif kind == kinds.GELU_QUICK:
                    y[i] = x * sigmoid(np.float32(1.702) * x)
                elif kind == kinds.SILU:
                    y[i] = silu(x)
                elif kind == kinds.HARDSWISH:
                    y[i] = x * min(np.float32(1), max(np.float32(0), (x + np.float32(3)) / np.float32(6)))
                elif kind == kinds.HARDSIGMOID:
                    y[i] = min(np.float32(1), max(np.float32(0), (x + np.float32(3)) / np.float32(6)))
                elif kind == kinds.EXP:
                    y[i] = exp(x)
                elif kind == kinds.EXPM1:
                    y[i] = math.expm1(x)
                elif kind == kinds.SOFTPLUS:
                    y[i] = softplus(x)
                elif kind == kinds.GELU_ERF:
                    y[i] = gelu_erf(x)
                elif kind == kinds.XIELU:
                    if x > 0:
                        y[i] = two * x * x + three * x
                    else:
                        y[i] = (math.expm1(min(x, four)) - x) * one + three * x
                elif kind == kinds.FLOOR:
                    y[i] = math.floor(x)
                elif kind == kinds.CEIL:
                    y[i] = math.ceil(x)
                elif kind == kinds.ROUND:
                    y[i] = np.trunc(x + math.copysign(np.float32(0.5), x))
                elif kind == kinds.TRUNC:
                    y[i] = np.trunc(x)
                elif kind == kinds.SQR:
                    y[i] = x * x
                elif kind == kinds.SQRT:
                    y[i] = np.sqrt(x)
                elif kind == kinds.LOG:
                    y[i] = np.log(x)
                elif kind == kinds.SIN:
                    y[i] = np.sin(x)
                else:
                    y[i] = np.cos(x)

    return run


@by_kind
def glu(tensor):
    kind = tensor.params[0]

    def run(node, ith, nth, chunks):
        lo, hi = share(n_rows(node), ith, nth)
        n, swapped, alpha, limit = ne(node, 0, 0), param(node, 1), param_f32(node, 2), param_f32(node, 3)
        for row in range(lo, hi):
            y = floats(row_address(node, 0, row), n)
            first = row_address(node, 1, row)
            second = row_address(node, 2, row) if data(node, 2) != 0 else first + 4 * n
            if data(node, 2) == 0 and swapped != 0:
                first, second = second, first
            gate, up = floats(first, n), floats(second, n)
            for i in range(n):
                if kind == kinds.REGLU:
                    y[i] = _times(max(gate[i], np.float32(0)), up[i])
                elif kind == kinds.GEGLU:
                    y[i] = _times(gelu(gate[i]), up[i])
                elif kind == kinds.SWIGLU:
                    y[i] = _times(silu(gate[i]), up[i])
                elif kind == kinds.SWIGLU_OAI:
                    x = min(gate[i], limit)
                    y[i] = x * sigmoid(alpha * x) * (min(max(up[i], -limit), limit) + np.float32(1))
                elif kind == kinds.GEGLU_ERF:
                    y[i] = _times(gelu_erf(gate[i]), up[i])
                elif kind == kinds.GEGLU_QUICK:
                    y[i] = _times(gate[i] * sigmoid(np.float32(1.702) * gate[i]), up[i])
                else:
                    y[i] = silu(min(gate[i], limit)) * min(max(up[i], -limit), limit)

    return run
