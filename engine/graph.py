"""The graph: headers in the order in which they can be computed. Building one computes nothing and compiles nothing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from engine.context import Context
from engine.errors import EngineError
from engine.tensor import Flag, Tensor

DEFAULT_SIZE = 2048  # nodes
GRAPH_HEADER, NODE_ENTRY = (
    80,
    40,
)  # bytes in an arena: of the graph, and a node's places in list, leafs, table and counts
_uids = itertools.count(1)


class Graph:
    """`expand` walks the sources of a result, depth first, and appends what is new: leafs (no op) and nodes.

    The order is fixed by construction: a node comes after all of its sources. `use_counts` says how many nodes read a
    tensor, twice for one that reads it twice. `uid` tells graphs apart. More than `size` nodes, or as many leafs, raise
    EngineError. `right_first` visits a node's sources from the last to the first.
    """

    def __init__(self, size: int = DEFAULT_SIZE, ctx: Context | None = None, right_first: bool = False):
        self.size = size
        self.right_first = right_first
        self.nodes: list[Tensor] = []
        self.leafs: list[Tensor] = []
        self.use_counts: dict[Tensor, int] = {}
        self.uid = next(_uids)
        self._seen: set[Tensor] = set()
        if ctx is not None:
            ctx.take(self.overhead, "graph", self)

    @property
    def overhead(self) -> int:
        """Bytes that the graph itself takes in an arena, beside its headers."""
        return GRAPH_HEADER + NODE_ENTRY * self.size

    def expand(self, result: Tensor, compute: bool = True) -> Graph:
        """Append everything that `result` needs, and itself; with `compute`, all of it is to be run."""
        stack: list[tuple[Tensor, int]] = [(result, 0)]
        while stack:
            tensor, at = stack.pop()
            if at == 0:
                if tensor in self._seen:
                    continue
                self._seen.add(tensor)
            sources = [s for s in tensor.src if s is not None]
            if self.right_first:
                sources.reverse()
            if at < len(sources):
                stack.append((tensor, at + 1))
                self.use_counts[sources[at]] = self.use_counts.get(sources[at], 0) + 1
                stack.append((sources[at], 0))
            else:
                self._append(tensor)
        if compute:
            self._mark(result)
        return self

    def select(self, results: Sequence[Tensor], index: int) -> Tensor:
        """Append all `results`, and mark only number `index` to be run: the graph keeps its shape whichever is chosen,
        so its memory plan can be used again. Returns the chosen one."""
        for result in results:
            self.expand(result, compute=False)
        self._mark(results[index])
        return results[index]

    def _append(self, tensor: Tensor) -> None:
        is_leaf = tensor.op is None and not tensor.flags & Flag.PARAM
        kind, into = ("leaf", self.leafs) if is_leaf else ("node", self.nodes)
        if len(into) == self.size:
            raise EngineError(f"graph full: more than {self.size} {kind}s; make the graph larger")
        tensor.name = tensor.name or f"{kind}_{len(into)}"
        into.append(tensor)

    def _mark(self, result: Tensor) -> None:
        stack = [result]
        while stack:
            tensor = stack.pop()
            if not tensor.flags & Flag.COMPUTE:
                tensor.flags |= Flag.COMPUTE
                stack += [s for s in tensor.src if s is not None]

    def part(self, first: int, last: int) -> Graph:
        """The nodes first..last-1 as a graph of their own, with the same use counts and no leafs."""
        graph = Graph(max(1, last - first))
        graph.nodes = self.nodes[first:last]
        graph.use_counts = self.use_counts
        return graph

    def dump(self) -> str:
        """The graph as text, one line a node; equal graphs give equal text."""
        index = {t: f"%{i}" for i, t in enumerate(self.nodes)} | {t: t.name for t in self.leafs}
        lines = [f"{len(self.nodes)} nodes, {len(self.leafs)} leafs"]
        for i, t in enumerate(self.nodes):
            sources = ", ".join(index[s] for s in t.src if s is not None)
            params = f" {t.params}" if t.params else ""
            lines.append(f"%{i} {t.name}: {t.op}({sources}){params} -> {t.format} {'x'.join(map(str, t.ne))}")
        return "\n".join(lines)

    def dot(self) -> str:
        """The graph in Graphviz's language: weights and inputs as boxes, views pale, outputs with a double border,
        views of memory as dashed lines. `dot -Tsvg` draws it."""
        from engine.ops.table import label

        name = {t: f"n{i}" for i, t in enumerate((*self.nodes, *self.leafs))}
        lines = ["digraph graph_ {", '  rankdir=TB; node [fontname="monospace", fontsize=10, style=filled];']
        for tensor, id_ in name.items():
            shape = "x".join(map(str, _without_ones(tensor.ne)))
            text = _quoted(f"{tensor.name}\n{label(tensor)}\n{tensor.format} {shape}")
            lines.append(f"  {id_} [label={text}, {_look(tensor)}];")
        for tensor in self.nodes:
            for i, source in enumerate(tensor.src):
                if source is not None:
                    lines.append(f'  {name[source]} -> {name[tensor]} [label="{i}", fontsize=8];')
            if tensor.view_src is not None and tensor.view_src in name and tensor.view_src not in tensor.src:
                lines.append(f"  {name[tensor.view_src]} -> {name[tensor]} [style=dashed, arrowhead=none];")
        return "\n".join([*lines, "}"])


def _without_ones(ne: tuple[int, ...]) -> list[int]:
    last = max((i for i, n in enumerate(ne) if n != 1), default=0)
    return list(ne[: last + 1])


def _look(tensor: Tensor) -> str:
    if tensor.op is None:
        return 'shape=box, fillcolor="' + ("lightblue" if tensor.flags & Flag.INPUT else "lightyellow") + '"'
    border = ", peripheries=2" if tensor.flags & Flag.OUTPUT else ""
    return 'shape=ellipse, fillcolor="' + ("white" if tensor.is_empty_op else "palegreen") + '"' + border


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
