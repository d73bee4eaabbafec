"""Llama 2 and 3, SmolLM2 and other models of their shape: metadata, tensors, graph."""

from __future__ import annotations

from engine import ops
from engine.context import Context
from engine.models.arch import Arch, Hparam, Hparams, TensorRow
from engine.models.blocks import Weights, attend, ffn_swiglu, heads, linear, rms_norm
from engine.tensor import Tensor

#: Rows that every decoder of this kind shares, in the order in which conversion writes them.
HPARAMS = (
    Hparam("n_layer", "{arch}.block_count", ("num_hidden_layers", "n_layer", "n_layers")),
    Hparam("n_ctx_train", "{arch}.context_length", ("max_position_embeddings", "n_ctx")),
    Hparam("n_embd", "{arch}.embedding_length", ("hidden_size", "n_embd")),
    Hparam("n_ff", "{arch}.feed_forward_length", ("intermediate_size",)),
    Hparam("n_head", "{arch}.attention.head_count", ("num_attention_heads", "n_head")),
    Hparam("n_head_kv", "{arch}.attention.head_count_kv", ("num_key_value_heads",), lambda h: h.n_head),
    Hparam("rope_scaling_type", "{arch}.rope.scaling.type", ("rope_parameters.scaling_type",), None, "string"),
    Hparam("rope_scaling_factor", "{arch}.rope.scaling.factor", ("rope_parameters.scaling_factor",), None, "float32"),
    Hparam("rope_base", "{arch}.rope.freq_base", ("rope_parameters.rope_theta", "rope_theta"), 10000.0, "float32"),
    Hparam("norm_eps", "{arch}.attention.layer_norm_rms_epsilon", ("rms_norm_eps",), kind="float32"),
    Hparam("n_embd_head_k", "{arch}.attention.key_length", ("head_dim",), lambda h: h.n_embd // h.n_head),
    Hparam("n_embd_head_v", "{arch}.attention.value_length", ("head_dim",), lambda h: h.n_embd // h.n_head),
)

EXTRA_HPARAMS = (
    Hparam("n_vocab", "{arch}.vocab_size", ("vocab_size",), None),
    Hparam("n_rot", "{arch}.rope.dimension_count", ("head_dim",), lambda h: h.n_embd_head_k, always=True),
)

_ATTN = "model.layers.{i}.self_attn."
_MLP = "model.layers.{i}.mlp."

TENSORS = (
    TensorRow("token_embd.weight", "model.embed_tokens.weight", lambda h: (h.n_vocab, h.n_embd)),
    TensorRow("output_norm.weight", "model.norm.weight", lambda h: (h.n_embd,)),
    TensorRow("output.weight", "lm_head.weight", lambda h: (h.n_vocab, h.n_embd), optional=True),
    TensorRow("rope_freqs.weight", "", lambda h: (h.n_rot // 2,), optional=True),
    TensorRow("blk.{i}.attn_norm.weight", "model.layers.{i}.input_layernorm.weight", lambda h: (h.n_embd,)),
    TensorRow(
        "blk.{i}.attn_q.weight",
        _ATTN + "q_proj.weight",
        lambda h: (h.n_head * h.n_embd_head_k, h.n_embd),
        "permute_heads_q",
    ),
    TensorRow(
        "blk.{i}.attn_k.weight",
        _ATTN + "k_proj.weight",
        lambda h: (h.n_head_kv * h.n_embd_head_k, h.n_embd),
        "permute_heads_k",
    ),
    TensorRow("blk.{i}.attn_v.weight", _ATTN + "v_proj.weight", lambda h: (h.n_head_kv * h.n_embd_head_v, h.n_embd)),
    TensorRow("blk.{i}.attn_output.weight", _ATTN + "o_proj.weight", lambda h: (h.n_embd, h.n_head * h.n_embd_head_v)),
    TensorRow(
        "blk.{i}.attn_q.bias",
        _ATTN + "q_proj.bias",
        lambda h: (h.n_head * h.n_embd_head_k,),
        "permute_heads_q",
        optional=True,
    ),
    TensorRow(
        "blk.{i}.attn_k.bias",
        _ATTN + "k_proj.bias",
        lambda h: (h.n_head_kv * h.n_embd_head_k,),
        "permute_heads_k",
        optional=True,
    ),
    TensorRow("blk.{i}.attn_v.bias", _ATTN + "v_proj.bias", lambda h: (h.n_head_kv * h.n_embd_head_v,), optional=True),
    TensorRow("blk.{i}.attn_output.bias", _ATTN + "o_proj.bias", lambda h: (h.n_embd,), optional=True),
    TensorRow("blk.{i}.ffn_norm.weight", "model.layers.{i}.post_attention_layernorm.weight", lambda h: (h.n_embd,)),
    TensorRow("blk.{i}.ffn_gate.weight", _MLP + "gate_proj.weight", lambda h: (h.n_ff, h.n_embd)),
    TensorRow("blk.{i}.ffn_up.weight", _MLP + "up_proj.weight", lambda h: (h.n_ff, h.n_embd)),
    TensorRow("blk.{i}.ffn_down.weight", _MLP + "down_proj.weight", lambda h: (h.n_embd, h.n_ff)),
    TensorRow("blk.{i}.ffn_gate.bias", _MLP + "gate_proj.bias", lambda h: (h.n_ff,), optional=True),
    TensorRow("blk.{i}.ffn_up.bias", _MLP + "up_proj.bias", lambda h: (h.n_ff,), optional=True),
    TensorRow("blk.{i}.ffn_down.bias", _MLP + "down_proj.bias", lambda h: (h.n_embd,), optional=True),
)


def body(
    ctx: Context, h: Hparams, w: Weights, tokens: Tensor, positions: Tensor, n_seq: int, out_rows: Tensor | None
) -> Tensor:
    """Token ids I32 [n] -> normalised hidden states [n_embd, n], or of the rows `out_rows` only.

    n = n_seq sequences of n / n_seq tokens each, one after another; positions: I32 [n / n_seq].
    """
    x = ops.get_rows(ctx, w["token_embd.weight"], tokens)
    for i in range(h.n_layer):
        blk = f"blk.{i}."
        cur = rms_norm(ctx, w, blk + "attn_norm", x, h.norm_eps)
        q = heads(ctx, linear(ctx, w, blk + "attn_q", cur), h.n_embd_head_k, n_seq)
        k = heads(ctx, linear(ctx, w, blk + "attn_k", cur), h.n_embd_head_k, n_seq)
        v = heads(ctx, linear(ctx, w, blk + "attn_v", cur), h.n_embd_head_v, n_seq)
        q, k = (rotate(ctx, h, w, t, positions) for t in (q, k))
        cur = linear(ctx, w, blk + "attn_output", attend(ctx, q, k, v, h.n_embd_head_k**-0.5))
        if out_rows is not None and i == h.n_layer - 1:  # nobody reads the other rows from here on
            cur, x = ops.get_rows(ctx, cur, out_rows), ops.get_rows(ctx, x, out_rows)
        x = ops.add(ctx, cur, x)
        cur = rms_norm(ctx, w, blk + "ffn_norm", x, h.norm_eps)
        x = ops.add(ctx, ffn_swiglu(ctx, w, blk, cur), x)
    return rms_norm(ctx, w, "output_norm", x, h.norm_eps)


def head(ctx: Context, h: Hparams, w: Weights, hidden: Tensor) -> Tensor:
    """Hidden states [n_embd, n] -> logits [n_vocab, n]; without an output matrix the embedding serves as one."""
    return ops.mul_mat(ctx, w.get("output.weight") or w["token_embd.weight"], hidden)


def rotate(ctx: Context, h: Hparams, w: Weights, x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of heads [d, n_head, n_tokens, n_seq], with the model's scaling."""
    freq_scale = 1.0 / h.rope_scaling_factor if h.rope_scaling_type == "linear" and h.rope_scaling_factor else 1.0
    return ops.rope(ctx, x, positions, h.n_rot, h.rope_base, freq_scale, w.get("rope_freqs.weight"))


LLAMA = Arch(
    name="llama",
    hf_names=("LlamaForCausalLM",),
    hparams=HPARAMS,
    extra_hparams=EXTRA_HPARAMS,
    tensors=TENSORS,
    body=body,
    head=head,
    refused=(
        ("hidden_act", ("silu",), "another activation"),
        ("rope_parameters.rope_type", ("default", "linear", "llama3"), "another rope scaling"),
        ("rope_scaling.rope_type", ("default", "linear", "llama3"), "another rope scaling"),
        ("rope_scaling.type", ("default", "linear", "llama3"), "another rope scaling"),
    ),
    runs=(("rope_scaling_type", (None, "none", "linear")),),
)
