"""ROPE: rotary position embedding (Su et al. 2021, arXiv 2104.09864) and its scalings for long contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from engine.context import Context
from engine.ops import kinds
from engine.ops.op import F32, I32, Op, need, need_rows, node, values
from engine.tensor import Tensor


@dataclass(frozen=True)
class Yarn:
    """YaRN (Peng et al. 2023, arXiv 2309.00071): slow pairs are interpolated, fast ones are not, with a ramp between.

    n_ctx_orig: tokens of the original context; ext_factor: share of the ramp, 0 is plain interpolation; attn_factor:
    factor of the rotated values; beta_fast, beta_slow: rotations over the original context where the ramp ends;
    rounded: it ends at whole pairs.
    """

    n_ctx_orig: int = 0
    ext_factor: float = 0.0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    rounded: bool = True


def rope(
    ctx: Context,
    a: Tensor,
    positions: Tensor,
    n_rot: int,
    base: float,
    freq_scale: float = 1.0,
    freq_factors: Tensor | None = None,
    neox: bool = False,
    *,
    yarn: Yarn | None = None,
    sections: tuple[int, ...] = (),
    interleaved: bool = False,
    offset: int = 0,
    inplace: bool = False,
) -> Tensor:
    """Rotate pairs of `n_rot` elements of each head by position * base^(-2i / n_rot) * freq_scale / factor_i.

    a: [n_embd_head, n_head, n_tokens, n_seq]; positions: I32 [n_tokens]. The elements are those from `offset` on; pairs
    are neighbours (2i, 2i + 1), or with `neox` (i, i + n_rot / 2). freq_factors: float32 [n_rot / 2], divides each
    frequency (Llama 3.1's and Phi 3's long contexts). yarn: see there.

    sections: of up to four numbers, for text with pictures (Qwen2-VL, arXiv 2409.12191): positions is then I32
    [4 * n_tokens], time, height, width and one more, and pair i takes that of its section, cyclically; pairs are
    halves. `interleaved` deals time, height and width out in turn (Qwen3-VL).
    """
    need_rows("ROPE", a, freq_factors)
    need(positions.format is I32 and positions.nb[0] == 4, "ROPE", "I32 positions", positions)
    need(n_rot % 2 == 0 and offset >= 0 and 0 < n_rot <= a.ne[0] - offset, "ROPE", f"cannot rotate {n_rot} elements", a)
    need(len(sections) <= 4, "ROPE", "more than four sections", a)
    sections = (*sections, 0, 0, 0, 0)[:4] if sections else ()
    need(not sections or 0 < sum(sections) <= n_rot, "ROPE", f"sections {sections} are not within {n_rot}", a)
    n_positions = a.ne[2] * (4 if sections else 1)
    need(positions.ne[0] == n_positions, "ROPE", "one position a token, four with sections", a, positions)
    need(freq_factors is None or freq_factors.ne[0] >= n_rot // 2, "ROPE", "too few factors", a)
    kind = kinds.ROPE_NEOX if neox else kinds.ROPE_NORMAL
    if sections:
        kind = kinds.ROPE_IMROPE if interleaved else kinds.ROPE_MROPE
    low, high, share, factor = _ramp(yarn, n_rot, base, freq_scale)
    params = (
        n_rot,
        float(base),
        float(freq_scale),
        kind,
        offset,
        low,
        high,
        share,
        factor,
        *(sections or (0, 0, 0, 0)),
    )
    return node(ctx, "ROPE", F32, a.ne, (a, positions, freq_factors), params, into=a if inplace else None)


def _ramp(yarn: Yarn | None, n_rot: int, base: float, freq_scale: float) -> tuple[float, float, float, float]:
    """(first pair of the ramp, last pair, share of it, factor of the rotated values)."""
    if yarn is None:
        return 0.0, 0.0, 0.0, 1.0
    if yarn.ext_factor == 0:
        return 0.0, 0.0, 0.0, float(yarn.attn_factor)

    def pair(rotations: float) -> float:
        return n_rot * math.log(yarn.n_ctx_orig / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair(yarn.beta_fast), pair(yarn.beta_slow)
    if yarn.rounded:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(0.0, low), min(n_rot - 1.0, high)
    factor = yarn.attn_factor * (1.0 + 0.1 * math.log(1.0 / freq_scale))
    return float(low), float(high), float(yarn.ext_factor), float(factor)


def frequencies(params: tuple, factors: np.ndarray | None) -> np.ndarray:
    """Radians a position of each pair: float32 [n_rot / 2]."""
    n_rot, base, freq_scale, _, _, low, high, share, _ = params[:9]
    pair = np.arange(n_rot // 2)
    inverse = (1.0 / np.float64(np.float32(base)) ** (2.0 * pair / n_rot)).astype(np.float32)
    if factors is not None:
        inverse = inverse / factors[: n_rot // 2]
    ramp = 1 - np.clip((pair - low) / max(0.001, high - low), 0, 1)
    mix = (ramp * share).astype(np.float32)
    return inverse * (np.float32(freq_scale) * (np.float32(1) - mix) + mix)


def axis_of_pair(params: tuple) -> np.ndarray:
    """Which of the four positions each pair takes: int [n_rot / 2]."""
    n_rot, kind, sections = params[0], params[3], params[9:13]
    sector = np.arange(n_rot // 2) % max(1, sum(sections))
    if kind == kinds.ROPE_MROPE:
        return np.searchsorted(np.cumsum(sections)[:3], sector, side="right")
    if kind == kinds.ROPE_IMROPE:
        turn = sector % 3
        return np.where(sector < 3 * np.array(sections)[turn], turn, 3)
    return np.zeros(n_rot // 2, int)


def _rope(n: Tensor) -> np.ndarray:
    a, positions, factors = n.src
    n_rot, kind, offset, factor = n.params[0], n.params[3], n.params[4], np.float32(n.params[8])
    inverse = frequencies(n.params, None if factors is None else values(factors)[0, 0, 0])
    place = values(positions)[0, 0, 0].reshape(-1, n.ne[2]).astype(np.float32)
    angle = place[axis_of_pair(n.params)].T * inverse  # (n_tokens, n_rot / 2)
    cos, sin = np.cos(angle)[None, :, None] * factor, np.sin(angle)[None, :, None] * factor
    out = values(a).copy()
    part = out[..., offset : offset + n_rot]
    if kind == kinds.ROPE_NORMAL:
        x, y = part[..., 0::2].copy(), part[..., 1::2].copy()
        part[..., 0::2], part[..., 1::2] = x * cos - y * sin, x * sin + y * cos
    else:
        x, y = part[..., : n_rot // 2].copy(), part[..., n_rot // 2 :].copy()
        part[..., : n_rot // 2], part[..., n_rot // 2 :] = x * cos - y * sin, x * sin + y * cos
    return out


OPS = (Op("ROPE", _rope, "engine.kernels.rotary:rope", inplace=True, label=lambda n: kinds.ROPE[n.params[3]]),)
