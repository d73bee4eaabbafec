"""Qwen 2 and 2.5: a decoder like Llama's with biases of queries, keys and values, and rotating halves; and its mixture
of experts, where every token also passes a shared expert with a gate."""

from __future__ import annotations

from dataclasses import replace

from engine import ops
from engine.models.arch import Arch
from engine.models.blocks import embed_tokens, ffn_gated, linear, output_head, qkv, rms_norm
from engine.models.build import Build
from engine.models.common import N_FF_EXPERT, N_FF_SHARED, N_ROT, N_VOCAB, PLAIN_YARN, SCALED_ROPE, rows, silent
from engine.models.decoder import LAYER, SHARED_GATE, attention_rows, embedding_rows, expert_rows, ffn_rows, norm_row
from engine.models.experts import gated_shared_expert, has_experts, moe
from engine.models.llama import finish
from engine.models.rotary import rotate
from engine.tensor import Tensor

_ATTENTION = (
    *embedding_rows(),
    *norm_row("attn_norm", LAYER + "input_layernorm"),
    *attention_rows(),
    *norm_row("ffn_norm", LAYER + "post_attention_layernorm"),
)
TENSORS = (*_ATTENTION, *ffn_rows())
MOE_TENSORS = (
    *_ATTENTION,
    *expert_rows(LAYER + "mlp.experts.{e}.", lambda h, i: h.n_ff_exp),
    *ffn_rows(LAYER + "mlp.shared_expert.", size=lambda h, i: h.n_ff_shexp, suffix="_shexp"),
    SHARED_GATE,
)


def attention(b: Build, i: int, x: Tensor) -> Tensor:
    """Grouped heads with rotary positions."""
    q, k, v = qkv(b, i, x)
    q, k = (rotate(b, t, neox=True) for t in (q, k))
    return linear(b, f"blk.{i}.attn_output", b.attend(i, q, k, v, b.h.n_embd_head_k**-0.5))


def layer(b: Build, i: int, x: Tensor) -> Tensor:
    """Attention and feed-forward, each with a norm in front and a residual connection."""
    blk = f"blk.{i}."
    cur = attention(b, i, rms_norm(b, blk + "attn_norm", x))
    cur, x = b.last(i, cur, x)
    x = ops.add(b.ctx, cur, x)
    return ops.add(b.ctx, ffn_gated(b, blk, rms_norm(b, blk + "ffn_norm", x)), x)


def moe_layer(b: Build, i: int, x: Tensor) -> Tensor:
    """The same with experts, whose weights do not sum to 1, and the shared one."""
    blk = f"blk.{i}."
    cur = attention(b, i, rms_norm(b, blk + "attn_norm", x))
    cur, x = b.last(i, cur, x)
    x = ops.add(b.ctx, cur, x)
    cur = rms_norm(b, blk + "ffn_norm", x)
    cur = ops.add(b.ctx, moe(b, blk, cur, normalize=False), gated_shared_expert(b, blk, cur))
    return ops.add(b.ctx, cur, x)


QWEN2 = Arch(
    name="qwen2",
    hf_names=("Qwen2ForCausalLM",),
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

QWEN2MOE = replace(
    QWEN2,
    name="qwen2moe",
    hf_names=("Qwen2MoeForCausalLM",),
    extra_hparams=(N_FF_EXPERT, N_FF_SHARED, silent(N_VOCAB), silent(N_ROT)),
    tensors=MOE_TENSORS,
    layer=moe_layer,
    refused=(
        *QWEN2.refused,
        ("norm_topk_prob", (False,), "weights of experts that sum to 1"),
        ("decoder_sparse_step", (1,), "layers without experts"),
        ("mlp_only_layers", ([],), "layers without experts"),
    ),
    check=has_experts,
)
