"""Normalisations of rows: RMS_NORM, NORM, L2_NORM, GROUP_NORM. Weight and bias are a MUL and an ADD of their own."""

from __future__ import annotations

import numpy as np

from engine.context import Context
from engine.ops.op import F32, Op, need, need_rows, node, values
from engine.tensor import Tensor


def rms_norm(ctx: Context, a: Tensor, eps: float) -> Tensor:
    """a / sqrt(mean(a^2) + eps) along axis 0 (Zhang and Sennrich 2019, arXiv 1910.07467)."""
    need_rows("RMS_NORM", a)
    return node(ctx, "RMS_NORM", F32, a.ne, (a,), (float(eps),))


def norm(ctx: Context, a: Tensor, eps: float) -> Tensor:
    """(a - mean(a)) / sqrt(var(a) + eps) along axis 0 (Ba et al. 2016, arXiv 1607.06450)."""
    need_rows("NORM", a)
    return node(ctx, "NORM", F32, a.ne, (a,), (float(eps),))


def l2_norm(ctx: Context, a: Tensor, eps: float) -> Tensor:
    """a / max(sqrt(sum(a^2)), eps) along axis 0."""
    need_rows("L2_NORM", a)
    return node(ctx, "L2_NORM", F32, a.ne, (a,), (float(eps),))


def group_norm(ctx: Context, a: Tensor, groups: int, eps: float) -> Tensor:
    """As NORM, but over all elements of each of `groups` runs of axis 2 (Wu and He 2018, arXiv 1803.08494)."""
    need_rows("GROUP_NORM", a)
    need(groups >= 1 and a.ne[2] % groups == 0, "GROUP_NORM", f"axis 2 has no {groups} equal groups", a)
    return node(ctx, "GROUP_NORM", F32, a.ne, (a,), (int(groups), float(eps)))


def _mean(x: np.ndarray, axes=-1) -> np.ndarray:
    return np.mean(x.astype(np.float64), axis=axes, keepdims=True).astype(np.float32)


def _rms_norm(n: Tensor) -> np.ndarray:
    x = values(n.src[0])
    return x * (np.float32(1) / np.sqrt(_mean(x.astype(np.float64) ** 2) + np.float32(n.params[0])))


def _norm(n: Tensor) -> np.ndarray:
    x = values(n.src[0])
    x = x - _mean(x)
    return x * (np.float32(1) / np.sqrt(_mean(x.astype(np.float64) ** 2) + np.float32(n.params[0])))


def _l2_norm(n: Tensor) -> np.ndarray:
    x = values(n.src[0])
    length = np.sqrt((x.astype(np.float64) ** 2).sum(-1, keepdims=True)).astype(np.float32)
    return x / np.maximum(length, np.float32(n.params[0]))


def _group_norm(n: Tensor) -> np.ndarray:
    groups, eps = n.params
    x = values(n.src[0])
    x = x.reshape(x.shape[0], groups, -1, *x.shape[2:])
    x = x - _mean(x, (2, 3, 4))
    return (x / np.sqrt(_mean(x.astype(np.float64) ** 2, (2, 3, 4)) + np.float32(eps))).reshape(n.shape)


_KERNELS = "engine.kernels.norms:"

OPS = (
    Op("RMS_NORM", _rms_norm, _KERNELS + "rms_norm", inplace=True),
    Op("NORM", _norm, _KERNELS + "norm"),
    Op("L2_NORM", _l2_norm, _KERNELS + "l2_norm"),
    Op("GROUP_NORM", _group_norm, _KERNELS + "group_norm"),
)
