"""What does it cost to quantize one tensor? Each tensor, class of tensors or block is swapped for its quantized form,
one at a time, in a model that is otherwise its source, and the divergence from the source is measured.

Variants run a few at a time beside the source, which runs once for all of them; they share its memory map, so each
takes the memory of its own tensors only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gguftools.corpus import read_corpus
from gguftools.errors import GGUFError
from gguftools.gguf.reader import GGUF, TensorView
from gguftools.imatrix_file import read_imatrix
from gguftools.measure import N_BATCH, N_CTX
from gguftools.picture import Picture, heat_map
from gguftools.quantize_file import convert_tensor
from quant.errors import QuantError
from quant.format import Format
from quant.formats import get_format
from quant.imatrix import IMatrix
from quant.imatrix_statistics import place
from quant.mixes import TensorInfo, why_never
from quant.recipes import Recipe

SCHEMA = "gguftools.sensitivity/1"
GROUPINGS = ("tensor", "class", "block")
AT_ONCE = 8  # variants that run beside the source

_ANY = Recipe("any", "F16")  # one that quantizes


@dataclass(frozen=True)
class View:
    """A tensor that is held in memory."""

    shape: tuple[int, ...]
    format: Format
    data: np.ndarray


@dataclass(frozen=True)
class Variant:
    """Tensors that are swapped together, and for which type."""

    group: str
    type: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Cost:
    """What a variant costs. saved_bits: of its tensors together; saved_bpw: the same per weight of the whole model;
    mean_kld, error: in nats a token; kld_per_bpw: mean_kld / saved_bpw, the price of a bit; kld_99: its 99 %
    percentile."""

    group: str
    type: str
    names: tuple[str, ...]
    weights: int
    saved_bits: int
    saved_bpw: float
    ppl: float
    mean_kld: float
    error: float
    kld_99: float
    kld_per_bpw: float


def run(
    model: str | os.PathLike,
    types: Sequence[str],
    text: str | os.PathLike,
    by: str = "tensor",
    imatrix: str | os.PathLike | None = None,
    n_ctx: int = N_CTX,
    chunks: int | None = None,
    n_batch: int = N_BATCH,
    threads: int | None = None,
    pattern: str = "",
    on_step: Callable[[int, int, float | None], None] | None = None,
    costs: list[Cost] | None = None,
) -> list[Cost]:
    """The costs of quantizing parts of a model.

    types: of tensors, such as Q4_K; by: one of GROUPINGS; imatrix: importance that the quantization uses; pattern: a
    regular expression that names of tensors must hold; on_step: called with the passes done, their number, and the last
    KLD; costs: a list that results are put into as they come.

    Raises GGUFError, QuantError and EngineError for what cannot work: unknown types, a pattern without tensors, no
    tensor whose rows fit.
    """
    from engine.evaluate import evaluate
    from engine.session import Session
    from gguftools.loading import load

    formats = [get_format(name) for name in types]
    with GGUF(model) as f:
        tensors = dict(f.tensors)
        metadata = f.metadata
        importance = read_imatrix(imatrix) if imatrix is not None else None
        variants = list(plan(tensors, formats, by, pattern, importance, str(metadata.get("general.architecture"))))
        if not variants:
            raise GGUFError(
                f"{model}: no tensor {f'with {pattern!r} in its name ' if pattern else ''}fits {', '.join(types)}"
            )
        n_weights = sum(t.size for t in tensors.values())
        source = load(model, threads=threads)
        tokens = source.tokenize(read_corpus(text, source).text)
        found = costs if costs is not None else []
        for lo in range(0, len(variants), AT_ONCE):
            group = variants[lo : lo + AT_ONCE]
            swapped = [swap(tensors, v, importance, threads) for v in group]
            sessions = [Session(metadata, view, "cpu", threads) for view in swapped]

            def step(done: int, total: int, _: object, lo: int = lo, n: int = len(group)) -> None:
                if on_step is not None:
                    last = found[-1].mean_kld if found else None
                    on_step(lo * total + done * n, len(variants) * total, last)

            results = evaluate(sessions, tokens, source, n_ctx, chunks, n_batch, step)
            for variant, view, result in zip(group, swapped, results):
                assert result.divergence is not None
                saved = 8 * sum(tensors[n].nbytes - view[n].data.nbytes for n in variant.names)
                kld = result.divergence.mean_kld
                bpw = saved / n_weights
                found.append(
                    Cost(
                        variant.group,
                        variant.type,
                        variant.names,
                        sum(tensors[n].size for n in variant.names),
                        saved,
                        bpw,
                        result.ppl.value,
                        kld.value,
                        kld.error,
                        result.divergence.kld_percentiles[99.0],
                        kld.value / bpw,
                    )
                )
    return found


def plan(
    tensors: Mapping[str, TensorView],
    formats: Sequence[Format],
    by: str = "tensor",
    pattern: str = "",
    importance: IMatrix | None = None,
    arch: str = "",
) -> Iterator[Variant]:
    """Every variant: matrices with whole blocks that become smaller, grouped; none that `quantize` would never touch.

    Raises GGUFError for an unknown grouping or a pattern that is no regular expression, QuantError for a type that
    needs importance where there is none.
    """
    if by not in GROUPINGS:
        raise GGUFError(f"tensors cannot be grouped by {by!r}; choose {', '.join(GROUPINGS)}")
    try:
        wanted = re.compile(pattern)
    except re.error as error:
        raise GGUFError(f"{pattern!r} is no regular expression: {error}") from None
    for format in formats:
        groups: dict[str, list[str]] = {}
        for name, view in tensors.items():
            kept = why_never(TensorInfo(name, view.shape, view.format), arch, _ANY)
            fits = not kept and view.shape[-1] % format.block_size == 0
            smaller = format.row_size(view.shape[-1]) < view.format.row_size(view.shape[-1]) if fits else False
            if smaller and wanted.search(name):
                block, role = place(name)
                key = {"tensor": name, "class": role, "block": "other" if block is None else f"blk.{block}"}[by]
                groups.setdefault(key, []).append(name)
        for group, names in groups.items():
            needs = format.kernels.quantize is None
            without = [n for n in names if importance is None or n not in importance.entries]
            if needs and without:
                if importance is None:
                    raise QuantError(f"{format} needs an importance matrix; give one with --imatrix")
                continue
            yield Variant(group, format.name, tuple(names))


def swap(
    tensors: Mapping[str, TensorView], variant: Variant, importance: IMatrix | None, threads: int | None
) -> dict[str, Any]:
    """All tensors of the model, the variant's quantized in memory."""
    format = get_format(variant.type)
    found: dict[str, Any] = dict(tensors)
    for name in variant.names:
        view = tensors[name]
        weights = None if importance is None or name not in importance.entries else importance.importance(name)
        parts = [
            np.ascontiguousarray(piece).view(np.uint8).reshape(-1)
            for piece in convert_tensor(view, format, weights, threads)
        ]
        found[name] = View(view.shape, format, np.concatenate(parts))
    return found


def summary(costs: Sequence[Cost], model: str, text: str, n_ctx: int) -> dict[str, Any]:
    """Everything, as JSON can hold it."""
    return {
        "schema": SCHEMA,
        "model": model,
        "text": text,
        "n_ctx": n_ctx,
        "costs": [asdict(c) for c in costs],
    }


def picture(costs: Sequence[Cost], title: str) -> Picture:
    """Mean KLD per group and type, on a logarithmic scale."""
    groups, types = list(dict.fromkeys(c.group for c in costs)), list(dict.fromkeys(c.type for c in costs))
    found = {(c.group, c.type): c for c in costs}
    values = [[found[g, t].mean_kld if (g, t) in found else None for t in types] for g in groups]
    tips = [
        [
            f"{g} in {t}: KLD {found[g, t].mean_kld:.3g}, {found[g, t].kld_per_bpw:.3g} per bit a weight"
            if (g, t) in found
            else ""
            for t in types
        ]
        for g in groups
    ]
    labels = [["" if v is None else f"{v:.1e}" for v in row] for row in values]
    return heat_map(f"{Path(title).name}: mean KLD", groups, types, values, tips, labels, log=True)
