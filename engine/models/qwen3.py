"""Qwen 3: a decoder like Llama's with a norm of each head's queries and keys, and rotating halves."""

from __future__ import annotations

from engine import ops
from engine.models.arch import Arch
from engine.models.blocks import embed_tokens, ffn_gated, linear, output_head, qkv, rms_norm
from engine.models.build import Build
from engine.models.common import N_ROT as _N_ROT
from engine.models.common import N_VOCAB, rows, silent
from engine.models.decoder import LAYER, attention_rows, embedding_rows, ffn_rows, norm_row, qk_norm_rows
from engine.models.llama import finish
from engine.models.rotary import rotate
from engine.tensor import Tensor

TENSORS = (
    *embedding_rows(),
    *norm_row("attn_norm", LAYER + "input_layernorm"),
    *attention_rows(),
    *qk_norm_rows(),
    *norm_row("ffn_norm", LAYER + "post_attention_layernorm"),
    *ffn_rows(),
)


def layer(b: Build, i: int, x: Tensor) -> Tensor:
    """Attention and feed-forward, each with a norm in front and a residual connection."""
    blk = f"blk.{i}."
    cur = attention(b, i, rms_norm(b, blk + "attn_norm", x))
    cur, x = b.last(i, cur, x)
    x = ops.add(b.ctx, cur, x)
    return ops.add(b.ctx, ffn_gated(b, blk, rms_norm(b, blk + "ffn_norm", x)), x)


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
    extra_hparams=(silent(N_VOCAB), silent(_N_ROT)),
    tensors=TENSORS,
    embed=embed_tokens,
    layer=layer,
    finish=finish,
    head=output_head,
    refused=(
        ("hidden_act", ("silu",), "another activation"),
        ("use_sliding_window", (False,), "a sliding window"),
        ("rope_parameters.rope_type", ("default", "linear", "yarn"), "another rope scaling"),
    ),
    runs=(("rope_scaling_type", (None, "none", "linear", "yarn")),),
)
