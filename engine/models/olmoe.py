"""OLMoE: a decoder like Llama's where every layer has experts, and a norm of queries and keys across all heads."""

from __future__ import annotations

from dataclasses import replace

from engine import ops
from engine.models.arch import Arch, at
from engine.models.blocks import embed_tokens, linear, output_head, qkv, rms_norm, rms_norm_across
from engine.models.build import Build
from engine.models.common import N_ROT, N_VOCAB, PLAIN_YARN, SCALED_ROPE, rows, silent
from engine.models.decoder import LAYER, attention_rows, embedding_rows, expert_rows, norm_row, wide_qk_norm_rows
from engine.models.experts import has_experts, moe
from engine.models.llama import finish
from engine.models.rotary import rotate
from engine.tensor import Tensor

TENSORS = (
    *embedding_rows(),
    *norm_row("attn_norm", LAYER + "input_layernorm"),
    *attention_rows(),
    *wide_qk_norm_rows(),
    *norm_row("ffn_norm", LAYER + "post_attention_layernorm"),
    *expert_rows(LAYER + "mlp.experts.{e}.", lambda h, i: at(h.n_ff, i)),
)
_ROWS = tuple(
    # the class's own default, which older configs leave out
    replace(row, default=1e-5, always=True) if row.field == "norm_eps" else row
    for row in rows()
)


def layer(b: Build, i: int, x: Tensor) -> Tensor:
    """Attention and experts, whose weights do not sum to 1, each with a norm in front and a residual connection."""
    blk = f"blk.{i}."
    cur = attention(b, i, rms_norm(b, blk + "attn_norm", x))
    cur, x = b.last(i, cur, x)
    x = ops.add(b.ctx, cur, x)
    return ops.add(b.ctx, moe(b, blk, rms_norm(b, blk + "ffn_norm", x), normalize=False), x)


def attention(b: Build, i: int, x: Tensor) -> Tensor:
    """Grouped heads; queries and keys are normalised before they are rotated."""
    blk = f"blk.{i}."
    q, k, v = qkv(b, i, x)
    q = rotate(b, rms_norm_across(b, blk + "attn_q_norm", q), neox=True)
    k = rotate(b, rms_norm_across(b, blk + "attn_k_norm", k), neox=True)
    return linear(b, blk + "attn_output", b.attend(i, q, k, v, b.h.n_embd_head_k**-0.5))


OLMOE = Arch(
    name="olmoe",
    hf_names=("OlmoeForCausalLM",),
    hparams=_ROWS,
    extra_hparams=(silent(N_VOCAB), silent(N_ROT)),
    tensors=TENSORS,
    embed=embed_tokens,
    layer=layer,
    finish=finish,
    head=output_head,
    refused=(
        ("hidden_act", ("silu",), "another activation"),
        ("clip_qkv", (None,), "queries, keys and values within limits"),
        ("norm_topk_prob", (False,), "weights of experts that sum to 1"),
        ("rope_parameters.rope_type", SCALED_ROPE, "another rope scaling"),
        *PLAIN_YARN,
    ),
    runs=(("rope_scaling_type", (None, "none", "linear", "yarn")),),
    check=has_experts,
)
