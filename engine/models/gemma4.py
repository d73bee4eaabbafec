"""Gemma 4, its text part: layers with a window have heads of another size than those without, the last layers take the
keys and values of earlier ones, every layer adds something that depends on the token alone, and larger models have
experts beside the feed-forward. Norms have plain weights, and scores no factor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from engine import ops
from engine.errors import EngineError
from engine.models.arch import REQUIRED, Arch, Hparam, Hparams, TensorRow, at
from engine.models.blocks import ffn_gated, heads, linear, rms_norm
from engine.models.build import Build
from engine.models.common import N_VOCAB, has_window, rows, silent, window_of, window_rows
from engine.models.decoder import LAYER, also_named, embedding_rows, ffn_rows, norm_row
from engine.models.experts import experts, route
from engine.models.gemma import FULL, GELU, SEEING_PARTS, TEXT_PARTS, WINDOW, cap_row, embed, head, kinds_of_layers
from engine.models.llama import finish
from engine.models.rotary import rotate
from engine.tensor import Tensor

# --- parameters -------------------------------------------------------------------------------------------------------

_USUAL_ROPE: dict[str, Mapping[str, Any]] = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    WINDOW: {"rope_type": "default", "rope_theta": 1e4},
}


def _rope(config: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """The rotary settings of layers of a kind."""
    return config["rope_parameters"].get(kind) or _USUAL_ROPE[kind]


def _slides(config: Mapping[str, Any], h: Hparams) -> list[bool]:
    """Which layers have a window: five of six, and never the last."""
    found = kinds_of_layers(config, h) or [(i + 1) % 6 != 0 for i in range(h.n_layer)]
    return [*found[:-1], False]


def _of_full(config: Mapping[str, Any], h: Hparams) -> Mapping[str, Any]:
    """Settings that layers without a window have for themselves, in either form of the config.

    Raises EngineError if layers differ in another way.
    """
    by_layer = config.get("per_layer_config")
    if by_layer is None:
        older = {"head_dim": config.get("global_head_dim") or 512}
        n_head_kv = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
        return older if n_head_kv is None else older | {"num_key_value_heads": n_head_kv}
    layers = {int(i) for i in by_layer}
    full = {i for i, slides in enumerate(_slides(config, h)) if not slides}
    first: Mapping[str, Any] = next(iter(by_layer.values()), {})
    same = all(settings == first for settings in by_layer.values())
    if by_layer and not (layers == full and same and set(first) <= {"head_dim", "num_key_value_heads"}):
        raise EngineError("'per_layer_config' has more than one head_dim and num_key_value_heads for full attention")
    return first


def _head_size(config: Mapping[str, Any], h: Hparams) -> int:
    return _of_full(config, h).get("head_dim") or config["head_dim"]


def _n_head_kv(config: Mapping[str, Any], h: Hparams) -> Any:
    few, many = _of_full(config, h).get("num_key_value_heads"), config.get("num_key_value_heads")
    return many if few is None else [many if slides else few for slides in _slides(config, h)]


def _n_ff(config: Mapping[str, Any], h: Hparams) -> Any:
    n, shared = config.get("intermediate_size"), config.get("num_kv_shared_layers") or 0
    if n is None or not config.get("use_double_wide_mlp"):
        return n
    return [n if i < h.n_layer - shared else 2 * n for i in range(h.n_layer)]


def _if_experts(name: str) -> Callable[[Mapping[str, Any], Hparams], Any]:
    return lambda config, h: config.get(name) if config.get("enable_moe_block") else None


_HPARAMS = rows(
    n_ff=Hparam("n_ff", "{arch}.feed_forward_length", _n_ff, per_layer=True),
    n_head_kv=Hparam("n_head_kv", "{arch}.attention.head_count_kv", _n_head_kv, lambda h: h.n_head, per_layer=True),
    rope_base=Hparam(
        "rope_base", "{arch}.rope.freq_base", lambda config, h: _rope(config, FULL).get("rope_theta"), 1e6, "float32"
    ),
    rope_base_swa=Hparam(
        "rope_base_swa",
        "{arch}.rope.freq_base_swa",
        lambda config, h: _rope(config, WINDOW).get("rope_theta"),
        1e4,
        "float32",
    ),
    n_expert=Hparam("n_expert", "{arch}.expert_count", _if_experts("num_experts"), 0),
    n_expert_used=Hparam("n_expert_used", "{arch}.expert_used_count", _if_experts("top_k_experts"), 0),
    n_embd_head_k=Hparam("n_embd_head_k", "{arch}.attention.key_length", _head_size),
    n_embd_head_v=Hparam("n_embd_head_v", "{arch}.attention.value_length", _head_size),
)

_KEY_LENGTH, _SHARED_LAYERS = "{arch}.attention.key_length_swa", "{arch}.attention.shared_kv_layers"

_EXTRA = (
    *(replace(row, default=REQUIRED) if row.field == "window_pattern" else row for row in window_rows(6, _slides)),
    Hparam("n_layer_shared", _SHARED_LAYERS, ("num_kv_shared_layers",), 0, always=True),
    Hparam(
        "n_embd_layer",
        "{arch}.embedding_length_per_layer_input",
        ("hidden_size_per_layer_input",),
        0,
        always=True,
    ),
    Hparam("n_embd_head_k_swa", _KEY_LENGTH, ("head_dim",)),
    Hparam("n_embd_head_v_swa", "{arch}.attention.value_length_swa", ("head_dim",)),
    Hparam("n_ff_exp", "{arch}.expert_feed_forward_length", _if_experts("moe_intermediate_size"), 0),
    cap_row("logit_cap", "final_logit_softcapping"),
    Hparam("n_rot", "{arch}.rope.dimension_count", (), lambda h: h.n_embd_head_k, always=True),
    Hparam("n_rot_swa", "{arch}.rope.dimension_count_swa", (), lambda h: h.n_embd_head_k_swa, always=True),
    silent(N_VOCAB),
    Hparam("keys_are_values", "", lambda config, h: bool(config.get("attention_k_eq_v")), None, "bool", written=False),
)


def _check(h: Hparams) -> None:
    """Raises EngineError for sizes and shared layers that cannot be."""
    if (h.n_embd_head_v, h.n_embd_head_v_swa) != (h.n_embd_head_k, h.n_embd_head_k_swa):
        raise EngineError("key 'gemma4.attention.value_length' is not the length of keys: the file is damaged")
    if not 0 < h.n_rot_swa <= h.n_embd_head_k_swa or h.n_rot_swa % 2:
        what = f"even and at most {h.n_embd_head_k_swa}: the file is damaged"
        raise EngineError(f"key 'gemma4.rope.dimension_count_swa' is {h.n_rot_swa}, expected {what}")
    n_own = h.n_layer - h.n_layer_shared
    kinds = {has_window(h, i) for i in range(n_own)}
    if n_own < 1 or any(has_window(h, i) not in kinds for i in range(n_own, h.n_layer)):
        raise EngineError(
            f"key 'gemma4.attention.shared_kv_layers' is {h.n_layer_shared} of {h.n_layer} layers: "
            "no layer of the same kind is left that has keys and values"
        )


# --- tensors ----------------------------------------------------------------------------------------------------------


def size_of_head(h: Hparams, i: int) -> int:
    """Length of a head of layer i."""
    return h.n_embd_head_k_swa if has_window(h, i) else h.n_embd_head_k


def _n_q(h: Hparams, i: int) -> int:
    return at(h.n_head, i) * size_of_head(h, i)


def _n_k(h: Hparams, i: int) -> int:
    return at(h.n_head_kv, i) * size_of_head(h, i)


def _is_shared(h: Hparams, i: int) -> bool:
    return i >= h.n_layer - h.n_layer_shared


def _may_lack_values(h: Hparams, i: int) -> bool:
    """Layers that may have no matrix of values; a config says which have none, a file does not."""
    return _is_shared(h, i) or (h.keys_are_values is not False and not has_window(h, i))


def _unless(lacks: Callable[[Hparams, int], bool], row: TensorRow) -> tuple[TensorRow, TensorRow]:
    """A tensor that must be there but in layers of a kind, which may hold it."""
    return (
        replace(row, layers=lambda h, i: not lacks(h, i)),
        replace(row, layers=lacks, optional=True),
    )


def _has_experts(h: Hparams, i: int) -> bool:
    return h.n_expert > 0


def _has_layer_inputs(h: Hparams, i: int) -> bool:
    return h.n_embd_layer > 0


_ATTN = LAYER + "self_attn."
_KEYS = TensorRow("blk.{i}.attn_k.weight", _ATTN + "k_proj.weight", lambda h, i: (_n_k(h, i), h.n_embd))
_KEY_NORM = TensorRow("blk.{i}.attn_k_norm.weight", _ATTN + "k_norm.weight", lambda h, i: (size_of_head(h, i),))
_VALUES = TensorRow("blk.{i}.attn_v.weight", _ATTN + "v_proj.weight", lambda h, i: (_n_k(h, i), h.n_embd))

_EXPERT_ROWS = tuple(
    TensorRow("blk.{i}." + name, LAYER + source, shape, layers=_has_experts)
    for name, source, shape in (
        ("ffn_gate_inp.weight", "router.proj.weight", lambda h: (h.n_expert, h.n_embd)),
        ("ffn_gate_inp.scale", "router.scale", lambda h: (h.n_embd,)),
        ("ffn_gate_up_exps.weight", "experts.gate_up_proj", lambda h: (h.n_expert, 2 * h.n_ff_exp, h.n_embd)),
        ("ffn_down_exps.weight", "experts.down_proj", lambda h: (h.n_expert, h.n_embd, h.n_ff_exp)),
        ("ffn_down_exps.scale", "router.per_expert_scale", lambda h: (h.n_expert,)),
    )
)
_LAYER_INPUT_ROWS = tuple(
    TensorRow(name, source, shape, layers=_has_layer_inputs)
    for name, source, shape in (
        (
            "per_layer_token_embd.weight",
            "model.embed_tokens_per_layer.weight",
            lambda h: (h.n_vocab, h.n_layer * h.n_embd_layer),
        ),
        (
            "per_layer_model_proj.weight",
            "model.per_layer_model_projection.weight",
            lambda h: (h.n_layer * h.n_embd_layer, h.n_embd),
        ),
        ("per_layer_proj_norm.weight", "model.per_layer_projection_norm.weight", lambda h: (h.n_embd_layer,)),
        ("blk.{i}.inp_gate.weight", LAYER + "per_layer_input_gate.weight", lambda h: (h.n_embd_layer, h.n_embd)),
        ("blk.{i}.proj.weight", LAYER + "per_layer_projection.weight", lambda h: (h.n_embd, h.n_embd_layer)),
        ("blk.{i}.post_norm.weight", LAYER + "post_per_layer_input_norm.weight", lambda h: (h.n_embd,)),
    )
)


def _divisors(config: Mapping[str, Any], h: Hparams) -> np.ndarray | None:
    """Divisors of the frequencies of layers without a window, of which only the first pairs turn: those of the others
    are so large that these stay as they are."""
    rope = _rope(config, FULL)
    if rope.get("rope_type") != "proportional":
        return None
    n_turning = int(rope.get("partial_rotary_factor", 1.0) * h.n_embd_head_k // 2)
    return np.where(np.arange(h.n_embd_head_k // 2) < n_turning, 1.0, 1e30).astype(np.float32)


TENSORS = also_named(
    (
        *embedding_rows(),
        *_LAYER_INPUT_ROWS,
        TensorRow("rope_freqs.weight", "", lambda h: (h.n_embd_head_k // 2,), optional=True, make=_divisors),
        *norm_row("attn_norm", LAYER + "input_layernorm"),
        TensorRow("blk.{i}.attn_q.weight", _ATTN + "q_proj.weight", lambda h, i: (_n_q(h, i), h.n_embd)),
        *_unless(_is_shared, _KEYS),
        *_unless(_may_lack_values, _VALUES),
        TensorRow("blk.{i}.attn_q_norm.weight", _ATTN + "q_norm.weight", lambda h, i: (size_of_head(h, i),)),
        *_unless(_is_shared, _KEY_NORM),
        TensorRow("blk.{i}.attn_output.weight", _ATTN + "o_proj.weight", lambda h, i: (h.n_embd, _n_q(h, i))),
        *norm_row("post_attention_norm", LAYER + "post_attention_layernorm"),
        *norm_row("ffn_norm", LAYER + "pre_feedforward_layernorm"),
        *(row for row in ffn_rows() if row.name.endswith(".weight")),
        *_EXPERT_ROWS,
        *norm_row("post_ffw_norm_1", LAYER + "post_feedforward_layernorm_1", _has_experts),
        *norm_row("pre_ffw_norm_2", LAYER + "pre_feedforward_layernorm_2", _has_experts),
        *norm_row("post_ffw_norm_2", LAYER + "post_feedforward_layernorm_2", _has_experts),
        *norm_row("post_ffw_norm", LAYER + "post_feedforward_layernorm"),
        TensorRow("blk.{i}.layer_output_scale.weight", LAYER + "layer_scalar", lambda h: (1,), optional=True),
    ),
    "model.",
    *TEXT_PARTS,
)

# --- graph ------------------------------------------------------------------------------------------------------------


def embed_with_inputs(b: Build) -> Tensor:
    """The scaled embeddings; and what layers add by token: of each layer's own embedding and of a projection of the
    common one, `extra["inputs"]` [n_embd_layer, n_layer, n]."""
    x, h = embed(b), b.h
    if h.n_embd_layer:
        shape = (h.n_embd_layer, h.n_layer, x.ne[1])
        own = ops.get_rows(b.ctx, b.w["per_layer_token_embd.weight"], b.tokens)
        own = ops.scale(b.ctx, ops.reshape(b.ctx, own, *shape), math.sqrt(h.n_embd_layer))
        common = ops.scale(b.ctx, linear(b, "per_layer_model_proj", x), h.n_embd**-0.5)
        common = rms_norm(b, "per_layer_proj_norm", ops.reshape(b.ctx, common, *shape))
        b.extra["inputs"] = ops.scale(b.ctx, ops.add(b.ctx, common, own), 2**-0.5)
    return x


def layer(b: Build, i: int, x: Tensor) -> Tensor:
    """Attention, feed-forward and the layer's own input, each with a residual connection; all of it times a number."""
    blk = f"blk.{i}."
    cur = attention(b, i, rms_norm(b, blk + "attn_norm", x))
    cur, x = b.last(i, cur, x)
    x = ops.add(b.ctx, rms_norm(b, blk + "post_attention_norm", cur), x)
    x = ops.add(b.ctx, rms_norm(b, blk + "post_ffw_norm", feed_forward(b, blk, x)), x)
    if b.h.n_embd_layer:
        x = ops.add(b.ctx, layer_input(b, i, x), x)
    scale = b.w.get(blk + "layer_output_scale.weight")
    return x if scale is None else ops.mul(b.ctx, x, scale)


