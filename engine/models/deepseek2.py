"""DeepSeek V2 and V3, Kimi K2, Moonlight: attention over compressed keys and values, dense layers first, then experts.

A token leaves `kv_lora_rank` numbers and one rotated key for all heads. The matrices that would expand them to keys and
values are applied to the queries and to the result instead, so that attention has one key head (DeepSeek-V2, arXiv
2405.04434, section 2.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from engine import ops
from engine.errors import EngineError
from engine.models.arch import Arch, Hparam, Hparams, TensorRow, at
from engine.models.blocks import embed_tokens, ffn_gated, heads, linear, output_head, part, rms_norm
from engine.models.build import Build
from engine.models.common import N_ROT, N_VOCAB, SCALED_ROPE, rope_of, rope_type, rows, uniform
from engine.models.decoder import LAYER, embedding_rows, expert_rows, ffn_rows, norm_row
from engine.models.experts import SIGMOID, SOFTMAX, has_experts, moe
from engine.models.llama import finish
from engine.models.rotary import mscale, rotate
from engine.models.steps import Take, Transpose
from engine.tensor import Tensor

_BY_FIELD = {row.field: row for row in rows()}


# --- parameters that families with first dense layers share -----------------------------------------------------------


def _dense_layers(config: Mapping[str, Any], h: Hparams) -> int:
    found = config.get("first_k_dense_replace")
    if found is not None:
        return found
    return 0 if config.get("n_routed_experts") is not None else config["num_hidden_layers"]


N_DENSE = Hparam("n_layer_dense", "{arch}.leading_dense_block_count", _dense_layers, 0)
N_FF_EXP = Hparam("n_ff_exp", "{arch}.expert_feed_forward_length", ("moe_intermediate_size", "intermediate_size"), 0)
N_SHARED = Hparam("n_expert_shared", "{arch}.expert_shared_count", ("n_shared_experts",), 0, always=True)
SCALE = Hparam("expert_scale", "{arch}.expert_weights_scale", ("routed_scaling_factor",), 1.0, "float32")
NORM = Hparam("expert_norm", "{arch}.expert_weights_norm", ("norm_topk_prob",), False, "bool")
N_NEXTN = Hparam("n_layer_nextn", "{arch}.nextn_predict_layers", (), 0)


def without_predictors(h: Hparams) -> None:
    """`n_layer` counts the layers that run: those behind them, which predict further tokens, are not used."""
    if h.n_layer_nextn:
        if h.n_layer_nextn >= h.n_layer:
            raise EngineError(f"{h.n_layer_nextn} of {h.n_layer} layers predict further tokens: the file is damaged")
        h.n_layer -= h.n_layer_nextn


def is_dense(h: Hparams, i: int) -> bool:
    """Whether layer i has a plain feed-forward network."""
    return i < h.n_layer_dense


def is_sparse(h: Hparams, i: int) -> bool:
    """Whether layer i has experts."""
    return i >= h.n_layer_dense


def _has_shared(h: Hparams, i: int) -> bool:
    return is_sparse(h, i) and h.n_expert_shared > 0


FFN_TENSORS = (
    *ffn_rows(layers=is_dense),
    *expert_rows(LAYER + "mlp.experts.{e}.", lambda h, i: h.n_ff_exp, layers=is_sparse),
    TensorRow(
        "blk.{i}.exp_probs_b.bias",
        LAYER + "mlp.gate.e_score_correction_bias",
        lambda h: (h.n_expert,),
        optional=True,
        layers=is_sparse,
    ),
    *ffn_rows(LAYER + "mlp.shared_experts.", _has_shared, lambda h, i: h.n_ff_exp * h.n_expert_shared, "_shexp"),
)


def feed_forward(b: Build, i: int, x: Tensor, gating: int) -> Tensor:
    """The plain network of the first layers; in the others the chosen experts and those that every token goes to."""
    blk, h = f"blk.{i}.", b.h
    if is_dense(h, i):
        return ffn_gated(b, blk, x)
    y = moe(
        b,
        blk,
        x,
        gating=gating,
        normalize=bool(h.expert_norm),
        scale=h.expert_scale or 1.0,
        bias=b.w.get(blk + "exp_probs_b.bias"),
        groups=h.n_expert_groups,
        groups_used=h.n_group_used,
        group_best=2 if gating == SIGMOID else 1,  # V2 takes the groups with the best single experts
    )
    return ops.add(b.ctx, y, ffn_gated(b, blk, x, suffix="_shexp")) if _has_shared(h, i) else y


def check_experts(h: Hparams) -> None:
    """Raises EngineError for missing experts, and for groups of them that cannot be."""
    if h.n_layer_dense < h.n_layer:
        has_experts(h)
    groups, used = h.n_expert_groups, h.n_group_used
    if groups > 1 and (h.n_expert % groups or not 0 < used <= groups or h.n_expert_used > h.n_expert // groups * used):
        raise EngineError(
            f"{h.n_expert} experts cannot be {groups} groups of which {used} are used (expert_group_count)"
        )


# --- DeepSeek ---------------------------------------------------------------------------------------------------------


def _gating(config: Mapping[str, Any], h: Hparams) -> int | None:
    names = config.get("architectures") or ()
    if config.get("scoring_func") is None and "DeepseekV3ForCausalLM" in names:
        return SIGMOID  # newer configs do not say it
    found = _BY_FIELD["gating"].config
    return found(config, h) if callable(found) else None


def _groups(key: str):
    """Groups of experts count only where the choice is by groups."""
    return lambda config, h: (
        None if config.get("topk_method") == "greedy" and (config.get(key) or 1) > 1 else config.get(key)
    )


def _log_multiplier(config: Mapping[str, Any], h: Hparams) -> float | None:
    """A tenth of `mscale_all_dim`, as the key has it."""
    rope = rope_of(config)
    value, other = rope.get("mscale_all_dim"), rope.get("mscale")
    if value is not None and other is not None and value != other:
        raise EngineError(
            f"'rope_parameters.mscale' is {other}, but 'mscale_all_dim' {value}: a GGUF file has one for both"
        )
    if value is None and other is not None and rope_type(config) == "yarn":
        raise EngineError(f"'rope_parameters.mscale' is {other} without 'mscale_all_dim': a GGUF file has one for both")
    return None if value is None else 0.1 * value


HPARAMS = rows(
    n_head_kv=replace(_BY_FIELD["n_head_kv"], config=lambda config, h: 1, default=1),
    gating=replace(_BY_FIELD["gating"], config=_gating),
    n_expert_groups=replace(_BY_FIELD["n_expert_groups"], config=_groups("n_group")),
    n_group_used=replace(_BY_FIELD["n_group_used"], config=_groups("topk_group")),
    yarn_log_multiplier=replace(_BY_FIELD["yarn_log_multiplier"], config=_log_multiplier),
    n_embd_head_k=replace(
        _BY_FIELD["n_embd_head_k"], config=lambda config, h: config["kv_lora_rank"] + config["qk_rope_head_dim"]
    ),
    n_embd_head_v=replace(_BY_FIELD["n_embd_head_v"], config=("kv_lora_rank",)),
)

EXTRA = (
    N_DENSE,
    N_VOCAB,
    Hparam("n_lora_q", "{arch}.attention.q_lora_rank", ("q_lora_rank",), 0),
    Hparam("n_lora_kv", "{arch}.attention.kv_lora_rank", ("kv_lora_rank",)),
    Hparam(
        "n_key_mla",
        "{arch}.attention.key_length_mla",
        lambda config, h: config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
    ),
    Hparam("n_value_mla", "{arch}.attention.value_length_mla", ("v_head_dim",)),
    N_FF_EXP,
    N_SHARED,
    SCALE,
    replace(NORM, config=lambda config, h: config.get("norm_topk_prob") or None),
    replace(N_ROT, config=("qk_rope_head_dim",)),
    N_NEXTN,
)


def check(h: Hparams) -> None:
    """What the graph takes for granted. Raises EngineError."""
    without_predictors(h)
    check_experts(h)
    if at(h.n_head_kv, 0) != 1 or h.n_embd_head_k != h.n_lora_kv + h.n_rot or h.n_embd_head_v != h.n_lora_kv:
        raise EngineError(
            "attention.key_length, value_length and head_count_kv do not fit kv_lora_rank: damaged, or too old"
        )
    if h.n_key_mla <= h.n_rot:
        raise EngineError(f"key 'deepseek2.attention.key_length_mla' is {h.n_key_mla}, expected more than {h.n_rot}")


def _nope(h: Hparams) -> int:
    """Elements of a head's key that are not rotated."""
    return h.n_key_mla - h.n_rot


