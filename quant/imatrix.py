"""Importance matrix: what calibration text puts into each column of every weight matrix.

For a product `x @ w.T` the error of quantizing column j of w counts in proportion to the mean of x[j]^2. `IMatrix`
gathers these means: the engine calls `observe` with every matrix product's input, quantization asks for `importance`.
Files are read and written elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from quant.errors import QuantError


@dataclass
class Entry:
    """Sums over the inputs of one weight tensor of n columns, which holds n_mat matrices (experts; 1 for plain ones).

    squares: float64 [n_mat, n], sum of x^2; counts: int64 [n_mat], number of inputs; sums: float64 [n_mat, n], sum of
    x, or None where it is not known (old files).
    """

    squares: np.ndarray
    counts: np.ndarray
    sums: np.ndarray | None

    @classmethod
    def zeros(cls, n_mat: int, n: int) -> Entry:
        return cls(np.zeros((n_mat, n)), np.zeros(n_mat, np.int64), np.zeros((n_mat, n)))

    def add(self, matrix: int, x: np.ndarray) -> None:
        """Account for the inputs x [rows, n] of one matrix."""
        # float64 sums: the number of tokens has no bearing on precision
        self.squares[matrix] += np.einsum("ij,ij->j", x, x, dtype=np.float64)
        if self.sums is not None:
            self.sums[matrix] += x.sum(axis=0, dtype=np.float64)
        self.counts[matrix] += len(x)


@dataclass
class IMatrix:
    """Entries by name of the weight, and what is known of the text.

    datasets: names of the texts; chunk_size: tokens per chunk; chunk_count: chunks seen. hashes: SHA-256 of the texts,
    by name; weights: what a text counted for, by name, where it is not 1; sketch: uint64, some hashes of what the texts
    say (see `gguftools.overlap`), None where unknown.
    """

    entries: dict[str, Entry] = field(default_factory=dict)
    datasets: list[str] = field(default_factory=list)
    chunk_count: int = 0
    chunk_size: int = 512
    hashes: dict[str, str] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    sketch: np.ndarray | None = None

    def observe(self, name: str, x: np.ndarray, n_mat: int = 1) -> None:
        """Account for the inputs of a plain product with the weight `name`.

        x: float32 [..., rows, n]; n_mat: matrices in the weight (more than 1 where its heads are matrices of their own:
        then the third last axis of x walks through them, repeatedly if it is longer).

        >>> m = IMatrix()
        >>> m.observe("blk.0.attn_q.weight", np.float32([[1, 2], [3, 4]]))
        >>> m.importance("blk.0.attn_q.weight").tolist()
        [[5.0, 10.0]]

        Raises QuantError when x does not fit what was observed before, or is not finite.
        """
        entry = self._entry(name, n_mat, x)
        groups = x.reshape(-1, *x.shape[-2:]) if n_mat > 1 else x.reshape(1, -1, x.shape[-1])
        for i, rows in enumerate(groups):
            entry.add(i % n_mat, rows)

    def observe_experts(self, name: str, x: np.ndarray, ids: np.ndarray, n_expert: int) -> None:
        """Account for the inputs of a product in which every token picks its experts.

        x: float32 [tokens, m, n]: slot i of a token takes input i % m, so that with m = 1 all share one; ids: int
        [tokens, slots], the experts. Raises QuantError as `observe` does, and for ids outside of 0..n_expert - 1.
        """
        if ids.size and not 0 <= ids.min() <= ids.max() < n_expert:
            raise QuantError(f"{name}: expert {ids.min()}..{ids.max()} chosen of {n_expert}; the routing is broken")
        entry = self._entry(name, n_expert, x)
        for expert in np.unique(ids):
            token, slot = np.nonzero(ids == expert)
            entry.add(expert, x[token, slot % x.shape[1]])

    def importance(self, name: str) -> np.ndarray:
        """float32 [n_mat, n]: mean of the squares per matrix, 1 for a matrix that no input reached.

        Raises QuantError if there is no entry of this name.
        """
        if name not in self.entries:
            raise QuantError(f"{name}: has no entry in the importance matrix; collect it again for this model")
        entry = self.entries[name]
        counts = entry.counts[:, None]
        # as the reference: float32 sums divided by float32 counts
        mean = entry.squares.astype(np.float32) / np.maximum(counts, 1).astype(np.float32)
        return np.where(counts > 0, mean, np.float32(1))

    def merge(self, other: IMatrix) -> None:
        """Add the sums of another matrix, as if its text had been observed too. Where one of both has flat entries of
        experts (see `fit`), the other says how many there are.

        Raises QuantError, with nothing added, where an entry has another shape.
        """
        other = replace(other, entries=dict(other.entries))
        for one, pattern in ((self, other), (other, self)):
            one.fit({name: entry.squares.shape for name, entry in pattern.entries.items()})
        for name, entry in other.entries.items():
            mine = self.entries.get(name)
            if mine is not None and mine.squares.shape != entry.squares.shape:
                raise QuantError(
                    f"{name}: entries of shape {mine.squares.shape} and {entry.squares.shape} cannot be merged: "
                    "the importance matrices belong to different models"
                )
        for name, entry in other.entries.items():
            mine = self.entries.setdefault(name, Entry.zeros(*entry.squares.shape))
            mine.squares += entry.squares
            mine.counts += entry.counts
            mine.sums = None if mine.sums is None or entry.sums is None else mine.sums + entry.sums
        self.datasets += [d for d in other.datasets if d not in self.datasets]
        self.hashes = {**other.hashes, **self.hashes}
        self.weights = {**other.weights, **self.weights}
        if other.sketch is not None:
            self.sketch = other.sketch if self.sketch is None else np.union1d(self.sketch, other.sketch)
        self.chunk_count += other.chunk_count

    def scaled(self, weight: float) -> IMatrix:
        """The same means from `weight` times as many inputs: for merging texts that do not count alike.

        Counts stay whole and keep at least 1 where they are not 0; sums follow them. Raises QuantError for a weight
        that is not finite and positive.
        """
        if not (np.isfinite(weight) and weight > 0):
            raise QuantError(f"a text cannot have the weight {weight}; use a positive number")
        if weight == 1:
            return self
        scaled = replace(self, entries={}, weights={**self.weights, **dict.fromkeys(self.datasets, weight)})
        for name, entry in self.entries.items():
            counts = np.where(entry.counts > 0, np.maximum(1, np.rint(entry.counts * weight)), 0).astype(np.int64)
            factor = (counts / np.maximum(entry.counts, 1))[:, None]
            sums = None if entry.sums is None else entry.sums * factor
            scaled.entries[name] = Entry(entry.squares * factor, counts, sums)
        return scaled

    def fit(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        """Cut flat entries of weights that hold several matrices, as older files have them.

        shapes: name -> number of matrices and columns of the model's weights.
        """
        for name, (n_mat, n) in shapes.items():
            entry = self.entries.get(name)
            if entry is not None and n_mat > 1 and entry.squares.shape == (1, n_mat * n):
                sums = None if entry.sums is None else entry.sums.reshape(n_mat, n)
                self.entries[name] = Entry(entry.squares.reshape(n_mat, n), np.repeat(entry.counts, n_mat), sums)

    def unreached(self) -> dict[str, list[int]]:
        """Name of a weight -> its matrices (experts) that no input reached; only weights that have such."""
        found = {name: np.flatnonzero(entry.counts == 0).tolist() for name, entry in sorted(self.entries.items())}
        return {name: experts for name, experts in found.items() if experts}

    def _entry(self, name: str, n_mat: int, x: np.ndarray) -> Entry:
        if not np.isfinite(x).all():
            raise QuantError(f"{name}: its input is not finite: the model or the text is broken")
        entry = self.entries.setdefault(name, Entry.zeros(n_mat, x.shape[-1]))
        if entry.squares.shape != (n_mat, x.shape[-1]):
            raise QuantError(
                f"{name}: input of {n_mat} matrices and {x.shape[-1]} columns after one of {entry.squares.shape}: "
                "the importance matrix belongs to another model"
            )
        return entry
