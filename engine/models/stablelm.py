"""StableLM 2: layer norms, a part of each head rotates. The 12B model has feed-forward beside attention, on the same
norm, and a layer norm of every head's queries and keys, each head with weights of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine import ops
from engine.models.arch import Arch, Hparam, Hparams, TensorRow, at
from engine.models.blocks import embed_tokens, ffn_gated, layer_norm, linear, output_head, qkv
from engine.models.build import Build
from engine.models.common import LAYER_NORM_EPS, N_VOCAB, PLAIN_YARN, SCALED_ROPE, partial_rotary, rope_of, rows, silent
from engine.models.decoder import LAYER, attention_rows, embedding_rows, ffn_rows, norm_row
from engine.models.rotary import rotate
from engine.tensor import Tensor

_DEFAULT_BASE = 10000.0


def _base(config: Mapping[str, Any], h: Hparams) -> float | None:
    base = rope_of(config).get("rope_theta")
    return None if base == _DEFAULT_BASE else base


_BASE = Hparam("rope_base", "{arch}.rope.freq_base", _base, _DEFAULT_BASE, "float32")
_EPS = replace(LAYER_NORM_EPS, config=("layer_norm_eps", "norm_eps"))
_PARALLEL = Hparam("parallel", "{arch}.use_parallel_residual", ("use_parallel_residual",), False, "bool", always=True)
_HEADS = LAYER + "self_attn."

TENSORS = (
    *embedding_rows(bias=True),
    *norm_row("attn_norm", LAYER + "input_layernorm", bias=True),
    *attention_rows(),
    TensorRow(
        "blk.{i}.attn_q_norm.weight",
        _HEADS + "q_layernorm.norms.{e}.weight",
        lambda h, i: (at(h.n_head, i), h.n_embd_head_k),
        optional=True,
    ),
    TensorRow(
        "blk.{i}.attn_k_norm.weight",
        _HEADS + "k_layernorm.norms.{e}.weight",
        lambda h, i: (at(h.n_head_kv, i), h.n_embd_head_k),
        optional=True,
    ),
    *norm_row("ffn_norm", LAYER + "post_attention_layernorm", layers=lambda h, i: not h.parallel, bias=True),
    *ffn_rows(),
)


def layer(b: Build, i: int, x: Tensor) -> Tensor:
    """Attention and feed-forward, one after the other with a norm in front of each, or side by side behind one norm."""
    blk = f"blk.{i}."
    normed = layer_norm(b, blk + "attn_norm", x)
    cur, x, normed = b.last(i, attention(b, i, normed), x, normed)
    x = ops.add(b.ctx, cur, x)
    if blk + "ffn_norm.weight" in b.w:
        normed = layer_norm(b, blk + "ffn_norm", x)
    return ops.add(b.ctx, ffn_gated(b, blk, normed), x)


def attention(b: Build, i: int, x: Tensor) -> Tensor:
    """Grouped heads; queries and keys are normalised, where the model has weights for that, before they are rotated."""
    blk = f"blk.{i}."
    q, k, v = qkv(b, i, x)
    if blk + "attn_q_norm.weight" in b.w:
        q, k = layer_norm(b, blk + "attn_q_norm", q), layer_norm(b, blk + "attn_k_norm", k)
    q, k = (rotate(b, t, neox=True) for t in (q, k))
    return linear(b, blk + "attn_output", b.attend(i, q, k, v, b.h.n_embd_head_k**-0.5))


def finish(b: Build, x: Tensor) -> Tensor:
    """The last norm."""
    return layer_norm(b, "output_norm", x)


STABLELM = Arch(
    name="stablelm",
    hf_names=("StableLmForCausalLM", "StableLMEpochForCausalLM"),
    hparams=rows(rope_base=_BASE, norm_eps=_EPS),
    extra_hparams=(partial_rotary(0.25), _PARALLEL, silent(N_VOCAB)),
    tensors=TENSORS,
    embed=embed_tokens,
    layer=layer,
    finish=finish,
    head=output_head,
    refused=(
        ("hidden_act", ("silu",), "another activation"),
        ("rope_parameters.rope_type", SCALED_ROPE, "another rope scaling"),
        *PLAIN_YARN,
    ),
    runs=(("rope_scaling_type", (None, "none", "linear", "yarn")),),
)
