"""Ops: builders that make graph nodes. Each takes the context first; shapes are checked when the graph is built."""

from engine.ops.attn import attention
from engine.ops.copies import cast, concat, cont, cpy, diag_mask_inf, dup, pad, repeat, tri
from engine.ops.elementwise import (
    add,
    add_id,
    clamp,
    div,
    exp,
    fill,
    gelu,
    glu,
    mul,
    relu,
    scale,
    sigmoid,
    silu,
    softplus,
    sqr,
    sqrt,
    sub,
    swiglu,
    tanh,
    unary,
    xielu,
)  # fmt: skip
from engine.ops.gather import get_rows, set_rows
from engine.ops.matmul import mul_mat, mul_mat_id
from engine.ops.norms import group_norm, l2_norm, norm, rms_norm
from engine.ops.recurrent import gated_delta_net, gated_linear_attn, ssm_conv, ssm_scan, wkv6, wkv7
from engine.ops.reduce import argmax, argsort, cumsum, mean, sum_all, sum_rows, top_k
from engine.ops.rotary import Yarn, rope
from engine.ops.softmax import soft_max
from engine.ops.views import permute, reshape, transpose, view

__all__ = [
    "Yarn", "add", "add_id", "argmax", "argsort", "attention", "cast", "clamp", "concat", "cont", "cpy", "cumsum",
    "diag_mask_inf", "div", "dup", "exp", "fill", "gated_delta_net", "gated_linear_attn", "gelu", "get_rows", "glu",
    "group_norm", "l2_norm", "mean", "mul", "mul_mat", "mul_mat_id", "norm", "pad", "permute", "relu", "repeat",
    "reshape",
    "rms_norm", "rope", "scale", "set_rows", "sigmoid", "silu", "soft_max", "softplus", "sqr", "sqrt", "ssm_conv",
    "ssm_scan", "sub", "sum_all", "sum_rows", "swiglu", "tanh", "top_k", "transpose", "tri", "unary", "view", "wkv6",
    "wkv7", "xielu",
]  # fmt: skip
