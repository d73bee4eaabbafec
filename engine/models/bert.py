"""BERT: an encoder, whose tokens see those behind them as well. It gives hidden states, of which sentence embeddings
are made (`engine/pooling.py`), and no logits (Devlin et al. 2018, arXiv 1810.04805)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from engine import ops
from engine.errors import EngineError
from engine.models.arch import Arch, Hparam, Hparams, TensorRow
from engine.models.blocks import embed_with_positions, ffn_plain, layer_norm, linear, qkv
from engine.models.build import Build
from engine.models.common import ACTIVATIONS, LAYER_NORM_EPS, N_VOCAB, activation_row, rows, silent
from engine.models.decoder import also_named
from engine.tensor import Tensor

_LAYER = "encoder.layer.{i}."


def _n_token_types(config: Mapping[str, Any], h: Hparams) -> int:
    return config.get("type_vocab_size") or 1


_EXTRA = (
    Hparam("causal", "{arch}.attention.causal", lambda config, h: False, False, "bool"),
    Hparam("pooling", "{arch}.pooling_type", ("pooling_type",), None),
    Hparam("n_token_types", "tokenizer.ggml.token_type_count", _n_token_types, written=False),  # the vocabulary has it
    activation_row("hidden_act", "gelu"),
    silent(N_VOCAB),
)


def _matrix(name: str, source: str, shape: Callable[[Hparams], tuple[int, int]]) -> tuple[TensorRow, ...]:
    return (
        TensorRow(f"blk.{{i}}.{name}.weight", f"{_LAYER}{source}.weight", shape),
        TensorRow(f"blk.{{i}}.{name}.bias", f"{_LAYER}{source}.bias", lambda h: shape(h)[:1], optional=True),
    )


def _norm(name: str, source: str) -> tuple[TensorRow, ...]:
    return tuple(TensorRow(f"{name}.{kind}", f"{source}.{kind}", lambda h: (h.n_embd,)) for kind in ("weight", "bias"))


#: what old checkpoints call the weights and biases of norms
_OLD = {".weight": ".gamma", ".bias": ".beta"}


def _also_old(row: TensorRow) -> TensorRow:
    end = next((end for end in _OLD if row.sources[0].endswith("LayerNorm" + end)), None)
    if end is None:
        return row
    return replace(row, source=(*row.sources, *(name.removesuffix(end) + _OLD[end] for name in row.sources)))


_ROWS = (
    TensorRow("token_embd.weight", "embeddings.word_embeddings.weight", lambda h: (h.n_vocab, h.n_embd)),
    TensorRow("position_embd.weight", "embeddings.position_embeddings.weight", lambda h: (h.n_ctx_train, h.n_embd)),
    TensorRow(
        "token_types.weight",
        "embeddings.token_type_embeddings.weight",
        lambda h: (h.n_token_types, h.n_embd),
        optional=True,
    ),
    *_norm("token_embd_norm", "embeddings.LayerNorm"),
    *_matrix("attn_q", "attention.self.query", lambda h: (h.n_embd, h.n_embd)),
    *_matrix("attn_k", "attention.self.key", lambda h: (h.n_embd, h.n_embd)),
    *_matrix("attn_v", "attention.self.value", lambda h: (h.n_embd, h.n_embd)),
    *_matrix("attn_output", "attention.output.dense", lambda h: (h.n_embd, h.n_embd)),
    *_norm("blk.{i}.attn_output_norm", _LAYER + "attention.output.LayerNorm"),
    *_matrix("ffn_up", "intermediate.dense", lambda h: (h.n_ff, h.n_embd)),
    *_matrix("ffn_down", "output.dense", lambda h: (h.n_embd, h.n_ff)),
    *_norm("blk.{i}.layer_output_norm", _LAYER + "output.LayerNorm"),
)
TENSORS = tuple(map(_also_old, also_named(_ROWS, "e", "bert.e")))


def embed(b: Build) -> Tensor:
    """Embeddings of tokens, of positions and of the first kind of text, normalised."""
    x, kinds = embed_with_positions(b), b.w.get("token_types.weight")
    x = x if kinds is None else ops.add(b.ctx, x, ops.view(b.ctx, kinds, (kinds.ne[0],), ()))
    return layer_norm(b, "token_embd_norm", x)


def layer(b: Build, i: int, x: Tensor) -> Tensor:
    """Attention and feed-forward, each with a residual connection and a norm behind it."""
    blk = f"blk.{i}."
    q, k, v = qkv(b, i, x)
    cur = linear(b, blk + "attn_output", b.attend(i, q, k, v, b.h.n_embd_head_k**-0.5, causal=False))
    cur, x = b.last(i, cur, x)
    x = layer_norm(b, blk + "attn_output_norm", ops.add(b.ctx, cur, x))
    cur = ffn_plain(b, blk, x, ACTIVATIONS[b.h.activation])
    return layer_norm(b, blk + "layer_output_norm", ops.add(b.ctx, cur, x))


def finish(b: Build, x: Tensor) -> Tensor:
    """The states are normalised already."""
    return x


def head(b: Build, hidden: Tensor) -> NoReturn:
    """Raises EngineError: there are no logits."""
    raise EngineError(f"a {b.arch.name} model gives embeddings, no probabilities of tokens")


BERT = Arch(
    name="bert",
    hf_names=("BertModel", "BertForMaskedLM"),
    hparams=tuple(silent(row) if row.field == "n_head_kv" else row for row in rows(norm_eps=LAYER_NORM_EPS)),
    extra_hparams=_EXTRA,
    tensors=TENSORS,
    embed=embed,
    layer=layer,
    finish=finish,
    head=head,
    refused=(
        ("hidden_act", tuple(ACTIVATIONS), "another activation"),
        ("position_embedding_type", ("absolute",), "other positions"),
        ("is_decoder", (False,), "a decoder"),
        ("add_cross_attention", (False,), "attention to another model"),
    ),
    runs=(
        ("activation", tuple(ACTIVATIONS)),
        ("causal", (False,)),
    ),
    ignored=("pooler.", "bert.pooler.", "cls.", "embeddings.position_ids", "bert.embeddings.position_ids"),
    causal=False,
    bounded=True,
)
