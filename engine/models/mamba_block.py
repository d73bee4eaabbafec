"""Selective state spaces: the blocks of Mamba 1 and 2, their parameters and tensors, for families that are made of them
or mix them with attention.

Mamba 1 (Gu and Dao 2023, arXiv 2312.00752): every channel is a head, with a decay of each number of its state. Mamba 2
(Dao and Gu 2024, arXiv 2405.21060): wide heads with one decay, and groups of heads that share B and C.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from engine import ops
from engine.errors import EngineError
from engine.models.arch import Hparam, Hparams, TensorRow
from engine.models.blocks import heads, linear, part, rms_norm
from engine.models.build import Build
from engine.models.decoder import Layers
from engine.models.recurrent import apart, check_kernel, convolve
from engine.models.steps import Map, Shape
from engine.tensor import Tensor

#: from a checkpoint's logarithm of the decay to what the scan multiplies with, rounded correctly
DECAY = Map(lambda x: -np.exp(x.astype(np.float64)))

#: limits of the time step that are none: the graph has no others
NO_LIMITS = ([0.0, {"__float__": "Infinity"}], [0.0, float("inf")], (0.0, float("inf")))

D_CONV = Hparam("d_conv", "{arch}.ssm.conv_kernel", ("conv_kernel", "d_conv", "mamba_d_conv"), 4, always=True)
INNER_EPS = 1e-6  # of Falcon Mamba's norms of time step, B and C; no key of a file has it
D_STATE_KEYS = ("state_size", "d_state", "mamba_d_state", "ssm_state_size")


def scan(b: Build, i: int, x: Tensor, dt: Tensor, b_in: Tensor, c_out: Tensor) -> Tensor:
    """The states' outputs y [d_head, n_head, n] for x of the same shape; layer i keeps its states as `scan`.

    dt: time steps before softplus [n_head, n]; b_in, c_out: [d_state, n_group, n].
    """
    d_state, (d_head, n_head, n) = b_in.ne[0], x.ne[:3]
    states = b.state(i, "scan", d_state, d_head, n_head)
    x, b_in, c_out = (apart(b, t, 2) for t in (x, b_in, c_out))
    out = ops.ssm_scan(b.ctx, states, x, apart(b, dt), b.w[f"blk.{i}.ssm_a"], b_in, c_out)
    b.keep(i, "scan", ops.view(b.ctx, out, states.ne, states.nb[1:], 4 * x.n_elements))
    return ops.view(b.ctx, out, (d_head, n_head, n), (4 * d_head, 4 * d_head * n_head))


# --- Mamba 1 ----------------------------------------------------------------------------------------------------------


def mamba1(b: Build, i: int, x: Tensor) -> Tensor:
    """The block of layer i on [n_embd, n]: projection, convolution, scan, gate, projection."""
    ctx, h, blk = b.ctx, b.h, f"blk.{i}."
    xz = linear(b, blk + "ssm_in", x)
    x, z = part(b, xz, 0, h.d_inner), part(b, xz, h.d_inner, h.d_inner)
    x = ops.silu(ctx, convolve(b, i, "ssm_conv1d", x))
    found = linear(b, blk + "ssm_x", x)
    dt, b_in, c_out = (
        part(b, found, first, size)
        for first, size in ((0, h.dt_rank), (h.dt_rank, h.d_state), (h.dt_rank + h.d_state, h.d_state))
    )
    if h.dt_b_c_rms:
        dt, b_in, c_out = (ops.rms_norm(ctx, t, INNER_EPS) for t in (dt, b_in, c_out))
    dt = linear(b, blk + "ssm_dt", dt)
    y = scan(b, i, heads(b, x, 1), dt, heads(b, b_in, h.d_state), heads(b, c_out, h.d_state))
    y = ops.add(ctx, ops.reshape(ctx, ops.cont(ctx, y), *x.ne), ops.mul(ctx, x, b.w[blk + "ssm_d"]))
    return linear(b, blk + "ssm_out", ops.swiglu(ctx, z, y))


def mamba1_rows(source: str) -> tuple[TensorRow, ...]:
    """The block's tensors; source: what comes before their names in the checkpoint."""
    return (
        TensorRow("blk.{i}.ssm_in.weight", source + "in_proj.weight", lambda h: (2 * h.d_inner, h.n_embd)),
        TensorRow("blk.{i}.ssm_conv1d.weight", source + "conv1d.weight", lambda h: (h.d_inner, h.d_conv), (Shape(),)),
        TensorRow("blk.{i}.ssm_conv1d.bias", source + "conv1d.bias", lambda h: (h.d_inner,)),
        TensorRow("blk.{i}.ssm_x.weight", source + "x_proj.weight", lambda h: (h.dt_rank + 2 * h.d_state, h.d_inner)),
        TensorRow("blk.{i}.ssm_dt.weight", source + "dt_proj.weight", lambda h: (h.d_inner, h.dt_rank)),
        TensorRow("blk.{i}.ssm_dt.bias", source + "dt_proj.bias", lambda h: (h.d_inner,)),
        TensorRow("blk.{i}.ssm_a", source + "A_log", lambda h: (h.d_inner, h.d_state), (DECAY,)),
        TensorRow("blk.{i}.ssm_d", source + "D", lambda h: (h.d_inner,)),
        TensorRow("blk.{i}.ssm_out.weight", source + "out_proj.weight", lambda h: (h.n_embd, h.d_inner)),
    )


