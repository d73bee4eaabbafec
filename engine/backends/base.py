"""What a backend is: it takes a graph, places its intermediates, and runs it as often as asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from engine.alloc import Allocator, BufferType, Plan
from engine.graph import Graph
from engine.tensor import Tensor

#: Called with (node, True) before a node is run: does the caller want to see it? If so, with (node, False) after it.
EvalCallback = Callable[[Tensor, bool], bool]
#: Called after a node: should the run end here?
AbortCallback = Callable[[], bool]


class Status(IntEnum):
    """How a run ended. Failures raise instead (EngineError, MemoryError)."""

    SUCCESS = 0
    ABORTED = 1


@dataclass(frozen=True)
class Timing:
    """What one step of a program took: the nodes that it computed (several where fused), and nanoseconds."""

    nodes: tuple[Tensor, ...]
    nanoseconds: int


class Program(Protocol):
    """Nodes in a form that a backend runs at once. Their memory is bound. `scratch_size`: bytes that nodes share."""

    scratch_size: int

    def run(
        self,
        callback: EvalCallback | None = None,
        abort: AbortCallback | None = None,
        timings: list[Timing] | None = None,
    ) -> Status: ...


class Backend(Protocol):
    """`supports`: can it compute this node?; `compile`: nodes in order, with memory -> Program; `prepare`: a whole
    graph whose weights are bound, in memory of its own or of an allocator that graphs share which run in turn."""

    name: str
    memory: BufferType

    def supports(self, node: Tensor) -> bool: ...

    def compile(self, nodes: Sequence[Tensor], graph: Graph, threads: int | None = None) -> Program: ...

    def prepare(self, graph: Graph, threads: int | None = None, allocator: Allocator | None = None) -> Executable: ...


class Executable:
    """A graph with memory and a program. Write the inputs through `tensor.array()`, run, read the outputs likewise."""

    def __init__(self, graph: Graph, backend: Backend, threads: int | None = None, allocator: Allocator | None = None):
        self.graph = graph
        self.allocator = allocator or Allocator((backend.memory,))
        self.plan: Plan = self.allocator.allocate(graph)
        self.program = backend.compile(graph.nodes, graph, threads)

    def run(
        self,
        callback: EvalCallback | None = None,
        abort: AbortCallback | None = None,
        timings: list[Timing] | None = None,
    ) -> Status:
        """Compute all nodes in order. callback: see EvalCallback; abort: asked after every node, a run that it ends
        returns ABORTED; timings: is filled with what each step took."""
        return self.program.run(callback, abort, timings)
