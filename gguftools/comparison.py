"""Several models against one base: one run, one table, and records that know what they were measured on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gguftools.errors import GGUFError
from gguftools.measure import N_BATCH, N_CTX, describe, measured, record, windows
from gguftools.picture import Picture, scatter
from gguftools.text import read_text

SCHEMA = "gguftools.compare/1"

#: what has to be equal for results to stand in one table
PROTOCOL = ("tokens_sha256", "n_ctx", "stride", "n_chunks", "n_tokens", "base")

Name = str | os.PathLike


def run(
    base: Name,
    models: Sequence[Name],
    text: Name,
    n_ctx: int = N_CTX,
    chunks: int | None = None,
    stride: int = 0,
    n_batch: int = N_BATCH,
    threads: int | None = None,
    on_chunk: Callable | None = None,
) -> dict[str, Any]:
    """Measure models, and the base itself, in one run: a record with schema, protocol, and a result per model, the base
    first. Raises GGUFError and EngineError as `measure.compare` does."""
    found = measured([base, *models], text, n_ctx, chunks, base, n_batch, threads, on_chunk, stride, partial=True)
    first = found[0][1]
    return {
        "schema": SCHEMA,
        "protocol": {
            **{key: getattr(first, key) for key in PROTOCOL if key != "base"},
            "base": found[0][0].fingerprint,
            "text": str(text),
        },
        "complete": first.complete,
        "results": [record(file, result) for file, result in found],
    }


def announced(base: Name, text: Name, n_ctx: int = N_CTX, chunks: int | None = None, stride: int = 0) -> dict[str, Any]:
    """The record of such a run before it ran: its protocol, and no results. Raises GGUFError and EngineError as `run`
    does."""
    found = windows(base, text, n_ctx, chunks, stride)
    n_chunks = len(found)
    protocol = {
        "tokens_sha256": found.sha256(n_chunks),
        "n_ctx": found.n_ctx,
        "stride": stride,
        "n_chunks": n_chunks,
        "n_tokens": n_chunks * found.scored,
        "base": describe(Path(base)).fingerprint,
    }
    return {"schema": SCHEMA, "protocol": protocol, "complete": True, "results": []}


def read_record(path: Name) -> dict[str, Any]:
    """A record that `run` made, from a JSON file. Raises GGUFError for anything else, and for another version of it."""
    try:
        found = json.loads(read_text(path))
    except (ValueError, RecursionError):
        raise GGUFError(f"{path}: is not JSON; give what `gguftools compare --json` prints") from None
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != SCHEMA:
        raise GGUFError(f"{path}: has the schema {schema!r}, expected {SCHEMA!r}; measure again with this version")
    protocol, results = found.get("protocol"), found.get("results")
    if not isinstance(protocol, dict) or not isinstance(results, list) or not all(map(_is_result, results)):
        raise GGUFError(f"{path}: lacks protocol or results: the file is damaged")
    return {**found, "complete": found.get("complete") is True}


def _is_result(result: Any) -> bool:
    """Whether a table can be made of it."""
    try:
        (row,) = rows({"results": [result]})
    except (KeyError, TypeError, ValueError, AttributeError):
        return False
    numbers = all(isinstance(v, (int, float)) for v in row[1:])
    return numbers and isinstance(row[0], str) and isinstance(result.get("fingerprint"), str)


def join(records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """One record of several; a model that comes again is taken once. names: of where they come from.

    Raises GGUFError where records were measured differently: on other tokens, windows, or against another base.
    """
    first = records[0]
    for other, name in zip(records[1:], names[1:]):
        for key in PROTOCOL:
            a, b = first["protocol"].get(key), other["protocol"].get(key)
            if a != b:
                raise GGUFError(
                    f"{name}: was measured with another {key} than {names[0]} ({_short(b)}, not {_short(a)})"
                )
    results = {result["fingerprint"]: result for each in records for result in each["results"]}
    complete = all(each["complete"] for each in records)
    return {**first, "complete": complete, "results": list(results.values())}


def _short(value: object) -> str:
    return str(value)[:12]


def rows(found: Mapping[str, Any]) -> list[tuple]:
    """The table: name, size in bytes, bits per weight, PPL, its error, KLD mean, median, 99 %, 99.9 %, same top token
    and its interval in per cent."""
    out = []
    for r in found["results"]:
        d = r["divergence"]
        percentiles = {float(p): v for p, v in d["kld_percentiles"].items()}
        low, high = d["same_top_interval"]
        out.append(
            (
                r["name"],
                r["bytes"],
                r["bpw"],
                r["ppl"]["value"],
                r["ppl"]["error"],
                d["mean_kld"]["value"],
                percentiles[50.0],
                percentiles[99.0],
                percentiles[99.9],
                100 * d["same_top"]["value"],
                100 * low,
                100 * high,
            )
        )
    return out


def picture(found: Mapping[str, Any]) -> Picture:
    """Mean KLD against size; models that are equal to the base have no place on a logarithmic axis."""
    points = [(Path(row[0]).stem, row[1] / (1 << 20), row[5]) for row in rows(found)]
    return scatter("Divergence from the base against size", "MiB", "mean KLD, nats a token", points, log_y=True)
