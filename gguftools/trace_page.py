"""A trace as one HTML page without outside parts: totals, a map of the memory over the run, and a table of all
nodes."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from gguftools import report

if TYPE_CHECKING:
    from engine.trace import Event, GraphTrace, Trace

WIDTH, HEIGHT = 1000, 320  # pixels of a memory map

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1080px; padding: 0 1rem; color: #1c2024; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; } code { font-family: ui-monospace, monospace; }
table { border-collapse: collapse; font-size: 12px; width: 100%; } th { text-align: left; position: sticky; top: 0; }
th, td { padding: 2px 8px; border-bottom: 1px solid #e3e6e9; background: #fff; white-space: nowrap; }
td.n { text-align: right; font-variant-numeric: tabular-nums; } tr.view td { color: #8a929a; }
.bar { display: inline-block; height: 9px; background: #3b82c4; vertical-align: middle; } .scroll { overflow-x: auto; }
svg { width: 100%; height: auto; border: 1px solid #e3e6e9; background: #fafbfc; } svg rect:hover { stroke: #000; }
p.note { color: #59626b; max-width: 46rem; }
"""

#: Colours of the largest groups of ops, by hue; an op's hue is its place in the totals.
_HUES = (205, 25, 140, 280, 50, 340, 170, 235, 90, 0)


def page(trace: Trace, model: str, following: str) -> str:
    """The page's text. model: its name; following: the most likely next token as text."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        f"<title>{escape(model)}: trace</title><style>{_STYLE}</style>",
        f"<h1>{escape(model)}: how {len(trace.tokens)} tokens are computed</h1>",
        f"<p>Most likely next token: <code>{escape(report.plain(following))}</code> ({trace.next_token})</p>",
        "<h2>Memory</h2>",
        _table(
            ("memory", "size", "lives", "what"),
            [(m.name, report.size(m.bytes), m.lifetime, m.what) for m in trace.memory],
        ),
    ]
    for graph in trace.graphs:
        parts += _graph(graph)
    return "\n".join(parts) + "\n"


def _graph(graph: GraphTrace) -> list[str]:
    totals = graph.totals()
    hues = {op: _HUES[i % len(_HUES)] for i, op in enumerate(dict.fromkeys(e.op for e in graph.events))}
    whole = max(1, graph.nanoseconds)
    return [
        f"<h2>Graph <code>{escape(graph.name)}</code>: {len(graph.events)} nodes, "
        f"{graph.nanoseconds / 1e6:.2f} ms</h2>",
        _table(
            ("op", "steps", "µs", "share"),
            [(op, n, f"{ns / 1000:,.1f}", _Bar(ns / whole)) for op, n, ns in totals],
        ),
        f"<p class=note>Each rectangle is a tensor: from the node that writes it to the node that reads it last "
        "(left to right), over the bytes that it takes of the compute buffer (upwards). "
        f"{report.size(graph.planned)} are planned; without reuse it would be {report.size(graph.naive)}.</p>",
        _memory_map(graph, hues),
        "<div class=scroll>",
        _events(graph.events),
        "</div>",
    ]


def _memory_map(graph: GraphTrace, hues: dict[str, int]) -> str:
    mine = [e for e in graph.events if e.memory in ("own", "in place")]
    top = max((e.offset + e.bytes for e in mine), default=1)
    step = WIDTH / max(1, len(graph.events))
    shapes = []
    for e in mine:
        x, width = e.index * step, (max(e.last_use, e.index) - e.index + 1) * step
        height = max(0.5, e.bytes / top * HEIGHT)
        y = HEIGHT - e.offset / top * HEIGHT - height
        title = escape(
            f"#{e.index} {e.name}: {e.op}, {report.size(e.bytes)} at {e.offset:,}, read last by #{e.last_use}"
        )
        shapes.append(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" '
            f'fill="hsl({hues.get(e.op, 0)} 60% 62%)" stroke="#fff" stroke-width=".3"><title>{title}</title></rect>'
        )
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="memory map">{"".join(shapes)}</svg>'


def _events(events: list[Event]) -> str:
    longest = max((e.nanoseconds or 0 for e in events), default=1) or 1
    head = ("#", "name", "op", "shape", "type", "sources", "backend", "offset", "bytes", "memory", "µs", "")
    rows = []
    for e in events:
        fused = f"in #{e.fused_into}" if e.fused_into is not None else ""
        time = fused if e.nanoseconds is None else f"{e.nanoseconds / 1000:,.1f}"
        rows.append(
            (
                e.index, e.name, e.op, "x".join(map(str, e.shape)), e.format, ", ".join(e.sources), e.backend, e.offset,
                e.bytes, e.memory, time, _Bar((e.nanoseconds or 0) / longest),
            )
        )  # fmt: skip
    return _table(head, rows, [e.memory == "view" for e in events])


class _Bar(float):
    """A share that is drawn."""


def _table(head: tuple[str, ...], rows: list[tuple], pale: list[bool] | None = None) -> str:
    lines = ["<table><thead><tr>" + "".join(f"<th>{escape(h)}</th>" for h in head) + "</tr></thead><tbody>"]
    for i, row in enumerate(rows):
        kind = ' class="view"' if pale is not None and pale[i] else ""
        lines.append(f"<tr{kind}>" + "".join(map(_cell, row)) + "</tr>")
    return "\n".join([*lines, "</tbody></table>"])


def _cell(value: object) -> str:
    if isinstance(value, _Bar):
        return f'<td><span class="bar" style="width:{120 * value:.1f}px"></span> {value:.1%}</td>'
    if isinstance(value, int):
        return f"<td class=n>{value:,}</td>"
    return f"<td>{escape(report.plain(str(value)))}</td>"
