"""Pieces that model graphs share. Functions, not base classes: a family calls what fits it.

Shapes are in ggml's order, axis 0 first; `n` is the number of tokens of all sequences together.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine import ops
from engine.adapters import Pair
from engine.models.arch import at
from engine.models.build import Build
from engine.tensor import Tensor


def embed_tokens(b: Build) -> Tensor:
    """The embeddings of the tokens: [n_embd, n]."""
    x = ops.get_rows(b.ctx, b.w["token_embd.weight"], b.tokens)
    for pair, factor in _changes(b, "token_embd"):
        change = ops.mul_mat(b.ctx, pair.b, ops.get_rows(b.ctx, pair.a, b.tokens))
        x = ops.add(b.ctx, x, ops.scale(b.ctx, change, factor))
    return x


def _changes(b: Build, name: str) -> Iterator[tuple[Pair, float]]:
    """What adapters change of a weight, and how much."""
    for adapter, strength in b.adapters:
        pair = adapter.pairs.get(name + ".weight")
        if pair is not None:
            yield pair, pair.scale * strength


def linear(b: Build, name: str, x: Tensor, scaled: bool = True) -> Tensor:
    """x times the weight `name`, plus its bias if the model has one. Every product of a weight matrix comes through
    here, or through `linear_experts`. scaled: whether a tensor `<name>.scale` is a factor of the result."""
    weight = b.w[name + ".weight"]
    y = ops.mul_mat(b.ctx, weight, b.seen(weight, x))
    scale = b.w.get(name + ".scale")  # of the whole tensor, for formats whose block scales are small (NVFP4)
    y = ops.mul(b.ctx, y, scale) if scaled and scale is not None else y
    for pair, factor in _changes(b, name):
        y = ops.add(b.ctx, y, ops.scale(b.ctx, ops.mul_mat(b.ctx, pair.b, ops.mul_mat(b.ctx, pair.a, x)), factor))
    bias = b.w.get(name + ".bias")
    return y if bias is None else ops.add(b.ctx, y, bias)


def linear_experts(b: Build, name: str, x: Tensor, ids: Tensor) -> Tensor:
    """x [k, 1 or n_used, n] through the experts `ids` I32 [n_used, n] of the weight `name`: [rows, n_used, n]."""
    weight = b.w[name + ".weight"]
    y = ops.mul_mat_id(b.ctx, weight, b.seen(weight, x), ids)
    scale = b.w.get(name + ".scale")  # one an expert
    if scale is not None:
        factors = ops.get_rows(b.ctx, ops.reshape(b.ctx, scale, 1, scale.ne[0]), flat(b, ids))
        y = ops.mul(b.ctx, y, ops.reshape(b.ctx, factors, 1, *ids.ne[:2]))
    for pair, factor in _changes(b, name):
        change = ops.mul_mat_id(b.ctx, pair.b, ops.mul_mat_id(b.ctx, pair.a, x, ids), ids)
        y = ops.add(b.ctx, y, ops.scale(b.ctx, change, factor))
    bias = b.w.get(name + ".bias")
    return y if bias is None else ops.add_id(b.ctx, y, bias, ids)


def flat(b: Build, x: Tensor) -> Tensor:
    """All elements along one axis."""
    return ops.reshape(b.ctx, x if x.is_contiguous else ops.cont(b.ctx, x), x.n_elements)


def rms_norm(b: Build, name: str, x: Tensor, eps: float | None = None) -> Tensor:
    """RMS norm with its weight, if there is one (Zhang and Sennrich 2019, arXiv 1910.07467)."""
    y = ops.rms_norm(b.ctx, x, b.h.norm_eps if eps is None else eps)
    weight = b.w.get(name + ".weight")
    return y if weight is None else ops.mul(b.ctx, y, weight)


def layer_norm(b: Build, name: str, x: Tensor, eps: float | None = None) -> Tensor:
    """Layer norm with its weight and bias, where there are some (Ba et al. 2016, arXiv 1607.06450)."""
    y = ops.norm(b.ctx, x, b.h.norm_eps if eps is None else eps)
    weight, bias = b.w.get(name + ".weight"), b.w.get(name + ".bias")
    y = y if weight is None else ops.mul(b.ctx, y, weight)
    return y if bias is None else ops.add(b.ctx, y, bias)


def heads(b: Build, x: Tensor, d: int) -> Tensor:
    """[d * n_head, n] -> [d, n_head, n]; `x` may be part of wider rows."""
    return ops.view(b.ctx, x, (d, x.ne[0] // d, x.ne[1]), (d * x.nb[0], x.nb[1]))


def part(b: Build, x: Tensor, first: int, size: int) -> Tensor:
    """Elements first to first + size of each row of x [n_all, n]: a view [size, n]."""
    return ops.view(b.ctx, x, (size, *x.ne[1:]), x.nb[1:], first * x.nb[0])


def qkv(b: Build, i: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of layer i as heads, from three matrices or from one that has all."""
    blk, h = f"blk.{i}.", b.h
    d_k, d_v = h.n_embd_head_k, h.n_embd_head_v
    n_q, n_k, n_v = at(h.n_head, i) * d_k, at(h.n_head_kv, i) * d_k, at(h.n_head_kv, i) * d_v
    if blk + "attn_qkv.weight" in b.w:
        y = linear(b, blk + "attn_qkv", x)
        q, k, v = part(b, y, 0, n_q), part(b, y, n_q, n_k), part(b, y, n_q + n_k, n_v)
    else:
        q, k, v = (linear(b, blk + name, x) for name in ("attn_q", "attn_k", "attn_v"))
    return heads(b, q, d_k), heads(b, k, d_k), heads(b, v, d_v)


