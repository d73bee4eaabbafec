"""From the hidden states of a text's tokens to one embedding of the text, and its length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from engine.errors import EngineError

if TYPE_CHECKING:
    from engine.session import Session

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


def name_of(value: int | None) -> str | None:
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


def pooling_of(session: Session, wanted: str | None) -> str:
    """The pooling that was asked for, or the model's own. Raises EngineError for one that there is not."""
    if wanted is not None and wanted not in POOLING:
        raise EngineError(f"there is no pooling '{wanted}'; use one of {', '.join(POOLING)}")
    if wanted is not None:
        return wanted
    number = session.metadata.get(f"{session.arch.name}.pooling_type")
    return "mean" if number is None else name_of(number) or "none"


def embed_texts(
    session: Session,
    texts: Sequence[Sequence[int]],
    kind: str,
    norm: int = 2,
    n_batch: int = 512,
    causal: bool | None = None,
) -> list[np.ndarray]:
    """Vectors of texts (ids): float32 [n_embd], or for pooling none [n_tokens, n_embd]. Texts of one length run
    together, up to n_batch tokens at once. Raises EngineError for a text that is empty or too long."""
    out: list[np.ndarray] = [np.empty(0)] * len(texts)
    by_length: dict[int, list[int]] = {}
    for i, ids in enumerate(texts):
        if len(ids) == 0:
            raise EngineError(f"text {i + 1} is empty: there is nothing to embed")
        session.check_context(len(ids))
        by_length.setdefault(len(ids), []).append(i)
    for length, members in by_length.items():
        step = max(1, n_batch // length)
        for lo in range(0, len(members), step):
            some = members[lo : lo + step]
            hidden = session.hidden(np.array([list(texts[i]) for i in some]), causal=causal)
            for i, rows in zip(some, hidden.reshape(len(some), length, -1)):
                out[i] = normalize(rows.copy() if kind == "none" else pool(rows, kind), norm)
    return out
