"""Mixtures of experts: which experts a token goes to, with which weights, and the sum of what they give."""

from __future__ import annotations

import math

from engine import ops
from engine.errors import EngineError
from engine.models.arch import Hparams
from engine.models.blocks import ffn_gated, linear, linear_experts
from engine.models.build import Build
from engine.ops.op import F32
from engine.tensor import Tensor

#: values of `{arch}.expert_gating_func`: how the router's logits become weights; the third takes the softmax of the
#: chosen ones only
SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3


def route(
    b: Build,
    logits: Tensor,
    *,
    gating: int = SOFTMAX,
    normalize: bool = True,
    scale: float = 1.0,
    bias: Tensor | None = None,
    groups: int = 0,
    groups_used: int = 0,
    group_best: int = 2,
) -> tuple[Tensor, Tensor]:
    """Experts of each token and their weights, from logits [n_expert, n]: I32 [n_used, n] and float32 [1, n_used, n].

    normalize: weights of a token sum to 1; scale: factor of them; bias: added to what the choice goes by, not to the
    weights (DeepSeek-V3, arXiv 2412.19437, section 2.1.2); groups: experts come in so many groups, of which only the
    best `groups_used` count, by the sum of their best `group_best` experts.
    """
    ctx, (n_expert, n), n_used = b.ctx, logits.ne[:2], b.h.n_expert_used
    if gating == SOFTMAX:
        probs = ops.soft_max(ctx, logits)
    elif gating == SIGMOID:
        probs = ops.sigmoid(ctx, logits)
    elif gating == SOFTMAX_OF_CHOSEN:
        probs = logits
    else:
        raise EngineError(f"key '{b.arch.name}.expert_gating_func' is {gating}: this version runs 1, 2, 3")
    choice = probs if bias is None else ops.add(ctx, probs, bias)
    if groups > 1:
        choice = _best_groups(b, choice, groups, groups_used, group_best)
    ids = ops.top_k(ctx, choice, n_used)
    weights = ops.get_rows(ctx, ops.reshape(ctx, probs, 1, n_expert, n), ids)  # [1, n_used, n]
    if gating == SOFTMAX_OF_CHOSEN:
        weights = ops.soft_max(ctx, ops.reshape(ctx, weights, n_used, n))
    elif normalize:
        weights = ops.reshape(ctx, weights, n_used, n)
        total = ops.clamp(ctx, ops.sum_rows(ctx, weights), 6.103515625e-5, math.inf)
        weights = ops.div(ctx, weights, total)
    if scale != 1.0:
        weights = ops.scale(ctx, weights, scale)
    return ids, ops.reshape(ctx, weights, 1, n_used, n)


def _best_groups(b: Build, choice: Tensor, groups: int, used: int, n_best: int) -> Tensor:
    """`choice` with minus infinity for the experts outside of each token's best groups."""
    ctx, (n_expert, n) = b.ctx, choice.ne[:2]
    size = n_expert // groups
    n_best = min(n_best, size)
    rows = ops.reshape(ctx, choice, 1, size, groups * n)
    best = ops.top_k(ctx, ops.reshape(ctx, choice, size, groups * n), n_best)  # [n_best, groups * n]
    pairs = ops.reshape(ctx, ops.get_rows(ctx, rows, best), n_best, groups * n)
    kept = ops.top_k(ctx, ops.reshape(ctx, ops.sum_rows(ctx, pairs), groups, n), used)  # [used, n]
    grouped = ops.reshape(ctx, choice, size, groups, n)
    outside = ops.fill(ctx, grouped, -math.inf)
    return ops.reshape(ctx, ops.set_rows(ctx, outside, ops.get_rows(ctx, grouped, kept), kept), n_expert, n)


