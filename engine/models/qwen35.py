"""Qwen 3.5, the text model: delta nets and gated attention as in Qwen3-Next, with a dense feed-forward or experts.

Files hold the heads of values of delta nets in another order than checkpoints do, see `delta_block.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine import ops
from engine.models.arch import Arch, Hparams, TensorRow
from engine.models.blocks import embed_tokens, ffn_gated, linear, output_head, rms_norm
from engine.models.build import Build
from engine.models.common import N_FF_EXPERT, N_FF_SHARED, N_VOCAB, rows, silent
from engine.models.decoder import LAYER, embedding_rows, expert_rows, ffn_rows, half_of, or_nested
from engine.models.delta_block import DELTA_HPARAMS, check_delta, delta_net, has_state, n_mixed, tiled
from engine.models.llama import finish
from engine.models.qwen3next import (
    LINEAR,
    NORMS,
    REFUSED,
    REFUSED_MOE,
    ROTATED,
    SHARED_EXPERT,
    all_experts,
    check_experts,
    delta_rows,
    gated_attention,
    gated_attention_rows,
    plus_one,
)
from engine.models.steps import Take, Whole
from engine.tensor import Tensor

_HEADS = Take(lambda h, i: tiled(h, 1))
_VALUES = Take(lambda h, i: tiled(h, h.d_state))
_MIXED = Take(lambda h, i: tiled(h, h.d_state, behind=2 * h.n_group * h.d_state))
_COLUMNS = Whole(lambda x, h, i: x[:, tiled(h, h.d_state)])

_OWN = (
    ("attn_qkv", "in_proj_qkv", lambda h: (n_mixed(h), h.n_embd), _MIXED),
    ("attn_gate", "in_proj_z", lambda h: (h.d_inner, h.n_embd), _VALUES),
    ("ssm_beta", "in_proj_b", lambda h: (h.n_ssm_head, h.n_embd), _HEADS),
    ("ssm_alpha", "in_proj_a", lambda h: (h.n_ssm_head, h.n_embd), _HEADS),
    ("ssm_out", "out_proj", lambda h: (h.n_embd, h.d_inner), _COLUMNS),
)
_DELTA = delta_rows(
    tuple(
        TensorRow(f"blk.{{i}}.{name}.weight", f"{LINEAR}{theirs}.weight", shape, (step,))
        for name, theirs, shape, step in _OWN
    ),
    order=(_HEADS,),
    channels=(_MIXED,),
)

_COMMON = (*plus_one((*embedding_rows(), *NORMS)), *gated_attention_rows(), *_DELTA)

TENSORS = or_nested((*_COMMON, *ffn_rows()))


def _expert_rows() -> tuple[TensorRow, ...]:
    """Experts are tensors of their own in checkpoints, or all are one tensor, with gate and up in one too."""
    source, count = LAYER + "mlp.", lambda h: h.n_expert
    wide = lambda h: (h.n_expert, h.n_ff_exp, h.n_embd)  # noqa: E731
    down = lambda h: (h.n_expert, h.n_embd, h.n_ff_exp)  # noqa: E731
    gate, up = ((half_of(which, lambda h, i: h.n_ff_exp, count),) for which in (0, 1))
    return (
        *expert_rows(source + "experts.{e}.", lambda h, i: h.n_ff_exp),
        TensorRow("blk.{i}.ffn_gate_exps.weight", source + "experts.gate_up_proj", wide, gate),
        TensorRow("blk.{i}.ffn_up_exps.weight", source + "experts.gate_up_proj", wide, up),
        TensorRow("blk.{i}.ffn_down_exps.weight", source + "experts.down_proj", down),
        *SHARED_EXPERT,
    )


def _sections(config: Mapping[str, Any], h: Hparams) -> list[int]:
    """Pairs that turn by time, height and width of a picture; a text has one position for all."""
    found = (config.get("rope_parameters") or {}).get("mrope_section") or (11, 11, 10)
    return [*found, 0, 0, 0, 0][:4]


_ROWS = {row.field: row for row in rows()}

HPARAMS = rows(rope_sections=replace(_ROWS["rope_sections"], config=_sections))


def layer(b: Build, i: int, x: Tensor) -> Tensor:
    """Delta net or attention, then a feed-forward, each with a norm in front and a residual connection."""
    blk = f"blk.{i}."
    cur = rms_norm(b, blk + "attn_norm", x)
    cur = _linear_attention(b, i, cur) if has_state(b.h, i) else gated_attention(b, i, cur)
    cur, x = b.last(i, cur, x)
    x = ops.add(b.ctx, cur, x)
    cur = rms_norm(b, blk + "post_attention_norm", x)
    return ops.add(b.ctx, all_experts(b, blk, cur) if b.h.n_expert else ffn_gated(b, blk, cur), x)


def _linear_attention(b: Build, i: int, x: Tensor) -> Tensor:
    blk = f"blk.{i}."
    return delta_net(b, i, x, linear(b, blk + "ssm_beta", x), linear(b, blk + "ssm_alpha", x), grouped=False)


QWEN35 = Arch(
    name="qwen35",
    hf_names=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    hparams=HPARAMS,
    extra_hparams=(silent(N_VOCAB), ROTATED, *DELTA_HPARAMS),
    tensors=TENSORS,
    embed=embed_tokens,
    layer=layer,
    finish=finish,
    head=output_head,
    refused=REFUSED,
    runs=(("rope_scaling_type", (None, "none", "linear", "yarn")),),
    ignored=("mtp.", "model.mtp.", "model.visual."),  # layers that predict further tokens, and the eye
    check=check_delta,
)

QWEN35MOE = replace(
    QWEN35,
    name="qwen35moe",
    hf_names=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    extra_hparams=(*QWEN35.extra_hparams, N_FF_EXPERT, N_FF_SHARED),
    tensors=or_nested((*_COMMON, *_expert_rows())),
    refused=(*REFUSED, *REFUSED_MOE),
    check=check_experts,
)
