"""Parameter rows that model families share, in the order in which conversion writes them.

`rows()` gives them all; a family changes single ones by field (`rows(n_ff=replace(...))`, or None to leave one out) and
adds its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from engine.errors import EngineError
from engine.models.arch import Hparam, Hparams, at


def rope_of(config: Mapping[str, Any], kind: str = "full_attention") -> Mapping[str, Any]:
    """The rotary settings of a normalized config for layers of a kind; those of all layers if it names no kinds."""
    rope = config.get("rope_parameters") or {}
    nested = rope.get(kind)
    return nested if isinstance(nested, Mapping) else rope


def rope_type(config: Mapping[str, Any]) -> str:
    """The kind of rotary scaling, in lower case; `default` if none is named."""
    return str(rope_of(config).get("rope_type") or "default").lower()


#: kinds of rotary scaling in configs -> what the GGUF key says
_SCALING = {"linear": "linear", "yarn": "yarn", "su": "longrope", "longrope": "longrope"}


def _scaling_type(config: Mapping[str, Any], h: Hparams) -> str | None:
    kind = rope_type(config)
    if kind in ("linear", "yarn") and rope_of(config).get("factor") is None:
        raise EngineError(f"'rope_parameters.factor' is missing, which the rope scaling '{kind}' needs")
    return _SCALING.get(kind)


def _of_scaling(kinds: tuple[str, ...], *names: str):
    """A setting of the rotary scaling, if that is of one of the kinds."""

    def found(config: Mapping[str, Any], h: Hparams) -> Any:
        rope = rope_of(config)
        if _scaling_type(config, h) not in kinds:
            return None
        return next((rope[name] for name in names if rope.get(name) is not None), None)

    return found


def _sections(config: Mapping[str, Any], h: Hparams) -> list[int] | None:
    found = (config.get("rope_parameters") or {}).get("mrope_section")
    return [*found, 0, 0, 0, 0][:4] if isinstance(found, list) else None


_GATING = {"softmax": 1, "sigmoid": 2, "sqrtsoftplus": 4}


def _gating(config: Mapping[str, Any], h: Hparams) -> int | None:
    names = ("score_function", "scoring_func", "score_func", "moe_router_activation", "moe_router_activation_func")
    found = next((config[name] for name in names if config.get(name) is not None), None)
    return None if found is None else _GATING.get(found, found)


def _gating_name(value: Any, h: Hparams) -> Mapping[str, Any]:
    return {"scoring_func": next((name for name, number in _GATING.items() if number == value), value)}


def _under(name: str) -> Callable[[Any, Hparams], Mapping[str, Any]]:
    """The way back for a rotary setting."""
    return lambda value, h: {f"rope_parameters.{name}": value}


def _rope_type_name(value: Any, h: Hparams) -> Mapping[str, Any]:
    return {} if value == "none" else {"rope_parameters.rope_type": value}


_YARN = ("yarn",)
_ROPE = "{arch}.rope."
_SCALE = _ROPE + "scaling."

_ROWS = (
    Hparam("n_layer", "{arch}.block_count", ("num_hidden_layers", "n_layer", "n_layers", "num_layers")),
    Hparam(
        "n_ctx_train",
        "{arch}.context_length",
        ("max_position_embeddings", "n_ctx", "n_positions", "max_length", "max_sequence_length", "model_max_length"),
    ),
    Hparam("n_embd", "{arch}.embedding_length", ("hidden_size", "n_embd", "dim")),
    Hparam("n_ff", "{arch}.feed_forward_length", ("intermediate_size", "n_inner", "hidden_dim"), per_layer=True),
    Hparam("n_head", "{arch}.attention.head_count", ("num_attention_heads", "n_head", "n_heads"), per_layer=True),
    Hparam(
        "n_head_kv",
        "{arch}.attention.head_count_kv",
        ("num_key_value_heads", "n_kv_heads"),
        lambda h: h.n_head,
        per_layer=True,
    ),
    Hparam("rope_scaling_type", _SCALE + "type", _scaling_type, None, "string", inverse=_rope_type_name),
    Hparam(
        "rope_scaling_factor",
        _SCALE + "factor",
        _of_scaling(("linear", "yarn"), "factor"),
        None,
        "float32",
        inverse=_under("factor"),
    ),
    Hparam(
        "n_ctx_orig",
        _SCALE + "original_context_length",
        _of_scaling(_YARN, "original_max_position_embeddings"),
        lambda h: h.n_ctx_train,
        inverse=_under("original_max_position_embeddings"),
    ),
    Hparam(
        "yarn_ext",
        _SCALE + "yarn_ext_factor",
        _of_scaling(_YARN, "extrapolation_factor"),
        None,
        "float32",
        inverse=_under("extrapolation_factor"),
    ),
    Hparam(
        "yarn_attn",
        _SCALE + "yarn_attn_factor",
        _of_scaling(_YARN, "attention_factor", "attn_factor"),
        None,
        "float32",
        inverse=_under("attention_factor"),
    ),
    Hparam(
        "yarn_beta_fast",
        _SCALE + "yarn_beta_fast",
        _of_scaling(_YARN, "beta_fast"),
        32.0,
        "float32",
        inverse=_under("beta_fast"),
    ),
    Hparam(
        "yarn_beta_slow",
        _SCALE + "yarn_beta_slow",
        _of_scaling(_YARN, "beta_slow"),
        1.0,
        "float32",
        inverse=_under("beta_slow"),
    ),
    Hparam("rope_attn_factor", _SCALE + "attn_factor", (), 1.0, "float32"),
    Hparam("yarn_log_multiplier", _SCALE + "yarn_log_multiplier", (), 0.0, "float32"),
    Hparam(
        "rope_sections",
        _ROPE + "dimension_sections",
        _sections,
        None,
        is_list=True,
        inverse=_under("mrope_section"),
    ),
    Hparam(
        "rope_base",
        _ROPE + "freq_base",
        lambda config, h: rope_of(config).get("rope_theta"),
        10000.0,
        "float32",
        inverse=_under("rope_theta"),
    ),
    Hparam(
        "rope_base_swa",
        _ROPE + "freq_base_swa",
        lambda config, h: _nested(config, "sliding_attention").get("rope_theta"),
        lambda h: h.rope_base,
        "float32",
        inverse=_under("sliding_attention.rope_theta"),
    ),
    Hparam("norm_eps", "{arch}.attention.layer_norm_rms_epsilon", ("rms_norm_eps", "norm_eps"), kind="float32"),
    Hparam("n_expert", "{arch}.expert_count", ("num_local_experts", "num_experts", "n_routed_experts"), 0),
    Hparam(
        "n_expert_used",
        "{arch}.expert_used_count",
        ("num_experts_per_tok", "num_experts_per_token", "top_k_experts"),
        0,
    ),
    Hparam("n_expert_groups", "{arch}.expert_group_count", ("n_group",), 0),
    Hparam("n_group_used", "{arch}.expert_group_used_count", ("topk_group",), 0),
    Hparam("gating", "{arch}.expert_gating_func", _gating, 0, inverse=_gating_name),
    Hparam("n_embd_head_k", "{arch}.attention.key_length", ("head_dim",), lambda h: _head_size(h)),
    Hparam("n_embd_head_v", "{arch}.attention.value_length", ("head_dim",), lambda h: _head_size(h)),
)

#: layer norm instead of RMS norm
LAYER_NORM_EPS = Hparam(
    "norm_eps",
    "{arch}.attention.layer_norm_epsilon",
    ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    kind="float32",
)

#: kinds of rotary scaling in config.json for families without rope_freqs.weight
SCALED_ROPE = ("default", "linear", "yarn")

#: variants of YaRN that plain decoders do not have
PLAIN_YARN = (
    ("rope_parameters.truncate", (True,), "YaRN whose ramp ends between pairs"),
    ("rope_parameters.mscale", (None,), "YaRN with multipliers of its growth"),
)

N_FF_EXPERT = Hparam(
    "n_ff_exp",
    "{arch}.expert_feed_forward_length",
    ("moe_intermediate_size",),
    lambda h: at(h.n_ff, 0) // h.n_expert_used,
)
N_FF_SHARED = Hparam(
    "n_ff_shexp",
    "{arch}.expert_shared_feed_forward_length",
    ("shared_expert_intermediate_size",),
    lambda h: at(h.n_ff, 0),
)
N_VOCAB = Hparam("n_vocab", "{arch}.vocab_size", ("vocab_size",), None)
N_ROT = Hparam("n_rot", "{arch}.rope.dimension_count", ("head_dim",), lambda h: h.n_embd_head_k, always=True)


def window_rows(period: int, of_config: Callable[[Mapping[str, Any], Hparams], Any]) -> tuple[Hparam, Hparam]:
    """The sliding window, and which layers have it: a list, or as in files without one, all but every `period`-th.

    of_config: the list from a config that has a window.
    """

    def pattern(config: Mapping[str, Any], h: Hparams) -> Any:
        return of_config(config, h) if h.window else None

    key = "{arch}.attention.sliding_window"
    return (
        Hparam("window", key, ("sliding_window",), 0),
        Hparam("window_pattern", key + "_pattern", pattern, period, "bool", per_layer=True),
    )


def layer_types(config: Mapping[str, Any], h: Hparams) -> list[bool] | None:
    """Which layers slide: newer configs list them; older ones say which, as "LLLG", or that every n-th does not."""
    kinds, pattern = config.get("layer_types"), config.get("sliding_window_pattern")
    if isinstance(kinds, list):
        return [kind == "sliding_attention" for kind in kinds]
    if isinstance(pattern, str) and pattern:
        return [pattern[i % len(pattern)] == "L" for i in range(h.n_layer)]
    return [(i + 1) % pattern != 0 for i in range(h.n_layer)] if isinstance(pattern, int) and pattern > 0 else None


def unless_usual(period: int) -> Callable[[Mapping[str, Any], Hparams], list[bool] | None]:
    """Which layers slide, where these are not all but every `period`-th, which files do not say."""

    def found(config: Mapping[str, Any], h: Hparams) -> list[bool] | None:
        slide = layer_types(config, h)
        return None if slide == [i % period < period - 1 for i in range(h.n_layer)] else slide

    return found


def has_window(h: Hparams, i: int) -> bool:
    """Whether layer i is one of those with a sliding window."""
    period = h.window_pattern
    if isinstance(period, (list, tuple)):
        return bool(period[i])
    return period == 0 or i % period < period - 1


def window_of(h: Hparams, i: int) -> int:
    """The sliding window of layer i, 0 for none."""
    return h.window if has_window(h, i) else 0


def partial_rotary(default: float) -> Hparam:
    """How many elements of a head rotate, from a config that says which part of them."""

    def found(config: Mapping[str, Any], h: Hparams) -> int:
        names = ("partial_rotary_factor", "rotary_pct", "rope_pct")
        places = [place[name] for place in (rope_of(config), config) for name in names if place.get(name) is not None]
        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return int((places[0] if places else default) * size)

    return replace(N_ROT, config=found)


def silent(row: Hparam) -> Hparam:
    """The row as one that is read everywhere, but that conversion does not write."""
    return replace(row, written=False)


def rows(**changed: Hparam | None) -> tuple[Hparam, ...]:
    """All shared rows, with some of them replaced (by field) or left out (None)."""
    found = (changed.get(row.field, row) for row in _ROWS)
    return tuple(row for row in found if row is not None)


def uniform(found: tuple[Hparam, ...]) -> tuple[Hparam, ...]:
    """The rows of a family whose layers are all alike: a list with a value for each is refused."""
    return tuple(replace(row, per_layer=False) for row in found)


def _nested(config: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    found = (config.get("rope_parameters") or {}).get(kind)
    return found if isinstance(found, Mapping) else {}


def _head_size(h: Hparams) -> int:
    n_head = max(h.n_head) if isinstance(h.n_head, (list, tuple)) else h.n_head
    if h.n_embd % n_head:
        raise EngineError(f"the embedding length {h.n_embd} is no multiple of the {n_head} heads, and no size is given")
    return h.n_embd // n_head


#: names of activations in configs -> kinds of `ops.unary`
ACTIVATIONS = {
    "gelu": "gelu_erf",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "quick_gelu": "gelu_quick",
    "relu": "relu",
    "silu": "silu",
}


def activation_row(key: str, usual: str) -> Hparam:
    """The activation by its name in ACTIVATIONS; key: of the config. Written only where it is not the family's usual
    one, which readers take for granted. The reference's graphs take the tanh form of GELU for all of them."""

    def found(config: Mapping[str, Any], h: Hparams) -> str | None:
        name = config.get(key)
        return None if name == usual else name

    return Hparam("activation", "{arch}.hidden_activation", found, usual, "string")


def unusual_base(usual: float = 10000.0) -> Hparam:
    """The base of the rotary frequencies, written only where it is not the one that the reference takes for granted."""

    def found(config: Mapping[str, Any], h: Hparams) -> float | None:
        base = rope_of(config).get("rope_theta")
        return None if base == usual else base

    return Hparam("rope_base", _ROPE + "freq_base", found, usual, "float32")
