"""LFM2 of Liquid AI: layers of short gated convolutions, some of attention, each with a gated feed-forward; `lfm2moe`
has experts behind the first layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine import ops
from engine.models.arch import Arch, Hparam, Hparams, TensorRow, at
from engine.models.blocks import embed_tokens, ffn_gated, linear, output_head, part, qkv, rms_norm
from engine.models.build import Build
from engine.models.common import N_ROT, N_VOCAB, PLAIN_YARN, SCALED_ROPE, rows, silent
from engine.models.decoder import LAYER, attention_rows, embedding_rows, expert_rows, ffn_rows, norm_row, qk_norm_rows
from engine.models.experts import SIGMOID, moe
from engine.models.recurrent import check_kernel, convolve
from engine.models.rotary import rotate
from engine.models.steps import Shape
from engine.tensor import Tensor

CONV, ATTENTION, FEED = LAYER + "conv.", LAYER + "self_attn.", LAYER + "feed_forward."
_MATRICES = ("w1", "w3", "w2")

_ROWS = {row.field: row for row in rows()}


def has_state(h: Hparams, i: int) -> bool:
    """Whether layer i is a convolution: those that have no keys."""
    return at(h.n_head_kv, i) == 0


def attends(h: Hparams, i: int) -> bool:
    """Whether layer i has attention."""
    return at(h.n_head_kv, i) > 0


def is_dense(h: Hparams, i: int) -> bool:
    """Whether layer i has one feed-forward and no experts."""
    return h.n_expert == 0 or i < h.n_dense


def _n_head_kv(config: Mapping[str, Any], h: Hparams) -> list[int]:
    n = config.get("num_key_value_heads") or h.n_head
    kinds, numbers = config.get("layer_types"), config.get("full_attn_idxs")
    attention: Any = numbers if kinds is None else [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    return [n if i in attention else 0 for i in range(h.n_layer if kinds is None else len(kinds))]


def _n_ff(config: Mapping[str, Any], h: Hparams) -> int:
    """The width of the feed-forward: configs may have that of one without a gate, of which it is two thirds, times a
    factor, rounded up."""
    n = config.get("block_ff_dim") or config["intermediate_size"]
    if not config.get("block_auto_adjust_ff_dim", False):
        return n
    n = int(2 * n / 3)
    if config.get("block_ffn_dim_multiplier") is not None:
        n = int(config["block_ffn_dim_multiplier"] * n)
    step = config["block_multiple_of"]
    return step * -(-n // step)


HPARAMS = rows(
    n_ff=replace(_ROWS["n_ff"], config=_n_ff),
    n_head_kv=replace(_ROWS["n_head_kv"], config=_n_head_kv),
    norm_eps=replace(_ROWS["norm_eps"], config=("norm_eps", "block_norm_eps", "rms_norm_eps")),
)

EXTRA = (N_VOCAB, silent(N_ROT), Hparam("d_conv", "{arch}.shortconv.l_cache", ("conv_L_cache",)))

EXPERTS = (
    Hparam("n_ff_exp", "{arch}.expert_feed_forward_length", ("moe_intermediate_size",)),
    Hparam("n_dense", "{arch}.leading_dense_block_count", ("num_dense_layers",), 0),
)


def _tensors() -> tuple[TensorRow, ...]:
    named = {"o_proj.weight": "out_proj.weight", "q_norm.weight": "q_layernorm.weight"}
    named |= {"k_norm.weight": "k_layernorm.weight"}
    attention = (*attention_rows(ATTENTION, layers=attends), *qk_norm_rows(ATTENTION, layers=attends))
    renamed = tuple(
        replace(row, source=ATTENTION + named.get(theirs, theirs))
        for row in attention
        for theirs in (row.sources[0].removeprefix(ATTENTION),)
        if not theirs.endswith(".bias")
    )
    width = lambda h: (h.n_embd, h.n_embd)  # noqa: E731
    convolution = (
        TensorRow("blk.{i}.shortconv.in_proj.weight", CONV + "in_proj.weight", lambda h: (3 * h.n_embd, h.n_embd)),
        TensorRow("blk.{i}.shortconv.conv.weight", CONV + "conv.weight", lambda h: (h.n_embd, h.d_conv), (Shape(),)),
        TensorRow("blk.{i}.shortconv.out_proj.weight", CONV + "out_proj.weight", width),
    )
    # the last norm is called as if it were the embedding's, here as in checkpoints
    outside = tuple(
        replace(row, name=row.name.replace("output_norm", "token_embd_norm"))
        for row in embedding_rows(norm="model.embedding_norm")
    )
    return (
        *outside,
        *norm_row("attn_norm", LAYER + "operator_norm"),
        *norm_row("ffn_norm", LAYER + "ffn_norm"),
        *renamed,
        *(replace(row, layers=has_state) for row in convolution),
    )


def _without_biases(tensors: tuple[TensorRow, ...]) -> tuple[TensorRow, ...]:
    return tuple(row for row in tensors if not row.name.endswith(".bias"))


def layer(b: Build, i: int, x: Tensor) -> Tensor:
    """Convolution or attention, and feed-forward, each with a norm in front and a residual connection."""
    blk = f"blk.{i}."
    cur = rms_norm(b, blk + "attn_norm", x)
    cur = short_convolution(b, i, cur) if has_state(b.h, i) else attention(b, i, cur)
    cur, x = b.last(i, cur, x)
    x = ops.add(b.ctx, cur, x)
    return ops.add(b.ctx, feed_forward(b, i, rms_norm(b, blk + "ffn_norm", x)), x)


def short_convolution(b: Build, i: int, x: Tensor) -> Tensor:
    """Two gates from the input, one in front of the convolution and one behind it."""
    blk, n = f"blk.{i}.shortconv.", b.h.n_embd
    found = linear(b, blk + "in_proj", x)
    before, behind, x = (part(b, found, k * n, n) for k in range(3))
    y = convolve(b, i, "shortconv.conv", ops.mul(b.ctx, before, x))
    return linear(b, blk + "out_proj", ops.mul(b.ctx, y, behind))


def attention(b: Build, i: int, x: Tensor) -> Tensor:
    """Grouped heads; queries and keys are normalised before they are rotated."""
    blk = f"blk.{i}."
    q, k, v = qkv(b, i, x)
    q = rotate(b, rms_norm(b, blk + "attn_q_norm", q), neox=True)
    k = rotate(b, rms_norm(b, blk + "attn_k_norm", k), neox=True)
    return linear(b, blk + "attn_output", b.attend(i, q, k, v, b.h.n_embd_head_k**-0.5))


def feed_forward(b: Build, i: int, x: Tensor) -> Tensor:
    """One, or experts that are chosen with a bias."""
    blk = f"blk.{i}."
    if is_dense(b.h, i):
        return ffn_gated(b, blk, x)
    return moe(b, blk, x, gating=b.h.gating or SIGMOID, bias=b.w[blk + "exp_probs_b.bias"])


def finish(b: Build, x: Tensor) -> Tensor:
    """The last norm."""
    return rms_norm(b, "token_embd_norm", x)


_COMMON = _tensors()

LFM2 = Arch(
    name="lfm2",
    hf_names=("Lfm2ForCausalLM", "LFM2ForCausalLM"),
    hparams=HPARAMS,
    extra_hparams=EXTRA,
    tensors=(*_COMMON, *_without_biases(ffn_rows(FEED, names=_MATRICES))),
    embed=embed_tokens,
    layer=layer,
    finish=finish,
    head=output_head,
    refused=(
        ("conv_bias", (False,), "biases of the convolution"),
        ("rope_parameters.rope_type", SCALED_ROPE, "another rope scaling"),
        *PLAIN_YARN,
    ),
    runs=(("rope_scaling_type", (None, "none", "linear", "yarn")),),
    check=check_kernel,
)

LFM2MOE = replace(
    LFM2,
    name="lfm2moe",
    hf_names=("Lfm2MoeForCausalLM",),
    hparams=tuple(
        replace(row, config=lambda config, h: SIGMOID, default=SIGMOID) if row.field == "gating" else row
        for row in HPARAMS
    ),
    extra_hparams=(*EXTRA, *EXPERTS),
    tensors=(
        *_COMMON,
        *_without_biases(ffn_rows(FEED, names=_MATRICES, layers=is_dense)),
        *expert_rows(
            FEED + "experts.{e}.",
            lambda h, i: h.n_ff_exp,
            FEED + "gate",
            lambda h, i: not is_dense(h, i),
            _MATRICES,
        ),
        TensorRow(
            "blk.{i}.exp_probs_b.bias",
            FEED + "expert_bias",
            lambda h: (h.n_expert,),
            layers=lambda h, i: not is_dense(h, i),
        ),
    ),
    refused=(
        *LFM2.refused,
        ("norm_topk_prob", (True,), "weights of experts that do not sum to 1"),
        ("routed_scaling_factor", (1.0,), "a factor of the experts' weights"),
        ("use_expert_bias", (True,), "experts that are chosen without a bias"),
    ),
)
