"""Phi 3.5 MoE: Phi 3's long contexts, layer norms, biases, and two experts a token, each weighed among its rivals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine import ops
from engine.errors import EngineError
from engine.models.arch import Arch, Hparams, TensorRow, at
from engine.models.blocks import embed_tokens, layer_norm, linear, qkv
from engine.models.build import Build
from engine.models.common import rope_of
from engine.models.decoder import LAYER, attention_rows, embedding_rows, expert_rows, norm_row
from engine.models.experts import experts
from engine.models.phi2 import finish, head
from engine.models.phi3 import EXTRA, FACTORS, PHI3, factors, is_long
from engine.models.rotary import rotate
from engine.tensor import Tensor

THRESHOLD = 0.01  # `router_jitter_noise`: rivals of an expert are within twice this share of its logit
_NEVER = -1e30  # a logit that no expert is chosen with


def _attn_factor(config: Mapping[str, Any], h: Hparams) -> float | None:
    """Factor of the rotated values, which the config gives for short and for long contexts, always the same."""
    if not is_long(config):
        return None
    short, long = (rope_of(config).get(f"{kind}_mscale") for kind in ("short", "long"))
    if short is None or short != long:
        raise EngineError(f"'rope_parameters.short_mscale' is {short}, 'long_mscale' {long}: expected one number")
    return short


TENSORS = (
    *embedding_rows(bias=True),
    TensorRow("output.bias", "lm_head.bias", lambda h: (h.n_vocab,), optional=True),
    *FACTORS,
    *norm_row("attn_norm", LAYER + "input_layernorm", bias=True),
    *attention_rows(),
    *norm_row("ffn_norm", LAYER + "post_attention_layernorm", bias=True),
    *expert_rows(
        LAYER + "block_sparse_moe.experts.{e}.",
        lambda h, i: at(h.n_ff, i),
        LAYER + "block_sparse_moe.gate",
        names=("w1", "w3", "w2"),
    ),
)


def check(h: Hparams) -> None:
    """Raises EngineError for another number of experts than the choice is made for."""
    if h.n_expert_used != 2:
        raise EngineError(f"key 'phimoe.expert_used_count' is {h.n_expert_used}: this version runs 2")


def layer(b: Build, i: int, x: Tensor) -> Tensor:
    """Attention and experts, each with a norm in front and a residual connection."""
    blk = f"blk.{i}."
    cur = attention(b, i, layer_norm(b, blk + "attn_norm", x))
    cur, x = b.last(i, cur, x)
    x = ops.add(b.ctx, cur, x)
    cur = layer_norm(b, blk + "ffn_norm", x)
    ids, weights = choose(b, linear(b, blk + "ffn_gate_inp", cur))
    return ops.add(b.ctx, experts(b, blk, cur, ids, weights), x)


def attention(b: Build, i: int, x: Tensor) -> Tensor:
    """Grouped heads with rotary positions."""
    q, k, v = qkv(b, i, x)
    q, k = (rotate(b, t, neox=True, factors=factors(b)) for t in (q, k))
    return linear(b, f"blk.{i}.attn_output", b.attend(i, q, k, v, b.h.n_embd_head_k**-0.5, window=b.h.window))


def choose(b: Build, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The two best experts and their weights, from logits [n_expert, n] (SparseMixer-v2, arXiv 2409.12136): I32 [2, n],
    float32 [1, 2, n]. llama.cpp's graph has a softmax of all logits there, and gives other weights.

    An expert's weight is its part of a softmax over the rivals, those that are near enough to it; the first is none of
    the second's rivals.
    """
    ctx, (n_expert, n) = b.ctx, logits.ne[:2]
    ids = ops.top_k(ctx, logits, 2)
    column = ops.reshape(ctx, logits, 1, n_expert, n)
    best = ops.get_rows(ctx, column, ids)  # [1, 2, n]
    size = ops.unary(ctx, "abs", logits)
    left, weights = logits, []
    for rank in range(2):
        one = ops.cont(ctx, ops.view(ctx, ids, (1, n), (ids.nb[1],), rank * ids.nb[0]))
        top = ops.view(ctx, best, (1, n), (best.nb[2],), rank * best.nb[1])
        # |logit|, at least the best, is what the distance is measured by
        measure = ops.add(ctx, ops.relu(ctx, ops.sub(ctx, size, top)), top)
        distance = ops.scale(ctx, ops.div(ctx, ops.sub(ctx, logits, top), measure), -1.0, -2 * THRESHOLD)
        far = ops.scale(ctx, ops.unary(ctx, "step", distance), _NEVER)
        shares = ops.reshape(ctx, ops.soft_max(ctx, ops.add(ctx, left, far)), 1, n_expert, n)
        weights.append(ops.get_rows(ctx, shares, one))
        nothing = ops.fill(ctx, column, 0.0)
        taken = ops.set_rows(ctx, nothing, ops.fill(ctx, weights[-1], _NEVER), one)
        left = ops.add(ctx, logits, ops.reshape(ctx, taken, n_expert, n))
    return ids, ops.concat(ctx, weights[0], weights[1], 1)


PHIMOE = Arch(
    name="phimoe",
    hf_names=("PhiMoEForCausalLM", "PhimoeForCausalLM"),
    hparams=tuple(
        replace(row, config=_attn_factor) if row.field == "rope_attn_factor" else row for row in PHI3.hparams
    ),
    extra_hparams=EXTRA,
    tensors=TENSORS,
    embed=embed_tokens,
    layer=layer,
    finish=finish,
    head=head,
    refused=(*PHI3.refused, ("router_jitter_noise", (THRESHOLD,), "another distance of rivals")),
    runs=PHI3.runs,
    check=check,
)
