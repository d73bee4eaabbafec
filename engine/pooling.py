"""From the hidden states of a text's tokens to one embedding of the text, and its length."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine.errors import EngineError

#: name -> what it makes of states [n_tokens, n_embd]
POOLINGS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "mean": lambda states: states.mean(0, dtype=np.float64).astype(np.float32),
    "cls": lambda states: states[0].copy(),
    "last": lambda states: states[-1].copy(),
}

#: Ways to make one vector of many: none keeps them all.
POOLING = ("none", *POOLINGS)

#: `{arch}.pooling_type`, as llama.cpp counts them -> its name
BY_NUMBER = dict(enumerate(POOLING))


def pooling_of(value: int | None) -> str | None:
    """The name of a file's pooling, None if it names none. Raises EngineError for kinds that are not here."""
    if not value:
        return None
    if value not in BY_NUMBER:
        known = ", ".join(f"{number} ({name})" for number, name in BY_NUMBER.items() if number)
        raise EngineError(f"pooling type {value} is unknown: this version has {known}")
    return BY_NUMBER[value]


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


def normalize(x: np.ndarray, norm: int = 2) -> np.ndarray:
    """Vectors x [..., n] of length 1 in the `norm`-norm (1: sum of absolute values, 2: Euclid, p). -1 leaves them as
    they are, 0 scales the largest absolute value to 32760, the range of 16-bit integers. Zeros stay zeros. Raises
    EngineError for other numbers."""
    if norm < -1:
        raise EngineError(f"there is no norm {norm}: -1 for none, 0 for 16-bit integers, or 1, 2, and so on")
    if norm == -1:
        return x
    size = np.abs(x.astype(np.float64))
    if norm == 0:
        length = size.max(-1, keepdims=True) / 32760.0
    else:
        length = (size**norm).sum(-1, keepdims=True) ** (1.0 / norm)
    return np.divide(x, length, out=np.zeros(x.shape), where=length > 0).astype(np.float32)
