"""Has a text been seen before? A sketch of a text is kept in the importance matrix that was made of it, so that a text
to measure on can be compared with the calibration text although that is not at hand.

A text is the set of its runs of eight words; a sketch holds the 1,024 smallest 64-bit hashes of them (bottom-k
sampling, Broder 1997). The share of another text's runs that were seen is estimated among its hashes below the sketch's
largest.
"""

from __future__ import annotations

import re
import zlib

import numpy as np

RUN = 8  # words
SIZE = 1024  # hashes that are kept
NOTEWORTHY = 0.02  # of a text's runs: less is chance and quotation

_WORD = re.compile(r"\w+")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio


def _hashes(text: str) -> np.ndarray:
    """uint64, ascending: one per different run of words."""
    known: dict[str, int] = {}
    words = np.array([known.setdefault(w, zlib.crc32(w.encode())) for w in _WORD.findall(text.lower())], np.uint64)
    if len(words) < RUN:
        return np.empty(0, np.uint64)
    total = np.zeros(len(words) - RUN + 1, np.uint64)
    with np.errstate(over="ignore"):
        for i in range(RUN):
            total = _mixed(total + words[i : i + len(total)])
    return np.unique(total)


def _mixed(x: np.ndarray) -> np.ndarray:
    """A bijection of 64 bits that spreads every bit over all others."""
    x = (x ^ (x >> np.uint64(32))) * _FACTOR
    return (x ^ (x >> np.uint64(29))) * _FACTOR


def sketch(text: str) -> np.ndarray:
    """uint64 [at most SIZE]: what is kept of a text."""
    return _hashes(text)[:SIZE]


def seen(text: str, known: np.ndarray) -> float:
    """Share of the text's runs of words that are in the text (or texts) behind the sketch `known`, from 0 to 1.

    >>> one = " ".join(f"word{i}" for i in range(4000))
    >>> two = " ".join(f"other{i}" for i in range(4000))
    >>> seen(one, sketch(one)), seen(two, sketch(one)), 0.4 < seen(one + " " + two, sketch(one)) < 0.6
    (1.0, 0.0, True)
    """
    if not len(known):
        return 0.0
    # a sketch of several texts is only complete up to the smallest of their largest hashes; that errs towards less
    below = _hashes(text)
    below = below[below <= known.max()]
    return float(np.isin(below, known).mean()) if len(below) else 0.0
