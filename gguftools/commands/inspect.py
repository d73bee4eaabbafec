"""`gguftools inspect`: what is in model files. Reads headers only, and needs no kernels."""

from __future__ import annotations

import fnmatch
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from gguftools import report
from gguftools.errors import GGUFError
from gguftools.toolbox.inspect import describe, fold, inspected, memory, tree

MAX_WIDTH = 60  # characters of a string in the table
SHOWN = 6  # elements of an array in the table
#: what llama.cpp counts in
_COLUMNS = ("index", "name", "shape", "type", "bytes", "offset")


def inspect(
    files: Annotated[list[Path], typer.Argument(help="GGUF or safetensors files, or folders.", show_default=False)],
    all_: Annotated[bool, typer.Option("--all", help="Every tensor, and every key in full.")] = False,
    key: Annotated[
        list[str] | None, typer.Option("--key", metavar="KEY", help="Print the bare value of a key; may be repeated.")
    ] = None,
    tensors: Annotated[
        str | None, typer.Option("--tensors", metavar="PATTERN", help="Only tensors whose name fits, as blk.*.ffn_up*.")
    ] = None,
    tree_: Annotated[bool, typer.Option("--tree", help="Tensors as a tree, with sums.")] = False,
    ctx_size: Annotated[
        int | None,
        typer.Option(
            "-c", "--ctx-size", min=1, max=1 << 40, help="Estimate the memory for so many tokens.", show_default=False
        ),
    ] = None,
    cache_type_k: Annotated[str, typer.Option(metavar="TYPE", help="Type of the cache's keys.")] = "F16",
    cache_type_v: Annotated[str, typer.Option(metavar="TYPE", help="Type of the cache's values.")] = "F16",
    markdown: Annotated[bool, typer.Option("--markdown", help="Print tables as Markdown.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON; arrays in full with --all.")] = False,
) -> None:
    """Show what model files hold: keys, tensors, sizes by type. Several files stand side by side.

    Example: gguftools inspect model.gguf -c 8192 --cache-type-k Q8_0
    """
    paths = [path for name in files for path in inspected(name)]
    if key:
        for path in paths:
            _print_keys(path, key)
        return
    found = [describe(path, None if all_ and json else 16) for path in paths]
    for entry in found:
        if tensors is not None:
            entry["tensors"] = _matching(entry, tensors)
        if ctx_size is not None:
            entry["memory"] = memory(entry, ctx_size, cache_type_k, cache_type_v)
    if json:
        report.print_json(found[0] if len(found) == 1 else found)
        return
    show = report.markdown if markdown else report.table
    if len(found) > 1:
        _side_by_side(found, show, all_, tensors is not None)
    elif tensors is not None:
        show(_columns(found[0]), [_tensor_row(i, t) for i, t in enumerate(found[0]["tensors"])])
    else:
        _single(found[0], show, all_, tree_)
    for entry in found:
        if "memory" in entry:
            report.write()
            report.write(_memory(entry))


def _print_keys(path: Path, names: list[str]) -> None:
    """Bare values for shells: strings as they are, arrays one element a line."""
    metadata = describe(path, None)["metadata"]
    for name in names:
        if name not in metadata:
            raise GGUFError(f"{path}: there is no key '{name}'")
        value = metadata[name]["value"]
        for element in value if isinstance(value, list) else [value]:
            _print_bare(element if isinstance(element, str) else _scalar(element))


def _print_bare(text: str) -> None:
    if sys.stdout.isatty():  # a value must not steer the terminal
        text = "\n".join(report.plain(line) for line in text.split("\n"))
    report.write_raw(text + "\n")


def _matching(entry: dict[str, Any], pattern: str) -> list[dict[str, Any]]:
    found = [t for t in entry["tensors"] if fnmatch.fnmatchcase(t["name"], pattern)]
    if not found:
        raise GGUFError(f"{entry['file']}: no tensor is called '{pattern}'")
    return found


# --- one file ---------------------------------------------------------------------------------------------------------


def _single(found: dict[str, Any], show: Any, all_: bool, as_tree: bool) -> None:
    report.write(_summary(found))
    if "shards" in found:
        report.write()
        show(("shard", "bytes"), [(shard["file"], shard["size"]) for shard in found["shards"]])
    if found["metadata"]:
        report.write()
        show(("key", "type", "value"), [(k, _type(e), _value(e, all_)) for k, e in found["metadata"].items()])
    report.write()
    folded = fold(found["tensors"])
    if as_tree:
        show(("name", "tensors", "bytes"), tree(found["tensors"]))
    elif all_ or len(folded) == len(found["tensors"]):
        show(_columns(found), [_tensor_row(i, t) for i, t in enumerate(found["tensors"])])
    else:
        show(("count", "name", "layers", "shape", "type", "bytes"), [_folded_row(row) for row in folded])
    report.write()
    rows = [(t["type"], t["tensors"], t["weights"], t["bytes"], f"{t['share']:.1%}") for t in found["types"]]
    show(("type", "tensors", "weights", "bytes", "share"), rows)
    report.write()
    report.write(_total(found))


def _columns(found: dict[str, Any]) -> tuple[str, ...]:
    return _COLUMNS if found["kind"] == "GGUF" else _COLUMNS[:-1]


