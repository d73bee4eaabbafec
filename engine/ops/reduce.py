"""Along a row: SUM_ROWS, MEAN, SUM, CUMSUM, ARGMAX, ARGSORT, TOP_K."""

from __future__ import annotations

import numpy as np

from engine.context import Context
from engine.ops.op import F32, I32, Op, need, need_rows, node, values
from engine.tensor import Tensor

ASCENDING, DESCENDING = 0, 1


def sum_rows(ctx: Context, a: Tensor) -> Tensor:
    """The sum of each row: [1, ...]."""
    need_rows("SUM_ROWS", a)
    return node(ctx, "SUM_ROWS", F32, (1, *a.ne[1:]), (a,))


def mean(ctx: Context, a: Tensor) -> Tensor:
    """The mean of each row: [1, ...]."""
    need_rows("MEAN", a)
    return node(ctx, "MEAN", F32, (1, *a.ne[1:]), (a,))


def sum_all(ctx: Context, a: Tensor) -> Tensor:
    """The sum of all elements: [1]."""
    need_rows("SUM", a)
    return node(ctx, "SUM", F32, (1,), (a,))


def cumsum(ctx: Context, a: Tensor) -> Tensor:
    """out[i] = a[0] + ... + a[i] along axis 0."""
    need_rows("CUMSUM", a)
    return node(ctx, "CUMSUM", F32, a.ne, (a,))


def argmax(ctx: Context, a: Tensor) -> Tensor:
    """Place of the largest element of each row of a matrix, the first of equals: I32 [n_rows]."""
    need_rows("ARGMAX", a)
    need(a.ne[2] == a.ne[3] == 1, "ARGMAX", "a matrix", a)
    return node(ctx, "ARGMAX", I32, (a.ne[1],), (a,))


def argsort(ctx: Context, a: Tensor, descending: bool = False) -> Tensor:
    """Places of the elements of each row in order, equals as they lie: I32 of a's shape."""
    need_rows("ARGSORT", a)
    return node(ctx, "ARGSORT", I32, a.ne, (a,), (DESCENDING if descending else ASCENDING,))


def top_k(ctx: Context, a: Tensor, k: int) -> Tensor:
    """Places of the k largest elements of each row, largest first, equals as they lie: I32 [k, ...]."""
    need_rows("TOP_K", a)
    need(1 <= k <= a.ne[0], "TOP_K", f"a row has no {k} largest", a)
    return node(ctx, "TOP_K", I32, (k, *a.ne[1:]), (a,), (int(k),))


def _wide(n: Tensor) -> np.ndarray:
    return values(n.src[0]).astype(np.float64)


def _argsort(n: Tensor) -> np.ndarray:
    x = values(n.src[0])
    return np.argsort(-x if n.params[0] == DESCENDING else x, axis=-1, kind="stable").astype(np.int32)


def _sort_scratch(n: Tensor, threads: int) -> int:
    return threads * (4 * n.src[0].ne[0] + 64)


_KERNELS = "engine.kernels.reduce:"

OPS = (
    Op("SUM_ROWS", lambda n: _wide(n).sum(-1, keepdims=True), _KERNELS + "sum_rows"),
    Op("MEAN", lambda n: _wide(n).mean(-1, keepdims=True), _KERNELS + "mean"),
    Op("SUM", lambda n: _wide(n).sum().reshape(n.shape), _KERNELS + "sum_all"),
    Op("CUMSUM", lambda n: _wide(n).cumsum(-1), _KERNELS + "cumsum"),
    Op("ARGMAX", lambda n: values(n.src[0]).argmax(-1).reshape(n.shape), _KERNELS + "argmax"),
    Op("ARGSORT", _argsort, _KERNELS + "argsort", scratch=_sort_scratch),
    Op(
        "TOP_K",
        lambda n: np.argsort(-values(n.src[0]), axis=-1, kind="stable")[..., : n.params[0]],
        _KERNELS + "top_k",
    ),
)
