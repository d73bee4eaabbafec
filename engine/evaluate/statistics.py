"""Means with their errors, percentiles, and what is made of them: pure functions of per-token scores (float64 [n]).

The formulas are those of llama.cpp's perplexity tool, so that numbers can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: Percentiles that are reported for divergences, in per cent.
PERCENTILES = (99.9, 99.0, 95.0, 90.0, 50.0, 10.0, 5.0, 1.0, 0.1)


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
