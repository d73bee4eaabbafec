"""From the hidden states of a text's tokens to one vector, and its length."""

from __future__ import annotations

import numpy as np

from engine.errors import EngineError

#: Ways to make one vector of many: none keeps them all.
POOLING = ("none", "mean", "cls", "last")

#: `{arch}.pooling_type` -> its name
BY_NUMBER = {0: "none", 1: "mean", 2: "cls", 3: "last"}


def pool(hidden: np.ndarray, kind: str) -> np.ndarray:
    """float32 [n_tokens, n_embd] -> [n_embd]: the mean, the first token's, or the last token's."""
    if kind == "mean":
        return hidden.mean(0, dtype=np.float64).astype(np.float32)
    return hidden[0 if kind == "cls" else -1].copy()


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
