"""One page that shows a model file: sizes, types and bits by layer and role, error and divergence against a base,
metadata. The page holds everything it needs; texts from the file are escaped, and it runs no scripts."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gguftools._version import __version__
from gguftools.errors import GGUFError
from gguftools.files import atomic_output, check_output
from gguftools.gguf.reader import GGUF, TensorView
from gguftools.gguf.values import Array
from gguftools.measure import N_BATCH, N_CTX, measured
from gguftools.picture import PALETTE, Picture, bars, heat_map, treemap
from gguftools.report import plain, size
from quant.imatrix_statistics import place

if TYPE_CHECKING:
    from engine.evaluate import Evaluation

PIECE = 1 << 22  # weights that are held as float32 at a time
_SHOWN = 8  # elements of an array
_WIDTH = 400  # characters of a text

_STYLE = """
:root { color-scheme: light; } body { font: 14px/1.45 sans-serif; color: #222; background: #fff; margin: 2em auto;
max-width: 1080px; padding: 0 1em; } h1 { font-size: 1.5em; overflow-wrap: anywhere; } h2 { font-size: 1.15em;
margin-top: 2em; border-bottom: 1px solid #ddd; } figure { margin: 1em 0; overflow-x: auto; } figcaption { color: #555;
} table { border-collapse: collapse; } td, th { padding: .15em .8em .15em 0; text-align: left; vertical-align: top;
border-bottom: 1px solid #eee; overflow-wrap: anywhere; } td.n, th.n { text-align: right; font-variant-numeric:
tabular-nums; white-space: nowrap; } .key { display: inline-block; margin-right: 1em; } .key i { display: inline-block;
width: .9em; height: .9em; margin-right: .3em; vertical-align: -.1em; } svg { max-width: none; }
""".replace("\n", " ").strip()


@dataclass(frozen=True)
class Facts:
    """What the page tells. errors: relative root mean square error of a tensor against the base's, by name."""

    path: Path
    tensors: Mapping[str, TensorView]
    metadata: Sequence[tuple[str, str, str]]
    file_size: int
    errors: Mapping[str, float]
    result: Evaluation | None
    base: str
    text: str


