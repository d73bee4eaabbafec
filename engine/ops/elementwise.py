"""ADD, MUL, SCALE and the gated activations: one element at a time, `b` repeats along the axes where it is shorter."""

from __future__ import annotations

import numpy as np

from engine.context import Context
from engine.ops.op import F32, Op, need, node, values
from engine.tensor import Tensor


def _binary(ctx: Context, op: str, a: Tensor, b: Tensor) -> Tensor:
    need(a.is_float_rows and b.is_float_rows, op, "float32 rows only", a, b)
    need(all(n % m == 0 for n, m in zip(a.ne, b.ne)), op, "the second does not repeat to the first", a, b)
    return node(ctx, op, F32, a.ne, (a, b))


def add(ctx: Context, a: Tensor, b: Tensor) -> Tensor:
    """a + b."""
    return _binary(ctx, "ADD", a, b)


def mul(ctx: Context, a: Tensor, b: Tensor) -> Tensor:
    """a * b."""
    return _binary(ctx, "MUL", a, b)


def scale(ctx: Context, a: Tensor, factor: float) -> Tensor:
    """a * factor."""
    need(a.is_float_rows, "SCALE", "float32 rows only", a)
    return node(ctx, "SCALE", F32, a.ne, (a,), (float(factor),))


def swiglu(ctx: Context, gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, with silu(v) = v / (1 + exp(-v)) (Shazeer 2020, arXiv 2002.05202)."""
    need(gate.is_float_rows and up.is_float_rows, "SWIGLU", "float32 rows only", gate, up)
    need(gate.ne == up.ne, "SWIGLU", "shapes differ", gate, up)
    return node(ctx, "SWIGLU", F32, gate.ne, (gate, up))


def _repeated(b: Tensor, like: Tensor) -> np.ndarray:
    return np.tile(values(b), [n // m for n, m in zip(like.shape, b.shape)])


def _silu(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return x / (np.float32(1) + np.exp(-x))


OPS = (
    Op("ADD", lambda n: values(n.src[0]) + _repeated(n.src[1], n), "engine.kernels.elementwise:add", inplace=True),
    Op("MUL", lambda n: values(n.src[0]) * _repeated(n.src[1], n), "engine.kernels.elementwise:mul", inplace=True),
    Op("SCALE", lambda n: values(n.src[0]) * np.float32(n.params[0]), "engine.kernels.elementwise:scale", inplace=True),
    Op(
        "SWIGLU",
        lambda n: _silu(values(n.src[0])) * values(n.src[1]),
        "engine.kernels.elementwise:swiglu",
        inplace=True,
    ),
)
