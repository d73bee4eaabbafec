"""What a run did, node by node: for people who want to see how a model is computed.

A trace is taken from the program that all runs use: the same kernels, the same fusion, the same places in memory; the
thread that leads notes the clock behind every node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.backends.base import Timing
from engine.errors import EngineError
from engine.memory import Memory, Prepared
from engine.ops.table import label
from engine.session import HEAD_ROWS, Session
from engine.tensor import Tensor

#: What a node's memory is: its own, taken over from a source that died there, another tensor's, or outside of the plan.
OWN, TAKEN, VIEW, OUTSIDE = "own", "in place", "view", "outside"


@dataclass(frozen=True)
class Event:
    """One node of a run. shape: NumPy's order; sources: names; offset: bytes from the start of its buffer's chunk;
    memory: see OWN; last_use: index of the node that reads it last, its own if none does; nanoseconds: None where
    nothing was computed, or where another node's kernel did it too (`fused_into`, that node's index)."""

    index: int
    name: str
    op: str
    shape: tuple[int, ...]
    format: str
    sources: tuple[str, ...]
    backend: str
    offset: int
    bytes: int
    memory: str
    last_use: int
    nanoseconds: int | None
    fused_into: int | None = None


@dataclass(frozen=True)
class GraphTrace:
    """One graph's run. planned, naive: bytes of its compute buffer with and without reuse; scratch: bytes; dot: the
    graph in Graphviz's language."""

    name: str
    events: list[Event]
    planned: int
    naive: int
    scratch: int
    dot: str

    @property
    def nanoseconds(self) -> int:
        """Time of all nodes."""
        return sum(e.nanoseconds or 0 for e in self.events)

    def totals(self) -> list[tuple[str, int, int]]:
        """(op, steps, nanoseconds), the longest first; fused ops are one step, named by all of them."""
        inner: dict[int, list[str]] = {}
        for event in self.events:
            if event.fused_into is not None:
                inner.setdefault(event.fused_into, []).append(event.op)
        found: dict[str, list[int]] = {}
        for event in self.events:
            if event.nanoseconds is not None:
                entry = found.setdefault("+".join([*inner.get(event.index, []), event.op]), [0, 0])
                entry[0] += 1
                entry[1] += event.nanoseconds
        return sorted(((op, n, ns) for op, (n, ns) in found.items()), key=lambda row: -row[2])


@dataclass(frozen=True)
class Trace:
    """A model's run over some tokens: its graphs in order, the memories, and the most likely next token."""

    tokens: list[int]
    graphs: list[GraphTrace]
    memory: list[Memory]
    next_token: int


def trace(session: Session, tokens: Sequence[int]) -> Trace:
    """Run a model over `tokens`, twice, so that compiling and the first touch of memory are not counted, and keep what
    the second run did. Raises EngineError for no tokens, or more than the model's context."""
    session.check_context(len(tokens))
    ids = list(map(int, tokens))
    if not ids:
        raise EngineError("no tokens to run: the text is empty")
    graphs: list[GraphTrace] = []
    session.head(session.hidden(np.array(ids)[None])[-HEAD_ROWS:])
    session.on_run = lambda prepared, timings: graphs.append(_describe(prepared, timings))
    try:
        logits = session.head(session.hidden(np.array(ids)[None])[-HEAD_ROWS:])
    finally:
        session.on_run = None
    names = [replace(graph, name=name) for graph, name in zip(graphs, ("body", "head"))]
    return Trace(ids, names, session.memory(), int(logits[-1].argmax()))


def _describe(prepared: Prepared, timings: Sequence[Timing]) -> GraphTrace:
    executable = prepared.executable
    return GraphTrace(
        "",
        _events(executable.graph.nodes, timings, getattr(executable, "originals", {})),
        executable.plan.size,
        executable.plan.naive,
        executable.program.scratch_size,
        executable.graph.dot(),
    )


def _events(nodes: Sequence[Tensor], timings: Sequence[Timing], originals: dict[Tensor, Tensor]) -> list[Event]:
    index = {node: i for i, node in enumerate(nodes)}
    time: dict[Tensor, int] = {}
    into: dict[Tensor, Tensor] = {}
    for timing in timings:
        *others, last = (originals.get(n, n) for n in timing.nodes)
        time[last] = timing.nanoseconds
        into |= dict.fromkeys(others, last)
    last_use = _last_uses(nodes)
    return [
        Event(
            i,
            node.name,
            label(node),
            node.shape,
            node.format.name,
            tuple(s.name for s in node.src if s is not None),
            node.backend or "file",
            node.offset,
            node.nbytes,
            _memory(node),
            last_use.get(node.view_src or node, i),
            time.get(node),
            index[into[node]] if node in into else None,
        )
        for i, node in enumerate(nodes)
    ]


def _last_uses(nodes: Sequence[Tensor]) -> dict[Tensor, int]:
    return {s.view_src or s: i for i, node in enumerate(nodes) for s in node.src if s is not None}


def _memory(node: Tensor) -> str:
    if node.view_src is not None:
        return VIEW
    if node.buffer is None:
        return OUTSIDE
    took = (s is not None and s.buffer is node.buffer and s.offset == node.offset for s in node.src)
    return TAKEN if any(took) else OWN
