"""ERNIE 4.5 (dense): Llama's decoder on rows as checkpoints have them, which rotate neighbours already."""

from __future__ import annotations

from dataclasses import replace

from engine.models.common import N_ROT, N_VOCAB, SCALED_ROPE, rows, silent
from engine.models.decoder import LAYER, attention_rows, embedding_rows, ffn_rows, norm_row
from engine.models.llama import LLAMA

ERNIE4_5 = replace(
    LLAMA,
    name="ernie4_5",
    hf_names=("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),
    hparams=rows(),
    extra_hparams=(silent(N_VOCAB), silent(N_ROT), *(row for row in LLAMA.extra_hparams if row.field == "window")),
    tensors=(
        *embedding_rows(),
        *norm_row("attn_norm", LAYER + "input_layernorm"),
        *attention_rows(),
        *norm_row("ffn_norm", LAYER + "post_attention_layernorm"),
        *ffn_rows(),
    ),
    refused=(
        ("hidden_act", ("silu",), "another activation"),
        ("rope_parameters.rope_type", SCALED_ROPE, "another rope scaling"),
    ),
)
