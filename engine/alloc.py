"""Memory of a graph's intermediates, planned before anything runs: a pure function from graph to offsets.

Headers are walked in execution order. A node takes the memory of a dying source where its op allows that, else the
smallest free block that fits, else the end of the arena grows. When the last reader of a tensor has run, its memory
returns to the free list and merges with its neighbours. The peak is the largest live set, not the sum.

Views own nothing: they keep their root alive. Leafs and inputs are placed first; leafs that already have memory
(weights) are left alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.graph import Graph
from engine.ops.table import OPS
from engine.tensor import Flag, Tensor

ALIGNMENT = 64  # bytes: a cache line


@dataclass
class Plan:
    """Offsets (bytes) of planned tensors in one arena of `size` bytes; `naive` is what no reuse would take."""

    size: int = 0
    naive: int = 0
    reused: int = 0
    offsets: dict[Tensor, int] = field(default_factory=dict)


@dataclass
class _Arena:
    """Free blocks [offset, size], sorted by offset; the last one has no end."""

    alignment: int
    peak: int = 0
    free: list[list[int]] = field(default_factory=lambda: [[0, 1 << 62]])

    def take(self, size: int) -> int:
        size = _pad(size, self.alignment)
        fitting = [b for b in self.free[:-1] if b[1] >= size]
        block = min(fitting, key=lambda b: b[1]) if fitting else self.free[-1]
        offset = block[0]
        block[0] += size
        block[1] -= size
        if block[1] == 0:
            self.free.remove(block)
        self.peak = max(self.peak, offset + size)
        return offset

    def give(self, offset: int, size: int) -> None:
        size = _pad(size, self.alignment)
        at = next(i for i, b in enumerate(self.free) if b[0] > offset)
        self.free.insert(at, [offset, size])
        for i in (at, at - 1):  # with the next one, then with the one before
            if 0 <= i < len(self.free) - 1 and sum(self.free[i]) == self.free[i + 1][0]:
                self.free[i][1] += self.free.pop(i + 1)[1]


def plan(graph: Graph, alignment: int = ALIGNMENT, inplace: bool = True) -> Plan:
    """Place every intermediate of `graph`. `inplace=False` turns the reuse of dying sources off."""
    result = Plan()
    arena = _Arena(alignment)
    children: dict[Tensor, int] = dict(graph.use_counts)
    views: dict[Tensor, int] = {}
    for tensor in graph.nodes:
        if tensor.view_src is not None:
            views[tensor.view_src] = views.get(tensor.view_src, 0) + 1
    owner: dict[Tensor, Tensor] = {}  # the tensor whose block this one sits in

    def place(tensor: Tensor) -> None:
        result.naive += _pad(tensor.nbytes, alignment)
        result.offsets[tensor] = arena.take(tensor.nbytes)
        owner[tensor] = tensor

    def release(tensor: Tensor) -> None:
        if tensor in owner and not tensor.flags & Flag.OUTPUT:
            arena.give(result.offsets[tensor], tensor.nbytes)
            del owner[tensor]

    def dead(tensor: Tensor) -> bool:
        return children.get(tensor, 0) == 0 and views.get(tensor, 0) == 0

    def take_over(node: Tensor) -> bool:
        """Let the node sit in the memory of a source that only it reads."""
        for source in node.src:
            if source is None or source.flags & Flag.OUTPUT or not node.same_layout(source):
                continue
            root = source.view_src or source
            if root not in owner or root.flags & Flag.OUTPUT or children.get(source, 0) != 1:
                continue
            if root is source:
                if views.get(source, 0):
                    continue
            elif source.view_offs or views.get(root, 0) != 1 or children.get(root, 0) or root.nbytes != node.nbytes:
                continue
            result.offsets[node] = result.offsets[root]
            result.naive += _pad(node.nbytes, alignment)
            result.reused += 1
            owner[node] = node
            del owner[root]
            return True
        return False

    for tensor in graph.leafs:
        if tensor.buffer is None:
            place(tensor)
    for node in graph.nodes:
        if node.view_src is None and not (inplace and OPS[node.op].inplace and take_over(node)):
            place(node)
        for source in node.src:
            if source is None:
                continue
            children[source] -= 1
            if not dead(source):
                continue
            if source.view_src is None:
                release(source)
            elif source.op is not None:
                views[source.view_src] -= 1
                if dead(source.view_src):
                    release(source.view_src)
    result.size = arena.peak
    return result


def _pad(size: int, alignment: int) -> int:
    return -(-max(size, 1) // alignment) * alignment
