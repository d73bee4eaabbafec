"""Granite 3, and Granite 4 where it has attention alone: Llama with factors of the embeddings, the attention, both
residual connections and the logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from engine import ops
from engine.models.arch import Hparam, Hparams, TensorRow
from engine.models.blocks import embed_tokens, ffn_gated, linear, output_head, qkv, rms_norm
from engine.models.build import Build
from engine.models.common import N_ROT, N_VOCAB
from engine.models.decoder import LAYER, Layers, attention_rows, embedding_rows, ffn_rows, half_of, norm_row
from engine.models.llama import LLAMA, ROPE_FREQS
from engine.models.rotary import rotate
from engine.tensor import Tensor

#: factors that Granite multiplies with, and the one that logits are divided by; 0 in a file means that there is none
SCALES = (
    Hparam("attention_scale", "{arch}.attention.scale", ("attention_multiplier",), 0.0, "float32"),
    Hparam("embedding_scale", "{arch}.embedding_scale", ("embedding_multiplier",), 0.0, "float32"),
    Hparam("residual_scale", "{arch}.residual_scale", ("residual_multiplier",), 0.0, "float32"),
    Hparam("logit_scale", "{arch}.logit_scale", ("logits_scaling",), 0.0, "float32"),
)


def fused_ffn_rows(
    suffix: str, source: str, size: Callable[[Hparams], int], layers: Layers = None, experts: bool = False
) -> tuple[TensorRow, ...]:
    """Gate, up and down of all experts, or of one feed-forward; gate and up are one tensor in checkpoints."""
    count = (lambda h: h.n_expert) if experts else (lambda h: 1)

    def shape(rows: Callable[[Hparams], int], columns: Callable[[Hparams], int]) -> Callable[[Hparams], tuple]:
        return lambda h: (*((h.n_expert,) if experts else ()), rows(h), columns(h))

    def width(h: Hparams) -> int:
        return h.n_embd

    wide = source + "input_linear.weight"
    halves = tuple(half_of(which, lambda h, i: size(h), count) for which in (0, 1))
    return (
        TensorRow(f"blk.{{i}}.ffn_gate{suffix}.weight", wide, shape(size, width), halves[:1], layers=layers),
        TensorRow(f"blk.{{i}}.ffn_up{suffix}.weight", wide, shape(size, width), halves[1:], layers=layers),
        TensorRow(
            f"blk.{{i}}.ffn_down{suffix}.weight", source + "output_linear.weight", shape(width, size), layers=layers
        ),
    )


TENSORS = (
    *embedding_rows(),
    ROPE_FREQS,
    *norm_row("attn_norm", LAYER + "input_layernorm"),
    *attention_rows(permuted=True),
    *norm_row("ffn_norm", LAYER + "post_attention_layernorm"),
    *ffn_rows(),
    *fused_ffn_rows("", LAYER + "shared_mlp.", lambda h: h.n_ff),
)


def is_attention_alone(config: Mapping[str, Any]) -> bool:
    """Whether a config of Granite 4 has neither layers with a state nor experts: then the model is as Granite 3."""
    kinds = config.get("layer_types") or ("mamba",)
    return all(kind in ("attention", "full_attention") for kind in kinds) and not config.get("num_local_experts")


def scaled(b: Build, x: Tensor, factor: float) -> Tensor:
    """x times a factor; 0 stands for none."""
    return ops.scale(b.ctx, x, factor) if factor not in (0.0, 1.0) else x


def embed(b: Build) -> Tensor:
    """Embeddings times their factor."""
    return scaled(b, embed_tokens(b), b.h.embedding_scale)


def layer(b: Build, i: int, x: Tensor) -> Tensor:
    """Attention and feed-forward, each with a norm in front; what they give is scaled before it is added."""
    blk, factor = f"blk.{i}.", b.h.residual_scale
    cur = attention(b, i, rms_norm(b, blk + "attn_norm", x))
    cur, x = b.last(i, cur, x)
    x = ops.add(b.ctx, scaled(b, cur, factor), x)
    return ops.add(b.ctx, scaled(b, ffn_gated(b, blk, rms_norm(b, blk + "ffn_norm", x)), factor), x)


def attention(b: Build, i: int, x: Tensor) -> Tensor:
    """Grouped heads with rotary positions and their own scale."""
    q, k, v = qkv(b, i, x)
    factors = b.w.get("rope_freqs.weight")
    q, k = (rotate(b, t, neox=False, factors=factors) for t in (q, k))
    y = b.attend(i, q, k, v, b.h.attention_scale or b.h.n_embd_head_k**-0.5)
    return linear(b, f"blk.{i}.attn_output", y)


def head(b: Build, hidden: Tensor) -> Tensor:
    """Logits, divided by their factor."""
    return scaled(b, output_head(b, hidden), 1.0 / b.h.logit_scale if b.h.logit_scale else 0.0)


GRANITE = replace(
    LLAMA,
    name="granite",
    hf_names=("GraniteForCausalLM", "GraniteMoeHybridForCausalLM"),
    extra_hparams=(N_VOCAB, N_ROT, *SCALES),
    tensors=TENSORS,
    embed=embed,
    layer=layer,
    head=head,
    refused=(*LLAMA.refused, ("position_embedding_type", ("rope",), "other positions")),
    fits=lambda config: "GraniteForCausalLM" in config["architectures"] or is_attention_alone(config),
)