def attention(b: Build, i: int, x: Tensor) -> Tensor:
    """Grouped heads. Layers at the end ask the last layer of their kind that has keys and values of its own."""
    blk, h, window = f"blk.{i}.", b.h, window_of(b.h, i)
    size, slides = size_of_head(h, i), has_window(h, i)
    rotary: dict[str, Any] = {"neox": True, "n_rot": h.n_rot_swa, "base": h.rope_base_swa, "scaled": False}
    if not slides:
        rotary = {"neox": True, "factors": b.w.get("rope_freqs.weight")}
    q = rotate(b, rms_norm(b, blk + "attn_q_norm", heads(b, linear(b, blk + "attn_q", x), size)), **rotary)
    if _is_shared(h, i):
        own = range(h.n_layer - h.n_layer_shared)
        y = b.attend(max(j for j in own if has_window(h, j) == slides), q, None, None, 1.0, window=window)
    else:
        k = heads(b, linear(b, blk + "attn_k", x), size)
        v = heads(b, linear(b, blk + "attn_v", x), size) if blk + "attn_v.weight" in b.w else k
        k = rotate(b, rms_norm(b, blk + "attn_k_norm", k), **rotary)
        y = b.attend(i, q, k, ops.rms_norm(b.ctx, v, h.norm_eps), 1.0, window=window)
    return linear(b, blk + "attn_output", y)


