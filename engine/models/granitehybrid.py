"""Granite 4: layers of Mamba 2 or of attention, each with a feed-forward of experts or a dense one, and Granite's
factors of embeddings, attention, residual connections and logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine import ops
from engine.models.arch import Arch, Hparam, Hparams, TensorRow, at
from engine.models.blocks import ffn_gated, linear, qkv, rms_norm
from engine.models.build import Build
from engine.models.common import N_ROT, N_VOCAB, PLAIN_YARN, SCALED_ROPE, rows
from engine.models.decoder import LAYER, attention_rows, embedding_rows, norm_row
from engine.models.experts import moe
from engine.models.granite import SCALES, embed, fused_ffn_rows, head, is_attention_alone, scaled
from engine.models.llama import finish
from engine.models.mamba_block import MAMBA2_HPARAMS, check_mamba2, mamba2, mamba2_rows, no_limits
from engine.models.rotary import rotate
from engine.tensor import Tensor

_ROWS = {row.field: row for row in rows()}


def has_state(h: Hparams, i: int) -> bool:
    """Whether layer i is one of Mamba's: those that have no keys."""
    return at(h.n_head_kv, i) == 0


def attends(h: Hparams, i: int) -> bool:
    """Whether layer i has attention."""
    return at(h.n_head_kv, i) > 0


def _rotates(config: Mapping[str, Any]) -> bool:
    return config.get("position_embedding_type") == "rope"


def _n_head_kv(config: Mapping[str, Any], h: Hparams) -> list[int]:
    n = config.get("num_key_value_heads") or h.n_head
    return [n if kind in ("attention", "full_attention") else 0 for kind in config["layer_types"]]


HPARAMS = rows(
    n_ctx_train=replace(
        _ROWS["n_ctx_train"],
        config=lambda config, h: config.get("max_position_embeddings") if _rotates(config) else 2**20,
    ),
    n_head_kv=replace(_ROWS["n_head_kv"], config=_n_head_kv),
    n_embd_head_k=replace(_ROWS["n_embd_head_k"], config=()),
    n_embd_head_v=replace(_ROWS["n_embd_head_v"], config=()),
)

EXTRA = (
    N_VOCAB,
    replace(N_ROT, config=()),
    *SCALES,
    Hparam("n_ff_shexp", "{arch}.expert_shared_feed_forward_length", ("shared_intermediate_size",), 0),
    *MAMBA2_HPARAMS,
    # what the key says elsewhere, that a model was trained with its scaling, is here whether it has rotary positions
    Hparam("rotates", "{arch}.rope.scaling.finetuned", lambda config, h: _rotates(config), True, "bool"),
)


TENSORS = (
    *embedding_rows(),
    *norm_row("attn_norm", LAYER + "input_layernorm"),
    *attention_rows(permuted=True, layers=attends),
    *mamba2_rows(LAYER + "mamba.", layers=has_state),
    *norm_row("ffn_norm", LAYER + "post_attention_layernorm"),
    TensorRow(
        "blk.{i}.ffn_gate_inp.weight",
        LAYER + "block_sparse_moe.router.layer.weight",
        lambda h: (h.n_expert, h.n_embd),
        layers=lambda h, i: h.n_expert > 0,
    ),
    *fused_ffn_rows("_exps", LAYER + "block_sparse_moe.", lambda h: h.n_ff, lambda h, i: h.n_expert > 0, experts=True),
    *fused_ffn_rows(
        "_shexp", LAYER + "shared_mlp.", lambda h: h.n_ff_shexp, lambda h, i: h.n_expert > 0 and h.n_ff_shexp > 0
    ),
    *fused_ffn_rows("", LAYER + "shared_mlp.", lambda h: h.n_ff, lambda h, i: h.n_expert == 0),
)


def layer(b: Build, i: int, x: Tensor) -> Tensor:
    """State space or attention, and feed-forward, each with a norm in front; what they give is scaled and added."""
    blk, factor = f"blk.{i}.", b.h.residual_scale
    cur = rms_norm(b, blk + "attn_norm", x)
    cur = mamba2(b, i, cur) if has_state(b.h, i) else attention(b, i, cur)
    cur, x = b.last(i, cur, x)
    x = ops.add(b.ctx, scaled(b, cur, factor), x)
    return ops.add(b.ctx, scaled(b, feed_forward(b, blk, rms_norm(b, blk + "ffn_norm", x)), factor), x)


def attention(b: Build, i: int, x: Tensor) -> Tensor:
    """Grouped heads with their own scale, with rotary positions or without any."""
    q, k, v = qkv(b, i, x)
    if b.h.rotates:
        q, k = (rotate(b, t, neox=False) for t in (q, k))
    y = b.attend(i, q, k, v, b.h.attention_scale or b.h.n_embd_head_k**-0.5)
    return linear(b, f"blk.{i}.attn_output", y)


def feed_forward(b: Build, blk: str, x: Tensor) -> Tensor:
    """Experts and the one for all tokens, or one feed-forward."""
    if not b.h.n_expert:
        return ffn_gated(b, blk, x)
    y = moe(b, blk, x)
    return ops.add(b.ctx, y, ffn_gated(b, blk, x, suffix="_shexp")) if b.h.n_ff_shexp else y


GRANITEHYBRID = Arch(
    name="granitehybrid",
    hf_names=("GraniteMoeHybridForCausalLM",),
    hparams=HPARAMS,
    extra_hparams=EXTRA,
    tensors=TENSORS,
    embed=embed,
    layer=layer,
    finish=finish,
    head=head,
    refused=(
        ("hidden_act", ("silu",), "another activation"),
        ("rope_parameters.rope_type", SCALED_ROPE, "another rope scaling"),
        *PLAIN_YARN,
        ("position_embedding_type", ("rope", "nope"), "other positions"),
        ("mamba_proj_bias", (False,), "biases of Mamba's projections"),
        no_limits(),
    ),
    runs=(("rope_scaling_type", (None, "none", "linear", "yarn")),),
    check=check_mamba2,
    fits=lambda config: not is_attention_alone(config),
)
