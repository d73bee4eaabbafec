"""Memory of a graph's intermediates, planned before anything runs.

`plan` is a pure function from graph to places. Headers are walked in execution order. A node takes the memory of a
dying source where its op allows that; else the smallest free block that fits; else the end of a chunk, which may grow;
else a new chunk. When the last reader of a tensor has run, its memory returns to the free list and merges with its
neighbours. The peak is the largest live set, not the sum.

Views own nothing: they keep their root alive. Leafs and inputs are placed first; leafs that already have memory
(weights, caches) are left alone, as are nodes that write into such memory. Kernels never allocate.

`Allocator` keeps the last plan and its memory: a graph of the same shape gets the same places without planning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from engine.context import BUFFER_ALIGN, aligned
from engine.errors import EngineError
from engine.graph import Graph
from engine.ops.table import OPS
from engine.tensor import Flag, Tensor

ALIGNMENT = BUFFER_ALIGN
MAX_CHUNKS = 16
MAX_FREE_BLOCKS = 256  # a chunk
ENDLESS = 1 << 62


class Place(NamedTuple):
    """Where a tensor lies: which buffer, which chunk of it, and the byte in the chunk."""

    buffer: int
    chunk: int
    offset: int


@dataclass(frozen=True)
class BufferType:
    """What a backend says of its memory: alignment of tensors, and the largest piece in bytes that it gives at once."""

    name: str = "host"
    alignment: int = ALIGNMENT
    max_size: int = ENDLESS


@dataclass
class Plan:
    """Places of planned tensors. sizes: bytes of every chunk of every buffer; naive: what no reuse would take;
    allocated, reused: tensors with memory of their own, and those that took over a source's; last_use: index of the
    node that reads a tensor last (one that nobody reads is kept to the end)."""

    places: dict[Tensor, Place] = field(default_factory=dict)
    sizes: list[list[int]] = field(default_factory=list)
    naive: int = 0
    allocated: int = 0
    reused: int = 0
    last_use: dict[Tensor, int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes in all."""
        return sum(map(sum, self.sizes))

    @property
    def offsets(self) -> dict[Tensor, int]:
        """Places as if all chunks lay one behind the other."""
        start, starts = 0, {}
        for i, chunks in enumerate(self.sizes):
            for j, size in enumerate(chunks):
                starts[i, j] = start
                start += size
        return {t: starts[p.buffer, p.chunk] + p.offset for t, p in self.places.items()}


@dataclass
class _Chunk:
    """Free blocks [offset, size] sorted by offset; `size` is the largest end of an allocation so far."""

    free: list[list[int]]
    size: int = 0

    def take(self, block: list[int], size: int) -> int:
        offset = block[0]
        block[0] += size
        block[1] -= size
        if block[1] == 0:
            self.free.remove(block)
        self.size = max(self.size, offset + size)
        return offset

    def give(self, offset: int, size: int) -> None:
        at = next((i for i, b in enumerate(self.free) if b[0] > offset), len(self.free))
        self.free.insert(at, [offset, size])
        for i in (at, at - 1):  # with the next one, then with the one before
            if 0 <= i < len(self.free) - 1 and sum(self.free[i]) == self.free[i + 1][0]:
                self.free[i][1] += self.free.pop(i + 1)[1]
        if len(self.free) > MAX_FREE_BLOCKS:
            raise EngineError(f"graph too scattered: more than {MAX_FREE_BLOCKS} free blocks while planning its memory")


