"""One element at a time: sums and products, scaling, activations, gated activations.

The second operand of a binary op repeats along the axes where it is shorter. In-place variants return a view of `a`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from engine.context import Context
from engine.ops import kinds
from engine.ops.op import F32, I32, Op, need, need_rows, node, repeated, repeats, values
from engine.tensor import Tensor

_ONE = np.float32(1)
_erf = np.vectorize(math.erf, otypes=[np.float32])


def _binary(ctx: Context, op: str, a: Tensor, b: Tensor, inplace: bool = False) -> Tensor:
    need_rows(op, a, b)
    need(repeats(b, a), op, "the second does not repeat to the first", a, b)
    return node(ctx, op, F32, a.ne, (a, b), (kinds.BINARY.index(op.lower()),), into=a if inplace else None)


def add(ctx: Context, a: Tensor, b: Tensor, inplace: bool = False) -> Tensor:
    """a + b."""
    return _binary(ctx, "ADD", a, b, inplace)


def sub(ctx: Context, a: Tensor, b: Tensor, inplace: bool = False) -> Tensor:
    """a - b."""
    return _binary(ctx, "SUB", a, b, inplace)


def mul(ctx: Context, a: Tensor, b: Tensor, inplace: bool = False) -> Tensor:
    """a * b."""
    return _binary(ctx, "MUL", a, b, inplace)


def div(ctx: Context, a: Tensor, b: Tensor, inplace: bool = False) -> Tensor:
    """a / b."""
    return _binary(ctx, "DIV", a, b, inplace)


def add_id(ctx: Context, a: Tensor, b: Tensor, ids: Tensor) -> Tensor:
    """out[:, i, t] = a[:, i, t] + b[:, ids[i, t]]: the bias of the expert that each row went through.

    a: float32 [n, n_used, n_tokens]; b: float32 [n, n_expert]; ids: I32 [n_used, n_tokens], below n_expert.
    """
    need_rows("ADD_ID", a, b)
    need(ids.format is I32 and ids.nb[0] == 4, "ADD_ID", "I32 ids", ids)
    need(a.ne[0] == b.ne[0] and a.ne[1:3] == ids.ne[:2] and a.ne[3] == 1, "ADD_ID", "shapes do not fit", a, b, ids)
    return node(ctx, "ADD_ID", F32, a.ne, (a, b, ids))


def scale(ctx: Context, a: Tensor, factor: float, bias: float = 0.0, inplace: bool = False) -> Tensor:
    """a * factor + bias."""
    need_rows("SCALE", a)
    return node(ctx, "SCALE", F32, a.ne, (a,), (float(factor), float(bias)), into=a if inplace else None)


def clamp(ctx: Context, a: Tensor, low: float, high: float) -> Tensor:
    """min(max(a, low), high)."""
    need_rows("CLAMP", a)
    need(low <= high, "CLAMP", f"the interval {low}..{high} is empty", a)
    return node(ctx, "CLAMP", F32, a.ne, (a,), (float(low), float(high)))


def fill(ctx: Context, a: Tensor, value: float) -> Tensor:
    """A tensor of a's shape, every element `value`; what `a` holds is not read."""
    need_rows("FILL", a)
    return node(ctx, "FILL", F32, a.ne, (a,), (float(value),))


def unary(ctx: Context, kind: str, a: Tensor, *params: float, inplace: bool = False) -> Tensor:
    """The function `kind` (one of `kinds.UNARY`) of every element."""
    need(kind in kinds.UNARY, "UNARY", f"no function '{kind}'", a)
    need_rows("UNARY", a)
    params = (kinds.UNARY.index(kind), *map(float, params))
    return node(ctx, "UNARY", F32, a.ne, (a,), params, into=a if inplace else None)


def silu(ctx: Context, a: Tensor) -> Tensor:
    """a / (1 + e^-a)."""
    return unary(ctx, "silu", a)


def gelu(ctx: Context, a: Tensor) -> Tensor:
    """a/2 (1 + tanh(sqrt(2/pi) (a + 0.044715 a^3))) (Hendrycks and Gimpel 2016, arXiv 1606.08415)."""
    return unary(ctx, "gelu", a)


