"""Which type each tensor should have so that a file of a given size diverges least from the original.

Measured, not guessed: each tensor is swapped for its form in one probing type, in a model that is otherwise whole, and
the divergence is measured (`gguftools/sensitivity.py`); how much more or less another type costs follows from the
tensor's own weighted error in it. Divergences of single tensors add up well enough to choose by. The choice is a
Lagrangian: least of sum(cost) + lambda * sum(bytes), lambda by bisection, and what is left of the budget is spent where
it gains most per byte. The table of measurements can be kept and used for any target.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gguftools.errors import GGUFError
from gguftools.files import atomic_output, read_whole
from gguftools.gguf.reader import GGUF, TensorView
from gguftools.imatrix_file import read_imatrix
from quant.format import Format
from quant.formats import get_format
from quant.imatrix import IMatrix
from quant.mixes import NEEDS_IMPORTANCE, TensorInfo, recipe_from
from quant.recipes import Recipe

SCHEMA = "gguftools.allocation/1"
#: types that are chosen from, unless others are named
TYPES = (
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "Q2_K", "IQ3_XXS", "IQ3_S", "Q3_K", "IQ4_XS", "IQ4_NL", "Q4_K"),
    *("Q5_K", "Q5_0", "Q6_K", "Q8_0", "F16"),
)
PROBES = ("Q3_K", "Q4_0")  # the first whose blocks divide a tensor's rows
SAMPLED_ROWS = 512  # of a tensor, for its error in a type
SPARE = 1 << 9  # bytes that are left for a recipe's text to grow by from one solution to the next


@dataclass(frozen=True)
class Table:
    """What was measured. digest: of the model, importance and text; cost: tensor -> type -> predicted divergence, in
    nats a token; size: tensor -> type -> bytes."""

    digest: str
    cost: Mapping[str, Mapping[str, float]]
    size: Mapping[str, Mapping[str, int]]

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        found = {"schema": SCHEMA, "digest": self.digest, "cost": self.cost, "size": self.size}
        with atomic_output(path) as f:
            f.write(json.dumps(found, indent=1).encode() + b"\n")


def load_table(path: Path) -> Table:
    """A table that was kept. Raises GGUFError for a file that is none."""
    try:
        found = json.loads(read_whole(path, "a table of measurements"))
        if found["schema"] != SCHEMA:
            raise KeyError("schema")
        cost = {str(n): {str(t): float(v) for t, v in row.items()} for n, row in found["cost"].items()}
        size = {str(n): {str(t): int(v) for t, v in row.items()} for n, row in found["size"].items()}
        if not all(np.isfinite(v) and v >= 0 for row in cost.values() for v in row.values()):
            raise ValueError("cost")
        return Table(str(found["digest"]), cost, size)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise GGUFError(f"{path}: is no table of measurements ({error}); measure again without it") from None


def measure(
    model: str | os.PathLike,
    text: str | os.PathLike,
    types: Sequence[str] = TYPES,
    imatrix: str | os.PathLike | None = None,
    n_ctx: int = 256,
    chunks: int = 24,
    threads: int | None = None,
    on_step: Callable[[int, int, float | None], None] | None = None,
) -> Table:
    """Measure a model, a GGUF file in 16 or 32 bits, on a text. Types that need importance are left out where there is
    none. Raises GGUFError, QuantError and EngineError for what cannot be read or run."""
    from gguftools.sensitivity import run

    importance = None if imatrix is None else read_imatrix(imatrix)
    found: dict[str, float] = {}
    with GGUF(model) as f:
        tensors = dict(f.tensors)
        if any(t.format.is_quantized for t in tensors.values()):
            raise GGUFError(f"{model}: is quantized already; measure the original, in 16 or 32 bits a weight")
        probed: dict[str, str] = {}
        for probe in PROBES:
            left = [n for n in tensors if n not in probed]
            pattern = "^(" + "|".join(map(re.escape, left)) + ")$"
            try:
                costs = run(model, [probe], text, "tensor", imatrix, n_ctx, chunks, 2048, threads, pattern, on_step)
            except GGUFError as error:
                if "fits" in str(error):
                    continue
                raise
            for one in costs:
                found[one.group], probed[one.group] = max(0.0, one.mean_kld), probe
        if not probed:
            raise GGUFError(f"{model}: has no tensor that could be quantized")
        cost: dict[str, dict[str, float]] = {}
        size: dict[str, dict[str, int]] = {}
        for name, probe in probed.items():
            errors = _errors(tensors[name], [*types, probe], importance, threads)
            base = errors[probe] or 1.0
            cost[name] = {t: found[name] * e / base for t, e in errors.items() if t in types}
            size[name] = {t: _bytes(tensors[name], get_format(t)) for t in cost[name]}
            native = tensors[name].format.name
            cost[name][native], size[name][native] = 0.0, _bytes(tensors[name], tensors[name].format)
    return Table(_digest(model, text, imatrix, types, n_ctx, chunks), cost, size)


def _digest(*about: Any) -> str:
    stats = []
    for item in about:
        path = Path(item) if isinstance(item, (str, os.PathLike)) else None
        is_file = path is not None and path.is_file()
        stats.append([str(item), path.stat().st_size, path.stat().st_mtime_ns] if path and is_file else str(item))
    return hashlib.sha256(json.dumps(stats).encode()).hexdigest()


def _bytes(view: TensorView, fmt: Format) -> int:
    n = view.shape[-1]
    return view.size // n * fmt.row_size(n)


def _errors(
    view: TensorView, types: Sequence[str], importance: IMatrix | None, threads: int | None
) -> dict[str, float]:
    """Weighted relative error of a tensor in each type whose blocks divide its rows."""
    from quant.quantize import dequantize_blocks, quantize_into

    n = view.shape[-1]
    rows = view.data.view(view.format.block).reshape(-1, n // view.format.block_size)
    keep = np.linspace(0, len(rows) - 1, min(len(rows), SAMPLED_ROWS)).astype(int)
    x = dequantize_blocks(np.ascontiguousarray(rows[keep]), view.format, threads)
    known = importance is not None and view.name in importance.entries
    weights = importance.importance(view.name).mean(0) if importance is not None and known else None
    scale = np.ones(n) if weights is None else weights.astype(np.float64)
    whole = float((scale * np.square(x, dtype=np.float64)).sum()) or 1.0
    found = {}
    for name in types:
        fmt = get_format(name)
        if n % fmt.block_size or (fmt.name in NEEDS_IMPORTANCE and weights is None):
            continue
        blocks = np.empty((len(x), n // fmt.block_size), fmt.block)
        own = weights if fmt.kernels.quantize_weighted is not None else None
        quantize_into(x, fmt, blocks, own, threads, view.name)
        left = np.square(dequantize_blocks(blocks, fmt, threads).astype(np.float64) - x)
        found[name] = float((scale * left).sum()) / whole
    return found


@dataclass(frozen=True)
class Allocation:
    """types: of each tensor; n_bytes: of them together; predicted: their divergence, nats a token."""

    types: Mapping[str, str]
    n_bytes: int
    predicted: float


def solve(
    table: Table,
    budget: int,
    least: Sequence[tuple[str, str]] = (),
    most: Sequence[tuple[str, str]] = (),
    fixed: Sequence[tuple[str, str]] = (),
) -> Allocation:
    """The types of least predicted divergence whose tensors take at most `budget` bytes.

    least, most, fixed: (regular expression, type) for tensors that must not have fewer or more bits a weight, or that
    must have that type. Raises GGUFError for a budget that no choice meets, and for constraints that leave none.
    """
    options = {name: _allowed(name, table, least, most, fixed) for name in table.cost}
    smallest = sum(min(table.size[name][t] for t in types) for name, types in options.items())
    if smallest > budget:
        raise GGUFError(
            f"the smallest choice of types takes {smallest:,} bytes, {budget:,} were asked for: ask for more"
        )

    def cheapest(price: float) -> dict[str, str]:
        """The types of least cost + price * bytes."""
        return {
            name: min((table.cost[name][t] + price * table.size[name][t], table.size[name][t], t) for t in types)[2]
            for name, types in options.items()
        }

    def total(types: Mapping[str, str]) -> int:
        return sum(table.size[name][t] for name, t in types.items())

    low, high = 1e-18, 1.0
    best = {name: min((table.size[name][t], t) for t in types)[1] for name, types in options.items()}
    for _ in range(80):
        price = (low * high) ** 0.5
        found = cheapest(price)
        if total(found) > budget:
            low = price
        else:
            high, best = price, found
    spent = total(best)
    while (step := _best_step(table, options, best, budget - spent)) is not None:
        name, kind = step
        spent += table.size[name][kind] - table.size[name][best[name]]
        best[name] = kind
    return Allocation(best, spent, sum(table.cost[name][t] for name, t in best.items()))


def _best_step(
    table: Table, options: Mapping[str, list[str]], now: Mapping[str, str], left: int
) -> tuple[str, str] | None:
    """The change that gains most a byte, of those that fit into what is left."""
    best, found = 0.0, None
    for name, types in options.items():
        cost, size = table.cost[name], table.size[name]
        for kind in types:
            more, gain = size[kind] - size[now[name]], cost[now[name]] - cost[kind]
            if 0 < more <= left and gain / more > best:
                best, found = gain / more, (name, kind)
    return found


def _allowed(name: str, table: Table, least: Sequence, most: Sequence, fixed: Sequence) -> list[str]:
    types = list(table.cost[name])
    for rules, keep in (
        (fixed, lambda t, rule: t == get_format(rule).name),
        (least, lambda t, rule: get_format(t).bpw >= get_format(rule).bpw),
        (most, lambda t, rule: get_format(t).bpw <= get_format(rule).bpw),
    ):
        for pattern, rule in rules:
            try:
                applies = re.search(pattern, name) is not None
            except re.error as error:
                raise GGUFError(f"'{pattern}' is no regular expression: {error}") from None
            if applies:
                types = [t for t in types if keep(t, rule)]
    if not types:
        raise GGUFError(
            f"no type is left for tensor '{name}': its constraints exclude each other, or were not measured"
        )
    return types


def allocate(
    source: str | os.PathLike,
    table: Table,
    target_bytes: int,
    least: Sequence[tuple[str, str]] = (),
    most: Sequence[tuple[str, str]] = (),
    fixed: Sequence[tuple[str, str]] = (),
    imatrix: str | os.PathLike | None = None,
) -> tuple[Recipe, Allocation]:
    """The recipe for a whole file of at most `target_bytes`, header and all, and what it chooses.

    Raises GGUFError for a target that cannot be met.
    """
    from gguftools.quantize_file import quantize

    with GGUF(source) as f:
        tensors = {t.name: TensorInfo(t.name, t.shape, t.format) for t in f.tensors.values()}
        arch = str(f.metadata.get("general.architecture", ""))
        if set(table.cost) - set(tensors):
            raise GGUFError(f"{source}: the table of measurements is of another model; measure again")
    others = 0  # bytes of the header and of tensors that stay as they are: a recipe's text is part of the header
    for _ in range(8):
        found = solve(table, target_bytes - others, least, most, fixed)
        infos = [replace(t, format=get_format(found.types[n])) if n in found.types else t for n, t in tensors.items()]
        recipe = recipe_from(infos, arch, f"{target_bytes:,} bytes", None)
        size = quantize(source, None, recipe, imatrix, dry_run=True).file_bytes
        if others and size <= target_bytes:
            return recipe, found
        others = size - found.n_bytes + (0 if size <= target_bytes else SPARE)
    raise GGUFError(f"no choice of types makes a file of {target_bytes:,} bytes or less; ask for more")


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}i": 1 << 10 * i for i, unit in enumerate(" KMGT") if i}


def size_of(text: str) -> int:
    """Bytes of a size as people write it.

    >>> size_of("4.2GB"), size_of("300M"), size_of("2GiB"), size_of("1800000")
    (4200000000, 300000000, 2147483648, 1800000)

    Raises GGUFError for anything else.
    """
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,6})?)\s*([KMGT]?i?)B?\s*", text, re.IGNORECASE)
    unit = match[2][:1].upper() + match[2][1:].lower() if match is not None else "?"
    if match is None or unit not in _UNITS:
        raise GGUFError(f"'{text}' is no size; write it as 4.2G, 300M or 2GiB")
    return int(float(match[1]) * _UNITS[unit])


def target_bytes(source: str | os.PathLike, size: str | None, bpw: float | None) -> int:
    """Bytes of a file, from a size as people write it or from bits per weight over all tensors. Raises GGUFError for a
    target above the source."""
    with GGUF(source) as f:
        weights, whole = sum(t.size for t in f.tensors.values()), f.size
        header = whole - sum(t.nbytes for t in f.tensors.values())
    wanted = size_of(size) if size is not None else int(header + weights * (bpw or 0.0) / 8)
    if wanted > whole:
        raise GGUFError(
            f"{source}: has {whole:,} bytes, the target is {wanted:,}: nothing would be gained; ask for less"
        )
    return wanted


def recipe_for(
    source: str | os.PathLike,
    size: str | None,
    bpw: float | None,
    text: str | None,
    table: Path | None = None,
    imatrix: str | os.PathLike | None = None,
    least: Sequence[tuple[str, str]] = (),
    most: Sequence[tuple[str, str]] = (),
    threads: int | None = None,
    on_step: Callable[[int, int, float | None], None] | None = None,
) -> tuple[Recipe, Allocation]:
    """The recipe of the best file of a size. table: of measurements: it is used if it is there and fits, else made on
    `text` and kept there. Raises GGUFError for a model that is no GGUF file, a missing text, and as `allocate` does."""
    if Path(source).is_dir():
        raise GGUFError(f"{source}: is a folder; convert it first: measuring needs a model that runs as it is")
    for _, kind in (*least, *most):
        get_format(kind)
    wanted = target_bytes(source, size, bpw)
    known = load_table(table) if table is not None and table.exists() else None
    if known is None:
        if text is None:
            raise GGUFError("a target needs measurements: give --target-text TEXT, or a --target-table that has them")
        known = measure(source, text, imatrix=imatrix, threads=threads, on_step=on_step)
        if table is not None:
            known.save(table)
    return allocate(source, known, wanted, least, most, imatrix=imatrix)
