"""Command R: attention and feed-forward side by side behind one norm, scaled logits; and Command R7B (`cohere2`), whose
layers have a sliding window, and rotary positions only there."""

from __future__ import annotations

from dataclasses import replace

from engine import ops
from engine.models.arch import Arch, Hparam, TensorRow
from engine.models.blocks import embed_tokens, ffn_gated, layer_norm, linear, output_head, qkv
from engine.models.build import Build
from engine.models.common import (
    LAYER_NORM_EPS,
    N_ROT,
    N_VOCAB,
    partial_rotary,
    rows,
    silent,
    uniform,
    unless_usual,
    window_of,
    window_rows,
)
from engine.models.decoder import LAYER, attention_rows, embedding_rows, ffn_rows, norm_row
from engine.models.rotary import rotate
from engine.tensor import Tensor

_BY_FIELD = {row.field: row for row in rows()}
_N_CTX = _BY_FIELD["n_ctx_train"]
_ACT = ("hidden_act", ("silu",), "another activation")

LOGIT_SCALE = Hparam("logit_scale", "{arch}.logit_scale", ("logit_scale",), kind="float32")
#: the reference writes that there is no scaling
SCALING = replace(_BY_FIELD["rope_scaling_type"], config=lambda config, h: "none")


def _norm_of_heads(name: str, source: str, n_heads) -> TensorRow:
    return TensorRow(
        f"blk.{{i}}.{name}.weight",
        f"{LAYER}self_attn.{source}.weight",
        lambda h: (n_heads(h), h.n_embd_head_k),
        optional=True,
    )


TENSORS = (
    *embedding_rows(),
    *norm_row("attn_norm", LAYER + "input_layernorm"),
    *attention_rows(),
    *ffn_rows(),
)
QK_NORMS = (
    _norm_of_heads("attn_q_norm", "q_norm", lambda h: h.n_head),
    _norm_of_heads("attn_k_norm", "k_norm", lambda h: h.n_head_kv),
)


def layer(b: Build, i: int, x: Tensor) -> Tensor:
    """x + attention(norm(x)) + feed-forward(norm(x))."""
    blk = f"blk.{i}."
    inside = layer_norm(b, blk + "attn_norm", x)
    cur = attention(b, i, inside)
    cur, inside, x = b.last(i, cur, inside, x)
    return ops.add(b.ctx, ops.add(b.ctx, ffn_gated(b, blk, inside), x), cur)


def attention(b: Build, i: int, x: Tensor) -> Tensor:
    """Grouped heads, whose queries and keys some models normalise, each head with weights of its own. Where some layers
    slide, the others know no positions."""
    blk = f"blk.{i}."
    q, k, v = qkv(b, i, x)
    slides = b.arch.name == COHERE2.name
    window = window_of(b.h, i) if slides else 0
    if blk + "attn_q_norm.weight" in b.w:
        q, k = layer_norm(b, blk + "attn_q_norm", q), layer_norm(b, blk + "attn_k_norm", k)
    if window or not slides:
        q, k = (rotate(b, t, neox=False, scaled=False) for t in (q, k))
    return linear(b, blk + "attn_output", b.attend(i, q, k, v, b.h.n_embd_head_k**-0.5, window=window))


def finish(b: Build, x: Tensor) -> Tensor:
    """The last norm."""
    return layer_norm(b, "output_norm", x)


def head(b: Build, hidden: Tensor) -> Tensor:
    """Logits, scaled."""
    logits = output_head(b, hidden)
    return ops.scale(b.ctx, logits, b.h.logit_scale) if b.h.logit_scale else logits


COMMAND_R = Arch(
    name="command-r",
    hf_names=("CohereForCausalLM",),
    hparams=uniform(
        rows(
            n_ctx_train=replace(_N_CTX, config=("model_max_length", "max_position_embeddings")),
            norm_eps=LAYER_NORM_EPS,
            rope_scaling_type=None,
        )
    ),
    extra_hparams=(LOGIT_SCALE, SCALING, silent(N_VOCAB), silent(N_ROT)),
    tensors=(*TENSORS, *QK_NORMS),
    embed=embed_tokens,
    layer=layer,
    finish=finish,
    head=head,
    refused=(_ACT, ("rope_parameters.rope_type", ("default",), "a rope scaling")),
    runs=(("rope_scaling_type", (None, "none")),),
)

COHERE2 = replace(
    COMMAND_R,
    name="cohere2",
    hf_names=("Cohere2ForCausalLM",),
    hparams=uniform(rows(norm_eps=LAYER_NORM_EPS, rope_scaling_type=None)),
    extra_hparams=(LOGIT_SCALE, *window_rows(4, unless_usual(4)), N_VOCAB, partial_rotary(1.0), SCALING),
    tensors=TENSORS,
)
