"""What products do to activations: nothing (`f32`), or rounding to the 8-bit partner of the weight's format (`q8`).

llama.cpp multiplies blocks of weights with blocks of activations in integers. With `q8` activations are rounded to the
same blocks; the products of these numbers are then the same but for the rounding of sums.
"""

from __future__ import annotations

from engine import ops
from engine.context import Context
from engine.errors import EngineError
from engine.ops.op import F32
from engine.tensor import Tensor
from quant import FORMATS, Format

ACTIVATIONS = ("f32", "q8")

#: format of the weight -> what ggml's CPU backend turns activations into (`vec_dot_type`); super-blocks have Q8_K
_PARTNERS = {
    **dict.fromkeys(("Q1_0", "Q2_0", "Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "MXFP4", "NVFP4"), "Q8_0"),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q8_1"), "Q8_1"),
    "F16": "F16",
    "BF16": "BF16",
}


def partner(weight: Format) -> Format | None:
    """The format that activations are rounded to before they meet a weight; None for float32 weights."""
    if weight is F32:
        return None
    return FORMATS[_PARTNERS.get(weight.name, "Q8_K")]


def rounded(ctx: Context, weight: Tensor, x: Tensor) -> Tensor:
    """Activations x as the products with `weight` see them."""
    into = partner(weight.format)
    if into is None:
        return x
    return ops.cast(ctx, ops.cast(ctx, x, into), F32)


def check(name: str) -> str:
    """The name, if there are such activations. Raises EngineError otherwise."""
    if name not in ACTIVATIONS:
        raise EngineError(f"there are no activations '{name}'; use one of {', '.join(ACTIVATIONS)}")
    return name
