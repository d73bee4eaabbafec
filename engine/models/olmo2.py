"""OLMo 2 and 3: norms behind attention and feed-forward, none in front, and a norm of queries and keys across all
heads. OLMo 3 adds a sliding window in three layers of four; rotary scaling is for the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine import ops
from engine.models.arch import Arch, Hparams
from engine.models.blocks import embed_tokens, ffn_gated, linear, output_head, qkv, rms_norm, rms_norm_across
from engine.models.build import Build
from engine.models.common import N_ROT, N_VOCAB, PLAIN_YARN, SCALED_ROPE, rows, silent, window_of, window_rows
from engine.models.decoder import LAYER, attention_rows, embedding_rows, ffn_rows, norm_row, wide_qk_norm_rows
from engine.models.llama import finish
from engine.models.rotary import rotate
from engine.tensor import Tensor

PERIOD = 4

TENSORS = (
    *embedding_rows(),
    *attention_rows(),
    *wide_qk_norm_rows(),
    *norm_row("post_attention_norm", LAYER + "post_attention_layernorm"),
    *ffn_rows(),
    *norm_row("post_ffw_norm", LAYER + "post_feedforward_layernorm"),
)


def _windowed(config: Mapping[str, Any], h: Hparams) -> list[bool]:
    kinds = config.get("layer_types")
    if kinds is None:
        return [(i + 1) % PERIOD != 0 for i in range(h.n_layer)]
    return [kind == "sliding_attention" for kind in kinds]


def layer(b: Build, i: int, x: Tensor) -> Tensor:
    """Attention and feed-forward, each with a norm behind it and a residual connection."""
    blk = f"blk.{i}."
    cur, x = b.last(i, attention(b, i, x), x)
    x = ops.add(b.ctx, rms_norm(b, blk + "post_attention_norm", cur), x)
    return ops.add(b.ctx, rms_norm(b, blk + "post_ffw_norm", ffn_gated(b, blk, x)), x)


def attention(b: Build, i: int, x: Tensor) -> Tensor:
    """Grouped heads; queries and keys are normalised before they are rotated."""
    blk, window = f"blk.{i}.", window_of(b.h, i)
    q, k, v = qkv(b, i, x)
    base = b.h.rope_base_swa if window else b.h.rope_base
    q, k = (
        rotate(b, rms_norm_across(b, blk + name, t), neox=True, base=base, scaled=not window)
        for name, t in (("attn_q_norm", q), ("attn_k_norm", k))
    )
    return linear(b, blk + "attn_output", b.attend(i, q, k, v, b.h.n_embd_head_k**-0.5, window=window))


OLMO2 = Arch(
    name="olmo2",
    hf_names=("Olmo2ForCausalLM", "Olmo3ForCausalLM"),
    hparams=rows(),
    extra_hparams=(*window_rows(PERIOD, _windowed), silent(N_VOCAB), silent(N_ROT)),
    tensors=TENSORS,
    embed=embed_tokens,
    layer=layer,
    finish=finish,
    head=output_head,
    refused=(
        ("hidden_act", ("silu",), "another activation"),
        ("rope_parameters.rope_type", SCALED_ROPE, "another rope scaling"),
        *PLAIN_YARN,
        *((key.replace("rope_parameters.", "rope_parameters.full_attention."), *rest) for key, *rest in PLAIN_YARN),
        ("rope_parameters.full_attention.rope_type", SCALED_ROPE, "another rope scaling"),
        ("rope_parameters.sliding_attention.rope_type", ("default",), "another rope scaling"),
    ),
    runs=(("rope_scaling_type", (None, "none", "linear", "yarn")),),
)
