"""gpt-oss: experts with biases in every layer, attention sinks, a sliding window in every other layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from engine import ops
from engine.models.arch import Arch, Hparam, Hparams, TensorRow
from engine.models.blocks import embed_tokens, linear, output_head, qkv, rms_norm
from engine.models.build import Build
from engine.models.common import (
    N_ROT,
    N_VOCAB,
    SCALED_ROPE,
    rope_of,
    rope_type,
    rows,
    silent,
    uniform,
    unless_usual,
    window_of,
    window_rows,
)
from engine.models.decoder import LAYER, attention_rows, embedding_rows, norm_row
from engine.models.experts import SOFTMAX_OF_CHOSEN, experts, has_experts, route
from engine.models.llama import finish
from engine.models.rotary import rotate
from engine.models.steps import Take, Transpose, Whole
from engine.tensor import Tensor

ALPHA, LIMIT = 1.702, 7.0  # of the gate, see `ops.glu`


def _rounded(config: Mapping[str, Any], h: Hparams) -> bool | None:
    """YaRN's ramp ends between pairs in these models, and readers know that; a model where it does not says so."""
    return True if rope_type(config) == "yarn" and rope_of(config).get("truncate", True) else None


EXTRA = (
    *window_rows(2, unless_usual(2)),
    Hparam("n_ff_exp", "{arch}.expert_feed_forward_length", ("intermediate_size",)),
    Hparam("yarn_rounded", "{arch}.rope.scaling.yarn_truncate", _rounded, False, "bool"),
    silent(N_VOCAB),
    silent(N_ROT),
)

# Checkpoints store an expert as inputs x outputs, with gate and up in turn along the outputs.
_TURNED = Transpose(lambda h, i: (h.n_expert, h.n_embd, 2 * h.n_ff_exp))


def _every_other(first: int) -> Take:
    return Take(lambda h, i: np.arange(first, 2 * h.n_expert * h.n_ff_exp, 2))


def _expert_rows() -> tuple[TensorRow, ...]:
    source = LAYER + "mlp.experts."
    wide, bias = (lambda h: (h.n_expert, h.n_ff_exp, h.n_embd)), (lambda h: (h.n_expert, h.n_ff_exp))
    return (
        TensorRow("blk.{i}.ffn_gate_inp.weight", LAYER + "mlp.router.weight", lambda h: (h.n_expert, h.n_embd)),
        TensorRow("blk.{i}.ffn_gate_inp.bias", LAYER + "mlp.router.bias", lambda h: (h.n_expert,)),
        TensorRow("blk.{i}.ffn_gate_exps.weight", source + "gate_up_proj", wide, (_TURNED, _every_other(0))),
        TensorRow("blk.{i}.ffn_up_exps.weight", source + "gate_up_proj", wide, (_TURNED, _every_other(1))),
        TensorRow(
            "blk.{i}.ffn_down_exps.weight",
            source + "down_proj",
            lambda h: (h.n_expert, h.n_embd, h.n_ff_exp),
            (Transpose(lambda h, i: (h.n_expert, h.n_ff_exp, h.n_embd)),),
        ),
        TensorRow(
            "blk.{i}.ffn_gate_exps.bias", source + "gate_up_proj_bias", bias, (Whole(lambda x, h, i: x[:, 0::2]),)
        ),
        TensorRow("blk.{i}.ffn_up_exps.bias", source + "gate_up_proj_bias", bias, (Whole(lambda x, h, i: x[:, 1::2]),)),
        TensorRow("blk.{i}.ffn_down_exps.bias", source + "down_proj_bias", lambda h: (h.n_expert, h.n_embd)),
    )


TENSORS = (
    *embedding_rows(),
    *norm_row("attn_norm", LAYER + "input_layernorm"),
    *attention_rows(),
    TensorRow("blk.{i}.attn_sinks.weight", LAYER + "self_attn.sinks", lambda h: (h.n_head,)),
    *norm_row("post_attention_norm", LAYER + "post_attention_layernorm"),
    *_expert_rows(),
)


def layer(b: Build, i: int, x: Tensor) -> Tensor:
    """Attention and experts, each with a norm in front and a residual connection."""
    blk = f"blk.{i}."
    cur = attention(b, i, rms_norm(b, blk + "attn_norm", x))
    cur, x = b.last(i, cur, x)
    x = ops.add(b.ctx, cur, x)
    cur = rms_norm(b, blk + "post_attention_norm", x)
    ids, weights = route(b, linear(b, blk + "ffn_gate_inp", cur), gating=SOFTMAX_OF_CHOSEN)
    cur = experts(b, blk, cur, ids, weights, kind="swiglu_oai", alpha=ALPHA, limit=LIMIT)
    return ops.add(b.ctx, cur, x)


def attention(b: Build, i: int, x: Tensor) -> Tensor:
    """Grouped heads, each with a sink: a score without a value."""
    blk = f"blk.{i}."
    q, k, v = qkv(b, i, x)
    q, k = (rotate(b, t, neox=True) for t in (q, k))
    y = b.attend(i, q, k, v, b.h.n_embd_head_k**-0.5, window=window_of(b.h, i), sinks=b.w[blk + "attn_sinks.weight"])
    return linear(b, blk + "attn_output", y)


GPT_OSS = Arch(
    name="gpt-oss",
    hf_names=("GptOssForCausalLM",),
    hparams=uniform(rows()),
    extra_hparams=EXTRA,
    tensors=TENSORS,
    embed=embed_tokens,
    layer=layer,
    finish=finish,
    head=output_head,
    refused=(
        ("hidden_act", ("silu",), "another activation"),
        ("swiglu_alpha", (ALPHA,), "another slope of the gate"),
        ("swiglu_limit", (LIMIT,), "another limit of the gate"),
        ("rope_parameters.rope_type", SCALED_ROPE, "another rope scaling"),
    ),
    runs=(("rope_scaling_type", (None, "none", "linear", "yarn")),),
    check=has_experts,
)
