"""Collecting an importance matrix: run calibration text through the model and watch every matrix product's input."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from engine.evaluate.scoring import N_BATCH, N_CTX, cut, negative_log_likelihood
from engine.session import HEAD_ROWS, Session
from quant.imatrix import IMatrix

#: Called after every chunk with its number from 1, the number of chunks, and the running perplexity (None: not scored).
OnChunk = Callable[[int, int, float | None], None]


def collect(
    session: Session,
    tokens: Sequence[int],
    n_ctx: int = N_CTX,
    chunks: int | None = None,
    n_batch: int = N_BATCH,
    process_output: bool = False,
    score: bool = True,
    on_chunk: OnChunk | None = None,
) -> IMatrix:
    """The importance matrix of the model over `tokens`, in chunks of n_ctx that begin with BOS as in `scoring`.

    All positions of a chunk count. Weights outside of the blocks (the output matrix) are left out unless
    `process_output`. score: also compute the perplexity of each chunk's second half, for `on_chunk`.
    Raises EngineError for a text shorter than two chunks, QuantError for activations that are not finite.
    """
    session.check_context(n_ctx)
    tokenizer = session.tokenizer
    windows, text = cut(tokens, n_ctx, chunks, tokenizer.bos if tokenizer.add_bos else None)
    imatrix = IMatrix(chunk_size=n_ctx)

    def observe(name: str, x: np.ndarray) -> None:
        if process_output or name.startswith("blk."):
            imatrix.observe(name, x)

    total, count = 0.0, 0
    first, last = n_ctx // 2, n_ctx - 1
    step = max(1, n_batch // n_ctx)
    for lo in range(0, len(windows), step):
        batch = windows[lo : lo + step]
        hidden = session.hidden(batch, observe=observe).reshape(len(batch), n_ctx, -1)
        for i, states in enumerate(hidden):
            if process_output:
                for at in range(0, n_ctx, HEAD_ROWS):
                    session.head(states[at : at + HEAD_ROWS], observe)
            if score:
                for at in range(first, last, HEAD_ROWS):
                    end = min(at + HEAD_ROWS, last)
                    total += negative_log_likelihood(session.head(states[at:end]), text[lo + i, at + 1 : end + 1]).sum()
                count += last - first
            imatrix.chunk_count += 1
            if on_chunk is not None:
                on_chunk(lo + i + 1, len(windows), float(np.exp(total / count)) if score else None)
    return imatrix
