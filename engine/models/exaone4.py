"""EXAONE 4: norms behind attention and feed-forward instead of in front; larger models have a sliding window in most
layers, and no positions in the others."""

from __future__ import annotations

from engine import ops
from engine.models.arch import Arch, TensorRow
from engine.models.blocks import embed_tokens, ffn_gated, linear, output_head, qkv, rms_norm
from engine.models.build import Build
from engine.models.common import N_ROT, N_VOCAB, layer_types, rows, silent, window_of, window_rows
from engine.models.decoder import LAYER, attention_rows, embedding_rows, ffn_rows, norm_row, qk_norm_rows
from engine.models.llama import ROPE_KINDS, finish
from engine.models.rotary import llama3_factors, rotate
from engine.tensor import Tensor

TENSORS = (
    *embedding_rows(),
    TensorRow("rope_freqs.weight", "", lambda h: (h.n_rot // 2,), optional=True, make=llama3_factors),
    *attention_rows(),
    *qk_norm_rows(),
    *norm_row("post_attention_norm", LAYER + "post_attention_layernorm"),
    *ffn_rows(),
    *norm_row("post_ffw_norm", LAYER + "post_feedforward_layernorm"),
)


def layer(b: Build, i: int, x: Tensor) -> Tensor:
    """Attention and feed-forward, each with a norm behind it and a residual connection."""
    blk = f"blk.{i}."
    cur = attention(b, i, x)
    cur, x = b.last(i, cur, x)
    x = ops.add(b.ctx, rms_norm(b, blk + "post_attention_norm", cur), x)
    return ops.add(b.ctx, rms_norm(b, blk + "post_ffw_norm", ffn_gated(b, blk, x)), x)


def attention(b: Build, i: int, x: Tensor) -> Tensor:
    """Grouped heads; where other layers slide, those that see everything know no positions."""
    blk = f"blk.{i}."
    q, k, v = qkv(b, i, x)
    q, k = rms_norm(b, blk + "attn_q_norm", q), rms_norm(b, blk + "attn_k_norm", k)
    window = window_of(b.h, i)
    if window or not b.h.window:
        factors = b.w.get("rope_freqs.weight")
        q, k = (rotate(b, t, neox=True, factors=factors) for t in (q, k))
    return linear(b, blk + "attn_output", b.attend(i, q, k, v, b.h.n_embd_head_k**-0.5, window=window))


EXAONE4 = Arch(
    name="exaone4",
    hf_names=("Exaone4ForCausalLM",),
    hparams=rows(),
    extra_hparams=(N_VOCAB, *window_rows(4, layer_types), silent(N_ROT)),
    tensors=TENSORS,
    embed=embed_tokens,
    layer=layer,
    finish=finish,
    head=output_head,
    refused=(
        ("hidden_act", ("silu",), "another activation"),
        ("rope_parameters.rope_type", ROPE_KINDS, "another rope scaling"),
    ),
    runs=(("rope_scaling_type", (None, "none", "linear", "yarn")),),
)
