"""Ops: builders that make graph nodes. Each takes the context first; shapes are checked when the graph is built."""

from engine.ops.attn import attention
from engine.ops.elementwise import add, mul, scale, swiglu
from engine.ops.gather import get_rows
from engine.ops.matmul import mul_mat
from engine.ops.norm import rms_norm
from engine.ops.rotary import rope
from engine.ops.views import cont, permute, reshape, transpose, view

__all__ = [
    "add",
    "attention",
    "cont",
    "get_rows",
    "mul",
    "mul_mat",
    "permute",
    "reshape",
    "rms_norm",
    "rope",
    "scale",
    "swiglu",
    "transpose",
    "view",
]