def write(
    model: str | os.PathLike,
    output: str | os.PathLike,
    base: str | os.PathLike | None = None,
    text: str | os.PathLike | None = None,
    n_ctx: int = N_CTX,
    chunks: int | None = None,
    n_batch: int = N_BATCH,
    threads: int | None = None,
    on_chunk: Callable | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Write the page about a GGUF file. base: a GGUF file of the same model, for errors; text: to measure the
    divergence on; on_bytes: called with bytes of tensors that were compared.

    Raises GGUFError if the file cannot be read, the page not written, or a text is given without a base.
    """
    if text is not None and base is None:
        raise GGUFError("divergence is measured against a base: name one with --base")
    inputs = [Path(p) for p in (model, base, text) if p is not None]
    check_output(Path(output), inputs)
    with GGUF(model) as f:
        errors = tensor_errors(f, Path(base), threads, on_bytes) if base is not None else {}
        result = None
        if text is not None:
            found = measured([model], text, n_ctx, chunks, base, n_batch, threads, on_chunk, partial=True)
            result = found[0][1]
        facts = Facts(
            path=Path(model),
            tensors=f.tensors,
            metadata=[(key, str(field.type), _value(field.value)) for key, field in f.fields.items()],
            file_size=f.size,
            errors=errors,
            result=result,
            base=str(base or ""),
            text=str(text or ""),
        )
        with atomic_output(output, inputs) as file:
            file.write(page(facts).encode())


def tensor_errors(
    f: GGUF, base: Path, threads: int | None = None, on_bytes: Callable[[int], None] | None = None
) -> dict[str, float]:
    """Name -> root mean square of the differences from the base, over that of the base. Raises GGUFError for a base
    that
    lacks a tensor or has it in another shape."""
    found = {}
    with GGUF(base) as b:
        for name, view in f.tensors.items():
            if name not in b.tensors or b.tensors[name].shape != view.shape:
                raise GGUFError(f"{base}: has no tensor '{name}' of shape {list(view.shape)}: it is another model")
            found[name] = _relative_error(view, b.tensors[name], threads)
            if on_bytes is not None:
                on_bytes(view.nbytes)
    return found


def _relative_error(view: TensorView, base: TensorView, threads: int | None) -> float:
    from quant.quantize import dequantize_blocks

    if not view.ne or not view.size:
        return 0.0
    rows = [v.data.view(v.format.block).reshape(-1, v.ne[0] // v.format.block_size) for v in (view, base)]
    step = max(1, PIECE // view.ne[0])
    difference = total = 0.0
    for lo in range(0, len(rows[0]), step):
        x, y = (dequantize_blocks(r[lo : lo + step], v.format, threads) for r, v in zip(rows, (view, base)))
        difference += float(np.square(x - y, dtype=np.float64).sum())
        total += float(np.square(y, dtype=np.float64).sum())
    return math.sqrt(difference / total) if total else float(difference > 0)


def page(facts: Facts) -> str:
    """The page as HTML."""
    data = sum(t.nbytes for t in facts.tensors.values())
    weights = sum(t.size for t in facts.tensors.values())
    title = f"{facts.path.name}"
    parts = [
        _summary(facts, data, weights),
        _section("sizes", "Where the bytes are", _sizes(facts)),
        _section("types", "Type and bits per weight, by layer and role", _figure(_types(facts))),
    ]
    if facts.errors:
        caption = f"Root mean square error over root mean square of {facts.base}."
        parts.append(_section("errors", "Error against the base", _figure(_errors(facts), caption)))
    if facts.result is not None:
        parts.append(_section("divergence", "Divergence from the base", _divergence(facts)))
    parts.append(_section("metadata", "Metadata", _table(("key", "type", "value"), facts.metadata)))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{_html(title)}</title><style>{_STYLE}</style></head><body><h1>{_html(title)}</h1>"
        + "".join(parts)
        + f"<p>gguftools {__version__}</p></body></html>\n"
    )


def _summary(facts: Facts, data: int, weights: int) -> str:
    rows = [
        ("file", str(facts.path)),
        ("size", f"{size(facts.file_size)} ({facts.file_size:,} bytes)"),
        ("tensors", f"{len(facts.tensors):,}"),
        ("weights", f"{weights:,}"),
        ("bits per weight", f"{8 * data / max(1, weights):.3f}"),
    ]
    return _table(("", ""), rows)


def _colours(facts: Facts) -> dict[str, str]:
    """Type -> colour, the types with most bytes first."""
    totals: dict[str, int] = {}
    for t in facts.tensors.values():
        totals[t.format.name] = totals.get(t.format.name, 0) + t.nbytes
    order = sorted(totals, key=lambda name: -totals[name])
    return {name: PALETTE[min(i, len(PALETTE) - 1)] for i, name in enumerate(order)}


def _sizes(facts: Facts) -> str:
    colours = _colours(facts)
    items = [
        (
            name.removeprefix("blk.").removesuffix(".weight"),
            t.nbytes,
            colours[t.format.name],
            f"{name}: {t.format}, {list(t.shape)}, {size(t.nbytes)}",
        )
        for name, t in facts.tensors.items()
    ]
    key = "".join(f'<span class="key"><i style="background:{c}"></i>{_html(n)}</span>' for n, c in colours.items())
    return _figure(treemap("Bytes of every tensor", items)) + f"<p>{key}</p>"


def _grid(facts: Facts) -> tuple[list[str], list[str], dict[tuple[str, str], TensorView]]:
    """Layers, roles, and the tensor at each place."""
    found: dict[tuple[str, str], TensorView] = {}
    layers: dict[str, int] = {}
    roles: dict[str, None] = {}
    for name, t in facts.tensors.items():
        block, role = place(name)
        layer = "-" if block is None else str(block)
        found[layer, role] = t
        layers[layer] = -1 if block is None else block
        roles[role] = None
    return sorted(layers, key=lambda name: layers[name]), list(roles), found


def _types(facts: Facts) -> Picture:
    layers, roles, found = _grid(facts)

    def each(what: Callable[[TensorView], Any], default: Any) -> list[list[Any]]:
        return [[what(found[c, r]) if (c, r) in found else default for c in layers] for r in roles]

    values = each(lambda t: 8 * t.nbytes / t.size if t.size else None, None)
    tips = each(lambda t: f"{t.name}: {t.format}, {8 * t.nbytes / max(1, t.size):.3f} bits per weight", "")
    return heat_map("Bits per weight", roles, layers, values, tips, each(lambda t: t.format.name, ""), True, " bit")


def _errors(facts: Facts) -> Picture:
    layers, roles, found = _grid(facts)
    values, tips = [], []
    for role in roles:
        row = [facts.errors[found[layer, role].name] if (layer, role) in found else None for layer in layers]
        values.append(row)
        tips.append(["" if v is None else f"{found[layer, role].name}: {v:.3g}" for layer, v in zip(layers, row)])
    labels = [["" if v is None else f"{v:.3f}" for v in row] for row in values]
    return heat_map("Relative error", roles, layers, values, tips, labels)


def _divergence(facts: Facts) -> str:
    from engine.evaluate.statistics import HISTOGRAM_EDGES

    result = facts.result
    assert result is not None
    d = result.divergence
    assert d is not None
    low, high = d.same_top_interval
    rows = [
        ("PPL", f"{result.ppl.value:.4f} ± {result.ppl.error:.4f}"),
        ("PPL of the base", f"{d.base_ppl.value:.4f} ± {d.base_ppl.error:.4f}"),
        ("mean KLD", f"{d.mean_kld.value:.6f} ± {d.mean_kld.error:.6f}"),
        *((f"{p:g} % KLD", f"{d.kld_percentiles[p]:.6f}") for p in (50.0, 99.0, 99.9)),
        ("maximum KLD", f"{d.max_kld:.6f}"),
        ("same top token", f"{100 * d.same_top.value:.2f} % (95 %: {100 * low:.2f} to {100 * high:.2f} %)"),
        ("measured on", f"{result.n_tokens:,} tokens of {facts.text}, {result.n_chunks:,} chunks of {result.n_ctx:,}"),
        ("base", facts.base),
    ]
    names = [f"{edge:.0e}" for edge in HISTOGRAM_EDGES[:-1]]
    tips = [f"{a:g} to {b:g}: {n:,} tokens" for a, b, n in zip(HISTOGRAM_EDGES, HISTOGRAM_EDGES[1:], d.kld_histogram)]
    caption = "Tokens by KLD in nats; smaller ones are in the first bar."
    return _table(("", ""), rows) + _figure(bars("Tokens by KLD", names, d.kld_histogram, tips, every=4), caption)


def _value(value: object) -> str:
    if isinstance(value, Array):
        head = ", ".join(str(v)[:40] for v in value[:_SHOWN])
        return f"{len(value):,}: {head}{', ...' if len(value) > _SHOWN else ''}"
    text = str(value)
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}... ({len(text):,} characters)"


def _section(name: str, title: str, content: str) -> str:
    return f'<section id="{name}"><h2>{_html(title)}</h2>{content}</section>'


def _figure(picture: Picture, caption: str = "") -> str:
    return f"<figure>{picture.svg()}{f'<figcaption>{_html(caption)}</figcaption>' if caption else ''}</figure>"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{_html(c)}</th>" for c in columns) if any(columns) else ""
    body = "".join(f"<tr>{''.join(f'<td>{_html(c)}</td>' for c in row)}</tr>" for row in rows)
    return f"<table>{f'<thead><tr>{head}</tr></thead>' if head else ''}<tbody>{body}</tbody></table>"


def _html(text: str) -> str:
    return escape(plain(text))
