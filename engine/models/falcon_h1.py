"""Falcon-H1: attention and Mamba 2 beside each other in every layer, then a gated feed-forward.

The model's many factors (of embeddings, logits, inputs and outputs of parts) are in the weights of a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from engine import ops
from engine.errors import EngineError
from engine.models.arch import Arch, Hparam, Hparams, TensorRow
from engine.models.blocks import embed_tokens, ffn_gated, linear, output_head, qkv, rms_norm
from engine.models.build import Build
from engine.models.common import N_ROT, N_VOCAB, PLAIN_YARN, SCALED_ROPE, rows, silent
from engine.models.decoder import LAYER, attention_rows, embedding_rows, ffn_rows, norm_row
from engine.models.llama import finish
from engine.models.mamba_block import MAMBA2_HPARAMS, check_mamba2, mamba2, mamba2_rows, no_limits
from engine.models.rotary import rotate
from engine.models.steps import Whole
from engine.tensor import Tensor

#: factors of a config, 1 where it has none; files do not have them
_FACTORS = (
    *("embedding_multiplier", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier"),
    *("attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
)
_MANY_FACTORS = {"mlp_multipliers": 2, "ssm_multipliers": 5}


def _one(name: str) -> Hparam:
    return silent(Hparam(name, "{arch}." + name, (name,), 1.0, "float32"))


def _several(name: str, n: int) -> Hparam:
    def found(config: Mapping[str, Any], h: Hparams) -> Any:
        values = config.get(name)
        if values is not None and (not isinstance(values, list) or len(values) != n):
            raise EngineError(f"'{name}' is {values!r}, expected a list of {n} factors")
        return values

    return silent(Hparam(name, "{arch}." + name, found, (1.0,) * n, "float32", is_list=True))


def _norm(config: Mapping[str, Any], h: Hparams) -> bool:
    """Whether Mamba's block has a norm, which files show by its tensor."""
    has = bool(config.get("mamba_rms_norm", False))
    if has and config.get("mamba_norm_before_gate", True):
        raise EngineError("'mamba_norm_before_gate' is true: a norm in front of the gate; this version has the other")
    return has


def _scaled(*names: str) -> tuple[Whole, ...]:
    """Times factors of the parameters, `name` or `name.number`, one after another."""

    def change(x: np.ndarray, h: Hparams, i: int) -> np.ndarray:
        for name in names:
            field, _, number = name.partition(".")
            value = getattr(h, field)
            x = x * np.float32(value[int(number)] if number else value)
        return x

    return (Whole(change),)


def _scaled_inputs(x: np.ndarray, h: Hparams, i: int) -> np.ndarray:
    """Mamba's first projection: gate, input, B, C and time step have a factor each."""
    n_bc = h.n_group * h.d_state
    factors = np.repeat(np.float32(h.ssm_multipliers), (h.d_inner, h.d_inner, n_bc, n_bc, h.n_ssm_head))
    return x * np.float32(h.ssm_in_multiplier) * factors[:, None]


#: name of a tensor -> what its weights are multiplied with
_IN_WEIGHTS: dict[str, tuple[Whole, ...]] = {
    "token_embd.weight": _scaled("embedding_multiplier"),
    "output.weight": _scaled("lm_head_multiplier"),
    "blk.{i}.attn_q.weight": _scaled("attention_in_multiplier"),
    "blk.{i}.attn_k.weight": _scaled("key_multiplier", "attention_in_multiplier"),
    "blk.{i}.attn_v.weight": _scaled("attention_in_multiplier"),
    "blk.{i}.attn_output.weight": _scaled("attention_out_multiplier"),
    "blk.{i}.ssm_in.weight": (Whole(_scaled_inputs),),
    "blk.{i}.ssm_out.weight": _scaled("ssm_out_multiplier"),
    "blk.{i}.ffn_gate.weight": _scaled("mlp_multipliers.0"),
    "blk.{i}.ffn_down.weight": _scaled("mlp_multipliers.1"),
}


def _with_factors(tensors: tuple[TensorRow, ...]) -> tuple[TensorRow, ...]:
    return tuple(replace(row, steps=_IN_WEIGHTS.get(row.name, row.steps)) for row in tensors)


def _embedding_rows() -> tuple[TensorRow, ...]:
    """An embedding that serves as output too is two tensors if their factors differ."""
    found = embedding_rows(norm="model.final_layernorm")
    output = next(row for row in found if row.name == "output.weight")
    alike = lambda h, i: h.embedding_multiplier == h.lm_head_multiplier  # noqa: E731
    return (
        *(row for row in found if row is not output),
        replace(output, layers=alike),
        replace(output, layers=lambda h, i: not alike(h, i), source=(*output.sources, "model.embed_tokens.weight")),
    )


TENSORS = _with_factors(
    (
        *_embedding_rows(),
        *norm_row("attn_norm", LAYER + "input_layernorm"),
        *attention_rows(),
        *mamba2_rows(LAYER + "mamba.", norm=False),
        TensorRow("blk.{i}.ffn_norm", LAYER + "pre_ff_layernorm.weight", lambda h: (h.n_embd,)),
        *ffn_rows(LAYER + "feed_forward."),
    )
)


def layer(b: Build, i: int, x: Tensor) -> Tensor:
    """Attention and state space of the same normalised input, added, then the feed-forward."""
    blk = f"blk.{i}."
    cur = rms_norm(b, blk + "attn_norm", x)
    cur = ops.add(b.ctx, attention(b, i, cur), mamba2(b, i, cur))
    cur, x = b.last(i, cur, x)
    x = ops.add(b.ctx, cur, x)
    cur = ops.mul(b.ctx, ops.rms_norm(b.ctx, x, b.h.norm_eps), b.w[blk + "ffn_norm"])
    return ops.add(b.ctx, ffn_gated(b, blk, cur), x)


def attention(b: Build, i: int, x: Tensor) -> Tensor:
    """Grouped heads with rotary positions."""
    q, k, v = qkv(b, i, x)
    q, k = (rotate(b, t, neox=True) for t in (q, k))
    return linear(b, f"blk.{i}.attn_output", b.attend(i, q, k, v, b.h.n_embd_head_k**-0.5))


FALCON_H1 = Arch(
    name="falcon-h1",
    hf_names=("FalconH1ForCausalLM",),
    hparams=rows(),
    extra_hparams=(
        N_VOCAB,
        silent(N_ROT),
        *MAMBA2_HPARAMS,
        *(_one(name) for name in _FACTORS),
        *(_several(name, n) for name, n in _MANY_FACTORS.items()),
        silent(Hparam("ssm_norm", "{arch}.ssm.norm", _norm, False, "bool")),
    ),
    tensors=TENSORS,
    embed=embed_tokens,
    layer=layer,
    finish=finish,
    head=output_head,
    refused=(
        ("hidden_act", ("silu",), "another activation"),
        ("rope_parameters.rope_type", SCALED_ROPE, "another rope scaling"),
        *PLAIN_YARN,
        *((name, (False,), "biases") for name in ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias")),
        no_limits(),
    ),
    runs=(("rope_scaling_type", (None, "none", "linear", "yarn")),),
    check=check_mamba2,
)
