"""Embeddings of texts: one vector a text, from encoders and from models that write."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gguftools.errors import naming
from gguftools.loading import load

if TYPE_CHECKING:
    from engine.session import Session

N_BATCH = 512  # tokens that run at once, at least one text


@dataclass(frozen=True)
class Embeddings:
    """vectors: of each text float32 [n_embd], or without pooling [n_tokens, n_embd]; ids: of each text; pooling: how
    they were made."""

    vectors: list[np.ndarray]
    ids: list[list[int]]
    pooling: str

    def similarities(self) -> np.ndarray:
        """Cosines of all pairs: float32 [n, n]; 0 where a vector is zero."""
        from engine.pooling import normalize

        x = normalize(np.stack([v.reshape(-1, v.shape[-1]).mean(0) for v in self.vectors]))
        return x @ x.T


def embed(
    model: str | os.PathLike | Session,
    texts: str | Sequence[str],
    pooling: str | None = None,
    normalize: int = 2,
    n_batch: int = N_BATCH,
    threads: int | None = None,
    causal: bool | None = None,
) -> Embeddings:
    """Vectors of texts.

    pooling: none, mean, cls or last; None: the model's own (`{arch}.pooling_type`), or for models that do not say, the
    mean; normalize: 2 for length 1, other p-norms, 0 for 16-bit integers, -1 for none; n_batch: tokens that run at
    once; causal: whether tokens see only what is before them, None: as the model was made.

    >>> import gguftools
    >>> found = gguftools.embed(gguftools.demo_model(), ["One text", "Another"], threads=2)
    >>> len(found.vectors), found.pooling
    (2, 'mean')

    Raises GGUFError and EngineError as `load` does, and for a text that is longer than the model was trained for.
    """
    from engine.pooling import embed_texts, pooling_of
    from engine.session import Session

    texts = [texts] if isinstance(texts, str) else list(texts)
    name = "model" if isinstance(model, Session) else model
    with naming(name):
        session = model if isinstance(model, Session) else load(model, threads=threads)
        kind = pooling_of(session, pooling)
        ids = [session.tokenize(text, add_special=True, parse_special=False) for text in texts]
        return Embeddings(embed_texts(session, ids, kind, normalize, n_batch, causal), ids, kind)
