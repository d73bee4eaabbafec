"""A look at all weights before work begins: values that are not finite would be found hours later otherwise. The same
look takes the fingerprints that a record needs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gguftools.quantizing.pipeline import in_parallel
from gguftools.quantizing.source import SourceTensor
from quant.errors import QuantError


@dataclass(frozen=True)
class Scanned:
    """Of one tensor. not_finite: values (blocks of quantized types) that are not; row, block: the first of them;
    digest: SHA-256 of its data, "" if it was not asked for."""

    not_finite: int = 0
    row: int = -1
    block: int = -1
    digest: str = ""


def scan(
    tensors: Iterable[SourceTensor],
    hashed: bool = False,
    threads: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Scanned]:
    """Name -> what was found, of tensors with findings (of all, if `hashed`). progress: called with bytes."""

    def work(tensor: SourceTensor) -> tuple[SourceTensor, Scanned]:
        return tensor, _scan(tensor, hashed)

    found = {}
    for tensor, result in in_parallel(iter(tensors), work, threads or os.cpu_count() or 1):
        if result.not_finite or hashed:
            found[tensor.name] = result
        if progress is not None:
            progress(tensor.n_bytes)
    return found


def _scan(tensor: SourceTensor, hashed: bool) -> Scanned:
    state = hashlib.sha256(f"{tensor.format} {list(tensor.shape)}\n".encode()) if hashed else None
    count, first = 0, (-1, -1)
    for lo, hi in tensor.spans():
        bad = tensor.not_finite(lo, hi)
        n = int(np.count_nonzero(bad))
        if n and not count:
            row, block = np.unravel_index(int(np.argmax(bad)), bad.shape)
            first = lo + int(row), int(block)
        count += n
        if state is not None and not count:
            state.update(np.ascontiguousarray(tensor.raw(lo, hi)).data)
    return Scanned(count, *first, state.hexdigest() if state is not None and not count else "")


def digest(tensor: SourceTensor) -> str:
    """SHA-256 of a tensor's data as it will be quantized; with zeros in place of values it says so."""
    state = hashlib.sha256(f"{tensor.format} {list(tensor.shape)}{' zero' * tensor.zero}\n".encode())
    for lo, hi in tensor.spans():
        state.update(np.ascontiguousarray(tensor.raw(lo, hi)).data)
    return state.hexdigest()


def refuse(tensors: dict[str, SourceTensor], scanned: dict[str, Scanned]) -> None:
    """Raises QuantError for the first tensor that holds values that are not finite."""
    bad = [(name, found) for name, found in scanned.items() if found.not_finite]
    if not bad:
        return
    name, found = min(bad, key=lambda pair: list(tensors).index(pair[0]))
    tensor = tensors[name]
    column = found.block * tensor.format.block_size
    others = f" (and {found.not_finite - 1:,} more)" if found.not_finite > 1 else ""
    more = f"; {len(bad) - 1} more tensors hold such values" if len(bad) > 1 else ""
    raise QuantError(
        f"{tensor.where}: row {found.row}, column {column} is {tensor.value(found.row, found.block)}{others}{more}; "
        "repair the source, or take 0 for such values with --on-nonfinite zero"
    )


def importance_digest(find: Callable[[], Any] | None) -> str:
    """SHA-256 of what a tensor is quantized with, zeros for nothing."""
    return "0" * 64 if find is None else hashlib.sha256(np.ascontiguousarray(find(), np.float32).data).hexdigest()
