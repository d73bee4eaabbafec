"""Hunyuan dense: a decoder like Qwen 3's whose queries and keys are normalised behind the rotation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine import ops
from engine.errors import EngineError
from engine.models.arch import Arch, Hparams, TensorRow
from engine.models.blocks import embed_tokens, ffn_gated, linear, output_head, qkv, rms_norm
from engine.models.build import Build
from engine.models.common import N_ROT, N_VOCAB, rope_of, rope_type, rows, silent
from engine.models.decoder import LAYER, attention_rows, embedding_rows, ffn_rows, norm_row
from engine.models.llama import finish
from engine.models.rotary import rotate
from engine.tensor import Tensor

_BY_FIELD = {row.field: row for row in rows()}
_LONG = 1 << 18  # tokens that the stretched base is for; configs say less, and the reference writes this


def _stretched(config: Mapping[str, Any]) -> bool:
    return rope_type(config) == "dynamic"


def _n_ctx(config: Mapping[str, Any], h: Hparams) -> int | None:
    found = config.get("max_position_embeddings")
    return _LONG if _stretched(config) and found in (1 << 15, _LONG) else found


def _n_ctx_orig(config: Mapping[str, Any], h: Hparams) -> int | None:
    return h.n_ctx_train if _stretched(config) else None


def _base(config: Mapping[str, Any], h: Hparams) -> float | None:
    """The base of the frequencies, which a fixed `alpha` stretches: base * alpha^(d / (d - 2))."""
    rope = rope_of(config)
    if not _stretched(config):
        return rope.get("rope_theta")
    alpha = rope.get("alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 1 <= alpha < 1e9:
        raise EngineError(f"'rope_parameters.alpha' is {alpha!r}, expected a number for rope_type 'dynamic'")
    size = config.get("head_dim") or h.n_embd // h.n_head
    return rope.get("rope_theta", 10000.0) * alpha ** (size / (size - 2))


HPARAMS = rows(
    n_ctx_train=replace(_BY_FIELD["n_ctx_train"], config=_n_ctx),
    n_ctx_orig=replace(_BY_FIELD["n_ctx_orig"], config=_n_ctx_orig),
    rope_scaling_type=replace(
        _BY_FIELD["rope_scaling_type"], config=lambda config, h: "none" if _stretched(config) else None
    ),
    rope_scaling_factor=replace(
        _BY_FIELD["rope_scaling_factor"], config=lambda config, h: 1.0 if _stretched(config) else None
    ),
    rope_base=replace(_BY_FIELD["rope_base"], config=_base),
    n_expert=None,  # some configs say that there is one expert
    n_expert_used=None,
)

_NORMS = (("attn_q_norm", "query_layernorm"), ("attn_k_norm", "key_layernorm"))

TENSORS = (
    *embedding_rows(),
    *norm_row("attn_norm", LAYER + "input_layernorm"),
    *attention_rows(),
    *(
        TensorRow(f"blk.{{i}}.{name}.weight", f"{LAYER}self_attn.{source}.weight", lambda h: (h.n_embd_head_k,))
        for name, source in _NORMS
    ),
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
    """Grouped heads; queries and keys are normalised after they are rotated."""
    blk = f"blk.{i}."
    q, k, v = qkv(b, i, x)
    q = rms_norm(b, blk + "attn_q_norm", rotate(b, q, neox=True))
    k = rms_norm(b, blk + "attn_k_norm", rotate(b, k, neox=True))
    return linear(b, blk + "attn_output", b.attend(i, q, k, v, b.h.n_embd_head_k**-0.5))


HUNYUAN_DENSE = Arch(
    name="hunyuan-dense",
    hf_names=("HunYuanDenseV1ForCausalLM",),
    hparams=HPARAMS,
    extra_hparams=(silent(N_VOCAB), silent(N_ROT)),
    tensors=TENSORS,
    embed=embed_tokens,
    layer=layer,
    finish=finish,
    head=output_head,
    refused=(
        ("hidden_act", ("silu",), "another activation"),
        ("rope_parameters.rope_type", ("default", "dynamic"), "another rope scaling"),
    ),
    runs=(("rope_scaling_type", (None, "none")),),
)
