"""Falcon 7B, 11B and 40B: layer norms, feed-forward beside attention, few key heads, GELU without a gate, no biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from engine import ops
from engine.models.arch import Arch, Hparam, Hparams, TensorRow
from engine.models.blocks import embed_tokens, ffn_plain, layer_norm, linear, output_head, qkv
from engine.models.build import Build
from engine.models.common import (
    ACTIVATIONS,
    LAYER_NORM_EPS,
    N_ROT,
    N_VOCAB,
    SCALED_ROPE,
    activation_row,
    rows,
    silent,
    unusual_base,
)
from engine.models.decoder import embedding_rows, ffn_rows
from engine.models.gpt2 import finish
from engine.models.rotary import rotate
from engine.models.steps import Take
from engine.tensor import Tensor

_LAYER = "transformer.h.{i}."
_LAYOUT = "jploski"  # all queries, then all keys, then all values: the one that there is


def _n_ff(config: Mapping[str, Any], h: Hparams) -> int:
    return config.get("ffn_hidden_size") or 4 * h.n_embd


def _n_head_kv(config: Mapping[str, Any], h: Hparams) -> int:
    """Key heads: few in newer models, one in the 7B model, one for each head otherwise."""
    if config.get("new_decoder_architecture"):
        return config.get("num_kv_heads") or config.get("n_head_kv") or h.n_head
    return 1 if config.get("multi_query", True) else h.n_head


def _by_kind(h: Hparams, i: int) -> np.ndarray:
    """From groups of queries, each with its key and its value behind, to all queries, all keys, all values.

    Raises ValueError for heads that do not come in groups.
    """
    group, d = h.n_head // h.n_head_kv, h.n_embd_head_k
    rows = np.arange((h.n_head + 2 * h.n_head_kv) * d).reshape(h.n_head_kv, group + 2, d)
    return np.concatenate([rows[:, :group].reshape(-1), rows[:, group].reshape(-1), rows[:, group + 1].reshape(-1)])


def _norm(name: str, sources: tuple[str, ...], optional: bool = False) -> tuple[TensorRow, ...]:
    return tuple(
        TensorRow(
            f"blk.{{i}}.{name}.{kind}",
            tuple(f"{_LAYER}{source}.{kind}" for source in sources),
            lambda h: (h.n_embd,),
            optional=optional,
        )
        for kind in ("weight", "bias")
    )


TENSORS = (
    *embedding_rows("transformer.word_embeddings", "transformer.ln_f", bias=True),
    *_norm("attn_norm", ("ln_mlp", "input_layernorm")),
    *_norm("attn_norm_2", ("ln_attn",), optional=True),
    TensorRow(
        "blk.{i}.attn_qkv.weight",
        _LAYER + "self_attention.query_key_value.weight",
        lambda h: ((h.n_head + 2 * h.n_head_kv) * h.n_embd_head_k, h.n_embd),
        (Take(_by_kind),),
    ),
    TensorRow("blk.{i}.attn_output.weight", _LAYER + "self_attention.dense.weight", lambda h: (h.n_embd, h.n_embd)),
    *(
        row
        for row in ffn_rows(_LAYER + "mlp.", gated=False, names=("", "dense_h_to_4h", "dense_4h_to_h"))
        if row.name.endswith(".weight")
    ),
)


def layer(b: Build, i: int, x: Tensor) -> Tensor:
    """Attention and feed-forward side by side; attention has a norm of its own where the model has two."""
    blk = f"blk.{i}."
    normed = layer_norm(b, blk + "attn_norm", x)
    own = layer_norm(b, blk + "attn_norm_2", x) if blk + "attn_norm_2.weight" in b.w else normed
    cur, x, normed = b.last(i, attention(b, i, own), x, normed)
    y = ffn_plain(b, blk, normed, ACTIVATIONS[b.h.activation])
    return ops.add(b.ctx, ops.add(b.ctx, y, cur), x)


def attention(b: Build, i: int, x: Tensor) -> Tensor:
    """Grouped heads with rotary positions."""
    q, k, v = qkv(b, i, x)
    q, k = (rotate(b, t, neox=True) for t in (q, k))
    return linear(b, f"blk.{i}.attn_output", b.attend(i, q, k, v, b.h.n_embd_head_k**-0.5))


FALCON = Arch(
    name="falcon",
    hf_names=("FalconForCausalLM", "RWForCausalLM"),
    hparams=rows(
        n_ctx_train=Hparam(
            "n_ctx_train", "{arch}.context_length", lambda config, h: config.get("max_position_embeddings") or 2048
        ),
        n_ff=Hparam("n_ff", "{arch}.feed_forward_length", _n_ff),
        n_head_kv=Hparam("n_head_kv", "{arch}.attention.head_count_kv", _n_head_kv, lambda h: h.n_head),
        rope_base=unusual_base(),
        norm_eps=LAYER_NORM_EPS,
    ),
    extra_hparams=(
        Hparam("layout", "{arch}.tensor_data_layout", lambda config, h: _LAYOUT, _LAYOUT, "string"),
        activation_row("activation", "gelu"),
        silent(N_VOCAB),
        silent(N_ROT),
    ),
    tensors=TENSORS,
    embed=embed_tokens,
    layer=layer,
    finish=finish,
    head=output_head,
    refused=(
        ("activation", tuple(ACTIVATIONS), "another activation"),
        ("alibi", (False,), "ALiBi instead of rotary positions"),
        ("bias", (False,), "biases"),
        ("parallel_attn", (True,), "feed-forward behind attention"),
        ("rope_parameters.rope_type", SCALED_ROPE, "another rope scaling"),
    ),
    runs=(
        ("layout", (_LAYOUT,)),
        ("activation", tuple(ACTIVATIONS)),
        ("rope_scaling_type", (None, "none", "linear", "yarn")),
    ),
)
