"""Tensor rows of the usual decoder: names in GGUF and in checkpoints, shapes. Families put them together.

Every function gives rows in the order of a layer; `layers` limits them to some layers, `source` are beginnings of names
in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from engine.models.arch import Hparams, TensorRow, at
from engine.models.steps import Step, Take, interleaved

LAYER = "model.layers.{i}."
Layers = Callable[[Hparams, int], bool] | None


def n_q(h: Hparams, i: int) -> int:
    """Rows of the query matrix of layer i."""
    return at(h.n_head, i) * h.n_embd_head_k


def n_k(h: Hparams, i: int) -> int:
    """Rows of the key matrix of layer i."""
    return at(h.n_head_kv, i) * h.n_embd_head_k


def n_v(h: Hparams, i: int) -> int:
    """Rows of the value matrix of layer i."""
    return at(h.n_head_kv, i) * h.n_embd_head_v


#: rotating neighbours instead of halves: what llama's queries and keys need
PERMUTE_Q = Take(lambda h, i: interleaved(n_q(h, i), at(h.n_head, i)))
PERMUTE_K = Take(lambda h, i: interleaved(n_k(h, i), at(h.n_head_kv, i)))


def embedding_rows(
    embedding: str = "model.embed_tokens", norm: str = "model.norm", head: str = "lm_head", bias: bool = False
) -> tuple[TensorRow, ...]:
    """Embedding, last norm and output; `bias`: the norm has one."""
    found = [
        TensorRow("token_embd.weight", embedding + ".weight", lambda h: (h.n_vocab, h.n_embd)),
        TensorRow("output_norm.weight", norm + ".weight", lambda h: (h.n_embd,)),
        TensorRow("output_norm.bias", norm + ".bias", lambda h: (h.n_embd,)),
        TensorRow("output.weight", head + ".weight", lambda h: (h.n_vocab, h.n_embd), optional=True),
    ]
    return tuple(row for row in found if bias or row.name != "output_norm.bias")


def norm_row(name: str, source: str, layers: Layers = None, bias: bool = False) -> tuple[TensorRow, ...]:
    """A norm over the model's width in every layer: `blk.{i}.<name>`."""
    kinds = ("weight", "bias") if bias else ("weight",)
    return tuple(
        TensorRow(f"blk.{{i}}.{name}.{kind}", f"{source}.{kind}", lambda h: (h.n_embd,), layers=layers)
        for kind in kinds
    )


def attention_rows(source: str = LAYER + "self_attn.", permuted: bool = False, layers: Layers = None):
    """q, k, v and output matrices, with biases where the checkpoint has them."""
    q_steps: tuple[Step, ...] = (PERMUTE_Q,) if permuted else ()
    k_steps: tuple[Step, ...] = (PERMUTE_K,) if permuted else ()
    matrices = (
        TensorRow("blk.{i}.attn_q.weight", source + "q_proj.weight", lambda h, i: (n_q(h, i), h.n_embd), q_steps),
        TensorRow("blk.{i}.attn_k.weight", source + "k_proj.weight", lambda h, i: (n_k(h, i), h.n_embd), k_steps),
        TensorRow("blk.{i}.attn_v.weight", source + "v_proj.weight", lambda h, i: (n_v(h, i), h.n_embd)),
        TensorRow("blk.{i}.attn_output.weight", source + "o_proj.weight", lambda h, i: (h.n_embd, _n_out(h, i))),
    )
    biases = (
        TensorRow("blk.{i}.attn_q.bias", source + "q_proj.bias", lambda h, i: (n_q(h, i),), q_steps, True),
        TensorRow("blk.{i}.attn_k.bias", source + "k_proj.bias", lambda h, i: (n_k(h, i),), k_steps, True),
        TensorRow("blk.{i}.attn_v.bias", source + "v_proj.bias", lambda h, i: (n_v(h, i),), (), True),
        TensorRow("blk.{i}.attn_output.bias", source + "o_proj.bias", lambda h: (h.n_embd,), (), True),
    )
    return tuple(replace(row, layers=layers) for row in (*matrices, *biases))


def _n_out(h: Hparams, i: int) -> int:
    return at(h.n_head, i) * h.n_embd_head_v


def qk_norm_rows(source: str = LAYER + "self_attn.", layers: Layers = None) -> tuple[TensorRow, ...]:
    """Norms of each head's queries and keys."""
    return (
        TensorRow("blk.{i}.attn_q_norm.weight", source + "q_norm.weight", lambda h: (h.n_embd_head_k,), layers=layers),
        TensorRow("blk.{i}.attn_k_norm.weight", source + "k_norm.weight", lambda h: (h.n_embd_head_k,), layers=layers),
    )


