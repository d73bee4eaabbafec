"""GLM 4.5 to 4.7: a dense layer first, then experts chosen by sigmoid; half of each head rotates."""

from __future__ import annotations

from dataclasses import replace

from engine import ops
from engine.models.arch import Arch, Hparam, Hparams
from engine.models.blocks import embed_tokens, linear, output_head, qkv, rms_norm
from engine.models.build import Build
from engine.models.common import N_VOCAB, SCALED_ROPE, partial_rotary, rows, silent
from engine.models.decoder import LAYER, attention_rows, embedding_rows, norm_row, qk_norm_rows
from engine.models.deepseek2 import (
    FFN_TENSORS,
    N_DENSE,
    N_FF_EXP,
    N_NEXTN,
    N_SHARED,
    NORM,
    SCALE,
    check_experts,
    feed_forward,
    without_predictors,
)
from engine.models.experts import SIGMOID
from engine.models.llama import finish
from engine.models.rotary import rotate
from engine.tensor import Tensor


def check(h: Hparams) -> None:
    """Conditions on the parameters. Raises EngineError."""
    without_predictors(h)
    check_experts(h)


TENSORS = (
    *embedding_rows(),
    *norm_row("attn_norm", LAYER + "input_layernorm"),
    *attention_rows(),
    *(replace(row, optional=True) for row in qk_norm_rows()),
    *norm_row("post_attention_norm", LAYER + "post_attention_layernorm"),
    *FFN_TENSORS,
)


def layer(b: Build, i: int, x: Tensor) -> Tensor:
    """Attention and feed-forward, each with a norm in front and a residual connection."""
    blk = f"blk.{i}."
    cur = attention(b, i, rms_norm(b, blk + "attn_norm", x))
    cur, x = b.last(i, cur, x)
    x = ops.add(b.ctx, cur, x)
    return ops.add(b.ctx, feed_forward(b, i, rms_norm(b, blk + "post_attention_norm", x), b.h.gating or SIGMOID), x)


def attention(b: Build, i: int, x: Tensor) -> Tensor:
    """Grouped heads; larger models normalise queries and keys."""
    blk = f"blk.{i}."
    q, k, v = qkv(b, i, x)
    if blk + "attn_q_norm.weight" in b.w:
        q, k = rms_norm(b, blk + "attn_q_norm", q), rms_norm(b, blk + "attn_k_norm", k)
    q, k = (rotate(b, t, neox=True) for t in (q, k))
    return linear(b, blk + "attn_output", b.attend(i, q, k, v, b.h.n_embd_head_k**-0.5))


GLM4MOE = Arch(
    name="glm4moe",
    hf_names=("Glm4MoeForCausalLM",),
    hparams=rows(gating=Hparam("gating", "{arch}.expert_gating_func", lambda config, h: SIGMOID, SIGMOID)),
    extra_hparams=(
        silent(N_VOCAB),
        partial_rotary(0.5),
        N_FF_EXP,
        replace(N_SHARED, always=False),
        N_DENSE,
        SCALE,
        NORM,
        N_NEXTN,
    ),
    tensors=TENSORS,
    embed=embed_tokens,
    layer=layer,
    finish=finish,
    head=output_head,
    refused=(
        ("hidden_act", ("silu",), "another activation"),
        ("rope_parameters.rope_type", SCALED_ROPE, "another rope scaling"),
    ),
    runs=(("rope_scaling_type", (None, "none", "linear", "yarn")), ("gating", (0, 1, SIGMOID))),
    beyond="model.layers.",
    check=check,
)