def relu(ctx: Context, a: Tensor) -> Tensor:
    """max(a, 0)."""
    return unary(ctx, "relu", a)


def sigmoid(ctx: Context, a: Tensor) -> Tensor:
    """1 / (1 + e^-a)."""
    return unary(ctx, "sigmoid", a)


def tanh(ctx: Context, a: Tensor) -> Tensor:
    """Hyperbolic tangent."""
    return unary(ctx, "tanh", a)


def softplus(ctx: Context, a: Tensor) -> Tensor:
    """log(1 + e^a); a itself above 20."""
    return unary(ctx, "softplus", a)


def exp(ctx: Context, a: Tensor) -> Tensor:
    """e^a."""
    return unary(ctx, "exp", a)


def sqr(ctx: Context, a: Tensor) -> Tensor:
    """a^2."""
    return unary(ctx, "sqr", a)


def sqrt(ctx: Context, a: Tensor) -> Tensor:
    """Square root."""
    return unary(ctx, "sqrt", a)


def xielu(ctx: Context, a: Tensor, alpha_n: float, alpha_p: float, beta: float, eps: float) -> Tensor:
    """xIELU (Huang and Schlag 2024, arXiv 2411.13010): for a > 0 softplus(alpha_p) a^2 + beta a, else
    (expm1(min(a, eps)) - a) (beta + softplus(alpha_n)) + beta a."""
    slope_n, slope_p = (float(np.logaddexp(0.0, alpha)) for alpha in (alpha_n, alpha_p))
    return unary(ctx, "xielu", a, beta + slope_n, slope_p, beta, eps)