class _Space:
    """The address space of one buffer while it is planned."""

    def __init__(self, kind: BufferType):
        self.kind = kind
        self.chunks: list[_Chunk] = []

    def padded(self, size: int) -> int:
        return -(-max(size, 1) // self.kind.alignment) * self.kind.alignment

    def take(self, size: int) -> tuple[int, int]:
        """(chunk, offset) of `size` bytes."""
        size = self.padded(size)
        found = self._hole(size) or self._end(size) or self._new_chunk(size)
        chunk, block = found
        return chunk, self.chunks[chunk].take(block, size)

    def give(self, chunk: int, offset: int, size: int) -> None:
        self.chunks[chunk].give(offset, self.padded(size))

    def _hole(self, size: int) -> tuple[int, list[int]] | None:
        """The smallest block that fits, the last of each chunk left out; of several chunks the last that has one."""
        found = None
        for i, chunk in enumerate(self.chunks):
            fitting = [b for b in chunk.free[:-1] if b[1] >= size]
            if fitting:
                found = i, min(reversed(fitting), key=lambda b: b[1])
        return found

    def _end(self, size: int) -> tuple[int, list[int]] | None:
        """The end of a chunk: where least has to be added, then where least is left over."""
        ends = [(i, c.free[-1]) for i, c in enumerate(self.chunks) if c.free and c.free[-1][1] >= size]

        def cost(end: tuple[int, list[int]]) -> tuple[bool, int]:
            spare = self.chunks[end[0]].size - end[1][0] - size  # negative: bytes to add
            return (spare < 0, abs(spare))

        return min(ends, key=cost, default=None)

    def _new_chunk(self, size: int) -> tuple[int, list[int]]:
        if len(self.chunks) == MAX_CHUNKS:
            raise EngineError(f"no room for {size:,} bytes in {MAX_CHUNKS} pieces of {self.kind.name} memory")
        last = len(self.chunks) == MAX_CHUNKS - 1  # the last one has no end
        self.chunks.append(_Chunk([[0, ENDLESS if last else max(size, self.kind.max_size)]]))
        return len(self.chunks) - 1, self.chunks[-1].free[0]


def plan(
    graph: Graph,
    alignment: int = ALIGNMENT,
    inplace: bool = True,
    kinds: Sequence[BufferType] | None = None,
    buffer_of: Callable[[Tensor], int] = lambda tensor: 0,
) -> Plan:
    """Place every intermediate of `graph`. `inplace=False` turns the reuse of dying sources off. kinds: the buffers,
    one by default; buffer_of: which of them a tensor belongs to."""
    kinds = kinds or [BufferType(alignment=alignment)]
    planner = _Planner(graph, kinds, buffer_of)
    for tensor in (*graph.leafs, *(n for n in graph.nodes if n.flags & Flag.INPUT)):
        if tensor.buffer is None and tensor.view_src is None:
            planner.place(tensor)
    for i, node in enumerate(graph.nodes):
        outside = node.op is None and node.buffer is not None  # a parameter with memory of its own
        unplaced = node.view_src is None and node not in planner.owned and not outside
        if unplaced and not (inplace and OPS[node.op].inplace and planner.take_over(node)):
            planner.place(node)
        planner.done(i, node)
    result = planner.result
    result.sizes = [[chunk.size for chunk in space.chunks] for space in planner.spaces]
    return result


class _Planner:
    """State of a plan in the making."""

    def __init__(self, graph: Graph, kinds: Sequence[BufferType], buffer_of: Callable[[Tensor], int]):
        self.spaces = [_Space(kind) for kind in kinds]
        self.buffer_of = buffer_of
        self.result = Plan()
        self.owned: set[Tensor] = set()  # tensors that hold a block now
        self.children: dict[Tensor, int] = {}
        self.views: dict[Tensor, int] = {}
        for node in graph.nodes:
            for source in node.src:
                if source is not None:
                    self.children[source] = self.children.get(source, 0) + 1
            if node.view_src is not None:
                self.views[node.view_src] = self.views.get(node.view_src, 0) + 1

    def place(self, tensor: Tensor) -> None:
        buffer = self.buffer_of(tensor)
        self.result.naive += self.spaces[buffer].padded(tensor.nbytes)
        self.result.allocated += 1
        self.result.places[tensor] = Place(buffer, *self.spaces[buffer].take(tensor.nbytes))
        self.owned.add(tensor)

    def take_over(self, node: Tensor) -> bool:
        """Let the node sit in the memory of a source that only it reads."""
        for source in node.src:
            if source is None or not node.same_layout(source) or self.children.get(source, 0) != 1:
                continue
            root = source.view_src or source
            if root not in self.owned or (source.flags | root.flags) & Flag.OUTPUT or self.views.get(source, 0):
                continue
            if root is not source and (source.view_offs or self.views[root] != 1 or self.children.get(root, 0)):
                continue
            place = self.result.places[root]
            if place.buffer != self.buffer_of(node):
                continue
            self.result.places[node] = place
            space = self.spaces[place.buffer]
            self.result.naive += space.padded(node.nbytes)
            self.result.reused += 1
            self.owned.discard(root)
            self.owned.add(node)
            rest = space.padded(root.nbytes) - space.padded(node.nbytes)
            if rest:
                space.give(place.chunk, place.offset + space.padded(node.nbytes), rest)
            return True
        return False

    def done(self, index: int, node: Tensor) -> None:
        """The node has run: let go of what it read last."""
        for source in node.src:
            if source is None:
                continue
            self.result.last_use[source.view_src or source] = index
            self.children[source] -= 1
            if not self._dead(source):
                continue
            if source.view_src is None:
                self._release(source)
            elif source.op is not None:
                self.views[source.view_src] -= 1
                if self._dead(source.view_src):
                    self._release(source.view_src)

    def _dead(self, tensor: Tensor) -> bool:
        return self.children.get(tensor, 0) == 0 and self.views.get(tensor, 0) == 0

    def _release(self, tensor: Tensor) -> None:
        if tensor in self.owned and not tensor.flags & Flag.OUTPUT:
            place = self.result.places[tensor]
            self.spaces[place.buffer].give(place.chunk, place.offset, tensor.nbytes)
            self.owned.discard(tensor)


class _Slot(NamedTuple):
    """What a plan remembers of one tensor: its op, its place and size, and when it is read last."""

    op: str | None
    place: Place | None
    size: int
    last_use: int


class Allocator:
    """Plans, holds the memory, and binds graphs to it. `planned` and `reapplied` count how often a graph needed a new
    plan, and how often the last one served. kinds: the buffers of the backends, in the order that `buffer_of`
    counts."""

    def __init__(self, kinds: Sequence[BufferType] = (BufferType(),), inplace: bool = True):
        self.kinds = tuple(kinds)
        self.inplace = inplace
        self.plan = Plan()
        self.planned = self.reapplied = 0
        self._slots: list[_Slot] | None = None
        self._arenas: dict[tuple[int, int], np.ndarray] = {}

    @property
    def size(self) -> int:
        """Bytes of memory held."""
        return sum(arena.size for arena in self._arenas.values())

    def reserve(self, graph: Graph, buffer_of: Callable[[Tensor], int] = lambda tensor: 0) -> Plan:
        """Plan for `graph`, the largest that will come, and get the memory. Binds nothing."""
        self._unbind(graph)
        found = plan(graph, inplace=self.inplace, kinds=self.kinds, buffer_of=buffer_of)
        self.plan, self.planned = found, self.planned + 1
        self._slots = [
            _Slot(t.op, found.places.get(t), t.nbytes, found.last_use.get(t, ENDLESS))
            for t in (*graph.leafs, *graph.nodes)
        ]
        self._shape = len(graph.leafs), len(graph.nodes)
        for i, chunks in enumerate(found.sizes):
            for j, size in enumerate(chunks):
                held = self._arenas.get((i, j))
                if held is None or held.size < size:
                    self._arenas[i, j] = aligned(size)
        return found

    def allocate(self, graph: Graph, buffer_of: Callable[[Tensor], int] = lambda tensor: 0) -> Plan:
        """Bind every tensor of `graph` to its place; the last plan is used again if the graph fits it."""
        self._unbind(graph)
        if self._fits(graph, buffer_of):
            self.reapplied += 1
            tensors = zip((*graph.leafs, *graph.nodes), self._slots or ())
            self.plan.places = {t: slot.place for t, slot in tensors if slot.place is not None}
        else:
            self.reserve(graph, buffer_of)
        for tensor, place in self.plan.places.items():
            tensor.bind(self._arenas[place.buffer, place.chunk], place.offset)
            tensor.backend = self.kinds[place.buffer].name
        bind_views(graph)
        return self.plan

    def _unbind(self, graph: Graph) -> None:
        """Leafs that an earlier plan of ours placed are to be placed anew."""
        held = {id(arena) for arena in self._arenas.values()}
        for leaf in graph.leafs:
            if leaf.buffer is not None and id(leaf.buffer) in held:
                leaf.buffer = leaf.backend = None

    def _fits(self, graph: Graph, buffer_of: Callable[[Tensor], int]) -> bool:
        """The same ops in the same order, nothing larger, and nothing read later than it was planned to live."""
        if self._slots is None or self._shape != (len(graph.leafs), len(graph.nodes)):
            return False
        slot_of = dict(zip((*graph.leafs, *graph.nodes), self._slots))
        for tensor, slot in slot_of.items():
            bound = tensor.view_src is not None or (tensor.op is None and tensor.buffer is not None)
            if tensor.op != slot.op or bound != (slot.place is None):
                return False
            if slot.place is not None and (tensor.nbytes > slot.size or buffer_of(tensor) != slot.place.buffer):
                return False
        for i, node in enumerate(graph.nodes):
            for source in node.src:
                root = None if source is None else source.view_src or source
                if root in slot_of and slot_of[root].place is not None and slot_of[root].last_use < i:
                    return False
        return True


def bind_views(graph: Graph) -> None:
    """Give every view the memory of its root."""
    for tensor in graph.nodes:
        root = tensor.view_src
        if root is not None:
            assert root.buffer is not None, f"{root!r} has no memory: bind it before the graph is prepared"
            tensor.bind(root.buffer, root.offset + tensor.view_offs)
            tensor.backend = root.backend
