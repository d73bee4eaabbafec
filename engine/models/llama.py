"""Llama 2 and 3, SmolLM2 and other models of their shape: metadata, tensors, graph."""

from engine.models.arch import Arch, Hparam, TensorRow

#: Rows that every decoder of this kind shares, in the order in which conversion writes them.
HPARAMS = (
    Hparam("n_layer", "{arch}.block_count", ("num_hidden_layers", "n_layer", "n_layers")),
    Hparam("n_ctx_train", "{arch}.context_length", ("max_position_embeddings", "n_ctx")),
    Hparam("n_embd", "{arch}.embedding_length", ("hidden_size", "n_embd")),
    Hparam("n_ff", "{arch}.feed_forward_length", ("intermediate_size",)),
    Hparam("n_head", "{arch}.attention.head_count", ("num_attention_heads", "n_head")),
    Hparam("n_head_kv", "{arch}.attention.head_count_kv", ("num_key_value_heads",), lambda h: h.n_head),
    Hparam("rope_scaling_type", "{arch}.rope.scaling.type", (), None, "string"),
    Hparam("rope_scaling_factor", "{arch}.rope.scaling.factor", (), None, "float32"),
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
    TensorRow("blk.{i}.attn_q.weight", _ATTN + "q_proj.weight", lambda h: (h.n_head * h.n_embd_head_k, h.n_embd),
              "permute_heads_q"),
    TensorRow("blk.{i}.attn_k.weight", _ATTN + "k_proj.weight", lambda h: (h.n_head_kv * h.n_embd_head_k, h.n_embd),
              "permute_heads_k"),
    TensorRow("blk.{i}.attn_v.weight", _ATTN + "v_proj.weight", lambda h: (h.n_head_kv * h.n_embd_head_v, h.n_embd)),
    TensorRow("blk.{i}.attn_output.weight", _ATTN + "o_proj.weight", lambda h: (h.n_embd, h.n_head * h.n_embd_head_v)),
    TensorRow("blk.{i}.attn_q.bias", _ATTN + "q_proj.bias", lambda h: (h.n_head * h.n_embd_head_k,),
              "permute_heads_q", optional=True),
    TensorRow("blk.{i}.attn_k.bias", _ATTN + "k_proj.bias", lambda h: (h.n_head_kv * h.n_embd_head_k,),
              "permute_heads_k", optional=True),
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


def body(*args):
    raise AssertionError("being written")


head = body

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
)
