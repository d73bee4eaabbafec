"""The gated delta rule (Yang et al. 2024, arXiv 2412.06464): the block of Qwen3-Next and Qwen 3.5, parameters, tensors.

A head of values learns a matrix from keys to values: it decays, and what it says wrongly of the new key is corrected.
Fewer heads of queries and keys serve several heads of values: in checkpoints neighbours share them ("grouped"), in the
op those that are as many heads apart as there are key heads ("tiled").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from engine import ops
from engine.errors import EngineError
from engine.models.arch import Hparam, Hparams
from engine.models.blocks import heads, linear, part, rms_norm
from engine.models.build import Build
from engine.models.mamba_block import D_CONV
from engine.models.recurrent import apart, check_kernel, convolve
from engine.tensor import Tensor

L2_EPS = 1e-6  # of the queries' and keys' norms; no config has it


def _recurrent(config: Mapping[str, Any], h: Hparams) -> list[bool] | None:
    kinds = config.get("layer_types")
    return [kind == "linear_attention" for kind in kinds] if isinstance(kinds, list) else None


DELTA_HPARAMS = (
    replace(D_CONV, config=("linear_conv_kernel_dim",)),
    Hparam("d_state", "{arch}.ssm.state_size", ("linear_key_head_dim",)),
    Hparam("n_group", "{arch}.ssm.group_count", ("linear_num_key_heads",)),
    Hparam("n_ssm_head", "{arch}.ssm.time_step_rank", ("linear_num_value_heads",)),
    Hparam(
        "d_inner",
        "{arch}.ssm.inner_size",
        lambda config, h: config["linear_value_head_dim"] * h.n_ssm_head,
    ),
    Hparam("interval", "{arch}.full_attention_interval", ("full_attention_interval",), 4, always=True),
    Hparam(
        "recurrent",
        "{arch}.attention.recurrent_layers",
        _recurrent,
        lambda h: tuple((i + 1) % h.interval != 0 for i in range(h.n_layer)),
        "bool",
        per_layer=True,
    ),
)


def has_state(h: Hparams, i: int) -> bool:
    """Whether layer i is a delta net."""
    return bool(h.recurrent[i])


def attends(h: Hparams, i: int) -> bool:
    """Whether layer i has attention."""
    return not h.recurrent[i]


def check_delta(h: Hparams) -> None:
    """What the block takes for granted. Raises EngineError."""
    check_kernel(h)
    if h.n_group < 1 or h.n_ssm_head % h.n_group:
        raise EngineError(
            f"{h.n_ssm_head} heads of values do not repeat {h.n_group} of keys: 'linear_num_key_heads' must divide "
            "'linear_num_value_heads'"
        )
    if h.d_inner != h.d_state * h.n_ssm_head:
        raise EngineError(
            f"keys of {h.d_state} and values of {h.d_inner / max(1, h.n_ssm_head):g} elements: this version runs "
            "delta nets where 'linear_key_head_dim' and 'linear_value_head_dim' are equal"
        )


def n_mixed(h: Hparams) -> int:
    """Channels of the convolution: queries, keys, values."""
    return 2 * h.n_group * h.d_state + h.d_inner


def tiled(h: Hparams, size: int, behind: int = 0) -> np.ndarray:
    """From grouped heads of values, of `size` rows each, to tiled ones; the first `behind` rows stay."""
    order = np.arange(h.n_ssm_head * size).reshape(h.n_group, -1, size).swapaxes(0, 1).reshape(-1)
    return np.concatenate([np.arange(behind), behind + order])


def delta_net(b: Build, i: int, x: Tensor, beta: Tensor, alpha: Tensor, grouped: bool) -> Tensor:
    """The block of layer i on x [n_embd, n]. beta, alpha: [n_head, n], how much is learned, and how much is forgotten,
    before their activations; grouped: the order of the heads of values."""
    ctx, h, blk, n = b.ctx, b.h, f"blk.{i}.", x.ne[1]
    d, n_head, n_qk = h.d_state, h.n_ssm_head, h.n_group * h.d_state
    mixed = ops.silu(ctx, convolve(b, i, "ssm_conv1d", linear(b, blk + "attn_qkv", x)))
    places = ((0, n_qk), (n_qk, n_qk), (2 * n_qk, h.d_inner))
    q, k, v = (heads(b, part(b, mixed, first, size), d) for first, size in places)
    q, k = (_unit(b, t) for t in (q, k))
    if grouped and n_head > h.n_group:
        q, k = (_repeated(b, t, n_head // h.n_group) for t in (q, k))
    decay = ops.mul(ctx, ops.softplus(ctx, ops.add(ctx, alpha, b.w[blk + "ssm_dt.bias"])), b.w[blk + "ssm_a"])
    decay, beta = (apart(b, ops.reshape(ctx, t, 1, n_head, n), 2) for t in (decay, ops.sigmoid(ctx, beta)))
    state = b.state(i, "delta", d, d, n_head)
    q, k, v = (apart(b, t, 2) for t in (q, k, v))
    out = ops.gated_delta_net(ctx, q, k, v, decay, beta, state)
    b.keep(i, "delta", ops.view(ctx, out, state.ne, state.nb[1:], 4 * h.d_inner * n))
    y = rms_norm(b, blk + "ssm_norm", ops.view(ctx, out, (d, n_head, n), (4 * d, 4 * h.d_inner)))
    y = ops.swiglu(ctx, heads(b, linear(b, blk + "attn_gate", x), d), y)
    return linear(b, blk + "ssm_out", ops.reshape(ctx, y, h.d_inner, n))


def _unit(b: Build, x: Tensor) -> Tensor:
    """x / sqrt(sum of squares + eps) of each head."""
    d = x.ne[0]
    return ops.scale(b.ctx, ops.rms_norm(b.ctx, x, L2_EPS / d), d**-0.5)


def _repeated(b: Build, x: Tensor, times: int) -> Tensor:
    """Every head of x [d, n_head, n] so many times, side by side."""
    d, n_head, n = x.ne[:3]
    x = ops.repeat(b.ctx, ops.reshape(b.ctx, x, d, 1, n_head, n), d, times, n_head, n)
    return ops.reshape(b.ctx, x, d, times * n_head, n)
