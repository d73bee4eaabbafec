"""RMS_NORM."""

from __future__ import annotations

import numpy as np

from engine.context import Context
from engine.ops.op import F32, Op, need, node, values
from engine.tensor import Tensor


def rms_norm(ctx: Context, a: Tensor, eps: float) -> Tensor:
    """a / sqrt(mean(a^2) + eps) along axis 0 (Zhang and Sennrich 2019, arXiv 1910.07467); its weight is a MUL."""
    need(a.is_float_rows, "RMS_NORM", "float32 rows only", a)
    return node(ctx, "RMS_NORM", F32, a.ne, (a,), (float(eps),))


def _rms_norm(n: Tensor) -> np.ndarray:
    x = values(n.src[0])
    mean = np.mean(x.astype(np.float64) ** 2, axis=-1, keepdims=True).astype(np.float32)
    return x * (np.float32(1) / np.sqrt(mean + np.float32(n.params[0])))


OPS = (Op("RMS_NORM", _rms_norm, "engine.kernels.norm:rms_norm", inplace=True),)