def _tensor_row(i: int, t: dict[str, Any]) -> tuple:
    return (i, *(t[name] for name in _COLUMNS[1:] if name in t))


def _folded_row(row: dict[str, Any]) -> tuple:
    return (
        f"{row['count']}x" if row["count"] > 1 else "",
        row["name"],
        row["layers"],
        row["shape"],
        row["type"],
        row["bytes"],
    )


def _summary(found: dict[str, Any]) -> str:
    name, sizes = report.plain(found["file"]), f"{report.size(found['size'])} ({found['size']:,} bytes)"
    if found["kind"] != "GGUF":
        return f"{name}: safetensors, {found['n_keys']:,} keys, {found['n_tensors']:,} tensors, {sizes}"
    order = "big-endian, " if found["byte_order"] == "big" else ""
    return (
        f"{name}: GGUF version {found['version']}, {order}{found['n_keys']:,} keys, "
        f"{found['n_tensors']:,} tensors, {sizes}, "
        f"data from byte {found['data_offset']:,}, alignment {found['alignment']:,}"
    )


def _total(found: dict[str, Any]) -> str:
    if found["bpw"] is None:
        return "no weights"
    return (
        f"{found['weights']:,} weights in {report.size(found['tensor_bytes'])} ({found['tensor_bytes']:,} bytes): "
        f"{found['bpw']:.3f} bits per weight"
    )


def _memory(found: dict[str, Any]) -> str:
    m = found["memory"]
    return (
        f"memory for {m['n_ctx']:,} tokens: weights {report.size(m['weights'])} + cache {report.size(m['cache'])} "
        f"({m['type_k']} keys, {m['type_v']} values) = {report.size(m['total'])}, and activations"
    )


# --- several files ----------------------------------------------------------------------------------------------------


def _side_by_side(found: list[dict[str, Any]], show: Any, all_: bool, only_tensors: bool) -> None:
    names = _short_names([entry["file"] for entry in found])
    if not only_tensors:
        facts = (("size", "size"), ("tensors", "n_tensors"), ("weights", "weights"), ("bits per weight", "bpw"))
        rows = [(label, *(_fact(entry[field]) for entry in found)) for label, field in facts]
        types = dict.fromkeys(t["type"] for entry in found for t in entry["types"])
        rows += [(f"{kind} tensors", *(_count(entry, kind) for entry in found)) for kind in types]
        show(("", *names), rows)
        report.write()
        keys = dict.fromkeys(key for entry in found for key in entry["metadata"])
        values = [(key, *(_value_of(entry, key, all_) for entry in found)) for key in keys]
        values = [row for row in values if all_ or len(set(row[1:])) > 1]
        show(("key", *names), values) if values else report.write("the keys are the same")
        report.write()
    by_name = [{t["name"]: f"{t['type']} {t['shape']}" for t in entry["tensors"]} for entry in found]
    kinds = {
        name: tuple(types.get(name, "") for types in by_name) for name in dict.fromkeys(n for t in by_name for n in t)
    }
    kept = {name: kind for name, kind in kinds.items() if all_ or len(set(kind)) > 1}
    blank = {"shape": [], "weights": 0, "bytes": 0}
    folded = [
        (row["name"], row["layers"], *row["type"])
        for row in fold({"name": n, "type": k} | blank for n, k in kept.items())
    ]
    if folded:
        show(("tensor", "layers", *names), folded)
    else:
        report.write("the tensors have the same types and shapes")


def _short_names(paths: list[str]) -> list[str]:
    short = [Path(path).name or path for path in paths]
    return short if len(set(short)) == len(short) else paths


def _fact(value: Any) -> str:
    return "" if value is None else f"{value:,.3f}" if isinstance(value, float) else f"{value:,}"


def _count(entry: dict[str, Any], kind: str) -> str:
    return next((f"{t['tensors']} ({t['share']:.1%})" for t in entry["types"] if t["type"] == kind), "")


def _value_of(entry: dict[str, Any], key: str, all_: bool) -> str:
    return _value(entry["metadata"][key], all_) if key in entry["metadata"] else ""


# --- values -----------------------------------------------------------------------------------------------------------


def _type(entry: dict[str, Any]) -> str:
    return f"{entry['element_type']}[{entry['count']}]" if "count" in entry else entry["type"]


def _value(entry: dict[str, Any], in_full: bool = False) -> str:
    """A value in one line: strings quoted and cut, arrays with their first elements."""
    value = entry["value"]
    if "count" not in entry:
        if isinstance(value, str):
            return _quoted(value, len(value) if in_full else MAX_WIDTH)
        return _scalar(value)
    n = len(value) if in_full else SHOWN
    shown = [_quoted(v, 20) if isinstance(v, str) else _scalar(v) for v in value[:n]]
    return "[" + ", ".join(shown) + (", ..." if entry["count"] > n else "") + "]"


def _scalar(value: float | bool) -> str:
    return f"{value:.7g}" if isinstance(value, float) else str(value).lower()


def _quoted(text: str, width: int) -> str:
    return repr(text) if len(text) <= width else f"{text[:width]!r}..."
