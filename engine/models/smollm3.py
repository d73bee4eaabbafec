"""SmolLM 3: Llama with every fourth layer without positions (Yang et al. 2025, arXiv 2501.18795)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine import ops
from engine.errors import EngineError
from engine.models.arch import Hparam, Hparams
from engine.models.blocks import ffn_gated, linear, qkv, rms_norm
from engine.models.build import Build
from engine.models.common import N_ROT, N_VOCAB, PLAIN_YARN, SCALED_ROPE
from engine.models.decoder import LAYER, attention_rows, embedding_rows, ffn_rows, norm_row
from engine.models.llama import LLAMA
from engine.models.rotary import rotate
from engine.tensor import Tensor

PERIOD = 4


def _period(config: Mapping[str, Any], h: Hparams) -> int:
    """GGUF has no key for the pattern: it is always the same. Raises EngineError for another one."""
    found = config.get("no_rope_layers")
    if found is not None and [bool(v) for v in found] != [_rotates(i) for i in range(h.n_layer)]:
        raise EngineError(
            f"'no_rope_layers' is {found}: 'smollm3' here has only every {PERIOD}th layer without positions"
        )
    return PERIOD


def _rotates(i: int) -> bool:
    return (i + 1) % PERIOD != 0


TENSORS = (
    *embedding_rows(),
    *norm_row("attn_norm", LAYER + "input_layernorm"),
    *attention_rows(permuted=True),
    *norm_row("ffn_norm", LAYER + "post_attention_layernorm"),
    *ffn_rows(),
)


def layer(b: Build, i: int, x: Tensor) -> Tensor:
    """Attention and feed-forward, each with a norm in front and a residual connection."""
    blk = f"blk.{i}."
    cur = attention(b, i, rms_norm(b, blk + "attn_norm", x))
    cur, x = b.last(i, cur, x)
    x = ops.add(b.ctx, cur, x)
    return ops.add(b.ctx, ffn_gated(b, blk, rms_norm(b, blk + "ffn_norm", x)), x)


def attention(b: Build, i: int, x: Tensor) -> Tensor:
    """Grouped heads, rotated in three layers of four."""
    q, k, v = qkv(b, i, x)
    if _rotates(i):
        q, k = (rotate(b, t, neox=False) for t in (q, k))
    return linear(b, f"blk.{i}.attn_output", b.attend(i, q, k, v, b.h.n_embd_head_k**-0.5))


SMOLLM3 = replace(
    LLAMA,
    name="smollm3",
    hf_names=("SmolLM3ForCausalLM",),
    extra_hparams=(N_VOCAB, N_ROT, Hparam("no_rope_period", "{arch}.no_rope_period", _period, PERIOD, written=False)),
    tensors=TENSORS,
    layer=layer,
    refused=(
        ("hidden_act", ("silu",), "another activation"),
        ("no_rope_layer_interval", (PERIOD,), "other layers without positions"),
        ("use_sliding_window", (False,), "a sliding window"),
        ("rope_parameters.rope_type", SCALED_ROPE, "another rope scaling"),
        *PLAIN_YARN,
    ),
)
