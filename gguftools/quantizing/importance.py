"""Which importance a tensor gets: its own entry, that of another weight that sees the same input, or that of the other
way of storing experts (one tensor for all, or one for each).

An importance matrix often lacks some entries; what is missing is said before the first tensor is quantized.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gguftools.errors import GGUFError
from gguftools.quantizing.source import SourceTensor
from quant.imatrix import IMatrix
from quant.mixes import Choice

#: Weights of one block that multiply the same input: what is known of one holds for the others
SAME_INPUT = (
    ("attn_q", "attn_k", "attn_v"),
    ("ffn_gate", "ffn_up"),
    ("ffn_gate_exps", "ffn_up_exps"),
    ("ffn_gate_shexp", "ffn_up_shexp"),
)
_WEIGHT = re.compile(r"(blk\.\d+)\.(\w+)\.weight")
_EXPERT = re.compile(r"(blk\.\d+\.ffn_(?:gate|up|down))\.(\d+)\.weight")  # experts as tensors of their own
_EXPERTS = re.compile(r"(blk\.\d+\.ffn_(?:gate|up|down))_exps\.weight")


@dataclass(frozen=True)
class Importance:
    """An importance matrix as a model's tensors see it. path: its file; substitutes: tensor -> the weight whose entry
    it takes for want of its own."""

    path: Path
    matrix: IMatrix
    substitutes: dict[str, str]
    _sources: dict[str, Callable[[], np.ndarray]] = field(repr=False)

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def of(self, name: str) -> Callable[[], np.ndarray] | None:
        """Function that gives float32 [matrices, n] for a tensor of the source, None where nothing is known."""
        return self._sources.get(name)


def select(matrix: IMatrix, include: Sequence[str], exclude: Sequence[str]) -> None:
    """Keep entries whose names hold one of `include`, if there are any, and none of `exclude`.

    Raises GGUFError if nothing is left, or both are given.
    """
    if include and exclude:
        raise GGUFError("--include-weights and --exclude-weights exclude each other; give one of them")
    if include:
        matrix.entries = {k: e for k, e in matrix.entries.items() if any(part in k for part in include)}
    if exclude:
        matrix.entries = {k: e for k, e in matrix.entries.items() if not any(part in k for part in exclude)}
    if not matrix.entries:
        raise GGUFError("no entry of the importance matrix is left; check --include-weights and --exclude-weights")


def resolve(path: Path, matrix: IMatrix, tensors: Iterable[SourceTensor]) -> Importance:
    """What each tensor gets. Raises GGUFError naming the first entry that does not fit its tensor, or if none fits."""
    known = {t.origin: t for t in tensors if t.shape}
    matrix.fit({name: (_matrices(t), t.n) for name, t in known.items()})
    sources: dict[str, Callable[[], np.ndarray]] = {}
    substitutes = {}
    for name, tensor in known.items():
        found = _own(matrix, name) or _of_experts(matrix, name, _matrices(tensor))
        if found is not None:
            _check(path, name, matrix, tensor)
            sources[name] = found
            continue
        for other in _same_input(name):
            found = _own(matrix, other)
            if found is not None and matrix.entries[other].squares.shape == (_matrices(tensor), tensor.n):
                sources[name], substitutes[name] = found, other
                break
    if not sources:
        raise GGUFError(f"{path}: no entry fits a tensor of the model: the importance matrix belongs to another model")
    return Importance(path, matrix, substitutes, sources)


def _matrices(tensor: SourceTensor) -> int:
    return int(np.prod(tensor.shape[:-2], dtype=np.int64))


def _own(matrix: IMatrix, name: str) -> Callable[[], np.ndarray] | None:
    return (lambda: matrix.importance(name)) if name in matrix.entries else None


def _of_experts(matrix: IMatrix, name: str, n_mat: int) -> Callable[[], np.ndarray] | None:
    """One expert's share of an entry for all, or all experts' entries together."""
    if found := _EXPERT.fullmatch(name):
        together, expert = f"{found[1]}_exps.weight", int(found[2])
        if together in matrix.entries and expert < len(matrix.entries[together].squares):
            return lambda: matrix.importance(together)[expert : expert + 1]
    if found := _EXPERTS.fullmatch(name):
        alone = [f"{found[1]}.{i}.weight" for i in range(n_mat)]
        if all(expert in matrix.entries for expert in alone):
            return lambda: np.concatenate([matrix.importance(expert) for expert in alone])
    return None


def _same_input(name: str) -> list[str]:
    found = _WEIGHT.fullmatch(name)
    for group in SAME_INPUT:
        if found and found[2] in group:
            return [f"{found[1]}.{other}.weight" for other in group if other != found[2]]
    return []


def _check(path: Path, name: str, matrix: IMatrix, tensor: SourceTensor) -> None:
    entry = matrix.entries.get(name)
    if entry is not None and entry.squares.shape != (_matrices(tensor), tensor.n):
        raise GGUFError(
            f"{path}: '{name}' has {entry.squares.shape[0]} x {entry.squares.shape[1]} values, the tensor "
            f"needs {_matrices(tensor)} x {tensor.n}: the importance matrix belongs to another model"
        )


@dataclass(frozen=True)
class Coverage:
    """How far an importance matrix reaches. covered: tensors of blocks that are quantized with importance; missing:
    those without; substituted: those that use another weight's; unreached: tensor -> experts that no input reached."""

    covered: int
    missing: tuple[str, ...]
    substituted: dict[str, str]
    unreached: dict[str, list[int]]

    def warnings(self) -> list[str]:
        """A line for each finding, with its remedy."""
        found = []
        total = self.covered + len(self.missing)
        if self.missing:
            found.append(
                f"the importance matrix covers {self.covered} of {total} tensors; quantized without are "
                f"{_some(self.missing)}: collect it again with `gguftools imatrix` for this model"
            )
        if self.substituted:
            name, other = next(iter(self.substituted.items()))
            found.append(
                f"{len(self.substituted)} tensors have no entry in the importance matrix and take that of a weight "
                f"with the same input, {name} that of {other}"
            )
        if self.unreached:
            experts = sum(map(len, self.unreached.values()))
            name, first = next(iter(self.unreached.items()))
            found.append(
                f"no text reached {experts} experts in {len(self.unreached)} tensors, such as expert {first[0]} of "
                f"{name}: all their columns count alike; collect importance from more text"
            )
        return found


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def coverage(importance: Importance, choices: Sequence[Choice], origins: dict[str, str]) -> Coverage:
    """What the tensors of blocks that will change their type find. origins: name in the output -> in the source."""
    quantized = [
        origins[c.name] for c in choices if not c.is_copy and c.target.is_quantized and c.name.startswith("blk.")
    ]
    missing = tuple(name for name in quantized if name not in importance)
    unreached = {name: experts for name, experts in importance.matrix.unreached().items() if name in set(quantized)}
    used = {name: other for name, other in importance.substitutes.items() if name in set(quantized)}
    return Coverage(len(quantized) - len(missing), missing, used, unreached)
