"""Qwen 3: a decoder like Llama's with a norm of each head's queries and keys, and rotating halves; and its mixture of
experts."""

from __future__ import annotations

from dataclasses import replace

from engine import ops
from engine.models.arch import Arch
from engine.models.blocks import embed_tokens, ffn_gated, linear, output_head, qkv, rms_norm
from engine.models.build import Build
from engine.models.common import N_FF_EXPERT, N_ROT, N_VOCAB, PLAIN_YARN, SCALED_ROPE, rows, silent
from engine.models.decoder import LAYER, attention_rows, embedding_rows, expert_rows, ffn_rows, norm_row, qk_norm_rows
from engine.models.experts import has_experts, moe
from engine.models.llama import finish
from engine.models.rotary import rotate
from engine.tensor import Tensor

_ATTENTION = (
    *embedding_rows(),
    *norm_row("attn_norm", LAYER + "input_layernorm"),
    *attention_rows(),
    *qk_norm_rows(),
    *norm_row("ffn_norm", LAYER + "post_attention_layernorm"),
)
TENSORS = (*_ATTENTION, *ffn_rows())
MOE_TENSORS = (*_ATTENTION, *expert_rows(LAYER + "mlp.experts.{e}.", lambda h, i: h.n_ff_exp))


def layer(b: Build, i: int, x: Tensor) -> Tensor:
    """Attention and feed-forward, each with a norm in front and a residual connection."""
    blk = f"blk.{i}."
    cur = attention(b, i, rms_norm(b, blk + "attn_norm", x))
    cur, x = b.last(i, cur, x)
    x = ops.add(b.ctx, cur, x)
    return ops.add(b.ctx, ffn_gated(b, blk, rms_norm(b, blk + "ffn_norm", x)), x)


def moe_layer(b: Build, i: int, x: Tensor) -> Tensor:
    """The same with experts."""
    blk = f"blk.{i}."
    cur = attention(b, i, rms_norm(b, blk + "attn_norm", x))
    cur, x = b.last(i, cur, x)
    x = ops.add(b.ctx, cur, x)
    return ops.add(b.ctx, moe(b, blk, rms_norm(b, blk + "ffn_norm", x)), x)


def attention(b: Build, i: int, x: Tensor) -> Tensor:
    """Grouped heads; queries and keys are normalised before they are rotated."""
    blk = f"blk.{i}."
    q, k, v = qkv(b, i, x)
    q = rotate(b, rms_norm(b, blk + "attn_q_norm", q), neox=True)
    k = rotate(b, rms_norm(b, blk + "attn_k_norm", k), neox=True)
    return linear(b, blk + "attn_output", b.attend(i, q, k, v, b.h.n_embd_head_k**-0.5))


QWEN3 = Arch(
    name="qwen3",
    hf_names=("Qwen3ForCausalLM",),
    hparams=rows(),
    extra_hparams=(silent(N_VOCAB), silent(N_ROT)),
    tensors=TENSORS,
    embed=embed_tokens,
    layer=layer,
    finish=finish,
    head=output_head,
    refused=(
        ("hidden_act", ("silu",), "another activation"),
        ("use_sliding_window", (False,), "a sliding window"),
        ("rope_parameters.rope_type", SCALED_ROPE, "another rope scaling"),
        *PLAIN_YARN,
    ),
    runs=(("rope_scaling_type", (None, "none", "linear", "yarn")),),
)

QWEN3MOE = replace(
    QWEN3,
    name="qwen3moe",
    hf_names=("Qwen3MoeForCausalLM",),
    extra_hparams=(N_FF_EXPERT, silent(N_VOCAB), silent(N_ROT)),
    tensors=MOE_TENSORS,
    layer=moe_layer,
    refused=(
        *QWEN3.refused,
        ("norm_topk_prob", (True,), "weights of experts that do not sum to 1"),
        ("decoder_sparse_step", (1,), "layers without experts"),
        ("mlp_only_layers", ([],), "layers without experts"),
    ),
    check=has_experts,
)
