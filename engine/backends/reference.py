"""The backend in NumPy: slow, obvious, and the definition that the others are tested against."""

from __future__ import annotations

from engine.backends.base import EvalCallback, place
from engine.graph import Graph
from engine.ops.table import OPS


class ReferenceBackend:
    """Runs each op's `reference` in turn."""

    def prepare(self, graph: Graph) -> ReferenceExecutable:
        return ReferenceExecutable(graph)


class ReferenceExecutable:
    def __init__(self, graph: Graph):
        self.graph = graph
        self.plan, self._arena = place(graph)

    def run(self, callback: EvalCallback | None = None) -> None:
        for node in self.graph.nodes:
            reference = OPS[node.op].reference
            if reference is None:
                continue
            wanted = callback is not None and callback(node, True)
            node.array()[...] = reference(node)
            if wanted and callback is not None:
                callback(node, False)
