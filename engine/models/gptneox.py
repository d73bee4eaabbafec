"""GPT-NeoX and Pythia: layer norms with biases, a part of each head rotates, feed-forward beside attention."""

from __future__ import annotations

import numpy as np

from engine import ops
from engine.models.arch import Arch, Hparam, Hparams, TensorRow
from engine.models.blocks import embed_tokens, ffn_plain, layer_norm, linear, output_head, qkv
from engine.models.build import Build
from engine.models.common import (
    ACTIVATIONS,
    LAYER_NORM_EPS,
    N_VOCAB,
    SCALED_ROPE,
    activation_row,
    partial_rotary,
    rows,
    silent,
    unusual_base,
)
from engine.models.decoder import embedding_rows, ffn_rows, norm_row
from engine.models.gpt2 import finish
from engine.models.rotary import rotate
from engine.models.steps import Take
from engine.tensor import Tensor

_LAYER = "gpt_neox.layers.{i}."

_PARALLEL = Hparam("parallel", "{arch}.use_parallel_residual", ("use_parallel_residual",), True, "bool", always=True)


def _by_kind(h: Hparams, i: int) -> np.ndarray:
    """From each head's queries, keys and values in turn to all queries, all keys, all values."""
    return np.arange(3 * h.n_embd).reshape(h.n_head, 3, -1).swapaxes(0, 1).reshape(-1)


_QKV = _LAYER + "attention.query_key_value."
_OUTPUT = _LAYER + "attention.dense."

TENSORS = (
    *embedding_rows("gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out", bias=True),
    *norm_row("attn_norm", _LAYER + "input_layernorm", bias=True),
    TensorRow("blk.{i}.attn_qkv.weight", _QKV + "weight", lambda h: (3 * h.n_embd, h.n_embd), (Take(_by_kind),)),
    TensorRow("blk.{i}.attn_qkv.bias", _QKV + "bias", lambda h: (3 * h.n_embd,), (Take(_by_kind),), True),
    TensorRow("blk.{i}.attn_output.weight", _OUTPUT + "weight", lambda h: (h.n_embd, h.n_embd)),
    TensorRow("blk.{i}.attn_output.bias", _OUTPUT + "bias", lambda h: (h.n_embd,), (), True),
    *norm_row("ffn_norm", _LAYER + "post_attention_layernorm", bias=True),
    *ffn_rows(_LAYER + "mlp.", gated=False, names=("", "dense_h_to_4h", "dense_4h_to_h")),
)


def layer(b: Build, i: int, x: Tensor) -> Tensor:
    """Attention and feed-forward, each with a norm in front: of the same input, or one after the other."""
    blk = f"blk.{i}."
    cur = attention(b, i, layer_norm(b, blk + "attn_norm", x))
    cur, x = b.last(i, cur, x)
    between = x if b.h.parallel else ops.add(b.ctx, cur, x)
    y = ffn_plain(b, blk, layer_norm(b, blk + "ffn_norm", between), ACTIVATIONS[b.h.activation])
    return ops.add(b.ctx, ops.add(b.ctx, y, x), cur)


def attention(b: Build, i: int, x: Tensor) -> Tensor:
    """Heads with rotary positions in their first elements."""
    q, k, v = qkv(b, i, x)
    q, k = (rotate(b, t, neox=True) for t in (q, k))
    return linear(b, f"blk.{i}.attn_output", b.attend(i, q, k, v, b.h.n_embd_head_k**-0.5))


GPTNEOX = Arch(
    name="gptneox",
    hf_names=("GPTNeoXForCausalLM",),
    hparams=tuple(
        silent(row) if row.field == "n_head_kv" else row
        for row in rows(rope_base=unusual_base(), norm_eps=LAYER_NORM_EPS)
    ),
    extra_hparams=(partial_rotary(0.25), _PARALLEL, activation_row("hidden_act", "gelu"), silent(N_VOCAB)),
    tensors=TENSORS,
    embed=embed_tokens,
    layer=layer,
    finish=finish,
    head=output_head,
    refused=(
        ("hidden_act", tuple(ACTIVATIONS), "another activation"),
        ("rope_parameters.rope_type", SCALED_ROPE, "another rope scaling"),
    ),
    runs=(
        ("activation", tuple(ACTIVATIONS)),
        ("rope_scaling_type", (None, "none", "linear", "yarn")),
    ),
)