def feed_forward(b: Build, blk: str, x: Tensor) -> Tensor:
    """The gated feed-forward; with experts, which a router chooses by the same input, the sum of both."""
    y = ffn_gated(b, blk, rms_norm(b, blk + "ffn_norm", x), "geglu")
    if not b.h.n_expert:
        return y
    scale = b.w[blk + "ffn_gate_inp.scale"]
    seen = ops.scale(b.ctx, ops.rms_norm(b.ctx, x, b.h.norm_eps), b.h.n_embd**-0.5)
    ids, weights = route(b, linear(b, blk + "ffn_gate_inp", ops.mul(b.ctx, seen, scale), scaled=False))
    mixed = experts(b, blk, rms_norm(b, blk + "pre_ffw_norm_2", x), ids, weights, kind="geglu")
    return ops.add(b.ctx, rms_norm(b, blk + "post_ffw_norm_1", y), rms_norm(b, blk + "post_ffw_norm_2", mixed))


def layer_input(b: Build, i: int, x: Tensor) -> Tensor:
    """What the layer adds by token, behind a gate."""
    blk, inputs = f"blk.{i}.", b.extra["inputs"]
    (own,) = b.last(i, ops.view(b.ctx, inputs, (inputs.ne[0], inputs.ne[2]), (inputs.nb[2],), i * inputs.nb[1]))
    gated = ops.mul(b.ctx, ops.gelu(b.ctx, linear(b, blk + "inp_gate", x)), own)
    return rms_norm(b, blk + "post_norm", linear(b, blk + "proj", gated))


GEMMA4 = Arch(
    name="gemma4",
    hf_names=("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    hparams=_HPARAMS,
    extra_hparams=_EXTRA,
    tensors=TENSORS,
    embed=embed_with_inputs,
    layer=layer,
    finish=finish,
    head=head,
    refused=(
        GELU,
        ("attention_bias", (False,), "biases"),
        ("use_bidirectional_attention", ("vision",), "attention to later tokens"),
        ("rope_parameters.rope_type", ("default",), "another rope scaling"),
        ("rope_parameters.full_attention.rope_type", ("default", "proportional"), "another rope scaling"),
        ("rope_parameters.full_attention.factor", (1.0,), "another rope scaling"),
        ("rope_parameters.sliding_attention.rope_type", ("default",), "another rope scaling"),
    ),
    runs=(("rope_scaling_type", (None, "none")),),
    ignored=(*SEEING_PARTS, "model.audio_tower.", "model.embed_vision.", "model.embed_audio."),
    check=_check,
)
