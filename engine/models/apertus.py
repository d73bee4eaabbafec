"""Apertus: a decoder like Qwen 3's, with a feed-forward network without a gate, whose activation has parameters that
were trained in every layer."""

from __future__ import annotations

from engine import ops
from engine.models.arch import Arch, Hparam, TensorRow, at
from engine.models.blocks import embed_tokens, linear, output_head, qkv, rms_norm
from engine.models.build import Build
from engine.models.common import N_ROT, N_VOCAB, rows
from engine.models.decoder import LAYER, attention_rows, embedding_rows, ffn_rows, norm_row, qk_norm_rows
from engine.models.llama import ROPE_KINDS, finish
from engine.models.rotary import llama3_factors, rotate
from engine.tensor import Tensor

_XIELU = ("alpha_n", "alpha_p", "beta", "eps")

TENSORS = (
    *embedding_rows(),
    TensorRow("rope_freqs.weight", "", lambda h: (h.n_rot // 2,), optional=True, make=llama3_factors),
    *norm_row("attn_norm", LAYER + "attention_layernorm"),
    *attention_rows(),
    *qk_norm_rows(),
    *norm_row("ffn_norm", LAYER + "feedforward_layernorm"),
    *ffn_rows(gated=False),
)


def _xielu_row(name: str) -> Hparam:
    return Hparam(
        f"xielu_{name}",
        f"xielu.{name}",
        (f"xielu_{name}",),
        kind="float32",
        per_layer=True,
        source=f"{LAYER}mlp.act_fn.{name}",
    )


def layer(b: Build, i: int, x: Tensor) -> Tensor:
    """Attention and feed-forward, each with a norm in front and a residual connection."""
    blk = f"blk.{i}."
    cur = attention(b, i, rms_norm(b, blk + "attn_norm", x))
    cur, x = b.last(i, cur, x)
    x = ops.add(b.ctx, cur, x)
    cur = linear(b, blk + "ffn_up", rms_norm(b, blk + "ffn_norm", x))
    cur = ops.xielu(b.ctx, cur, *(at(getattr(b.h, f"xielu_{name}"), i) for name in _XIELU))
    return ops.add(b.ctx, linear(b, blk + "ffn_down", cur), x)


def attention(b: Build, i: int, x: Tensor) -> Tensor:
    """Grouped heads; queries and keys are normalised before they are rotated."""
    blk = f"blk.{i}."
    q, k, v = qkv(b, i, x)
    factors = b.w.get("rope_freqs.weight")
    q = rotate(b, rms_norm(b, blk + "attn_q_norm", q), neox=True, factors=factors)
    k = rotate(b, rms_norm(b, blk + "attn_k_norm", k), neox=True, factors=factors)
    return linear(b, blk + "attn_output", b.attend(i, q, k, v, b.h.n_embd_head_k**-0.5))


APERTUS = Arch(
    name="apertus",
    hf_names=("ApertusForCausalLM",),
    hparams=rows(),
    extra_hparams=(N_VOCAB, N_ROT, *map(_xielu_row, _XIELU)),
    tensors=TENSORS,
    embed=embed_tokens,
    layer=layer,
    finish=finish,
    head=output_head,
    refused=(
        ("hidden_act", ("xielu",), "another activation"),
        ("rope_parameters.rope_type", ROPE_KINDS, "another rope scaling"),
    ),
    runs=(("rope_scaling_type", (None, "none", "linear", "yarn")),),
    ignored=tuple(f".act_fn.{name}" for name in _XIELU),
)