def _of_heads(first: bool) -> Take:
    """Of the expanding matrix, each head's rows for keys, which are first, or those for values."""

    def found(h: Hparams, i: int) -> np.ndarray:
        inside = np.arange(_nope(h)) if first else _nope(h) + np.arange(h.n_value_mla)
        return (np.arange(h.n_head)[:, None] * (_nope(h) + h.n_value_mla) + inside).reshape(-1)

    return Take(found)


_COMPRESSED = lambda h, i: h.n_lora_q > 0  # noqa: E731
_PLAIN = lambda h, i: h.n_lora_q == 0  # noqa: E731
_ATTN = LAYER + "self_attn."


def _row(name: str, source: str, shape, *steps, layers=None) -> TensorRow:
    return TensorRow(f"blk.{{i}}.{name}.weight", f"{_ATTN}{source}.weight", shape, steps, layers=layers)


TENSORS = (
    *embedding_rows(),
    *norm_row("attn_norm", LAYER + "input_layernorm"),
    _row("attn_q", "q_proj", lambda h: (h.n_head * h.n_key_mla, h.n_embd), layers=_PLAIN),
    _row("attn_q_a", "q_a_proj", lambda h: (h.n_lora_q, h.n_embd), layers=_COMPRESSED),
    _row("attn_q_a_norm", "q_a_layernorm", lambda h: (h.n_lora_q,), layers=_COMPRESSED),
    _row("attn_q_b", "q_b_proj", lambda h: (h.n_head * h.n_key_mla, h.n_lora_q), layers=_COMPRESSED),
    _row("attn_kv_a_mqa", "kv_a_proj_with_mqa", lambda h: (h.n_lora_kv + h.n_rot, h.n_embd)),
    _row("attn_kv_a_norm", "kv_a_layernorm", lambda h: (h.n_lora_kv,)),
    _row(
        "attn_k_b",
        "kv_b_proj",
        lambda h: (h.n_head, h.n_lora_kv, _nope(h)),
        _of_heads(True),
        Transpose(lambda h, i: (h.n_head, _nope(h), h.n_lora_kv)),
    ),
    _row("attn_v_b", "kv_b_proj", lambda h: (h.n_head, h.n_value_mla, h.n_lora_kv), _of_heads(False)),
    _row("attn_output", "o_proj", lambda h: (h.n_embd, h.n_head * h.n_value_mla)),
    *norm_row("ffn_norm", LAYER + "post_attention_layernorm"),
    *FFN_TENSORS,
)


