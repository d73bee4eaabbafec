"""What an importance matrix says of a model: statistics of every weight's inputs, and how they change from block to
block.

Formulas are those of llama.cpp's imatrix tool. For one weight, over all its columns (of matrices that inputs reached):
e = mean square of the column's input, v = mean of the column's input (e again where plain sums are unknown).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from quant.imatrix import Entry, IMatrix

NAN = float("nan")

_TINY = 1e-10
_BLOCK = re.compile(r"(?:^|\.)blk\.(\d+)\.(.*)$")


@dataclass(frozen=True)
class Pair:
    """Sums over the n columns c of a weight and p of the one before it, to be pooled over weights: products, squares,
    squared differences, centred products and squares; energy and columns of both."""

    n: int = 0
    dot: float = 0.0
    norm: float = 0.0
    norm_before: float = 0.0
    distance: float = 0.0
    covariance: float = 0.0
    variance: float = 0.0
    variance_before: float = 0.0
    energy: float = 0.0
    energy_before: float = 0.0
    columns: int = 0
    columns_before: int = 0

    def __add__(self, other: Pair) -> Pair:
        return Pair(*(a + b for a, b in zip(vars(self).values(), vars(other).values())))

    def l2_distance(self) -> float:
        return float(np.sqrt(self.distance))

    def cosine(self) -> float:
        return _normalized(self.dot, self.norm, self.norm_before)

    def pearson(self) -> float:
        return _normalized(self.covariance, self.variance, self.variance_before)


@dataclass(frozen=True)
class WeightStatistics:
    """One weight. block: its number, None outside of blocks; role: its name within the block.

    energy: sum of e; elements: columns; mean, deviation, skewness, kurtosis (excess) of v; entropy: of the distribution
    of energy over columns in bits, evenness: the same in per cent of its maximum. Against the same weight of the
    nearest block before (NaN without one): gain: ratio of root mean squares; distance, cosine, pearson, covariance of
    v.
    """

    name: str
    block: int | None
    role: str
    energy: float
    elements: int
    mean: float
    deviation: float
    skewness: float
    kurtosis: float
    entropy: float
    evenness: float
    gain: float = NAN
    distance: float = NAN
    cosine: float = NAN
    pearson: float = NAN
    covariance: float = NAN
    pair: Pair | None = None


@dataclass(frozen=True)
class BlockStatistics:
    """All weights of a block together, against the block before. Fields as in `WeightStatistics`."""

    block: int
    energy: float
    gain: float
    distance: float
    cosine: float
    pearson: float
    covariance: float


#: order of the values in a file's `.stats`
SCHEMA = {
    "sum_sq": "energy",
    "mean": "mean",
    "elements": "elements",
    "std_deviation": "deviation",
    "skewness": "skewness",
    "kurtosis": "kurtosis",
    "gain": "gain",
    "h_norm": "evenness",
    "l2_dist": "distance",
    "cossim": "cosine",
    "pearson": "pearson",
    "covariance": "covariance",
}


def place(name: str) -> tuple[int | None, str]:
    """Block and role of a weight.

    >>> place("blk.12.ffn_down.weight"), place("output.weight")
    ((12, 'ffn_down'), (None, 'output'))
    """
    found = _BLOCK.search(name)
    block, rest = (int(found[1]), found[2]) if found else (None, name)
    return block, rest.removesuffix(".weight")


def weight_statistics(imatrix: IMatrix) -> list[WeightStatistics]:
    """Per weight that inputs reached, by block and then name; what is outside of blocks comes last."""
    entries = {name: e for name, e in imatrix.entries.items() if (e.counts > 0).any()}
    alone = {name: _alone(name, entry) for name, entry in entries.items()}
    found = [_beside(s, alone, entries) for s in alone.values()]
    return sorted(found, key=lambda s: (s.block is None, s.block or 0, s.name))


def block_statistics(weights: list[WeightStatistics]) -> list[BlockStatistics]:
    """Per block; empty if the blocks have gaps, so that neighbours are not what they seem."""
    blocks = sorted({s.block for s in weights if s.block is not None})
    if blocks and blocks[-1] - blocks[0] + 1 != len(blocks):
        return []
    return [_pooled(block, [s for s in weights if s.block == block]) for block in blocks]


def _pooled(block: int, weights: list[WeightStatistics]) -> BlockStatistics:
    pair = sum((s.pair for s in weights if s.pair is not None), Pair())
    energy = sum(s.energy for s in weights)
    if not pair.n:
        return BlockStatistics(block, energy, NAN, NAN, NAN, NAN, NAN)
    gain = NAN
    if pair.energy_before > 0 and pair.columns and pair.columns_before:
        gain = float(np.sqrt(pair.energy / pair.columns) / np.sqrt(pair.energy_before / pair.columns_before))
    return BlockStatistics(
        block, energy, gain, pair.l2_distance(), pair.cosine(), pair.pearson(), pair.covariance / pair.n
    )


def _means(entry: Entry, plain: bool) -> np.ndarray:
    """float64 [n_mat, n] of v (plain sums) or e; NaN for matrices that no input reached."""
    sums = entry.sums if plain and entry.sums is not None else entry.squares
    counts = entry.counts[:, None]
    return np.where(counts > 0, sums / np.maximum(counts, 1), NAN)


def _alone(name: str, entry: Entry) -> WeightStatistics:
    reached = entry.counts > 0
    e, v = _means(entry, False)[reached].ravel(), _means(entry, True)[reached].ravel()
    n, mean = len(v), v.mean()
    d = v - mean
    variance = np.mean(d**2) if n > 1 else 0.0
    deviation = float(np.sqrt(variance))
    flat = deviation <= _TINY
    entropy = _entropy(e)
    block, role = place(name)
    return WeightStatistics(
        name=name,
        block=block,
        role=role,
        energy=float(e.sum()),
        elements=n,
        mean=float(mean),
        deviation=deviation,
        skewness=0.0 if flat else float(np.mean(d**3) / variance**1.5),
        kurtosis=0.0 if flat else float(np.mean(d**4) / variance**2 - 3),
        entropy=entropy,
        evenness=100 * entropy / float(np.log2(n)) if n > 1 else NAN,
    )


def _entropy(e: np.ndarray) -> float:
    total = e.sum()
    p = e / total if total > 0 else np.zeros_like(e)
    p = p[p > _TINY]
    return float(-(p * np.log2(p)).sum()) if p.size else 0.0


def _beside(
    s: WeightStatistics, alone: Mapping[str, WeightStatistics], entries: Mapping[str, Entry]
) -> WeightStatistics:
    """With the comparison against the same weight of the nearest block before."""
    before = None
    for block in range((s.block or 0) - 1, -1, -1):
        before = alone.get(s.name.replace(f"blk.{s.block}.", f"blk.{block}.", 1))
        if before is not None:
            break
    if before is None:
        return s
    a, b = entries[s.name], entries[before.name]
    plain = a.sums is not None and b.sums is not None
    c, p = _means(a, plain).ravel(), _means(b, plain).ravel()
    if c.size != p.size:
        return s
    known = np.isfinite(c) & np.isfinite(p)
    if not known.any():
        return s
    pair = _pair(c[known], p[known], s, before)
    gain = NAN
    if before.energy > _TINY:
        gain = float(np.sqrt(s.energy / s.elements) / np.sqrt(before.energy / before.elements))
    elif s.energy <= _TINY:
        gain = 1.0
    return WeightStatistics(
        **{
            **vars(s),
            "gain": gain,
            "distance": pair.l2_distance(),
            "cosine": pair.cosine(),
            "pearson": pair.pearson(),
            "covariance": pair.covariance / pair.n if pair.n > 1 else NAN,
            "pair": pair,
        }
    )


def _pair(c: np.ndarray, p: np.ndarray, now: WeightStatistics, before: WeightStatistics) -> Pair:
    dc, dp = c - c.mean(), p - p.mean()
    told = before.energy > _TINY  # without energy there is no ratio to pool
    return Pair(
        n=len(c),
        dot=float(c @ p),
        norm=float(c @ c),
        norm_before=float(p @ p),
        distance=float(np.square(c - p).sum()),
        covariance=float(dc @ dp),
        variance=float(dc @ dc),
        variance_before=float(dp @ dp),
        energy=now.energy if told else 0.0,
        energy_before=before.energy if told else 0.0,
        columns=now.elements if told else 0,
        columns_before=before.elements if told else 0,
    )


def _normalized(product: float, a: float, b: float) -> float:
    """product / sqrt(a b) within -1..1; 0 if one of both is 0, NaN if both are."""
    if a > 0 and b > 0:
        return float(np.clip(product / (np.sqrt(a) * np.sqrt(b)), -1, 1))
    return NAN if a == b == 0 else 0.0
