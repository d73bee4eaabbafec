"""Gemma 1 to 3: decoders like Llama's with GELU, embeddings that are multiplied by the root of their length, and norms
whose weights are written as what is added to 1. Gemma 2 has norms behind attention and feed-forward as well, caps of
scores and logits, and a window in every other layer; Gemma 3 norms of queries and keys, and a window in five of six
layers, which rotate with a base of their own."""

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
from engine.models.common import (
    N_ROT,
    N_VOCAB,
    SCALED_ROPE,
    rope_of,
    rows,
    silent,
    unusual_base,
    window_of,
    window_rows,
)
from engine.models.decoder import (
    LAYER,
    also_named,
    attention_rows,
    embedding_rows,
    ffn_rows,
    norm_row,
    qk_norm_rows,
)
from engine.models.llama import finish
from engine.models.rotary import rotate
from engine.models.steps import Map
from engine.tensor import Tensor

# --- parameters -------------------------------------------------------------------------------------------------------

#: kinds of layers in configs
WINDOW, FULL = "sliding_attention", "full_attention"


def _back(key: str) -> Callable[[Any, Hparams], Mapping[str, Any]]:
    """The way back for a setting of that name."""
    return lambda value, h: {key: value}


def _or(key: str, usual: Any) -> Callable[[Mapping[str, Any], Hparams], Any]:
    """A setting that the config leaves out where it is the usual one."""

    def found(config: Mapping[str, Any], h: Hparams) -> Any:
        value = config.get(key)
        return usual if value is None else value

    return found


def kinds_of_layers(config: Mapping[str, Any], h: Hparams) -> list[bool] | None:
    """Which layers have a window, by the config's `layer_types`, None if it has none. Raises EngineError for others."""
    kinds = config.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != h.n_layer or not set(kinds) <= {WINDOW, FULL}:
        raise EngineError(f"'layer_types' does not name {WINDOW} or {FULL} for each of the {h.n_layer} layers")
    return [kind == WINDOW for kind in kinds]


def usual_period(period: int) -> Callable[[Mapping[str, Any], Hparams], list[bool] | None]:
    """Which layers have the window, if not all but every `period`-th, which readers take for granted."""

    def found(config: Mapping[str, Any], h: Hparams) -> list[bool] | None:
        names = ("sliding_window_pattern", "_sliding_window_pattern")
        n = next((config[name] for name in names if config.get(name)), period)
        slides = kinds_of_layers(config, h) or [(i + 1) % n != 0 for i in range(h.n_layer)]
        return None if slides == [(i + 1) % period != 0 for i in range(h.n_layer)] else slides

    return found


def _scale_row(n_layer_of_27b: int) -> Hparam:
    """Factor of the scores: by the length of a head; in the models of 27 billion weights, which readers know by their
    layers, by another number. Written only where it is neither."""

    def usual(h: Hparams) -> float:
        size = h.n_embd // h.n_head if h.n_layer == n_layer_of_27b else h.n_embd_head_k
        return size**-0.5

    def found(config: Mapping[str, Any], h: Hparams) -> float | None:
        scalar = config.get("query_pre_attn_scalar")
        return None if scalar is None or math.isclose(scalar**-0.5, usual(h)) else scalar**-0.5

    return Hparam("attn_scale", "{arch}.attention.scale", found, usual, "float32")


def cap_row(field: str, name: str, usual: float = 0.0) -> Hparam:
    """A cap c of values: c tanh(value / c), 0 for none; usual: where the config does not name it."""

    def found(config: Mapping[str, Any], h: Hparams) -> float | None:
        value = config.get(name, usual)
        return value or (0.0 if usual else None)

    return Hparam(field, "{arch}." + name, found, usual, "float32")


_CAPS = (cap_row("attn_cap", "attn_logit_softcapping"), cap_row("logit_cap", "final_logit_softcapping"))


def _base_of_windows(config: Mapping[str, Any], h: Hparams) -> float:
    nested = config["rope_parameters"].get("sliding_attention") or {}
    return nested.get("rope_theta") or config.get("rope_local_base_freq") or 10000.0


