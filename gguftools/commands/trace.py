"""`gguftools trace`: the graph of a model as it runs, node by node, as text, JSON, a picture or a page."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gguftools import report
from gguftools.commands.options import Json, Threads

if TYPE_CHECKING:
    from engine.trace import Event, GraphTrace, Trace


def trace(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="GGUF file.", show_default=False)],
    prompt: Annotated[str, typer.Option("-p", "--prompt", metavar="TEXT", help="Text to run the model over.")],
    backend: Annotated[
        str, typer.Option(help="cpu, reference, or several joined by '+': the layers are then spread over them.")
    ] = "cpu",
    fusion: Annotated[
        bool, typer.Option("--fusion/--no-fusion", help="Merge neighbouring ops into one kernel.")
    ] = True,
    threads: Threads = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write a page with a map of the memory.", show_default=False),
    ] = None,
    dot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the graph for Graphviz.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Show how a model computes: every node with op, shape, backend, place in memory and time.

    Example: gguftools trace model.gguf -p "Once upon a time" --html trace.html
    """
    from engine.trace import trace as run

    session = _load(model, backend, fusion, threads)
    ids = session.tokenize(prompt)
    found = run(session, ids)
    if html is not None:
        from gguftools.trace_page import page

        html.write_text(page(found, model.name, session.detokenize([found.next_token])), encoding="utf-8")
    if dot is not None:
        dot.write_text("\n".join(g.dot for g in found.graphs), encoding="utf-8")
    if json:
        report.print_json(describe(found) | {"model": str(model), "next_text": session.detokenize([found.next_token])})
        return
    _print(found, session.detokenize(ids), session.detokenize([found.next_token]))


def _load(model: Path, backend: str, fusion: bool, threads: int | None) -> Any:
    from engine.backends import get_backend
    from engine.scheduler import Scheduler, by_layer
    from gguftools.loading import load

    names = backend.split("+")
    backends = [get_backend(name, threads, fuse=fusion) for name in names]
    if len(names) == 1:
        return load(model, backends[0], threads)
    session = load(model, Scheduler(backends), threads)
    rule = by_layer(names)
    for name, tensor in session.weights.items():
        tensor.backend = rule(name, session.hparams.n_layer)
    return session


def describe(found: Trace) -> dict[str, Any]:
    """A trace as JSON can hold it: tokens, memory, and per graph its events and totals."""
    return {
        "tokens": found.tokens,
        "next_token": found.next_token,
        "memory": [asdict(m) for m in found.memory],
        "graphs": [
            {
                "name": g.name,
                "nanoseconds": g.nanoseconds,
                "planned": g.planned,
                "naive": g.naive,
                "scratch": g.scratch,
                "events": [asdict(e) for e in g.events],
                "totals": [{"op": op, "steps": n, "nanoseconds": ns} for op, n, ns in g.totals()],
            }
            for g in found.graphs
        ],
    }


def _print(found: Trace, text: str, following: str) -> None:
    report.write(f"{len(found.tokens)} tokens: {report.plain(text)}")
    for graph in found.graphs:
        report.write()
        _print_graph(graph)
    report.write()
    report.table(
        ("memory", "size", "lives", "what"), ((m.name, report.size(m.bytes), m.lifetime, m.what) for m in found.memory)
    )
    report.write()
    report.write(f"next token: {found.next_token} '{report.plain(following)}'")


def _print_graph(graph: GraphTrace) -> None:
    columns = ("#", "name", "op", "shape", "sources", "backend", "offset", "bytes", "memory", "us")
    report.table(columns, (_row(e) for e in graph.events), f"graph '{graph.name}'")
    report.write()
    total = max(1, graph.nanoseconds)
    rows = ((op, n, ns / 1000, f"{ns / total:.1%}") for op, n, ns in graph.totals())
    report.table(("op", "steps", "us", "share"), ((op, n, round(us, 1), share) for op, n, us, share in rows))
    ratio = graph.planned / max(1, graph.naive)
    report.write(
        f"{graph.nanoseconds / 1e6:.2f} ms; compute buffer {report.size(graph.planned)} of {report.size(graph.naive)} "
        f"without reuse ({ratio:.0%}), scratch {report.size(graph.scratch)}"
    )


def _row(event: Event) -> tuple:
    shape = "x".join(map(str, _significant(event.shape))) + f" {event.format}"
    if event.nanoseconds is not None:
        time: object = round(event.nanoseconds / 1000, 1)
    else:
        time = f"in #{event.fused_into}" if event.fused_into is not None else ""
    return (
        event.index, event.name, event.op, shape, ", ".join(event.sources), event.backend, event.offset, event.bytes,
        event.memory, str(time),
    )  # fmt: skip


def _significant(shape: tuple[int, ...]) -> tuple[int, ...]:
    first = next((i for i, n in enumerate(shape) if n != 1), len(shape) - 1)
    return shape[first:]