def experts(
    b: Build,
    prefix: str,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    *,
    kind: str = "swiglu",
    weigh_inputs: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
) -> Tensor:
    """Sum over each token's experts of weight * down(act(gate(x)) * up(x)): [n_embd, n].

    kind: of `ops.glu`, or `relu_sqr` and the like for experts without a gate (see `_activated`); gate and up may be one
    tensor, gate first; weigh_inputs: the weights multiply x instead of the result. With `b.all_experts` the other
    experts compute too, for whoever watches their products; what they give is not read.
    """
    ctx, (n_embd, n), n_used = b.ctx, x.ne[:2], ids.ne[0]
    if b.all_experts:
        ids = _others_behind(b, ids)
    x = ops.reshape(ctx, x, n_embd, 1, n)
    if weigh_inputs:
        factors = weights if n_used == ids.ne[0] else _ones_behind(b, weights, ids.ne[0])
        x = ops.mul(ctx, ops.repeat(ctx, x, n_embd, ids.ne[0], n), factors)
    y = linear_experts(b, prefix + "ffn_down_exps", _activated(b, prefix, x, ids, kind, alpha, limit), ids)
    if n_used < ids.ne[0]:
        y = ops.view(ctx, y, (n_embd, n_used, n), y.nb[1:3])
    if not weigh_inputs:
        y = ops.mul(ctx, y, weights)
    parts = [ops.view(ctx, y, (n_embd, n), (y.nb[2],), i * y.nb[1]) for i in range(n_used)]
    total = parts[0] if len(parts) > 1 else ops.cont(ctx, parts[0])
    for one in parts[1:]:
        total = ops.add(ctx, total, one)
    return total


def _others_behind(b: Build, ids: Tensor) -> Tensor:
    """All experts of each token, I32 [n_expert, n]: those of `ids` [n_used, n], then the others as they lie."""
    ctx, (n_used, n), n_expert = b.ctx, ids.ne[:2], b.h.n_expert
    places = ops.cumsum(ctx, ops.fill(ctx, ctx.tensor(F32, n_used, n), -1.0))  # -1, -2, ...
    ranks = ops.reshape(ctx, ops.scale(ctx, places, 1.0, n_used + 1.0), 1, n_used, n)
    none = ops.fill(ctx, ctx.tensor(F32, 1, n_expert, n), 0.0)
    return ops.top_k(ctx, ops.reshape(ctx, ops.set_rows(ctx, none, ranks, ids), n_expert, n), n_expert)


def _ones_behind(b: Build, weights: Tensor, n_expert: int) -> Tensor:
    """Weights [1, n_used, n] of the chosen experts and 1 for the others."""
    ones = ops.fill(b.ctx, b.ctx.tensor(F32, 1, n_expert - weights.ne[1], weights.ne[2]), 1.0)
    return ops.concat(b.ctx, weights, ones, 1)


def _activated(b: Build, prefix: str, x: Tensor, ids: Tensor, kind: str, alpha: float, limit: float) -> Tensor:
    if prefix + "ffn_gate_up_exps.weight" in b.w:
        return ops.glu(b.ctx, kind, linear_experts(b, prefix + "ffn_gate_up_exps", x, ids), alpha=alpha, limit=limit)
    up = linear_experts(b, prefix + "ffn_up_exps", x, ids)
    if prefix + "ffn_gate_exps.weight" in b.w:
        gate = linear_experts(b, prefix + "ffn_gate_exps", x, ids)
        return ops.glu(b.ctx, kind, gate, up, alpha=alpha, limit=limit)
    if kind == "relu_sqr":
        return ops.sqr(b.ctx, ops.relu(b.ctx, up))
    return ops.unary(b.ctx, kind, up)


def moe(b: Build, prefix: str, x: Tensor, *, kind: str = "swiglu", **routing) -> Tensor:
    """The common case: the router `ffn_gate_inp`, its choice (see `route`), and its experts."""
    ids, weights = route(b, linear(b, prefix + "ffn_gate_inp", x), **routing)
    return experts(b, prefix, x, ids, weights, kind=kind)


def gated_shared_expert(b: Build, prefix: str, x: Tensor) -> Tensor:
    """The expert of all tokens, times a gate of one number a token: `ffn_*_shexp`, `ffn_gate_inp_shexp`."""
    gate = ops.sigmoid(b.ctx, linear(b, prefix + "ffn_gate_inp_shexp", x))
    return ops.mul(b.ctx, ffn_gated(b, prefix, x, suffix="_shexp"), gate)


def has_experts(h: Hparams) -> None:
    """A check for families that are nothing without experts. Raises EngineError."""
    if h.n_expert < 1 or h.n_expert_used < 1:
        raise EngineError(
            f"{h.n_expert} experts of which a token uses {h.n_expert_used}: expected 1 or more of each; "
            "'expert_count' or 'expert_used_count' is missing or damaged"
        )