_BASE_OF_WINDOWS = Hparam(
    "rope_base_swa",
    "{arch}.rope.freq_base_swa",
    _base_of_windows,
    10000.0,
    "float32",
    inverse=_back("rope_parameters.sliding_attention.rope_theta"),
)
_SHARED = rows(rope_base=unusual_base())
_HEAD_SIZES = tuple(
    Hparam(f"n_embd_head_{part}", f"{{arch}}.attention.{name}_length", _or("head_dim", 256), inverse=_back("head_dim"))
    for part, name in (("k", "key"), ("v", "value"))
)
#: of Gemma 3, whose first configs say only what differs from the 1B model
_OF_GEMMA3 = {
    "n_ctx_train": Hparam(
        "n_ctx_train",
        "{arch}.context_length",
        _or("max_position_embeddings", 131072),
        inverse=_back("max_position_embeddings"),
    ),
    "n_head": Hparam(
        "n_head", "{arch}.attention.head_count", _or("num_attention_heads", 8), inverse=_back("num_attention_heads")
    ),
    "n_head_kv": Hparam(
        "n_head_kv",
        "{arch}.attention.head_count_kv",
        _or("num_key_value_heads", 4),
        inverse=_back("num_key_value_heads"),
    ),
    "rope_base": Hparam(
        "rope_base",
        "{arch}.rope.freq_base",
        lambda config, h: rope_of(config).get("rope_theta") or 1e6,
        1e6,
        "float32",
        inverse=_back("rope_parameters.rope_theta"),
    ),
    "rope_base_swa": _BASE_OF_WINDOWS,
    "norm_eps": Hparam(
        "norm_eps",
        "{arch}.attention.layer_norm_rms_epsilon",
        _or("rms_norm_eps", 1e-6),
        kind="float32",
        inverse=_back("rms_norm_eps"),
    ),
    "n_embd_head_k": _HEAD_SIZES[0],
    "n_embd_head_v": _HEAD_SIZES[1],
}

# --- tensors ----------------------------------------------------------------------------------------------------------

#: what is before the names of the text part in models that also see
TEXT_PARTS = ("language_model.model.", "model.language_model.")
#: parts of such models that are left out
SEEING_PARTS = ("vision_tower.", "model.vision_tower.", "multi_modal_projector.", "model.multi_modal_projector.")


def _plus_one(row: TensorRow) -> TensorRow:
    """A norm's weight in the form that is multiplied with."""
    if not row.name.endswith("norm.weight"):
        return row
    return replace(row, steps=(Map(lambda x: x + np.float32(1), lambda x: x - np.float32(1)),))


_FIRST = (
    *embedding_rows(),
    *norm_row("attn_norm", LAYER + "input_layernorm"),
    *attention_rows(),
    *norm_row("ffn_norm", LAYER + "post_attention_layernorm"),
    *ffn_rows(),
)
_SECOND = (
    *embedding_rows(),
    *norm_row("attn_norm", LAYER + "input_layernorm"),
    *attention_rows(),
    *norm_row("post_attention_norm", LAYER + "post_attention_layernorm"),
    *norm_row("ffn_norm", LAYER + "pre_feedforward_layernorm"),
    *ffn_rows(),
    *norm_row("post_ffw_norm", LAYER + "post_feedforward_layernorm"),
)
_THIRD = also_named((*_SECOND, *qk_norm_rows()), "model.", *TEXT_PARTS)

# --- graph ------------------------------------------------------------------------------------------------------------


def embed(b: Build) -> Tensor:
    """The embeddings of the tokens times sqrt(n_embd)."""
    return ops.scale(b.ctx, embed_tokens(b), math.sqrt(b.h.n_embd))


def layer(b: Build, i: int, x: Tensor) -> Tensor:
    """Attention and feed-forward, each with a norm in front, one behind where the model has it, and a residual."""
    blk = f"blk.{i}."
    cur = attention(b, i, rms_norm(b, blk + "attn_norm", x))
    cur, x = b.last(i, cur, x)
    x = ops.add(b.ctx, _behind(b, blk + "post_attention_norm", cur), x)
    cur = ffn_gated(b, blk, rms_norm(b, blk + "ffn_norm", x), "geglu")
    return ops.add(b.ctx, _behind(b, blk + "post_ffw_norm", cur), x)