# --- Mamba 2 ----------------------------------------------------------------------------------------------------------


def no_limits(key: str = "time_step_limit") -> tuple[str, tuple, str]:
    """A row for `Arch.refused`."""
    return key, NO_LIMITS, "limits of the time step"


def _d_inner(config: Mapping[str, Any], h: Hparams) -> int:
    """The width inside, as configs have it, or heads times their size, or a multiple of the model's width."""
    found = config.get("mamba_d_ssm")
    if found is not None:
        return found
    n_head = next((config[key] for key in _N_HEAD_KEYS if config.get(key) is not None), None)
    size = next((config[key] for key in ("mamba_d_head", "mamba_head_dim", "head_dim") if key in config), None)
    if isinstance(n_head, int) and isinstance(size, int):
        return n_head * size
    return config.get("mamba_expand", config.get("expand", 2)) * config["hidden_size"]


_N_HEAD_KEYS = ("num_heads", "mamba_n_heads", "mamba_num_heads")

MAMBA2_HPARAMS = (
    D_CONV,
    Hparam("d_state", "{arch}.ssm.state_size", D_STATE_KEYS, 128, always=True),
    Hparam("n_group", "{arch}.ssm.group_count", ("n_groups", "mamba_n_groups"), 1, always=True),
    Hparam("d_inner", "{arch}.ssm.inner_size", _d_inner),
    Hparam("n_ssm_head", "{arch}.ssm.time_step_rank", _N_HEAD_KEYS),
)


def check_mamba2(h: Hparams) -> None:
    """What the block takes for granted. Raises EngineError."""
    check_kernel(h)
    for small, large in (("n_ssm_head", "d_inner"), ("n_group", "n_ssm_head")):
        n, n_all = getattr(h, small), getattr(h, large)
        if n < 1 or n_all % n:
            raise EngineError(f"'{small}' is {n}, expected a divisor of '{large}', {n_all}: the file is damaged")


def mamba2(b: Build, i: int, x: Tensor) -> Tensor:
    """The block of layer i on [n_embd, n]: projection, convolution, scan, gate, grouped norm if there is one,
    projection."""
    ctx, h, blk = b.ctx, b.h, f"blk.{i}."
    d_head, n_bc = h.d_inner // h.n_ssm_head, h.n_group * h.d_state
    found = linear(b, blk + "ssm_in", x)
    z = part(b, found, 0, h.d_inner)
    xbc = ops.silu(ctx, convolve(b, i, "ssm_conv1d", part(b, found, h.d_inner, h.d_inner + 2 * n_bc)))
    dt = ops.add(ctx, part(b, found, 2 * (h.d_inner + n_bc), h.n_ssm_head), b.w[blk + "ssm_dt.bias"])
    x = heads(b, part(b, xbc, 0, h.d_inner), d_head)
    b_in, c_out = (heads(b, part(b, xbc, h.d_inner + at, n_bc), h.d_state) for at in (0, n_bc))
    y = scan(b, i, x, dt, b_in, c_out)
    y = ops.add(ctx, y, ops.mul(ctx, x, b.w[blk + "ssm_d"]))
    y = ops.swiglu(ctx, heads(b, z, d_head), y)
    if blk + "ssm_norm.weight" in b.w:
        y = rms_norm(b, blk + "ssm_norm", ops.reshape(ctx, y, h.d_inner // h.n_group, h.n_group, y.ne[2]))
    return linear(b, blk + "ssm_out", ops.reshape(ctx, y, h.d_inner, x.ne[2]))


def n_mixed(h: Hparams) -> int:
    """Channels of the convolution: x, B and C."""
    return h.d_inner + 2 * h.n_group * h.d_state


def mamba2_rows(source: str, layers: Layers = None, norm: bool = True) -> tuple[TensorRow, ...]:
    """The block's tensors; source: what comes before their names in the checkpoint; norm: whether it must have one."""
    found = (
        ("ssm_in.weight", "in_proj.weight", lambda h: (h.d_inner + n_mixed(h) + h.n_ssm_head, h.n_embd), ()),
        ("ssm_conv1d.weight", "conv1d.weight", lambda h: (n_mixed(h), h.d_conv), (Shape(),)),
        ("ssm_conv1d.bias", "conv1d.bias", lambda h: (n_mixed(h),), ()),
        ("ssm_dt.bias", "dt_bias", lambda h: (h.n_ssm_head,), ()),
        ("ssm_a", "A_log", lambda h: (h.n_ssm_head, 1), (DECAY, Shape())),
        ("ssm_d", "D", lambda h: (h.n_ssm_head, 1), (Shape(),)),
        ("ssm_norm.weight", "norm.weight", lambda h: (h.n_group, h.d_inner // h.n_group), (Shape(),)),
        ("ssm_out.weight", "out_proj.weight", lambda h: (h.n_embd, h.d_inner), ()),
    )
    optional = ("ssm_conv1d.bias",) if norm else ("ssm_conv1d.bias", "ssm_norm.weight")
    return tuple(
        TensorRow("blk.{i}." + name, source + theirs, shape, steps, name in optional, layers)
        for name, theirs, shape, steps in found
    )
