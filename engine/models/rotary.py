"""Rotary embedding as models use it: kinds of scaling from the parameters, and the divisors that conversion writes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from engine import ops
from engine.errors import EngineError
from engine.models.arch import Hparams
from engine.models.build import Build
from engine.models.common import rope_of, rope_type
from engine.ops import Yarn
from engine.tensor import Tensor


def rotate(
    b: Build,
    x: Tensor,
    *,
    neox: bool,
    n_rot: int | None = None,
    base: float | None = None,
    scaled: bool = True,
    factors: Tensor | None = None,
    offset: int = 0,
    growth: float | None = None,
) -> Tensor:
    """Rotary embedding of heads x [d, n_head, n] by the tokens' positions, with the model's scaling.

    neox: pairs are halves, not neighbours; n_rot, base: the model's if None; scaled: False for layers that the scaling
    leaves alone; factors: divisors of the frequencies; offset: first element that is rotated; growth: see `yarn_of`.
    """
    h = b.h
    kind = h.rope_scaling_type if scaled else None
    factor = h.rope_scaling_factor if kind in ("linear", "yarn") and h.rope_scaling_factor else 1.0
    yarn = yarn_of(h, factor, growth) if scaled else None
    return ops.rope(
        b.ctx,
        x,
        b.positions,
        h.n_rot if n_rot is None else n_rot,
        h.rope_base if base is None else base,
        1.0 / factor,
        factors,
        neox,
        yarn=yarn,
        offset=offset,
    )


def yarn_of(h: Hparams, factor: float, growth: float | None = None) -> Yarn | None:
    """The ramp and the factor of the values, as the parameters have them (Peng et al. 2023, arXiv 2309.00071).

    The values grow by 1 + 0.1 ln(factor) unless the model says otherwise; ROPE itself multiplies by that wherever there
    is a ramp, so it is divided out of what is asked for. With `yarn_log_multiplier` m (DeepSeek) the growth is in the
    attention's scale already. growth: of the values, for families that know it otherwise.
    """
    ext = h.yarn_ext if h.yarn_ext is not None else 1.0 if h.rope_scaling_type == "yarn" else 0.0
    if ext == 0.0:
        attn = (h.yarn_attn or 1.0) * h.rope_attn_factor
        return None if attn == 1.0 else Yarn(attn_factor=attn)
    if growth is None:
        growth = h.yarn_attn or mscale(factor, 1.0) / mscale(factor, h.yarn_log_multiplier)
    attn = growth * h.rope_attn_factor / (1.0 + 0.1 * math.log(factor))
    return Yarn(h.n_ctx_orig, ext, attn, h.yarn_beta_fast, h.yarn_beta_slow, getattr(h, "yarn_rounded", True))


def mscale(factor: float, multiplier: float) -> float:
    """YaRN's factor of the attention: 1 + 0.1 m ln(factor)."""
    return 1.0 if factor <= 1.0 else 0.1 * multiplier * math.log(factor) + 1.0


#: settings of Llama 3.1's rotary scaling, and their defaults
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama3_factors(config: Mapping[str, Any], h: Hparams) -> np.ndarray | None:
    """Divisors of the rotary frequencies for the `llama3` kind of scaling, float32 [n_rot / 2]; None for other kinds.

    Wavelengths below original context / high_freq_factor stay, those above original context / low_freq_factor are
    divided by `factor`, between them the change is smooth (Llama 3.1). Raises EngineError for settings that make no
    sense.
    """
    if rope_type(config) != "llama3":
        return None
    settings = {name: rope_of(config).get(name, default) for name, default in LLAMA3.items()}
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise EngineError(f"config.json: 'rope_parameters.{name}' is {value!r}, expected a positive number")
    factor, low, high, n_ctx = map(np.float32, settings.values())
    if low == high:
        raise EngineError("config.json: 'low_freq_factor' and 'high_freq_factor' of rope_parameters must differ")
    exponents = np.arange(0, h.n_rot, 2, dtype=np.float32) / np.float32(h.n_rot)
    frequencies = np.float32(1) / (float(h.rope_base) ** exponents.astype(np.float64)).astype(np.float32)
    wavelengths = np.float32(1) / frequencies * np.float32(2 * math.pi)  # the reference divides in this way
    smooth = (np.float32(1) / wavelengths * n_ctx - low) / (high - low)
    between = np.float32(1) / ((np.float32(1) - smooth) / factor + smooth)
    long = np.where(wavelengths > n_ctx / low, factor, between)
    return np.where(wavelengths < n_ctx / high, np.float32(1), long).astype(np.float32)