def glu(
    ctx: Context,
    kind: str,
    a: Tensor,
    b: Tensor | None = None,
    swapped: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
) -> Tensor:
    """f(gate) * up with f by `kind` (one of `kinds.GLU`; Shazeer 2020, arXiv 2002.05202).

    Two tensors are gate and up; of one, the first half of each row is the gate, `swapped` the second. `swiglu_oai` is
    x sigmoid(alpha x) (1 + up) with x = min(gate, limit) and up within +-limit; `swiglu_clamp` silu(x) up with the same
    bounds.
    """
    need(kind in kinds.GLU, "GLU", f"no gate '{kind}'", a)
    need_rows("GLU", a, b)
    params = (kinds.GLU.index(kind), int(swapped), float(alpha), float(limit))
    if b is None:
        need(a.ne[0] % 2 == 0, "GLU", "rows do not halve", a)
        return node(ctx, "GLU", F32, (a.ne[0] // 2, *a.ne[1:]), (a, None), params)
    need(a.ne == b.ne, "GLU", "shapes differ", a, b)
    return node(ctx, "GLU", F32, a.ne, (a, b), params)


def swiglu(ctx: Context, gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, with silu(v) = v / (1 + exp(-v))."""
    return glu(ctx, "swiglu", gate, up)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return _ONE / (_ONE + np.exp(-x))


def _gelu(x: np.ndarray) -> np.ndarray:
    inner = np.float32(math.sqrt(2 / math.pi)) * x * (_ONE + np.float32(0.044715) * x * x)
    return np.float32(0.5) * x * (_ONE + np.tanh(inner))


def _gelu_erf(x: np.ndarray) -> np.ndarray:
    return np.float32(0.5) * x * (_ONE + _erf(x * np.float32(math.sqrt(0.5))))


def _elu(x: np.ndarray) -> np.ndarray:
    return np.where(x > 0, x, np.expm1(x))


def _softplus(x: np.ndarray) -> np.ndarray:
    return np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, 20))))


def _xielu(x: np.ndarray, alpha_n: float, alpha_p: float, beta: float, eps: float) -> np.ndarray:
    below = (np.expm1(np.minimum(x, np.float32(eps))) - x) * np.float32(alpha_n) + np.float32(beta) * x
    return np.where(x > 0, np.float32(alpha_p) * x * x + np.float32(beta) * x, below)


_UNARY: dict[str, Callable[..., np.ndarray]] = {
    "abs": np.abs,
    "sgn": np.sign,
    "neg": np.negative,
    "step": lambda x: (x > 0).astype(np.float32),
    "tanh": np.tanh,
    "elu": _elu,
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": _sigmoid,
    "gelu": _gelu,
    "gelu_quick": lambda x: x * _sigmoid(np.float32(1.702) * x),
    "silu": lambda x: x * _sigmoid(x),
    "hardswish": lambda x: x * np.clip((x + 3) / np.float32(6), 0, 1),
    "hardsigmoid": lambda x: np.clip((x + 3) / np.float32(6), 0, 1),
    "exp": np.exp,
    "expm1": np.expm1,
    "softplus": _softplus,
    "gelu_erf": _gelu_erf,
    "xielu": _xielu,
    "floor": np.floor,
    "ceil": np.ceil,
    "round": lambda x: np.trunc(x + np.copysign(np.float32(0.5), x)),
    "trunc": np.trunc,
    "sqr": np.square,
    "sqrt": np.sqrt,
    "log": np.log,
    "sin": np.sin,
    "cos": np.cos,
}
_GATES: dict[str, Callable[..., np.ndarray]] = {
    "reglu": _UNARY["relu"],
    "geglu": _gelu,
    "swiglu": _UNARY["silu"],
    "geglu_erf": _gelu_erf,
    "geglu_quick": _UNARY["gelu_quick"],
}


def _unary(n: Tensor) -> np.ndarray:
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        return _UNARY[kinds.UNARY[n.params[0]]](values(n.src[0]), *n.params[1:])


def _glu(n: Tensor) -> np.ndarray:
    kind, swapped, alpha, limit = n.params
    if n.src[1] is None:
        gate, up = np.split(values(n.src[0]), 2, axis=-1)
        gate, up = (up, gate) if swapped else (gate, up)
    else:
        gate, up = values(n.src[0]), values(n.src[1])
    with np.errstate(over="ignore"):
        if kind in (kinds.SWIGLU_OAI, kinds.SWIGLU_CLAMP):
            x, up = np.minimum(gate, np.float32(limit)), np.clip(up, np.float32(-limit), np.float32(limit))
            return (
                x * _sigmoid(np.float32(alpha) * x) * (up + _ONE) if kind == kinds.SWIGLU_OAI else x * _sigmoid(x) * up
            )
        return _GATES[kinds.GLU[kind]](gate) * up


def _add_id(n: Tensor) -> np.ndarray:
    a, b, ids = n.src
    return values(a) + values(b)[0, 0][values(ids)[0, 0]]


_BINARY = {"ADD": np.add, "SUB": np.subtract, "MUL": np.multiply, "DIV": np.divide}
_KERNELS = "engine.kernels.elementwise:"

OPS = (
    *(
        Op(name, lambda n, f=f: f(values(n.src[0]), repeated(n.src[1], n)), _KERNELS + "binary", inplace=True)  # type: ignore[misc]
        for name, f in _BINARY.items()
    ),
    Op("ADD_ID", _add_id, _KERNELS + "add_id", inplace=True),
    Op(
        "SCALE",
        lambda n: values(n.src[0]) * np.float32(n.params[0]) + np.float32(n.params[1]),
        _KERNELS + "scale",
        inplace=True,
    ),
    Op(
        "CLAMP",
        lambda n: np.clip(values(n.src[0]), np.float32(n.params[0]), np.float32(n.params[1])),
        _KERNELS + "clamp",
        inplace=True,
    ),
    Op("FILL", lambda n: np.full(n.shape, n.params[0], np.float32), _KERNELS + "fill", inplace=True),
    Op("UNARY", _unary, _KERNELS + "unary", inplace=True, label=lambda n: kinds.UNARY[n.params[0]]),
    Op("GLU", _glu, _KERNELS + "glu", inplace=True, label=lambda n: kinds.GLU[n.params[0]]),
)
