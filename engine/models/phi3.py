"""Phi 3, 3.5 and 4: one matrix for queries, keys and values, one for gate and up; divisors of the rotary frequencies
for contexts up to the original one, and others for longer ones (LongRoPE, arXiv 2402.13753)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from engine import ops
from engine.errors import EngineError
from engine.models.arch import Arch, Hparam, Hparams, TensorRow
from engine.models.blocks import embed_tokens, ffn_gated, linear, output_head, qkv, rms_norm
from engine.models.build import Build
from engine.models.common import N_VOCAB, partial_rotary, rope_of, rope_type, rows, silent, uniform
from engine.models.decoder import LAYER, embedding_rows, n_k, n_q, n_v, norm_row
from engine.models.llama import finish
from engine.models.rotary import rotate
from engine.tensor import Tensor

ROPE_KINDS = ("default", "longrope", "su")
_BY_FIELD = {row.field: row for row in rows()}


def _n_ctx_orig(config: Mapping[str, Any], h: Hparams) -> int | None:
    key = "original_max_position_embeddings"
    found = config.get(key) if rope_of(config).get(key) is None else rope_of(config)[key]
    if is_long(config) and not found:
        raise EngineError(f"'rope_parameters.{key}' is missing, which the rope scaling '{rope_type(config)}' needs")
    if not is_long(config) and rope_of(config).get("long_factor") is not None:
        raise EngineError(f"'rope_parameters.long_factor' is there, but 'rope_type' is '{rope_type(config)}'")
    return found


def is_long(config: Mapping[str, Any]) -> bool:
    """Whether the model has divisors for long contexts."""
    return rope_type(config) in ("longrope", "su")


def _attn_factor(config: Mapping[str, Any], h: Hparams) -> float | None:
    """Factor of the rotated values: sqrt(1 + ln(s) / ln(n)) for a context that grew s-fold from n tokens."""
    if not is_long(config):
        return None
    rope = rope_of(config)
    if rope.get("attention_factor") is not None:
        return rope["attention_factor"]
    growth = rope.get("factor") or h.n_ctx_train / h.n_ctx_orig
    return math.sqrt(1 + math.log(growth) / math.log(h.n_ctx_orig)) if growth > 1 else 1.0


def _factors(name: str) -> Callable[[Mapping[str, Any], Hparams], np.ndarray | None]:
    def found(config: Mapping[str, Any], h: Hparams) -> np.ndarray | None:
        if not is_long(config):
            return None
        values = rope_of(config).get(name)
        if not isinstance(values, list) or len(values) != h.n_rot // 2:
            size = len(values) if isinstance(values, list) else "no"
            raise EngineError(f"config.json: 'rope_parameters.{name}' has {size} values, expected {h.n_rot // 2}")
        for value in values:
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise EngineError(f"config.json: 'rope_parameters.{name}' has {value!r}, expected positive numbers")
        return np.array(values, np.float32)

    return found


FACTORS = tuple(
    TensorRow(
        f"rope_factors_{kind}.weight", "", lambda h: (h.n_rot // 2,), optional=True, make=_factors(f"{kind}_factor")
    )
    for kind in ("long", "short")
)


def factors(b: Build) -> Tensor | None:
    """The divisors for the context that the tokens' sequences have or may grow to."""
    n_ctx = b.n_ctx or b.positions.ne[0] // b.n_seq
    return b.w.get(f"rope_factors_{'long' if n_ctx > b.h.n_ctx_orig else 'short'}.weight")


HPARAMS = rows(
    n_ctx_orig=replace(_BY_FIELD["n_ctx_orig"], config=_n_ctx_orig),
    rope_attn_factor=replace(_BY_FIELD["rope_attn_factor"], config=_attn_factor),
    rope_scaling_type=None,
    rope_scaling_factor=None,
)
EXTRA = (
    partial_rotary(1.0),
    Hparam("window", "{arch}.attention.sliding_window", ("sliding_window",), 0, always=True),
    silent(N_VOCAB),
    # The reference names no kind of scaling: the divisors and the factor say all.
    Hparam("rope_scaling_type", "{arch}.rope.scaling.type", (), None, "string"),
    Hparam("rope_scaling_factor", "{arch}.rope.scaling.factor", (), None, "float32"),
)

TENSORS = (
    *embedding_rows(),
    *FACTORS,
    *norm_row("attn_norm", LAYER + "input_layernorm"),
    TensorRow(
        "blk.{i}.attn_qkv.weight",
        LAYER + "self_attn.qkv_proj.weight",
        lambda h, i: (n_q(h, i) + n_k(h, i) + n_v(h, i), h.n_embd),
    ),
    TensorRow("blk.{i}.attn_output.weight", LAYER + "self_attn.o_proj.weight", lambda h, i: (h.n_embd, n_q(h, i))),
    *norm_row("ffn_norm", LAYER + "post_attention_layernorm"),
    TensorRow("blk.{i}.ffn_up.weight", LAYER + "mlp.gate_up_proj.weight", lambda h: (2 * h.n_ff, h.n_embd)),
    TensorRow("blk.{i}.ffn_down.weight", LAYER + "mlp.down_proj.weight", lambda h: (h.n_embd, h.n_ff)),
)


def layer(b: Build, i: int, x: Tensor) -> Tensor:
    """Attention and feed-forward, each with a norm in front and a residual connection."""
    blk = f"blk.{i}."
    cur = attention(b, i, rms_norm(b, blk + "attn_norm", x))
    cur, x = b.last(i, cur, x)
    x = ops.add(b.ctx, cur, x)
    return ops.add(b.ctx, ffn_gated(b, blk, rms_norm(b, blk + "ffn_norm", x)), x)


def attention(b: Build, i: int, x: Tensor) -> Tensor:
    """Grouped heads with rotary positions. llama.cpp's graph has no window, the original does."""
    q, k, v = qkv(b, i, x)
    q, k = (rotate(b, t, neox=True, factors=factors(b)) for t in (q, k))
    return linear(b, f"blk.{i}.attn_output", b.attend(i, q, k, v, b.h.n_embd_head_k**-0.5, window=b.h.window))


PHI3 = Arch(
    name="phi3",
    hf_names=("Phi3ForCausalLM",),
    hparams=uniform(HPARAMS),
    extra_hparams=EXTRA,
    tensors=TENSORS,
    embed=embed_tokens,
    layer=layer,
    finish=finish,
    head=output_head,
    refused=(
        ("hidden_act", ("silu",), "another activation"),
        ("rope_parameters.rope_type", ROPE_KINDS, "another rope scaling"),
    ),
    runs=(("rope_scaling_type", (None, "none", "longrope")),),
)
