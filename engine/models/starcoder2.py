"""StarCoder 2: a decoder like Llama's with layer norms, biases everywhere, and GELU without a gate."""

from __future__ import annotations

from engine import ops
from engine.models.arch import Arch, Hparam
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
)
from engine.models.decoder import LAYER, attention_rows, embedding_rows, ffn_rows, norm_row
from engine.models.gpt2 import finish
from engine.models.rotary import rotate
from engine.tensor import Tensor

#: llama.cpp's graph has no window; a key that it does not read does no harm there
_WINDOW = Hparam("window", "{arch}.attention.sliding_window", ("sliding_window",), 0)

TENSORS = (
    *embedding_rows(bias=True),
    *norm_row("attn_norm", LAYER + "input_layernorm", bias=True),
    *attention_rows(),
    *norm_row("ffn_norm", LAYER + "post_attention_layernorm", bias=True),
    *ffn_rows(gated=False, names=("", "c_fc", "c_proj")),
)


def layer(b: Build, i: int, x: Tensor) -> Tensor:
    """Attention and feed-forward, each with a norm in front and a residual connection."""
    blk = f"blk.{i}."
    cur = attention(b, i, layer_norm(b, blk + "attn_norm", x))
    cur, x = b.last(i, cur, x)
    x = ops.add(b.ctx, cur, x)
    cur = ffn_plain(b, blk, layer_norm(b, blk + "ffn_norm", x), ACTIVATIONS[b.h.activation])
    return ops.add(b.ctx, cur, x)


def attention(b: Build, i: int, x: Tensor) -> Tensor:
    """Grouped heads with rotary positions."""
    q, k, v = qkv(b, i, x)
    q, k = (rotate(b, t, neox=True) for t in (q, k))
    y = b.attend(i, q, k, v, b.h.n_embd_head_k**-0.5, window=b.h.window)
    return linear(b, f"blk.{i}.attn_output", y)


STARCODER2 = Arch(
    name="starcoder2",
    hf_names=("Starcoder2ForCausalLM",),
    hparams=rows(norm_eps=LAYER_NORM_EPS),
    extra_hparams=(_WINDOW, activation_row("hidden_act", "gelu_pytorch_tanh"), silent(N_VOCAB), silent(N_ROT)),
    tensors=TENSORS,
    embed=embed_tokens,
    layer=layer,
    finish=finish,
    head=output_head,
    refused=(
        ("hidden_act", tuple(ACTIVATIONS), "another activation"),
        ("mlp_type", ("default",), "another feed-forward"),
        ("norm_type", ("layer_norm",), "another norm"),
        ("rope_parameters.rope_type", SCALED_ROPE, "another rope scaling"),
    ),
    runs=(
        ("activation", tuple(ACTIVATIONS)),
        ("rope_scaling_type", (None, "none", "linear", "yarn")),
    ),
)
