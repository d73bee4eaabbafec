"""The graph: headers in the order in which they can be computed."""

from __future__ import annotations

import itertools

from engine.errors import EngineError
from engine.tensor import Tensor

DEFAULT_SIZE = 2048  # nodes
_uids = itertools.count(1)


class Graph:
    """`expand` walks the sources of a result, depth first, and appends what is new: leafs (no op) and nodes.

    The order is fixed by construction: a node comes after all of its sources. `use_counts` says how many nodes read a
    tensor, twice for one that reads it twice. `uid` tells graphs apart. More than `size` nodes raise EngineError.
    """

    def __init__(self, size: int = DEFAULT_SIZE):
        self.size = size
        self.nodes: list[Tensor] = []
        self.leafs: list[Tensor] = []
        self.use_counts: dict[Tensor, int] = {}
        self.uid = next(_uids)
        self._seen: set[Tensor] = set()

    def expand(self, result: Tensor) -> Graph:
        """Append everything that `result` needs, and itself."""
        stack: list[tuple[Tensor, int]] = [(result, 0)]
        while stack:
            tensor, at = stack.pop()
            if at == 0:
                if tensor in self._seen:
                    continue
                self._seen.add(tensor)
            sources = [s for s in tensor.src if s is not None]
            if at < len(sources):
                stack.append((tensor, at + 1))
                self.use_counts[sources[at]] = self.use_counts.get(sources[at], 0) + 1
                stack.append((sources[at], 0))
            elif tensor.op is None:
                tensor.name = tensor.name or f"leaf_{len(self.leafs)}"
                self.leafs.append(tensor)
            else:
                if len(self.nodes) == self.size:
                    raise EngineError(f"graph full: more than {self.size} nodes")
                tensor.name = tensor.name or f"node_{len(self.nodes)}"
                self.nodes.append(tensor)
        return self

    def dump(self) -> str:
        """The graph as text, one line a node; equal graphs give equal text."""
        index = {t: f"%{i}" for i, t in enumerate(self.nodes)} | {t: t.name for t in self.leafs}
        lines = [f"{len(self.nodes)} nodes, {len(self.leafs)} leafs"]
        for i, t in enumerate(self.nodes):
            sources = ", ".join(index[s] for s in t.src if s is not None)
            params = f" {t.params}" if t.params else ""
            lines.append(f"%{i} {t.name}: {t.op}({sources}){params} -> {t.format} {'x'.join(map(str, t.ne))}")
        return "\n".join(lines)
