"""GLM 4 (0414): a norm in front of and behind attention and feed-forward; half of each head rotates, in neighbours."""

from __future__ import annotations

from engine import ops
from engine.models.arch import Arch, TensorRow
from engine.models.blocks import embed_tokens, ffn_gated, linear, output_head, qkv, rms_norm
from engine.models.build import Build
from engine.models.common import N_VOCAB, SCALED_ROPE, partial_rotary, rows, silent, uniform
from engine.models.decoder import LAYER, attention_rows, embedding_rows, norm_row
from engine.models.llama import finish
from engine.models.rotary import rotate
from engine.tensor import Tensor

TENSORS = (
    *embedding_rows(),
    *norm_row("attn_norm", LAYER + "input_layernorm"),
    *attention_rows(),
    *norm_row("post_attention_norm", LAYER + "post_self_attn_layernorm"),
    *norm_row("ffn_norm", LAYER + "post_attention_layernorm"),
    TensorRow("blk.{i}.ffn_up.weight", LAYER + "mlp.gate_up_proj.weight", lambda h: (2 * h.n_ff, h.n_embd)),
    TensorRow("blk.{i}.ffn_down.weight", LAYER + "mlp.down_proj.weight", lambda h: (h.n_embd, h.n_ff)),
    *norm_row("post_ffw_norm", LAYER + "post_mlp_layernorm"),
)


def layer(b: Build, i: int, x: Tensor) -> Tensor:
    """Attention and feed-forward, each between two norms, with a residual connection."""
    blk = f"blk.{i}."
    cur = attention(b, i, rms_norm(b, blk + "attn_norm", x))
    cur, x = b.last(i, cur, x)
    x = ops.add(b.ctx, rms_norm(b, blk + "post_attention_norm", cur), x)
    cur = ffn_gated(b, blk, rms_norm(b, blk + "ffn_norm", x))
    return ops.add(b.ctx, rms_norm(b, blk + "post_ffw_norm", cur), x)


def attention(b: Build, i: int, x: Tensor) -> Tensor:
    """Grouped heads with rotary positions."""
    q, k, v = qkv(b, i, x)
    q, k = (rotate(b, t, neox=False) for t in (q, k))
    return linear(b, f"blk.{i}.attn_output", b.attend(i, q, k, v, b.h.n_embd_head_k**-0.5))


GLM4 = Arch(
    name="glm4",
    hf_names=("Glm4ForCausalLM",),
    hparams=uniform(rows()),
    extra_hparams=(partial_rotary(0.5), silent(N_VOCAB)),
    tensors=TENSORS,
    embed=embed_tokens,
    layer=layer,
    finish=finish,
    head=output_head,
    refused=(
        ("hidden_act", ("silu",), "another activation"),
        ("rope_parameters.rope_type", SCALED_ROPE, "another rope scaling"),
        ("rope_parameters.mrope_section", (), "positions of pictures"),
    ),
    runs=(("rope_scaling_type", (None, "none", "linear", "yarn")), ("rope_sections", (None,))),
)