def ffn_rows(
    source: str = LAYER + "mlp.",
    layers: Layers = None,
    size: Callable[[Hparams, int], int] = lambda h, i: at(h.n_ff, i),
    suffix: str = "",
    gated: bool = True,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> tuple[TensorRow, ...]:
    """gate, up and down, with biases where the checkpoint has them; suffix: of the GGUF names, as `_shexp`."""
    gate, up, down = names
    wide = [("gate", gate), ("up", up)] if gated else [("up", up)]
    found = []
    for kind in ("weight", "bias"):
        for name, theirs in wide:
            shape = (lambda h, i: (size(h, i), h.n_embd)) if kind == "weight" else (lambda h, i: (size(h, i),))
            found.append((f"ffn_{name}{suffix}.{kind}", f"{theirs}.{kind}", shape))
        shape = (lambda h, i: (h.n_embd, size(h, i))) if kind == "weight" else (lambda h, i: (h.n_embd,))
        found.append((f"ffn_down{suffix}.{kind}", f"{down}.{kind}", shape))
    return tuple(
        TensorRow("blk.{i}." + name, source + theirs, shape, optional=name.endswith(".bias"), layers=layers)
        for name, theirs, shape in found
    )


def expert_rows(
    source: str,
    size: Callable[[Hparams, int], int],
    router: str = LAYER + "mlp.gate",
    layers: Layers = None,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> tuple[TensorRow, ...]:
    """The router, and gate, up and down of all experts as three tensors; source: ends before the matrix's name and
    holds `{e}`."""
    gate, up, down = names
    return (
        TensorRow("blk.{i}.ffn_gate_inp.weight", router + ".weight", lambda h: (h.n_expert, h.n_embd), layers=layers),
        TensorRow(
            "blk.{i}.ffn_gate_exps.weight",
            f"{source}{gate}.weight",
            lambda h, i: (h.n_expert, size(h, i), h.n_embd),
            layers=layers,
        ),
        TensorRow(
            "blk.{i}.ffn_up_exps.weight",
            f"{source}{up}.weight",
            lambda h, i: (h.n_expert, size(h, i), h.n_embd),
            layers=layers,
        ),
        TensorRow(
            "blk.{i}.ffn_down_exps.weight",
            f"{source}{down}.weight",
            lambda h, i: (h.n_expert, h.n_embd, size(h, i)),
            layers=layers,
        ),
    )


#: the gate of the shared expert, one number a token
SHARED_GATE = TensorRow(
    "blk.{i}.ffn_gate_inp_shexp.weight", LAYER + "mlp.shared_expert_gate.weight", lambda h: (1, h.n_embd)
)


def wide_qk_norm_rows(source: str = LAYER + "self_attn.") -> tuple[TensorRow, ...]:
    """Norms of queries and keys across all heads."""
    return (
        TensorRow("blk.{i}.attn_q_norm.weight", source + "q_norm.weight", lambda h, i: (n_q(h, i),)),
        TensorRow("blk.{i}.attn_k_norm.weight", source + "k_norm.weight", lambda h, i: (n_k(h, i),)),
    )


def half_of(which: int, size: Callable[[Hparams, int], int], count: Callable[[Hparams], int] = lambda h: 1) -> Take:
    """The first (0) or second (1) `size` rows of every one of `count` matrices: gate or up of those that have both."""

    def found(h: Hparams, i: int) -> np.ndarray:
        n = size(h, i)
        return (2 * n * np.arange(count(h))[:, None] + which * n + np.arange(n)).reshape(-1)

    return Take(found)


def also_named(rows: tuple[TensorRow, ...], beginning: str, *others: str) -> tuple[TensorRow, ...]:
    """The rows, whose names in a checkpoint may also have one of `others` in the place of `beginning`."""

    def spellings(row: TensorRow) -> tuple[str, ...]:
        ends = [name.removeprefix(beginning) for name in row.sources if name.startswith(beginning)]
        return (*row.sources, *(other + end for other in others for end in ends))

    return tuple(replace(row, source=spellings(row)) for row in rows)


def or_nested(rows: tuple[TensorRow, ...], outer: str = "model.language_model.") -> tuple[TensorRow, ...]:
    """The rows, also with the names that they have where the text model is a part of a larger one."""
    return also_named(rows, "model.", outer)