def output_head(b: Build, hidden: Tensor) -> Tensor:
    """Hidden states [n_embd, n] -> logits [n_vocab, n]; without an output matrix the embedding serves as one."""
    if "output.weight" in b.w:
        return linear(b, "output", hidden)
    weight = b.w["token_embd.weight"]
    y = ops.mul_mat(b.ctx, weight, b.seen(weight, hidden))
    for pair, factor in _changes(b, "token_embd"):
        inner = ops.mul_mat(b.ctx, ops.cont(b.ctx, ops.transpose(b.ctx, pair.b)), hidden)
        y = ops.add(b.ctx, y, ops.scale(b.ctx, ops.mul_mat(b.ctx, pair.a, inner), factor))
    return y


# --- feed-forward -----------------------------------------------------------------------------------------------------


def ffn_gated(b: Build, prefix: str, x: Tensor, kind: str = "swiglu", suffix: str = "") -> Tensor:
    """down(act(gate(x)) * up(x)); kind: of `ops.glu`; gate and up may be one matrix, gate first; suffix: of the
    tensors' names, such as `_shexp` of the shared expert."""
    up = linear(b, f"{prefix}ffn_up{suffix}", x)
    if f"{prefix}ffn_gate{suffix}.weight" in b.w:
        y = ops.glu(b.ctx, kind, linear(b, f"{prefix}ffn_gate{suffix}", x), up)
    else:
        y = ops.glu(b.ctx, kind, up)
    return linear(b, f"{prefix}ffn_down{suffix}", y)


def ffn_plain(b: Build, prefix: str, x: Tensor, kind: str = "gelu", suffix: str = "") -> Tensor:
    """down(act(up(x))); kind: of `ops.unary`."""
    up = linear(b, f"{prefix}ffn_up{suffix}", x)
    return linear(b, f"{prefix}ffn_down{suffix}", ops.unary(b.ctx, kind, up))


def rms_norm_across(b: Build, name: str, x: Tensor) -> Tensor:
    """RMS norm of heads x [d, n_head, n] over all elements of a token, and the heads again."""
    d, n_head, n = x.ne[:3]
    x = x if x.is_contiguous else ops.cont(b.ctx, x)
    return ops.reshape(b.ctx, rms_norm(b, name, ops.reshape(b.ctx, x, d * n_head, n)), d, n_head, n)


def embed_with_positions(b: Build) -> Tensor:
    """The embeddings of the tokens, plus those of their positions: [n_embd, n]."""
    return ops.add(b.ctx, embed_tokens(b), ops.get_rows(b.ctx, b.w["position_embd.weight"], b.positions))
