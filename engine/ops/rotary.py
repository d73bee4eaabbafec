"""ROPE: rotary position embedding (Su et al. 2021, arXiv 2104.09864)."""

from __future__ import annotations

import numpy as np

from engine.context import Context
from engine.ops.op import F32, I32, Op, need, node, values
from engine.tensor import Tensor


def rope(
    ctx: Context,
    a: Tensor,
    positions: Tensor,
    n_rot: int,
    base: float,
    freq_scale: float = 1.0,
    freq_factors: Tensor | None = None,
    neox: bool = False,
) -> Tensor:
    """Rotate pairs of the first `n_rot` elements of each head by position * base^(-2i / n_rot) * freq_scale / factor_i.

    a: [n_embd_head, n_head, n_tokens, n_seq]; positions: I32 [n_tokens]. Pairs are neighbours (2i, 2i + 1), or with
    `neox` (i, i + n_rot / 2). freq_factors: float32 [n_rot / 2], divides each frequency (Llama 3.1's long context).
    """
    need(a.is_float_rows and positions.format is I32, "ROPE", "float32 rows and I32 positions", a, positions)
    need(n_rot % 2 == 0 and n_rot <= a.ne[0], "ROPE", f"cannot rotate {n_rot} elements", a)
    need(positions.ne[0] == a.ne[2], "ROPE", "one position a token", a, positions)
    if freq_factors is not None:
        need(freq_factors.is_float_rows and freq_factors.ne[0] >= n_rot // 2, "ROPE", "too few factors", freq_factors)
    params = (int(n_rot), float(base), float(freq_scale), int(neox))
    return node(ctx, "ROPE", F32, a.ne, (a, positions, freq_factors), params)


def _rope(n: Tensor) -> np.ndarray:
    a, positions, factors = n.src
    n_rot, base, freq_scale, neox = n.params
    out = values(a).copy()
    inverse = (1.0 / base ** (np.arange(0, n_rot, 2) / n_rot)).astype(np.float32)
    if factors is not None:
        inverse = inverse / values(factors)[0, 0, 0, : n_rot // 2]
    angle = values(positions)[0, 0, 0, :, None].astype(np.float32) * (inverse * np.float32(freq_scale))
    cos, sin = np.cos(angle)[None, :, None], np.sin(angle)[None, :, None]  # (1, n_tokens, 1, n_rot / 2)
    half = n_rot // 2
    first, second = (slice(0, half), slice(half, n_rot)) if neox else (slice(0, n_rot, 2), slice(1, n_rot, 2))
    x, y = out[..., first].copy(), out[..., second].copy()
    out[..., first] = x * cos - y * sin
    out[..., second] = x * sin + y * cos
    return out


OPS = (Op("ROPE", _rope, "engine.kernels.rotary:rope", inplace=True),)
