"""The five memories of a model that runs, how large they are, and how long each lives.

Headers say what a tensor is, and live apart from the bytes that hold its numbers: the same graph can be built on any
backend, and a model's headers take kilobytes whatever its weights take.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.backends.base import Executable
from engine.context import Context
from engine.scheduler import Schedule
from engine.tensor import Tensor


@dataclass(frozen=True)
class Prepared:
    """A graph that is ready to run, its inputs and results by name, and the arena of its headers."""

    executable: Executable | Schedule
    io: dict[str, Tensor]
    ctx: Context


@dataclass(frozen=True)
class Memory:
    """One of the five. naive: what it would take without reuse, where that differs."""

    name: str
    bytes: int
    lifetime: str
    what: str
    naive: int | None = None


def report(headers: Context, weights: Iterable[Tensor], graphs: Sequence[Prepared]) -> list[Memory]:
    """The five memories of a model and of the graphs that are kept for it."""
    plans = [p.executable.plan for p in graphs]
    return [
        Memory("model headers", headers.used, "from load to close", "a header for each weight"),
        Memory("weights", sum(t.nbytes for t in weights), "from load to close", "mapped from the file, never expanded"),
        Memory(
            "graph headers",
            sum(p.ctx.used for p in graphs),
            "until a graph of another shape takes its place",
            "a header for each node and input, and the graph's lists",
        ),
        Memory(
            "compute buffers",
            sum(p.executable.allocator.size for p in graphs),
            "as long as the graph; its content from node to node",
            "inputs, intermediates and outputs, in planned places",
            sum(plan.naive for plan in plans),
        ),
        Memory(
            "scratch",
            sum(p.executable.program.scratch_size for p in graphs),
            "as long as the graph; its content for one node",
            "tiles that threads decode and sort in: the largest request of all nodes",
        ),
    ]
