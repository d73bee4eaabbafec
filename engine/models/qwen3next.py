"""Qwen3-Next: three layers of gated delta nets for one of gated attention, each with a mixture of experts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from engine import ops
from engine.models.arch import Arch, Hparams, TensorRow
from engine.models.blocks import embed_tokens, heads, linear, output_head, rms_norm
from engine.models.build import Build
from engine.models.common import (
    N_FF_EXPERT,
    N_FF_SHARED,
    N_VOCAB,
    PLAIN_YARN,
    SCALED_ROPE,
    partial_rotary,
    rows,
    silent,
)
from engine.models.decoder import (
    LAYER,
    SHARED_GATE,
    attention_rows,
    embedding_rows,
    expert_rows,
    ffn_rows,
    n_q,
    norm_row,
    qk_norm_rows,
)
from engine.models.delta_block import DELTA_HPARAMS, attends, check_delta, delta_net, has_state, n_mixed
from engine.models.experts import gated_shared_expert, has_experts, moe
from engine.models.llama import finish
from engine.models.mamba_block import DECAY
from engine.models.rotary import rotate
from engine.models.steps import Map, Shape, Take
from engine.tensor import Tensor

LINEAR = LAYER + "linear_attn."

#: checkpoints hold what is added to a norm's weight of 1
PLUS_ONE = Map(lambda x: x + np.float32(1), lambda x: x - np.float32(1))


ROTATED = partial_rotary(0.25)


def plus_one(tensors: tuple[TensorRow, ...]) -> tuple[TensorRow, ...]:
    """The rows, with 1 added to those of norms."""
    return tuple(replace(row, steps=(PLUS_ONE,)) if row.name.endswith("norm.weight") else row for row in tensors)


def gated_attention_rows() -> tuple[TensorRow, ...]:
    """Attention whose query matrix has, for each head, queries and then gates of the output."""
    found = attention_rows(layers=attends)
    wide = lambda h, i: (2 * n_q(h, i), h.n_embd)  # noqa: E731
    return tuple(replace(row, shape=wide) if row.name == "blk.{i}.attn_q.weight" else row for row in found)


def delta_rows(own: tuple[TensorRow, ...], order: tuple[Take, ...] = (), channels: tuple[Take, ...] = ()):
    """The tensors that delta nets share; own: those of one family; order, channels: other orders of heads, and of the
    convolution's channels."""
    kernel = lambda h: (n_mixed(h), h.d_conv)  # noqa: E731
    shared = (
        TensorRow("blk.{i}.ssm_conv1d.weight", LINEAR + "conv1d.weight", kernel, (*channels, Shape())),
        TensorRow("blk.{i}.ssm_dt.bias", LINEAR + "dt_bias", lambda h: (h.n_ssm_head,), order),
        TensorRow("blk.{i}.ssm_a", LINEAR + "A_log", lambda h: (h.n_ssm_head,), (*order, DECAY)),
        TensorRow("blk.{i}.ssm_norm.weight", LINEAR + "norm.weight", lambda h: (h.d_state,)),
    )
    return tuple(replace(row, layers=has_state) for row in (*own, *shared))


def _kinds(*wanted: int) -> Take:
    """Rows from a matrix that has, for each head of keys, queries, keys, values and gates (kinds 0 to 3): those of the
    kinds wanted, one kind after another."""

    def found(h: Hparams, i: int) -> np.ndarray:
        n_v = h.d_inner // h.n_group
        sizes = (h.d_state, h.d_state, n_v, n_v)
        starts = sum(sizes) * np.arange(h.n_group)[:, None]
        return np.concatenate([(starts + sum(sizes[:k]) + np.arange(sizes[k])).reshape(-1) for k in wanted])

    return Take(found)


_QKVZ = LINEAR + "in_proj_qkvz.weight"
_OWN = (
    TensorRow("blk.{i}.attn_qkv.weight", _QKVZ, lambda h: (n_mixed(h), h.n_embd), (_kinds(0, 1, 2),)),
    TensorRow("blk.{i}.attn_gate.weight", _QKVZ, lambda h: (h.d_inner, h.n_embd), (_kinds(3),)),
    TensorRow("blk.{i}.ssm_ba.weight", LINEAR + "in_proj_ba.weight", lambda h: (2 * h.n_ssm_head, h.n_embd)),
    TensorRow("blk.{i}.ssm_out.weight", LINEAR + "out_proj.weight", lambda h: (h.n_embd, h.d_inner)),
)

NORMS = (
    *norm_row("attn_norm", LAYER + "input_layernorm"),
    *norm_row("post_attention_norm", LAYER + "post_attention_layernorm"),
    *qk_norm_rows(layers=attends),
)

