"""What a backend is: it takes a graph, places its intermediates, and runs it as often as asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from engine.alloc import Plan, plan
from engine.graph import Graph
from engine.tensor import Tensor

#: Called with (node, True) before a node is run: does the caller want to see it? If so, with (node, False) after it.
EvalCallback = Callable[[Tensor, bool], bool]


class Executable(Protocol):
    """A graph with memory. Write the inputs through `tensor.array()`, run, read the outputs the same way."""

    graph: Graph
    plan: Plan

    def run(self, callback: EvalCallback | None = None) -> None: ...


class Backend(Protocol):
    """Prepares graphs whose weights are bound."""

    def prepare(self, graph: Graph) -> Executable: ...


def place(graph: Graph) -> tuple[Plan, np.ndarray]:
    """Plan a graph's memory, make the arena, bind every tensor to its place. Keep the arena as long as the graph."""
    placed = plan(graph)
    arena = np.zeros(placed.size + 64, np.uint8)
    start = -arena.ctypes.data % 64
    for tensor in (*graph.leafs, *graph.nodes):
        if tensor in placed.offsets:
            tensor.bind(arena, start + placed.offsets[tensor])
    for tensor in graph.nodes:
        if tensor.view_src is not None:
            root = tensor.view_src
            assert root.buffer is not None
            tensor.bind(root.buffer, root.offset + tensor.view_offs)
    return placed, arena
