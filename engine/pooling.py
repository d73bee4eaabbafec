"""From the hidden states of a text's tokens to one embedding of the text."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine.errors import EngineError

#: name -> what it makes of states [n_tokens, n_embd]
POOLINGS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "mean": lambda states: states.mean(0, dtype=np.float64).astype(np.float32),
    "cls": lambda states: states[0],
    "last": lambda states: states[-1],
}

#: values of `{arch}.pooling_type`, as llama.cpp counts them
TYPES = {1: "mean", 2: "cls", 3: "last"}


def pooling_of(value: int | None) -> str | None:
    """The name of a file's pooling, None if it names none. Raises EngineError for kinds that are not here."""
    if not value:
        return None
    if value not in TYPES:
        known = ", ".join(f"{number} ({name})" for number, name in TYPES.items())
        raise EngineError(f"pooling type {value} is unknown: this version has {known}")
    return TYPES[value]


def pool(states: np.ndarray, pooling: str) -> np.ndarray:
    """The embedding of one text: float32 [n_embd], from states float32 [n_tokens, n_embd].

    pooling: `mean` of all tokens, the first one (`cls`), or the `last`. Raises EngineError for another name, and for a
    text without tokens.
    """
    if pooling not in POOLINGS:
        raise EngineError(f"unknown pooling '{pooling}'; there are {', '.join(POOLINGS)}")
    if len(states) == 0:
        raise EngineError("no tokens to pool: the text is empty")
    return POOLINGS[pooling](states)


def unit(embedding: np.ndarray) -> np.ndarray:
    """The embedding at length 1, so that a dot product is a cosine; zeros stay zeros."""
    length = np.sqrt(np.square(embedding, dtype=np.float64).sum(-1, keepdims=True))
    return (embedding / np.where(length > 0, length, 1)).astype(np.float32)
