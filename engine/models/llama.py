"""Llama 1 to 3, SmolLM2, Mistral, Mixtral and other models of their shape: metadata, tensors, graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine import ops
from engine.models.arch import Arch, Hparam, Hparams, TensorRow, at
from engine.models.blocks import embed_tokens, ffn_gated, linear, output_head, qkv, rms_norm
from engine.models.build import Build
from engine.models.common import N_ROT, N_VOCAB, PLAIN_YARN, rows
from engine.models.decoder import LAYER, attention_rows, embedding_rows, expert_rows, ffn_rows, norm_row
from engine.models.experts import moe
from engine.models.rotary import llama3_factors, rotate
from engine.tensor import Tensor

#: kinds of rotary scaling in config.json that the graph has
ROPE_KINDS = ("default", "linear", "llama3", "yarn")

REFUSED = (
    ("hidden_act", ("silu",), "another activation"),
    ("rope_parameters.rope_type", ROPE_KINDS, "another rope scaling"),
    *PLAIN_YARN,
)


def _window(config: Mapping[str, Any], h: Hparams) -> int | None:
    """Mistral's sliding window. llama.cpp's graph has none; a key that it does not read does no harm there."""
    return (
        config.get("sliding_window") if str(config.get("model_type", "")).startswith(("mistral", "mixtral")) else None
    )


EXTRA = (
    N_VOCAB,
    N_ROT,
    Hparam(
        "window",
        "{arch}.attention.sliding_window",
        _window,
        0,
        inverse=lambda value, h: {"sliding_window": value},
    ),
)

_IS_DENSE = lambda h, i: h.n_expert == 0  # noqa: E731
_HAS_EXPERTS = lambda h, i: h.n_expert > 0  # noqa: E731

ROPE_FREQS = TensorRow("rope_freqs.weight", "", lambda h: (h.n_rot // 2,), optional=True, make=llama3_factors)

TENSORS = (
    *embedding_rows(),
    ROPE_FREQS,
    *norm_row("attn_norm", LAYER + "input_layernorm"),
    *attention_rows(permuted=True),
    *norm_row("ffn_norm", LAYER + "post_attention_layernorm"),
    *ffn_rows(layers=_IS_DENSE),
    *expert_rows(
        LAYER + "block_sparse_moe.experts.{e}.",
        lambda h, i: at(h.n_ff, i),
        LAYER + "block_sparse_moe.gate",
        _HAS_EXPERTS,
        ("w1", "w3", "w2"),
    ),
)


def layer(b: Build, i: int, x: Tensor) -> Tensor:
    """Attention and feed-forward, each with a norm in front and a residual connection."""
    blk = f"blk.{i}."
    cur = attention(b, i, rms_norm(b, blk + "attn_norm", x))
    cur, x = b.last(i, cur, x)
    x = ops.add(b.ctx, cur, x)
    cur = rms_norm(b, blk + "ffn_norm", x)
    cur = moe(b, blk, cur) if b.h.n_expert else ffn_gated(b, blk, cur)
    return ops.add(b.ctx, cur, x)


def attention(b: Build, i: int, x: Tensor) -> Tensor:
    """Grouped heads with rotary positions."""
    q, k, v = qkv(b, i, x)
    factors = b.w.get("rope_freqs.weight")
    q, k = (rotate(b, t, neox=False, factors=factors) for t in (q, k))
    y = b.attend(i, q, k, v, b.h.n_embd_head_k**-0.5, window=b.h.window)
    return linear(b, f"blk.{i}.attn_output", y)


def finish(b: Build, x: Tensor) -> Tensor:
    """The last norm."""
    return rms_norm(b, "output_norm", x)


def _hf_class(h: Hparams) -> str:
    return f"{'Mixtral' if h.n_expert else 'Mistral' if getattr(h, 'window', 0) else 'Llama'}ForCausalLM"


LLAMA = Arch(
    name="llama",
    hf_names=("LlamaForCausalLM", "LLaMAForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"),
    hparams=rows(),
    extra_hparams=EXTRA,
    tensors=TENSORS,
    embed=embed_tokens,
    layer=layer,
    finish=finish,
    head=output_head,
    refused=REFUSED,
    runs=(("rope_scaling_type", (None, "none", "linear", "yarn")),),
    hf_class=_hf_class,
)
