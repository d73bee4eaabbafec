"""Phi 1, 1.5 and 2: attention and feed-forward side by side behind one norm, biases everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine import ops
from engine.models.arch import Arch, Hparams, TensorRow
from engine.models.blocks import embed_tokens, ffn_plain, layer_norm, linear, output_head, qkv
from engine.models.build import Build
from engine.models.common import LAYER_NORM_EPS, N_VOCAB, partial_rotary, rope_of, rows, silent
from engine.models.decoder import LAYER, attention_rows, embedding_rows, ffn_rows, norm_row
from engine.models.rotary import rotate
from engine.tensor import Tensor

_BY_FIELD = {row.field: row for row in rows()}
_OUTPUT = {"attn_output." + kind: f"{LAYER}self_attn.dense.{kind}" for kind in ("weight", "bias")}

TENSORS = (
    *embedding_rows(norm="model.final_layernorm", bias=True),
    TensorRow("output.bias", "lm_head.bias", lambda h: (h.n_vocab,), optional=True),
    *norm_row("attn_norm", LAYER + "input_layernorm", bias=True),
    *(replace(row, source=_OUTPUT.get(row.name.removeprefix("blk.{i}."), row.source)) for row in attention_rows()),
    *ffn_rows(gated=False, names=("", "fc1", "fc2")),
)


def layer(b: Build, i: int, x: Tensor) -> Tensor:
    """x + attention(norm(x)) + feed-forward(norm(x))."""
    blk = f"blk.{i}."
    inside = layer_norm(b, blk + "attn_norm", x)
    cur = attention(b, i, inside)
    cur, inside, x = b.last(i, cur, inside, x)
    return ops.add(b.ctx, ops.add(b.ctx, cur, ffn_plain(b, blk, inside)), x)


def attention(b: Build, i: int, x: Tensor) -> Tensor:
    """Heads of which a part rotates."""
    q, k, v = qkv(b, i, x)
    q, k = (rotate(b, t, neox=True) for t in (q, k))
    return linear(b, f"blk.{i}.attn_output", b.attend(i, q, k, v, b.h.n_embd_head_k**-0.5))


def finish(b: Build, x: Tensor) -> Tensor:
    """The last norm."""
    return layer_norm(b, "output_norm", x)


def head(b: Build, hidden: Tensor) -> Tensor:
    """Logits, with a bias even where the embedding serves as the output matrix."""
    logits, bias = output_head(b, hidden), b.w.get("output.bias")
    return logits if bias is None or "output.weight" in b.w else ops.add(b.ctx, logits, bias)


def _base(config: Mapping[str, Any], h: Hparams) -> float | None:
    """The base of the frequencies, which the reference leaves out because it is the usual one."""
    base = rope_of(config).get("rope_theta")
    return None if base == 10000.0 else base


PHI2 = Arch(
    name="phi2",
    hf_names=("PhiForCausalLM",),
    hparams=rows(norm_eps=LAYER_NORM_EPS, rope_base=replace(_BY_FIELD["rope_base"], config=_base)),
    extra_hparams=(partial_rotary(1.0), silent(N_VOCAB)),
    tensors=TENSORS,
    embed=embed_tokens,
    layer=layer,
    finish=finish,
    head=head,
    refused=(
        ("hidden_act", ("gelu_new", "gelu_pytorch_tanh"), "another activation"),
        ("qk_layernorm", (False,), "norms of queries and keys"),
        ("rope_parameters.rope_type", ("default", "linear"), "another rope scaling"),
    ),
    runs=(("rope_scaling_type", (None, "none", "linear")),),
)
