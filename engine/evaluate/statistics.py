"""Means with their errors, percentiles, and what is made of them: pure functions of per-token scores (float64 [n]).

The formulas are those of llama.cpp's perplexity tool, so that numbers can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: Percentiles that are reported for divergences, in per cent.
PERCENTILES = (99.9, 99.0, 95.0, 90.0, 50.0, 10.0, 5.0, 1.0, 0.1)

#: Edges of the histogram of divergences, in nats: four bins a decade. Smaller values count in the first bin, larger
#: ones in the last.
HISTOGRAM_EDGES = tuple(float(f"{10 ** (e / 4):.3g}") for e in range(-28, 9))

_Z95 = 1.95996398454  # 97.5 % quantile of the normal distribution


@dataclass(frozen=True)
class Estimate:
    """A value and its standard error."""

    value: float
    error: float


def mean(x: np.ndarray) -> Estimate:
    """Mean and standard error sqrt((mean(x^2) - mean(x)^2) / (n - 1)); the error is 0 for 10 values or fewer."""
    n = len(x)
    value = float(np.mean(x))
    variance = float(np.mean(np.square(x))) - value * value
    return Estimate(value, float(np.sqrt(variance / (n - 1))) if n > 10 and variance > 0 else 0.0)


def covariance(a: np.ndarray, b: np.ndarray) -> float:
    """Covariance of the means of a and b; 0 for fewer than 10 values."""
    n = len(a)
    return float(np.mean(a * b) - np.mean(a) * np.mean(b)) / (n - 1) if n >= 10 else 0.0


def perplexity(nll: np.ndarray) -> Estimate:
    """exp(mean nll); the error is that of the mean times the value."""
    m = mean(nll)
    value = float(np.exp(m.value))
    return Estimate(value, m.error * value)


def log_ratio(nll: np.ndarray, base: np.ndarray) -> Estimate:
    """ln(PPL / PPL of the base), with an error that knows that both saw the same tokens."""
    a, b = mean(nll), mean(base)
    variance = a.error**2 + b.error**2 - 2 * covariance(nll, base)
    return Estimate(a.value - b.value, float(np.sqrt(max(0.0, variance))))


def ratio(nll: np.ndarray, base: np.ndarray) -> Estimate:
    """PPL / PPL of the base: exp of `log_ratio`, and its error times the value."""
    r = log_ratio(nll, base)
    value = float(np.exp(r.value))
    return Estimate(value, value * r.error)


def difference(nll: np.ndarray, base: np.ndarray) -> Estimate:
    """PPL - PPL of the base, with an error that knows that both saw the same tokens."""
    a, b = perplexity(nll), perplexity(base)
    variance = a.error**2 + b.error**2 - 2 * a.value * b.value * covariance(nll, base)
    return Estimate(a.value - b.value, float(np.sqrt(max(0.0, variance))))


def correlation(nll: np.ndarray, base: np.ndarray) -> float | None:
    """Correlation of both log-likelihoods; None where one of them has no spread or there are too few values."""
    a, b = mean(nll).error, mean(base).error
    return float(covariance(nll, base) / (a * b)) if a and b else None


def wilson(hits: int, n: int) -> tuple[float, float]:
    """95 % confidence interval of a share of `hits` in n (Wilson 1927).

    >>> low, high = wilson(5, 10)
    >>> round(low, 4), round(high, 4)
    (0.2366, 0.7634)
    """
    p, z = hits / n, _Z95 * _Z95 / n
    centre, half = p + z / 2, np.sqrt(z * p * (1 - p) + z * z / 4)
    return max(0.0, float((centre - half) / (1 + z))), min(1.0, float((centre + half) / (1 + z)))


def histogram(kld: np.ndarray) -> list[int]:
    """Number of values in each bin of HISTOGRAM_EDGES."""
    edges = np.asarray(HISTOGRAM_EDGES)
    return np.histogram(np.clip(kld, edges[0], edges[-1]), edges)[0].tolist()


def share(hits: np.ndarray) -> Estimate:
    """Share p of true values with its binomial error sqrt(p (1 - p) / (n - 1))."""
    p, n = float(np.mean(hits)), len(hits)
    return Estimate(p, float(np.sqrt(p * (1 - p) / (n - 1))) if n > 1 else 0.0)


def root_mean_square(x: np.ndarray) -> Estimate:
    """sqrt(mean(x^2)), with the error of the mean carried through the root."""
    m = mean(np.square(x))
    value = float(np.sqrt(m.value))
    return Estimate(value, 0.5 * m.error / value if value > 0 else 0.0)


def percentiles(x: np.ndarray, at: tuple[float, ...] = PERCENTILES) -> dict[float, float]:
    """Percentile (in per cent) -> value, interpolated linearly between neighbours in order."""
    return dict(zip(at, np.percentile(x, at).tolist())) if len(x) else {}
