"""`gguftools inspect`: what is in a GGUF file. Reads the header only, and needs no kernels."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from gguftools import report
from gguftools.gguf import GGUF, Field, TensorView
from gguftools.gguf.values import Array

MAX_ELEMENTS = 16  # of an array in `describe`
MAX_WIDTH = 60  # characters of a string in the table
SHOWN = 6  # elements of an array in the table


def inspect(
    file: Annotated[Path, typer.Argument(help="GGUF file.", show_default=False)],
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show what a GGUF file holds: metadata, tensors, sizes by type."""
    found = describe(file)
    if json:
        report.print_json(found)
        return
    report.write(_summary(found))
    report.write()
    report.table(("key", "type", "value"), ((key, _type(e), _value(e)) for key, e in found["metadata"].items()))
    report.write()
    names = ("index", "name", "shape", "type", "bytes", "offset")
    report.table(names, ((i, *(t[name] for name in names[1:])) for i, t in enumerate(found["tensors"])))
    report.write()
    rows = ((t["type"], t["tensors"], t["weights"], t["bytes"], f"{t['share']:.1%}") for t in found["types"])
    report.table(("type", "tensors", "weights", "bytes", "share"), rows)
    report.write()
    report.write(_total(found))


def describe(path: str | Path) -> dict[str, Any]:
    """What is in the GGUF file, as JSON can hold it.

    metadata: key -> type, value, and for arrays element_type and count, with at most 16 elements as value; tensors in
    file order, with shape in NumPy's order, ne in ggml's, offset from the beginning of the data; types: totals by type,
    largest first, share of the bytes of all tensors; bpw: bits per weight over all tensors, None without any.

    >>> import gguftools
    >>> found = gguftools.inspect(gguftools.demo_model())
    >>> found["n_tensors"], found["types"][0]["type"], found["metadata"]["general.architecture"]["value"]
    (56, 'BF16', 'llama')

    Raises GGUFError for a file that cannot be read.
    """
    with GGUF(path) as f:
        weights = sum(t.size for t in f.tensors.values())
        data = sum(t.nbytes for t in f.tensors.values())
        return {
            "file": str(path),
            "size": f.size,
            "version": f.version,
            "alignment": f.alignment,
            "data_offset": f.data_offset,
            "n_keys": len(f.fields),
            "n_tensors": len(f.tensors),
            "weights": weights,
            "tensor_bytes": data,
            "bpw": report.bpw(data, weights),
            "metadata": {key: _describe_field(field) for key, field in f.fields.items()},
            "tensors": [_describe_tensor(t) for t in f.tensors.values()],
            "types": _totals(f.tensors),
        }


def _describe_field(field: Field) -> dict[str, Any]:
    value = field.value
    if isinstance(value, Array):
        head = value[:MAX_ELEMENTS]
        return {"type": "array", "element_type": str(field.element_type), "count": len(value), "value": head}
    return {"type": str(field.type), "value": value}


def _describe_tensor(t: TensorView) -> dict[str, Any]:
    return {
        "name": t.name,
        "shape": list(t.shape),
        "ne": list(t.ne),
        "type": t.format.name,
        "weights": t.size,
        "bytes": t.nbytes,
        "offset": t.offset,
    }


def _totals(tensors: Mapping[str, TensorView]) -> list[dict[str, Any]]:
    totals: dict[str, dict[str, Any]] = {}
    for t in tensors.values():
        total = totals.setdefault(t.format.name, {"type": t.format.name, "tensors": 0, "weights": 0, "bytes": 0})
        total["tensors"] += 1
        total["weights"] += t.size
        total["bytes"] += t.nbytes
    data = sum(total["bytes"] for total in totals.values())
    for total in totals.values():
        total["share"] = total["bytes"] / data if data else 0.0
    return sorted(totals.values(), key=lambda total: -total["bytes"])


def _summary(found: dict[str, Any]) -> str:
    return (
        f"{report.plain(found['file'])}: GGUF version {found['version']}, {found['n_keys']:,} keys, "
        f"{found['n_tensors']:,} tensors, {report.size(found['size'])} ({found['size']:,} bytes), "
        f"data from byte {found['data_offset']:,}, alignment {found['alignment']:,}"
    )


def _total(found: dict[str, Any]) -> str:
    if found["bpw"] is None:
        return "no weights"
    return (
        f"{found['weights']:,} weights in {report.size(found['tensor_bytes'])} ({found['tensor_bytes']:,} bytes): "
        f"{found['bpw']:.3f} bits per weight"
    )


def _type(entry: dict[str, Any]) -> str:
    return f"{entry['element_type']}[{entry['count']}]" if "count" in entry else entry["type"]


def _value(entry: dict[str, Any]) -> str:
    """A value in one line: strings quoted and cut, arrays with their first elements."""
    value = entry["value"]
    if "count" not in entry:
        return _quoted(value, MAX_WIDTH) if isinstance(value, str) else _scalar(value)
    shown = [_quoted(v, 20) if isinstance(v, str) else _scalar(v) for v in value[:SHOWN]]
    return "[" + ", ".join(shown) + (", ..." if entry["count"] > SHOWN else "") + "]"


def _scalar(value: float | bool) -> str:
    return f"{value:.7g}" if isinstance(value, float) else str(value).lower()


def _quoted(text: str, width: int) -> str:
    return repr(text) if len(text) <= width else f"{text[:width]!r}..."
