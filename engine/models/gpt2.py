"""GPT-2: learned positions, layer norms with biases, one matrix for queries, keys and values, GELU without a gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from engine import ops
from engine.errors import EngineError
from engine.models.arch import Arch, Hparam, Hparams, TensorRow, at
from engine.models.blocks import embed_with_positions, ffn_plain, layer_norm, linear, output_head, qkv
from engine.models.build import Build
from engine.models.common import ACTIVATIONS, LAYER_NORM_EPS, N_VOCAB, activation_row, rows, silent
from engine.models.decoder import also_named, embedding_rows, norm_row
from engine.models.steps import Whole
from engine.tensor import Tensor

_LAYER = "transformer.h.{i}."


def _n_ff(config: Mapping[str, Any], h: Hparams) -> int:
    return config.get("n_inner") or 4 * h.n_embd


_HPARAMS = tuple(
    silent(row) if row.field == "n_head_kv" else row
    for row in rows(
        n_ctx_train=Hparam("n_ctx_train", "{arch}.context_length", ("n_positions", "n_ctx")),
        n_ff=Hparam("n_ff", "{arch}.feed_forward_length", _n_ff),
        norm_eps=LAYER_NORM_EPS,
    )
)


def _turned(x: np.ndarray, h: Hparams, i: int, shape: Callable[[Hparams], tuple[int, int]]) -> np.ndarray:
    rows, columns = shape(h)
    if x.shape != (columns, rows):
        raise EngineError(f"a matrix of layer {i} has shape {list(x.shape)}, config.json implies {[columns, rows]}")
    return x.T


def _matrix(name: str, source: str, shape: Callable[[Hparams], tuple[int, int]]) -> tuple[TensorRow, ...]:
    """A matrix, which checkpoints hold with inputs as rows, and its bias."""
    turn = Whole(lambda x, h, i: _turned(x, h, i, shape))
    return (
        TensorRow(f"blk.{{i}}.{name}.weight", f"{_LAYER}{source}.weight", shape, (turn,)),
        TensorRow(f"blk.{{i}}.{name}.bias", f"{_LAYER}{source}.bias", lambda h: shape(h)[:1]),
    )


TENSORS = also_named(
    (
        *embedding_rows("transformer.wte", "transformer.ln_f", bias=True),
        TensorRow("position_embd.weight", "transformer.wpe.weight", lambda h: (h.n_ctx_train, h.n_embd)),
        *norm_row("attn_norm", _LAYER + "ln_1", bias=True),
        *_matrix("attn_qkv", "attn.c_attn", lambda h: (3 * h.n_embd, h.n_embd)),
        *_matrix("attn_output", "attn.c_proj", lambda h: (h.n_embd, h.n_embd)),
        *norm_row("ffn_norm", _LAYER + "ln_2", bias=True),
        *_matrix("ffn_up", "mlp.c_fc", lambda h: (at(h.n_ff, 0), h.n_embd)),
        *_matrix("ffn_down", "mlp.c_proj", lambda h: (h.n_embd, at(h.n_ff, 0))),
    ),
    "transformer.",
    "",
)


def layer(b: Build, i: int, x: Tensor) -> Tensor:
    """Attention and feed-forward, each with a norm in front and a residual connection."""
    blk = f"blk.{i}."
    q, k, v = qkv(b, i, layer_norm(b, blk + "attn_norm", x))
    cur = linear(b, blk + "attn_output", b.attend(i, q, k, v, b.h.n_embd_head_k**-0.5))
    cur, x = b.last(i, cur, x)
    x = ops.add(b.ctx, cur, x)
    cur = ffn_plain(b, blk, layer_norm(b, blk + "ffn_norm", x), ACTIVATIONS[b.h.activation])
    return ops.add(b.ctx, cur, x)


def finish(b: Build, x: Tensor) -> Tensor:
    """The last norm."""
    return layer_norm(b, "output_norm", x)


GPT2 = Arch(
    name="gpt2",
    hf_names=("GPT2LMHeadModel",),
    hparams=_HPARAMS,
    extra_hparams=(activation_row("activation_function", "gelu_new"), silent(N_VOCAB)),
    tensors=TENSORS,
    embed=embed_with_positions,
    layer=layer,
    finish=finish,
    head=output_head,
    refused=(
        ("activation_function", tuple(ACTIVATIONS), "another activation"),
        ("scale_attn_by_inverse_layer_idx", (False,), "another scale of the scores"),
        ("scale_attn_weights", (True,), "scores without a scale"),
        ("add_cross_attention", (False,), "attention to another model"),
    ),
    runs=(("activation", tuple(ACTIVATIONS)),),
    ignored=(".attn.bias", ".attn.masked_bias"),
    bounded=True,
)
