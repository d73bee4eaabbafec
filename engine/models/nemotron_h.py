"""Nemotron-H and Nemotron 3: layers that are one thing each, a Mamba 2 block, attention without positions, or a
feed-forward with squared ReLU: dense in `nemotron_h`, of experts in `nemotron_h_moe`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine import ops
from engine.errors import EngineError
from engine.models.arch import Arch, Hparam, Hparams, TensorRow, at
from engine.models.blocks import embed_tokens, linear, output_head, qkv, rms_norm
from engine.models.build import Build
from engine.models.common import LAYER_NORM_EPS, N_VOCAB, rows
from engine.models.decoder import attention_rows, embedding_rows, ffn_rows, norm_row
from engine.models.experts import SIGMOID, experts, route
from engine.models.llama import finish
from engine.models.mamba import BACKBONE
from engine.models.mamba_block import MAMBA2_HPARAMS, check_mamba2, mamba2, mamba2_rows, no_limits
from engine.tensor import Tensor

MIXER = BACKBONE + "mixer."

#: kinds of layers: in `layers_block_type`, and letters of `hybrid_override_pattern`
_KINDS = {
    "M": ("mamba", "linear_attention", "M"),
    "*": ("attention", "full_attention", "*"),
    "-": ("mlp", "-"),
    "E": ("moe", "E"),
}


def _kinds(config: Mapping[str, Any]) -> str:
    """A letter for each layer."""
    names = config.get("layers_block_type") or config.get("hybrid_override_pattern") or ""
    found = [next((letter for letter, known in _KINDS.items() if name in known), None) for name in names]
    if not found or None in found:
        unknown = names[found.index(None)] if found else "missing"
        raise EngineError(f"'layers_block_type': {unknown!r} is no kind of layer; there are mamba, attention, mlp, moe")
    return "".join(letter for letter in found if letter)


def _n_ff(config: Mapping[str, Any], h: Hparams) -> list[int]:
    size = {"-": config.get("intermediate_size"), "E": config.get("moe_intermediate_size")}
    return [size.get(kind, 0) or 0 for kind in _kinds(config)]


def _n_head_kv(config: Mapping[str, Any], h: Hparams) -> list[int]:
    n = config.get("num_key_value_heads") or h.n_head
    return [n if kind == "*" else 0 for kind in _kinds(config)]


_ROWS = {row.field: row for row in rows()}

HPARAMS = rows(
    n_layer=replace(_ROWS["n_layer"], config=lambda config, h: len(_kinds(config))),
    n_ctx_train=replace(_ROWS["n_ctx_train"], config=lambda config, h: 2**20),
    n_ff=replace(_ROWS["n_ff"], config=_n_ff),
    n_head_kv=replace(_ROWS["n_head_kv"], config=_n_head_kv),
    norm_eps=replace(LAYER_NORM_EPS, config=("layer_norm_epsilon", "norm_eps", "rms_norm_eps")),
    n_embd_head_k=replace(_ROWS["n_embd_head_k"], config=("head_dim", "attention_head_dim")),
    n_embd_head_v=replace(_ROWS["n_embd_head_v"], config=("head_dim", "attention_head_dim")),
    n_expert=None,
    n_expert_used=None,
    n_expert_groups=None,
    n_group_used=None,
    gating=None,
)

EXTRA = (
    N_VOCAB,
    Hparam("attention_scale", "{arch}.attention.scale", (), 0.0, "float32"),
    *MAMBA2_HPARAMS,
    # nothing rotates; readers find what they expect
    Hparam("rope_dim", "{arch}.rope.dimension_count", lambda config, h: h.n_embd // h.n_head, 0),
    Hparam("rotates", "{arch}.rope.scaling.finetuned", lambda config, h: False, False, "bool"),
)

EXPERTS = (
    Hparam("n_expert", "{arch}.expert_count", ("n_routed_experts",)),
    Hparam("n_expert_used", "{arch}.expert_used_count", ("num_experts_per_tok",)),
    Hparam(
        "n_ff_exp",
        "{arch}.expert_feed_forward_length",
        ("moe_intermediate_size",),
        lambda h: max(h.n_ff) // h.n_expert_used,
    ),
    Hparam("n_ff_shexp", "{arch}.expert_shared_feed_forward_length", ("moe_shared_expert_intermediate_size",)),
    Hparam("n_shared", "{arch}.expert_shared_count", ("n_shared_experts",), 1),
    Hparam("normalizes", "{arch}.expert_weights_norm", ("norm_topk_prob",), False, "bool"),
    Hparam("expert_scale", "{arch}.expert_weights_scale", ("routed_scaling_factor",), 1.0, "float32"),
    Hparam("n_expert_groups", "{arch}.expert_group_count", ("n_group",), 1),
    Hparam("n_group_used", "{arch}.expert_group_used_count", ("topk_group",), 1),
    Hparam("n_latent", "{arch}.moe_latent_size", ("moe_latent_size",), 0),
)


def attends(h: Hparams, i: int) -> bool:
    """Whether layer i is attention."""
    return at(h.n_head_kv, i) > 0


def feeds(h: Hparams, i: int) -> bool:
    """Whether layer i is a feed-forward."""
    return at(h.n_head_kv, i) == 0 and at(h.n_ff, i) > 0


def has_state(h: Hparams, i: int) -> bool:
    """Whether layer i is a Mamba 2 block."""
    return at(h.n_head_kv, i) == 0 and at(h.n_ff, i) == 0


def _inside(h: Hparams) -> int:
    """The width that routed experts see."""
    return h.n_latent or h.n_embd


_SHARED = (
    *embedding_rows("backbone.embeddings", "backbone.norm_f"),
    *norm_row("attn_norm", BACKBONE + "norm"),
    *mamba2_rows(MIXER, layers=has_state),
    *attention_rows(MIXER, permuted=True, layers=attends),  # no use here, where nothing rotates: equal bytes
)


def _expert_rows() -> tuple[TensorRow, ...]:
    found = (
        ("ffn_gate_inp.weight", "gate.weight", lambda h: (h.n_expert, h.n_embd)),
        ("exp_probs_b.bias", "gate.e_score_correction_bias", lambda h: (h.n_expert,)),
        ("ffn_up_exps.weight", "experts.{e}.up_proj.weight", lambda h: (h.n_expert, h.n_ff_exp, _inside(h))),
        ("ffn_down_exps.weight", "experts.{e}.down_proj.weight", lambda h: (h.n_expert, _inside(h), h.n_ff_exp)),
        ("ffn_up_shexp.weight", "shared_experts.up_proj.weight", lambda h: (h.n_ff_shexp, h.n_embd)),
        ("ffn_down_shexp.weight", "shared_experts.down_proj.weight", lambda h: (h.n_embd, h.n_ff_shexp)),
        ("ffn_latent_down.weight", "fc1_latent_proj.weight", lambda h: (h.n_latent, h.n_embd)),
        ("ffn_latent_up.weight", "fc2_latent_proj.weight", lambda h: (h.n_embd, h.n_latent)),
    )
    return tuple(
        TensorRow(
            "blk.{i}." + name,
            MIXER + theirs,
            shape,
            layers=(lambda h, i: feeds(h, i) and h.n_latent > 0) if "latent" in name else feeds,
        )
        for name, theirs, shape in found
    )


def layer(b: Build, i: int, x: Tensor) -> Tensor:
    """A norm, what the layer is, a residual connection."""
    h, cur = b.h, rms_norm(b, f"blk.{i}.attn_norm", x)
    if has_state(h, i):
        cur = mamba2(b, i, cur)
    elif attends(h, i):
        q, k, v = qkv(b, i, cur)
        y = b.attend(i, q, k, v, h.attention_scale or h.n_embd_head_k**-0.5)
        cur = linear(b, f"blk.{i}.attn_output", y)
    else:
        cur, x = b.last(i, cur, x)
        return ops.add(b.ctx, feed_forward(b, f"blk.{i}.", cur), x)
    cur, x = b.last(i, cur, x)
    return ops.add(b.ctx, cur, x)


def feed_forward(b: Build, blk: str, x: Tensor) -> Tensor:
    """Squared ReLU between two matrices, or experts of that form beside one for all tokens."""
    if blk + "ffn_gate_inp.weight" not in b.w:
        return _squared_relu(b, blk, x, "")
    ids, weights = route(
        b,
        linear(b, blk + "ffn_gate_inp", x),
        gating=SIGMOID,
        normalize=b.h.normalizes,
        scale=b.h.expert_scale,
        bias=b.w[blk + "exp_probs_b.bias"],
        groups=b.h.n_expert_groups,
        groups_used=b.h.n_group_used,
    )
    inside = linear(b, blk + "ffn_latent_down", x) if b.h.n_latent else x
    y = experts(b, blk, inside, ids, weights, kind="relu_sqr")
    y = linear(b, blk + "ffn_latent_up", y) if b.h.n_latent else y
    return ops.add(b.ctx, y, _squared_relu(b, blk, x, "_shexp"))


def _squared_relu(b: Build, blk: str, x: Tensor, suffix: str) -> Tensor:
    y = ops.sqr(b.ctx, ops.relu(b.ctx, linear(b, f"{blk}ffn_up{suffix}", x)))
    return linear(b, f"{blk}ffn_down{suffix}", y)


NEMOTRON_H = Arch(
    name="nemotron_h",
    hf_names=("NemotronHForCausalLM",),
    hparams=HPARAMS,
    extra_hparams=EXTRA,
    tensors=(*_SHARED, *ffn_rows(MIXER, layers=feeds, gated=False)),
    embed=embed_tokens,
    layer=layer,
    finish=finish,
    head=output_head,
    refused=(
        ("mlp_hidden_act", ("relu2",), "another activation"),
        ("mamba_hidden_act", ("silu",), "another activation"),
        ("use_bias", (False,), "biases of Mamba's projections"),
        ("mamba_proj_bias", (False,), "biases of Mamba's projections"),
        ("sliding_window", (), "a sliding window"),
        no_limits(),
    ),
    ignored=("mtp.",),
    check=check_mamba2,
    fits=lambda config: "E" not in _kinds(config),
)


def _check_experts(h: Hparams) -> None:
    check_mamba2(h)
    if h.n_expert_used < 1 or h.n_expert % max(1, h.n_expert_groups):
        raise EngineError(
            f"{h.n_expert} experts in {h.n_expert_groups} groups, {h.n_expert_used} a token: the file is damaged"
        )


NEMOTRON_H_MOE = replace(
    NEMOTRON_H,
    name="nemotron_h_moe",
    extra_hparams=(*EXTRA, *EXPERTS),
    tensors=(*_SHARED, *_expert_rows()),
    refused=(*NEMOTRON_H.refused, ("n_shared_experts", (1,), "several shared experts")),
    check=_check_experts,
    fits=lambda config: "E" in _kinds(config),
)