def layer(b: Build, i: int, x: Tensor) -> Tensor:
    """Attention and feed-forward, each with a norm in front and a residual connection."""
    blk = f"blk.{i}."
    cur = attention(b, i, rms_norm(b, blk + "attn_norm", x))
    cur, x = b.last(i, cur, x)
    x = ops.add(b.ctx, cur, x)
    cur = feed_forward(b, i, rms_norm(b, blk + "ffn_norm", x), b.h.gating or SOFTMAX)
    return ops.add(b.ctx, cur, x)


def attention(b: Build, i: int, x: Tensor) -> Tensor:
    """Queries of all heads, in the space of the compressed keys, over one key and value head."""
    blk, ctx, h, n = f"blk.{i}.", b.ctx, b.h, x.ne[1]
    growth, scale = _yarn(h)
    if h.n_lora_q:
        q = linear(b, blk + "attn_q_b", rms_norm(b, blk + "attn_q_a_norm", linear(b, blk + "attn_q_a", x)))
    else:
        q = linear(b, blk + "attn_q", x)
    q = heads(b, q, h.n_key_mla)  # [key, n_head, n]
    q_rot = rotate(b, part(b, q, _nope(h), h.n_rot), neox=False, growth=growth)
    q_kv = ops.permute(ctx, part(b, q, 0, _nope(h)), 0, 2, 1, 3)
    q_kv = ops.permute(ctx, linear(b, blk + "attn_k_b", q_kv), 0, 2, 1, 3)  # [kv_lora, n_head, n]
    q = ops.concat(ctx, q_kv, q_rot, 0)

    kv = linear(b, blk + "attn_kv_a_mqa", x)
    k_rot = rotate(b, heads(b, part(b, kv, h.n_lora_kv, h.n_rot), h.n_rot), neox=False, growth=growth)
    v = heads(b, rms_norm(b, blk + "attn_kv_a_norm", part(b, kv, 0, h.n_lora_kv)), h.n_lora_kv)  # [kv_lora, 1, n]
    y = b.attend(i, q, ops.concat(ctx, v, k_rot, 0), v, scale)

    y = ops.permute(ctx, ops.reshape(ctx, y, h.n_lora_kv, h.n_head, n), 0, 2, 1, 3)
    y = ops.cont(ctx, ops.permute(ctx, linear(b, blk + "attn_v_b", y), 0, 2, 1, 3))  # [value, n_head, n]
    return linear(b, blk + "attn_output", ops.reshape(ctx, y, h.n_value_mla * h.n_head, n))


def _yarn(h: Hparams) -> tuple[float, float]:
    """Factor of the rotated values, and the attention's scale: with a multiplier the growth is in the scale alone."""
    factor = h.rope_scaling_factor if h.rope_scaling_type == "yarn" and h.rope_scaling_factor else 1.0
    multiplier = h.yarn_log_multiplier / 0.1
    growth = 1.0 if multiplier else h.yarn_attn or mscale(factor, 1.0)
    return growth, mscale(factor, multiplier) ** 2 * h.n_key_mla**-0.5


DEEPSEEK2 = Arch(
    name="deepseek2",
    hf_names=("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
    hparams=uniform(HPARAMS),
    extra_hparams=EXTRA,
    tensors=TENSORS,
    embed=embed_tokens,
    layer=layer,
    finish=finish,
    head=output_head,
    refused=(
        ("hidden_act", ("silu",), "another activation"),
        ("topk_method", ("greedy", "group_limited_greedy", "noaux_tc"), "another choice of experts"),
        ("moe_layer_freq", (1,), "layers without experts in between"),
        ("rope_interleave", (True,), "rotary pairs of halves"),
        ("rope_parameters.rope_type", SCALED_ROPE, "another rope scaling"),
    ),
    runs=(("rope_scaling_type", (None, "none", "linear", "yarn")), ("gating", (0, SOFTMAX, SIGMOID))),
    beyond="model.layers.",
    check=check,
)
