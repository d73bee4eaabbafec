"""The backend in NumPy: slow, obvious, and the definition that the others are tested against."""

from __future__ import annotations

import time
from collections.abc import Sequence

from engine.alloc import Allocator, BufferType
from engine.backends.base import AbortCallback, EvalCallback, Executable, Status, Timing
from engine.graph import Graph
from engine.ops.table import OPS
from engine.tensor import Flag, Tensor


class ReferenceBackend:
    """Runs each op's `reference` in turn."""

    name = "reference"
    memory = BufferType("reference")

    def supports(self, node: Tensor) -> bool:
        """Whether the op is defined: all are."""
        return node.op in OPS

    def compile(self, nodes: Sequence[Tensor], graph: Graph, threads: int | None = None) -> ReferenceProgram:
        """See `Backend`."""
        return ReferenceProgram(nodes)

    def prepare(self, graph: Graph, threads: int | None = None, allocator: Allocator | None = None) -> Executable:
        """See `Backend`."""
        return Executable(graph, self, threads, allocator)


class ReferenceProgram:
    """Nodes to compute, one after another."""

    scratch_size = 0

    def __init__(self, nodes: Sequence[Tensor]):
        self.nodes = [n for n in nodes if not n.is_empty_op and n.flags & Flag.COMPUTE]

    def run(
        self,
        callback: EvalCallback | None = None,
        abort: AbortCallback | None = None,
        timings: list[Timing] | None = None,
    ) -> Status:
        """See `Executable.run`."""
        for node in self.nodes:
            wanted = callback is not None and callback(node, True)
            started = time.perf_counter_ns()
            compute(node)
            if timings is not None:
                timings.append(Timing((node,), time.perf_counter_ns() - started))
            if wanted and callback is not None:
                callback(node, False)
            if abort is not None and node is not self.nodes[-1] and abort():
                return Status.ABORTED
        return Status.SUCCESS


def compute(node: Tensor) -> None:
    """One node by its definition."""
    op = OPS[node.op]
    assert op.reference is not None
    result = op.reference(node)
    if not op.store:
        node.array()[...] = result