def _behind(b: Build, name: str, x: Tensor) -> Tensor:
    return rms_norm(b, name, x) if name + ".weight" in b.w else x


def attention(b: Build, i: int, x: Tensor) -> Tensor:
    """Grouped heads; scaling of positions is for the layers without a window."""
    blk, h, window = f"blk.{i}.", b.h, window_of(b.h, i)
    q, k, v = qkv(b, i, x)
    if blk + "attn_q_norm.weight" in b.w:
        q, k = rms_norm(b, blk + "attn_q_norm", q), rms_norm(b, blk + "attn_k_norm", k)
    base = h.rope_base_swa if window else h.rope_base
    q, k = (rotate(b, t, neox=True, base=base, scaled=not window) for t in (q, k))
    y = b.attend(i, q, k, v, h.attn_scale, window=window, softcap=h.attn_cap)
    return linear(b, blk + "attn_output", y)


def head(b: Build, hidden: Tensor) -> Tensor:
    """Logits, capped where the model has a cap."""
    logits, cap = output_head(b, hidden), b.h.logit_cap
    return ops.scale(b.ctx, ops.tanh(b.ctx, ops.scale(b.ctx, logits, 1.0 / cap)), cap) if cap else logits


# --- families ---------------------------------------------------------------------------------------------------------

GELU = ("hidden_activation", ("gelu_pytorch_tanh",), "another activation")
_REFUSED = (
    ("hidden_act", ("gelu", "gelu_pytorch_tanh"), "another activation"),  # the first is a legacy name of the second
    GELU,
    ("use_bidirectional_attention", (False,), "attention to later tokens"),
    ("rope_parameters.rope_type", SCALED_ROPE, "another rope scaling"),
    ("rope_parameters.full_attention.rope_type", SCALED_ROPE, "another rope scaling"),
    ("rope_parameters.sliding_attention.rope_type", ("default",), "another rope scaling"),
)
_RUNS = (("rope_scaling_type", (None, "none", "linear", "yarn")),)

GEMMA = Arch(
    name="gemma",
    hf_names=("GemmaForCausalLM",),
    hparams=_SHARED,
    extra_hparams=tuple(
        silent(row) for row in (N_VOCAB, N_ROT, *window_rows(1, usual_period(1)), _scale_row(0), *_CAPS)
    ),
    tensors=tuple(map(_plus_one, _FIRST)),
    embed=embed,
    layer=layer,
    finish=finish,
    head=head,
    refused=_REFUSED,
    runs=_RUNS,
)

GEMMA2 = Arch(
    name="gemma2",
    hf_names=("Gemma2ForCausalLM",),
    hparams=_SHARED,
    extra_hparams=(
        cap_row("attn_cap", "attn_logit_softcapping", 50.0),
        cap_row("logit_cap", "final_logit_softcapping", 30.0),
        *(replace(row, default=4096 if row.field == "window" else 2) for row in window_rows(2, usual_period(2))),
        _scale_row(46),
        silent(N_VOCAB),
        silent(N_ROT),
    ),
    tensors=tuple(map(_plus_one, _SECOND)),
    embed=embed,
    layer=layer,
    finish=finish,
    head=head,
    refused=_REFUSED,
    runs=_RUNS,
)

GEMMA3 = Arch(
    name="gemma3",
    hf_names=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    hparams=rows(**_OF_GEMMA3),
    extra_hparams=(
        *_CAPS,
        *window_rows(6, usual_period(6)),
        _scale_row(62),
        silent(replace(N_VOCAB, config=_or("vocab_size", 262208))),
        silent(N_ROT),
    ),
    tensors=tuple(map(_plus_one, _THIRD)),
    embed=embed,
    layer=layer,
    finish=finish,
    head=head,
    refused=_REFUSED,
    runs=_RUNS,
    ignored=SEEING_PARTS,
)
