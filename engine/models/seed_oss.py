"""Seed-OSS: Qwen 2's layer with a head size of its own and, on request, a bias of the attention's output."""

from __future__ import annotations

from dataclasses import replace

from engine import ops
from engine.models.blocks import ffn_gated, rms_norm
from engine.models.build import Build
from engine.models.decoder import LAYER, attention_rows, embedding_rows, ffn_rows, norm_row
from engine.models.qwen2 import QWEN2, attention
from engine.tensor import Tensor

TENSORS = (
    *embedding_rows(),
    *norm_row("attn_norm", LAYER + "input_layernorm"),
    *attention_rows(),
    *norm_row("post_attention_norm", LAYER + "post_attention_layernorm"),
    *ffn_rows(),
)


def layer(b: Build, i: int, x: Tensor) -> Tensor:
    """Attention and feed-forward, each with a norm in front and a residual connection; the name of the second norm says
    behind what it stands, not that it is the last of its branch."""
    blk = f"blk.{i}."
    cur = attention(b, i, rms_norm(b, blk + "attn_norm", x))
    cur, x = b.last(i, cur, x)
    x = ops.add(b.ctx, cur, x)
    return ops.add(b.ctx, ffn_gated(b, blk, rms_norm(b, blk + "post_attention_norm", x)), x)


SEED_OSS = replace(QWEN2, name="seed_oss", hf_names=("SeedOssForCausalLM",), tensors=TENSORS, layer=layer)
