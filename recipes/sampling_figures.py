"""Figures of sampling: the default chain, and the masks of a grammar, over vocabularies of three sizes.

    python recipes/sampling_figures.py

Texts of the tokens are made up: 1 to 9 letters, digits, blanks and marks, as in real vocabularies. See
engine/README.md, "Figures".
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from engine.sampling import Chain, GrammarMatcher, Params, TokenTexts
from engine.sampling.json_schema import json_to_gbnf


def milliseconds(function: Callable[[], object], repeats: int = 20) -> float:
    """The median of some calls."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3


def vocabulary(n: int, rng: np.random.Generator) -> TokenTexts:
    letters = np.frombuffer(b'etaoinshrdlucmfwygpbvk      0123456789"{}[],:.-_\n' + bytes(range(0xC3, 0xC8)), np.uint8)
    row = rng.choice(letters, n * 9).tobytes()
    pieces = tuple(row[9 * i : 9 * i + length] for i, length in enumerate(rng.integers(1, 10, n)))
    return TokenTexts(pieces, pieces)


def main() -> None:
    rng = np.random.default_rng(0)
    for n in (32_000, 128_000, 262_144):
        logits = (rng.standard_normal(n) * 3).astype(np.float32)
        texts = vocabulary(n, rng)
        chain = Chain.of(Params(seed=1))
        everything = Chain.of(
            Params(seed=1, repeat_penalty=1.1, dry_multiplier=0.8, top_n_sigma=2.0, typ_p=0.95, xtc_probability=0.5),
            texts,
        )
        for token in rng.integers(0, 50, 100).tolist():
            everything.accept(token)
        print(f"{n:,} tokens: default chain {milliseconds(partial(chain.sample, logits)):.2f} ms", end="")
        print(f", all samplers {milliseconds(partial(everything.sample, logits)):.2f} ms", end="")
        matcher = GrammarMatcher.of(json_to_gbnf(), texts)
        first: list[float] = []
        for text in (b"{", b'"', b"t", b'"', b":"):
            first.append(milliseconds(matcher.mask, 1))
            matcher.state = matcher.grammar.read(matcher.state, text)
        names = ("start", "key", "in a string", "behind it")
        print(", first masks of JSON", ", ".join(f"{name} {t:.0f} ms" for name, t in zip(names, first)), end="")
        print(f", again {milliseconds(matcher.mask):.3f} ms")


if __name__ == "__main__":
    main()
