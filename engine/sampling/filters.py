"""Samplers without a memory: each keeps some of the candidates, as a function of them and of its parameters.

`min_keep` is the number of candidates that are kept whatever the rule says. Every function names its source.
"""

from __future__ import annotations

import numpy as np

from engine.sampling.candidates import Candidates, largest

#: top-p looks at so many of the likeliest before it sorts them all; the first hold enough almost always
_LOOKS = (256, 8192)


def top_k(c: Candidates, k: int) -> None:
    """Keep the k likeliest (Fan et al. 2018, arXiv 1805.04833); k <= 0 keeps all."""
    if k > 0:
        c.sort(k)


def top_p(c: Candidates, p: float, min_keep: int = 0) -> None:
    """Keep the fewest of the likeliest whose probabilities reach p (Holtzman et al. 2019, arXiv 1904.09751)."""
    if p >= 1 or not len(c):
        return
    c.softmax()
    for k in (*_LOOKS, len(c)):
        order = np.arange(len(c)) if c.sorted else largest(c.logits, k)
        reached = np.flatnonzero(np.cumsum(c.p[order], dtype=np.float32) >= np.float32(p))  # type: ignore[index]
        if len(reached) or len(order) == len(c):
            break
    last = int(reached[0]) + 1 if len(reached) else len(c)
    last = max(last, min_keep)
    if last > len(order):
        order = largest(c.logits, last)
    c.take(order[:last])
    c.sorted = True


def min_p(c: Candidates, p: float, min_keep: int = 0) -> None:
    """Keep what is at least p times as likely as the likeliest (Nguyen et al. 2024, arXiv 2407.01082)."""
    if p <= 0 or not len(c):
        return
    kept = np.flatnonzero(c.logits >= c.logits.max() + np.log(np.float32(p)))
    if len(kept) >= max(min_keep, 1):
        c.take(kept)
    else:
        c.sort(max(min_keep, 1))


def typical(c: Candidates, p: float, min_keep: int = 0) -> None:
    """Keep the tokens whose surprise is nearest to the entropy, until they reach p.

    Locally typical sampling (Meister et al. 2022, arXiv 2202.00666). Tokens of probability 0 come last.
    """
    if p >= 1 or not len(c):
        return
    c.sort()
    q = c.softmax()
    with np.errstate(divide="ignore", invalid="ignore"):
        surprise = -np.log(q)
        entropy = np.where(q > 0, q * surprise, np.float32(0)).sum()
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    beyond = np.flatnonzero(np.cumsum(q[order], dtype=np.float32) > np.float32(p))
    last = int(beyond[0]) + 1 if len(beyond) else len(c)
    c.take(order[: max(last, min_keep)])
    c.sorted = False


def top_n_sigma(c: Candidates, n: float) -> None:
    """Keep logits within n standard deviations of the largest (Tang et al. 2024, arXiv 2411.07641); n <= 0 keeps all.

    Mean and deviation are those of the finite logits.
    """
    finite = c.logits[c.logits > -np.inf]
    if n > 0 and len(c) > 1 and len(finite):
        c.take(np.flatnonzero(c.logits >= finite.max() - np.float32(n) * finite.std()))


def temperature(c: Candidates, t: float) -> None:
    """Divide the logits by t; t <= 0 keeps the likeliest alone."""
    if t > 0:
        c.logits = c.logits / np.float32(t)
        c.p = None
    elif len(c):
        c.take(np.array([np.argmax(c.logits)]))
        c.sorted = True


def dynamic_temperature(c: Candidates, t: float, span: float, exponent: float) -> None:
    """A temperature from t - span to t + span that grows with the entropy of the candidates.

    lowest + (highest - lowest) * (entropy / log n) ** exponent, lowest not below 0 (kalomaze, "dynamic temperature").
    """
    if span <= 0:
        temperature(c, t)
        return
    if len(c) <= 1:
        return
    q = c.softmax()
    q = q[q > 0]
    share = max(float(-(q * np.log(q)).sum() / np.log(len(c))), 0.0)
    lowest, highest = max(0.0, t - span), t + span
    temperature(c, lowest + (highest - lowest) * share**exponent)


def xtc(c: Candidates, threshold: float, min_keep: int = 0) -> None:
    """Exclude top choices: of the tokens at or above `threshold` keep only the least likely.

    The caller tosses the coin (p-e-w, text-generation-webui pull request 6335).
    """
    c.sort()
    top = int(np.count_nonzero(c.softmax() >= np.float32(threshold))) - 1
    if top > 0 and len(c) - top >= min_keep:
        c.take(slice(top, None))
