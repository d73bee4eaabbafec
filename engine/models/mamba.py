"""Mamba and Falcon Mamba: layers of a norm and a selective state space, without attention."""

from __future__ import annotations

from dataclasses import replace

from engine import ops
from engine.models.arch import Arch, Hparam
from engine.models.blocks import embed_tokens, output_head, rms_norm
from engine.models.build import Build
from engine.models.common import N_VOCAB, rows, silent
from engine.models.decoder import embedding_rows, norm_row
from engine.models.llama import finish
from engine.models.mamba_block import D_CONV, D_STATE_KEYS, INNER_EPS, mamba1, mamba1_rows
from engine.models.recurrent import check_kernel
from engine.tensor import Tensor

BACKBONE = "backbone.layers.{i}."

_ROWS = {row.field: row for row in rows()}

#: rows of every model without attention: there is no limit to the context, and readers want these keys
ENDLESS = (
    _ROWS["n_layer"],
    Hparam("n_ctx_train", "{arch}.context_length", lambda config, h: 2**20),
    replace(_ROWS["n_embd"], config=("hidden_size", "d_model", "dim")),
    Hparam("n_ff", "{arch}.feed_forward_length", (), 0, always=True),
    Hparam("n_head", "{arch}.attention.head_count", (), 0, always=True),
)
NORM_EPS = replace(_ROWS["norm_eps"], config=("layer_norm_epsilon", "rms_norm_eps"), default=1e-5, always=True)

HPARAMS = (
    *ENDLESS,
    D_CONV,
    Hparam("d_inner", "{arch}.ssm.inner_size", ("intermediate_size", "d_inner"), lambda h: 2 * h.n_embd, always=True),
    Hparam("d_state", "{arch}.ssm.state_size", D_STATE_KEYS, 16, always=True),
    Hparam(
        "dt_rank", "{arch}.ssm.time_step_rank", ("time_step_rank", "dt_rank"), lambda h: -(-h.n_embd // 16), always=True
    ),
    NORM_EPS,
    Hparam(
        "dt_b_c_rms",
        "{arch}.ssm.dt_b_c_rms",
        lambda config, h: config.get("model_type") == "falcon_mamba",
        False,
        "bool",
    ),
)

TENSORS = (
    *embedding_rows("backbone.embeddings", "backbone.norm_f"),
    *norm_row("attn_norm", BACKBONE + "norm"),
    *mamba1_rows(BACKBONE + "mixer."),
)


def layer(b: Build, i: int, x: Tensor) -> Tensor:
    """A norm, the block, a residual connection."""
    cur = mamba1(b, i, rms_norm(b, f"blk.{i}.attn_norm", x))
    cur, x = b.last(i, cur, x)
    return ops.add(b.ctx, cur, x)


MAMBA = Arch(
    name="mamba",
    hf_names=("MambaForCausalLM", "FalconMambaForCausalLM"),
    hparams=HPARAMS,
    extra_hparams=(silent(N_VOCAB),),
    tensors=TENSORS,
    embed=embed_tokens,
    layer=layer,
    finish=finish,
    head=output_head,
    refused=(
        ("hidden_act", ("silu",), "another activation"),
        ("mixer_rms_eps", (INNER_EPS,), "another epsilon of inner norms"),
        ("use_bias", (False,), "biases of the projections"),
        ("use_conv_bias", (True,), "a convolution without bias"),
    ),
    attends=False,
    check=check_kernel,
)
