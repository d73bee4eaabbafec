"""Pieces that model graphs share. Functions, not base classes: a family calls what fits it.

Shapes are in ggml's order, axis 0 first; `n` is the number of tokens of all sequences together.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine import ops
from engine.context import Context
from engine.tensor import Tensor

Weights = Mapping[str, Tensor]


def linear(ctx: Context, w: Weights, name: str, x: Tensor) -> Tensor:
    """x times the weight `name`, plus its bias if the model has one."""
    y = ops.mul_mat(ctx, w[name + ".weight"], x)
    bias = w.get(name + ".bias")
    return y if bias is None else ops.add(ctx, y, bias)


def rms_norm(ctx: Context, w: Weights, name: str, x: Tensor, eps: float) -> Tensor:
    """RMS norm with its weight."""
    return ops.mul(ctx, ops.rms_norm(ctx, x, eps), w[name + ".weight"])


def heads(ctx: Context, x: Tensor, d: int, n_seq: int) -> Tensor:
    """[d * n_head, n] -> [d, n_head, n / n_seq, n_seq]."""
    return ops.reshape(ctx, x, d, x.ne[0] // d, x.ne[1] // n_seq, n_seq)


def attend(ctx: Context, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of heads [d, n_head, n_tokens, n_seq] -> [dv * n_head, n]."""
    q, k, v = (ops.permute(ctx, t, 0, 2, 1, 3) for t in (q, k, v))
    y = ops.attention(ctx, q, k, v, scale)
    return ops.reshape(ctx, y, y.ne[0] * y.ne[1], y.ne[2] * y.ne[3])


def ffn_swiglu(ctx: Context, w: Weights, prefix: str, x: Tensor) -> Tensor:
    """down(silu(gate(x)) * up(x))."""
    gate, up = linear(ctx, w, prefix + "ffn_gate", x), linear(ctx, w, prefix + "ffn_up", x)
    return linear(ctx, w, prefix + "ffn_down", ops.swiglu(ctx, gate, up))
