"""What a tensor is, by its name: its role in the model, its place in the file, and whether it is ever quantized.

The names are llama.cpp's (b11434); mixtures (`presets.py`, `recipes.py`) speak of roles, `mixes.py` puts both together.
"""

from __future__ import annotations

import re

#: Copied, whatever the preset: small, or read by code that wants floats. Any of these in the name:
NEVER_CONTAINS = (
    "_norm.weight",
    "ffn_gate_inp.weight",
    "ffn_gate_tid2eid.weight",
    "altup",
    "laurel",
    "per_layer_model_proj",
    "ssm_conv1d",
    "shortconv.conv.weight",
    "indexer.k_proj.weight",
    "indexer.q_proj.weight",
    "time_mix_first.weight",
    *(f"time_mix_{part}.weight" for part in ("w0", "w1", "w2", "v0", "v1", "v2", "a0", "a1", "a2", "g1", "g2")),
    *(f"time_mix_{part}.weight" for part in ("decay_w1", "decay_w2", "lerp_fused")),
    "attn_rel_b.weight",
    ".position_embd",
    "sam.pos_embd",
    "sam.neck.",
    "sam.net_",
    ".rel_pos",
    ".patch_embd",
    ".patch_merger",
    "a.rvq.codebook",
    "mm.a.code_embd",
)
#: these exact names
NEVER_NAMES = ("position_embd.weight", "token_types.weight")
#: and in files of one architecture also these
NEVER_CONTAINS_OF = {
    "glm5-next": (
        "hc_",
        "indexer.attn_q_b",
        "indexer.attn_k",
        "indexer.proj",
        "indexer_compressor_gate",
        "indexer_compressor_ape",
        *(f"ssm_{part}.weight" for part in ("f_a", "f_b", "g_a", "g_b", "beta")),
        "attn_kv_a_mqa.weight",
        "attn_k_b.weight",
        "attn_v_b.weight",
    ),
}

OUTPUT = "output.weight"
EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
#: (part of the name, role), first match wins; before them the names above are "output" and "token_embd"
ROLE_OF_PART = (
    ("attn_qkv.weight", "attn_qkv"),
    ("attn_kv_b.weight", "attn_kv_b"),
    ("attn_v.weight", "attn_v"),
    ("attn_k.weight", "attn_k"),
    ("attn_q.weight", "attn_q"),
    ("attn_output.weight", "attn_output"),
    ("ffn_up", "ffn_up"),
    ("ffn_gate", "ffn_gate"),
    ("ffn_down", "ffn_down"),
)
#: they carry attention's values: counted and treated as one
VALUES = ("attn_v", "attn_qkv", "attn_kv_b")
FEED_FORWARD = ("ffn_up", "ffn_gate", "ffn_down")
#: every role; `head` is the output matrix, or the embeddings where they serve as such
ROLES = ("head", "output", "token_embd", *(role for _, role in ROLE_OF_PART), "other")


def role_of(name: str) -> str:
    """The role of a tensor by its name: `output`, `token_embd`, one of ROLE_OF_PART, or `other`.

    >>> role_of("blk.3.attn_v.weight"), role_of("blk.3.attn_norm.weight")
    ('attn_v', 'other')
    """
    if name == OUTPUT:
        return "output"
    if name in EMBEDDINGS:
        return "token_embd"
    return next((role for part, role in ROLE_OF_PART if part in name), "other")


def file_order(name: str) -> tuple[int, str]:
    """Sort key of tensors in a file: block number (-1 outside of blocks), then name."""
    block = _BLOCK.match(name)
    return int(block[1]) if block else -1, name


_BLOCK = re.compile(r"blk\.(\d+)\.")
