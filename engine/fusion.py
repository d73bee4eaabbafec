"""Fusion: neighbours in the graph that one kernel can do in one pass over memory, found when a graph is lowered.

A pattern names the ops of consecutive nodes, and `merge` turns such nodes into the record of one kernel. Conditions
that hold for all patterns are checked here: every node is to be run; a result that is dropped has one reader, the next
node, and is neither an output nor a view; and nothing that is written overlaps something that is read, unless both are
the same rows. A new pattern is a row of PATTERNS. Fused and single kernels give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from engine.ops import kinds
from engine.tensor import Flag, Tensor


@dataclass(frozen=True)
class Fused:
    """What the kernel of `op` gets: result, sources, params. `writes`: sources that are results too."""

    op: str
    result: Tensor
    src: tuple[Any, ...]
    params: tuple
    writes: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Pattern:
    """ops: of consecutive nodes; kept: which of their results are still written; merge: the nodes -> Fused, or None
    where they do not fit."""

    ops: tuple[str, ...]
    merge: Callable[[Sequence[Tensor]], Fused | None]
    kept: frozenset[int] = frozenset()

    @property
    def name(self) -> str:
        return "+".join(self.ops)


def match(nodes: Sequence[Tensor], at: int, use_counts: Mapping[Tensor, int]) -> tuple[Pattern, Fused] | None:
    """The first pattern that fits the nodes from `at` on, whose tensors have their memory already."""
    for pattern in PATTERNS:
        group = nodes[at : at + len(pattern.ops)]
        if tuple(n.op for n in group) != pattern.ops or not _droppable(group, pattern, use_counts):
            continue
        fused = pattern.merge(group)
        if fused is not None and _apart(fused):
            return pattern, fused
    return None


def _droppable(group: Sequence[Tensor], pattern: Pattern, use_counts: Mapping[Tensor, int]) -> bool:
    for i, node in enumerate(group):
        if not node.flags & Flag.COMPUTE:
            return False
        if i == len(group) - 1 or i in pattern.kept:
            continue
        if use_counts.get(node, 0) != 1 or node.flags & Flag.OUTPUT or node.view_src is not None:
            return False
    return all(before in after.src for before, after in pairwise(group))


def _apart(fused: Fused) -> bool:
    written = (fused.result, *fused.writes)
    everything = (*written, *(s for s in fused.src if s is not None))
    return all(
        a is b or _disjoint(a, b) or (a.address == b.address and a.same_layout(b)) for a in written for b in everything
    )


def _disjoint(a: Tensor, b: Tensor) -> bool:
    return a.address + a.nbytes <= b.address or b.address + b.nbytes <= a.address


def _weight_of(norm: Tensor, product: Tensor) -> Tensor | None:
    """The other factor of a product with the norm, if it is a row of the same length or more of them."""
    a, b = product.src[0], product.src[1]
    w = b if a is norm else a
    fits = w is not None and w is not norm and w.is_float_rows and w.ne[0] == norm.ne[0] and product.ne == norm.ne
    return w if fits else None


def _norm_and_weight(group: Sequence[Tensor]) -> Fused | None:
    norm, product = group
    w = _weight_of(norm, product)
    return None if w is None else Fused("RMS_NORM", product, (norm.src[0], w, None, None), norm.params)


def _sum_norm_and_weight(group: Sequence[Tensor]) -> Fused | None:
    total, norm, product = group
    w = _weight_of(norm, product)
    a, b = total.src[0], total.src[1]
    if w is None or w is total or a is None or b is None or a.ne != b.ne or norm.src[0] is not total:
        return None
    return Fused("RMS_NORM", product, (a, w, b, total), norm.params, (total,))


#: function of a gate -> the gated activation
_GATED = {
    kinds.RELU: kinds.REGLU, kinds.GELU: kinds.GEGLU, kinds.SILU: kinds.SWIGLU, kinds.GELU_ERF: kinds.GEGLU_ERF,
    kinds.GELU_QUICK: kinds.GEGLU_QUICK,
}  # fmt: skip


def _gate_and_up(group: Sequence[Tensor]) -> Fused | None:
    gate, product = group
    up = product.src[1] if product.src[0] is gate else product.src[0]
    kind = _GATED.get(gate.params[0])
    if kind is None or up is None or up is gate or up.ne != gate.ne or product.ne != gate.ne:
        return None
    return Fused("GLU", product, (gate.src[0], up), (kind, 0, 1.0, 0.0))


PATTERNS = (
    Pattern(("ADD", "RMS_NORM", "MUL"), _sum_norm_and_weight, frozenset({0})),
    Pattern(("RMS_NORM", "MUL"), _norm_and_weight),
    Pattern(("UNARY", "MUL"), _gate_and_up),
)
