"""Variants of UNARY, GLU, ROPE and the reductions, as numbers that nodes carry in `params` and kernels are compiled
for."""

UNARY = (
    "abs", "sgn", "neg", "step", "tanh", "elu", "relu", "sigmoid", "gelu", "gelu_quick", "silu", "hardswish",
    "hardsigmoid", "exp", "expm1", "softplus", "gelu_erf", "xielu", "floor", "ceil", "round", "trunc", "sqr", "sqrt",
    "log", "sin", "cos",
)  # fmt: skip
(
    ABS, SGN, NEG, STEP, TANH, ELU, RELU, SIGMOID, GELU, GELU_QUICK, SILU, HARDSWISH, HARDSIGMOID, EXP, EXPM1, SOFTPLUS,
    GELU_ERF, XIELU, FLOOR, CEIL, ROUND, TRUNC, SQR, SQRT, LOG, SIN, COS,
) = range(len(UNARY))  # fmt: skip

GLU = ("reglu", "geglu", "swiglu", "swiglu_oai", "geglu_erf", "geglu_quick", "swiglu_clamp")
REGLU, GEGLU, SWIGLU, SWIGLU_OAI, GEGLU_ERF, GEGLU_QUICK, SWIGLU_CLAMP = range(len(GLU))

BINARY = ("add", "sub", "mul", "div")
ADD, SUB, MUL, DIV = range(len(BINARY))

#: Pairs that ROPE rotates: neighbours, or halves; and whence the positions come: one a token, or one of four by
#: section.
ROPE = ("normal", "neox", "mrope", "imrope")
ROPE_NORMAL, ROPE_NEOX, ROPE_MROPE, ROPE_IMROPE = range(len(ROPE))
