"""Mamba 2: layers of a norm and a state space with wide heads, without attention."""

from __future__ import annotations

from dataclasses import replace

from engine import ops
from engine.models.blocks import rms_norm
from engine.models.build import Build
from engine.models.decoder import embedding_rows, norm_row
from engine.models.mamba import BACKBONE, ENDLESS, MAMBA, NORM_EPS
from engine.models.mamba_block import MAMBA2_HPARAMS, check_mamba2, mamba2, mamba2_rows, no_limits
from engine.tensor import Tensor


def layer(b: Build, i: int, x: Tensor) -> Tensor:
    """A norm, the block, a residual connection."""
    cur = mamba2(b, i, rms_norm(b, f"blk.{i}.attn_norm", x))
    cur, x = b.last(i, cur, x)
    return ops.add(b.ctx, cur, x)


MAMBA2 = replace(
    MAMBA,
    name="mamba2",
    hf_names=("Mamba2ForCausalLM",),
    hparams=(*ENDLESS, *MAMBA2_HPARAMS, NORM_EPS),
    tensors=(
        *embedding_rows("backbone.embeddings", "backbone.norm_f"),
        *norm_row("attn_norm", BACKBONE + "norm"),
        *mamba2_rows(BACKBONE + "mixer."),
    ),
    layer=layer,
    refused=(*MAMBA.refused, ("norm_before_gate", (False,), "a norm in front of the gate"), no_limits()),
    check=check_mamba2,
)
