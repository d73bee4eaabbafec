"""Samplers without a memory: each keeps some of the candidates, as a function of them and of its parameters.

`min_keep` is the number of candidates that are kept whatever the rule says. Every function names its source.
"""

from __future__ import annotations

import numpy as np

from engine.errors import EngineError
from engine.sampling.candidates import Candidates, largest
from engine.sampling.texts import TokenTexts

#: top-p looks at so many of the likeliest before it sorts them all; the first hold enough almost always
_LOOKS = (256, 8192)
#: candidates that infill compares with one another, and the least probability that it keeps
MAX_INFILL, INFILL_SHARE = 1024, 0.2


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


def infill(c: Candidates, texts: TokenTexts) -> None:
    """For filling a gap: keep the tokens that surely go on, or end if none does (llama.cpp pull request 9896).

    If the tokens that end a text have more than 1 / (3 n) of the probability of the others, only they are kept. Else of
    a token and another that begins with it the likelier takes the probability of both; what then has less than 0.2
    falls away, and of the rest what has less than 1 / (tokens of text + 1). If no token of text is left, the text ends.
    Raises EngineError for more candidates than can be compared with one another.
    """
    if len(c) > MAX_INFILL:
        raise EngineError(f"infill compares at most {MAX_INFILL:,} candidates: put top_k before it")
    if not len(c):
        return
    c.sort()
    p = c.softmax().astype(np.float64)
    ends = np.isin(c.ids, list(texts.eog))
    if 3 * p[ends].sum() * len(c) > p[~ends].sum():
        c.take(ends)
        return
    p = _merged(p, [texts.pieces[i] if i < len(texts.pieces) else b"" for i in c.ids.tolist()])
    kept = ends | (p >= INFILL_SHARE)
    n = int((kept & ~ends).sum())
    if n:
        c.take(kept & (ends | (p / p[kept].sum() >= 1 / (n + 1))))
    elif ends.any():
        c.take(np.flatnonzero(ends)[:1])


def _merged(p: np.ndarray, pieces: list[bytes]) -> np.ndarray:
    """Probabilities after each token that begins another has merged with it, into the likelier of the two."""
    p = p.copy()
    for i, begin in enumerate(pieces):
        for j, piece in enumerate(pieces):
            if not p[i] or not begin:
                break
            if i != j and p[j] and piece.startswith(begin):
                to, source = (i, j) if p[i] >= p[j] else (j, i)
                p[to] += p[source]
                p[source] = 0
    return p