SHARED_EXPERT = (
    SHARED_GATE,
    *ffn_rows(LAYER + "mlp.shared_expert.", size=lambda h, i: h.n_ff_shexp, suffix="_shexp"),
)

TENSORS = (
    *plus_one((*embedding_rows(), *NORMS)),
    *gated_attention_rows(),
    *delta_rows(_OWN),
    *expert_rows(LAYER + "mlp.experts.{e}.", lambda h, i: h.n_ff_exp),
    *SHARED_EXPERT,
)


def layer(b: Build, i: int, x: Tensor) -> Tensor:
    """Delta net or attention, then experts, each with a norm in front and a residual connection."""
    blk = f"blk.{i}."
    cur = rms_norm(b, blk + "attn_norm", x)
    cur = _linear_attention(b, i, cur) if has_state(b.h, i) else gated_attention(b, i, cur)
    cur, x = b.last(i, cur, x)
    x = ops.add(b.ctx, cur, x)
    return ops.add(b.ctx, all_experts(b, blk, rms_norm(b, blk + "post_attention_norm", x)), x)


def _linear_attention(b: Build, i: int, x: Tensor) -> Tensor:
    """The delta net; its two gates come from one matrix, which has both for each head of keys."""
    h, n = b.h, x.ne[1]
    each = h.n_ssm_head // h.n_group
    both = heads(b, linear(b, f"blk.{i}.ssm_ba", x), 2 * each)  # [2 * each, n_group, n]
    beta, alpha = (ops.view(b.ctx, both, (each, h.n_group, n), both.nb[1:3], first * both.nb[0]) for first in (0, each))
    beta, alpha = (ops.reshape(b.ctx, ops.cont(b.ctx, t), h.n_ssm_head, n) for t in (beta, alpha))
    return delta_net(b, i, x, beta, alpha, grouped=True)


def gated_attention(b: Build, i: int, x: Tensor) -> Tensor:
    """Attention with norms of queries and keys, of which a part rotates; a gate from the input scales the output."""
    ctx, blk, n, d = b.ctx, f"blk.{i}.", x.ne[1], b.h.n_embd_head_k
    both = heads(b, linear(b, blk + "attn_q", x), 2 * d)  # [2 * d, n_head, n]
    q, gate = (ops.view(ctx, both, (d, *both.ne[1:3]), both.nb[1:3], first * both.nb[0]) for first in (0, d))
    k, v = (heads(b, linear(b, blk + name, x), d) for name in ("attn_k", "attn_v"))
    q = rotate(b, rms_norm(b, blk + "attn_q_norm", q), neox=True)
    k = rotate(b, rms_norm(b, blk + "attn_k_norm", k), neox=True)
    y = b.attend(i, q, k, v, d**-0.5)
    gate = ops.sigmoid(ctx, ops.reshape(ctx, ops.cont(ctx, gate), y.ne[0], n))
    return linear(b, blk + "attn_output", ops.mul(ctx, y, gate))


def all_experts(b: Build, blk: str, x: Tensor) -> Tensor:
    """The experts that were chosen, and the one for all tokens, times a gate."""
    return ops.add(b.ctx, moe(b, blk, x), gated_shared_expert(b, blk, x))


def check_experts(h: Hparams) -> None:
    """What the family takes for granted. Raises EngineError."""
    check_delta(h)
    has_experts(h)


REFUSED = (
    ("hidden_act", ("silu",), "another activation"),
    ("attention_bias", (False,), "biases of the attention"),
    ("use_sliding_window", (False,), "a sliding window"),
    ("rope_parameters.rope_type", SCALED_ROPE, "another rope scaling"),
    *PLAIN_YARN,
)

#: what else a mixture of experts may have
REFUSED_MOE: tuple[tuple[str, tuple, str], ...] = (
    ("norm_topk_prob", (True,), "weights of experts that do not sum to 1"),
    ("decoder_sparse_step", (1,), "layers without experts"),
    ("mlp_only_layers", ([],), "layers without experts"),
)

QWEN3NEXT = Arch(
    name="qwen3next",
    hf_names=("Qwen3NextForCausalLM",),
    hparams=rows(),
    extra_hparams=(silent(N_VOCAB), ROTATED, N_FF_EXPERT, N_FF_SHARED, *DELTA_HPARAMS),
    tensors=TENSORS,
    embed=embed_tokens,
    layer=layer,
    finish=finish,
    head=output_head,
    refused=(*REFUSED, *REFUSED_MOE),
    runs=(("rope_scaling_type", (None, "none", "linear", "yarn")),),
    ignored=("mtp.", "model.mtp."),  # layers that predict further tokens
    check=check_experts,
)
