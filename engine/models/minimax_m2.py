"""MiniMax-M2: experts chosen by sigmoid and a bias, half of each head rotates, and a norm of queries and keys across
all heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine import ops
from engine.models.arch import Arch, Hparam, Hparams, TensorRow
from engine.models.blocks import embed_tokens, linear, output_head, qkv, rms_norm, rms_norm_across
from engine.models.build import Build
from engine.models.common import N_FF_EXPERT, N_ROT, N_VOCAB, PLAIN_YARN, SCALED_ROPE, partial_rotary, rows, silent
from engine.models.decoder import LAYER, attention_rows, embedding_rows, expert_rows, norm_row, wide_qk_norm_rows
from engine.models.experts import SIGMOID, has_experts, moe
from engine.models.llama import finish
from engine.models.rotary import rotate
from engine.tensor import Tensor

_MOE = LAYER + "block_sparse_moe."

TENSORS = (
    *embedding_rows(),
    *norm_row("attn_norm", LAYER + "input_layernorm"),
    *attention_rows(),
    *wide_qk_norm_rows(),
    *norm_row("ffn_norm", LAYER + "post_attention_layernorm"),
    *expert_rows(_MOE + "experts.{e}.", lambda h, i: h.n_ff_exp, _MOE + "gate", names=("w1", "w3", "w2")),
    TensorRow("blk.{i}.exp_probs_b.bias", _MOE + "e_score_correction_bias", lambda h: (h.n_expert,)),
)


def _rotating(config: Mapping[str, Any], h: Hparams) -> int:
    """As the released model says it, or as newer configs do."""
    return config.get("rotary_dim") or _PARTIAL(config, h)


_PARTIAL: Any = partial_rotary(1.0).config
_ROWS = tuple(replace(row, default=SIGMOID, always=True) if row.field == "gating" else row for row in rows())
_N_FF_EXPERT: Hparam = replace(N_FF_EXPERT, config=("intermediate_size",))


def layer(b: Build, i: int, x: Tensor) -> Tensor:
    """Attention and experts, each with a norm in front and a residual connection."""
    blk = f"blk.{i}."
    cur = attention(b, i, rms_norm(b, blk + "attn_norm", x))
    cur, x = b.last(i, cur, x)
    x = ops.add(b.ctx, cur, x)
    cur = rms_norm(b, blk + "ffn_norm", x)
    return ops.add(b.ctx, moe(b, blk, cur, gating=b.h.gating, bias=b.w[blk + "exp_probs_b.bias"]), x)


def attention(b: Build, i: int, x: Tensor) -> Tensor:
    """Grouped heads; queries and keys are normalised before they are rotated."""
    blk = f"blk.{i}."
    q, k, v = qkv(b, i, x)
    q = rotate(b, rms_norm_across(b, blk + "attn_q_norm", q), neox=True)
    k = rotate(b, rms_norm_across(b, blk + "attn_k_norm", k), neox=True)
    return linear(b, blk + "attn_output", b.attend(i, q, k, v, b.h.n_embd_head_k**-0.5))


MINIMAX_M2 = Arch(
    name="minimax-m2",
    hf_names=("MiniMaxM2ForCausalLM",),
    hparams=_ROWS,
    extra_hparams=(_N_FF_EXPERT, replace(N_ROT, config=_rotating), silent(N_VOCAB)),
    tensors=TENSORS,
    embed=embed_tokens,
    layer=layer,
    finish=finish,
    head=output_head,
    refused=(
        ("hidden_act", ("silu",), "another activation"),
        ("scoring_func", ("sigmoid",), "another choice of experts"),
        ("use_routing_bias", (True,), "experts chosen without a bias"),
        ("shared_intermediate_size", (0,), "a shared expert"),
        ("use_qk_norm", (True,), "queries and keys without a norm"),
        ("qk_norm_type", ("per_layer",), "another norm of queries and keys"),
        ("rope_parameters.rope_type", SCALED_ROPE, "another rope scaling"),
        *PLAIN_YARN,
    ),
    runs=(("rope_scaling_type", (None, "none", "linear", "yarn")),),
    check=has_experts,
)
