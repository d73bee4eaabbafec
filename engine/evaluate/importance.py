"""Collecting an importance matrix: run calibration text through the model and watch every matrix product's input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.evaluate.scoring import N_BATCH, N_CTX, cut, negative_log_likelihood
from engine.session import HEAD_ROWS, Session
from quant.imatrix import IMatrix

#: Called after every batch with the chunks done, the number of chunks, and the running perplexity (None if not scored).
OnChunk = Callable[[int, int, float | None], None]


@dataclass
class Collection:
    """How far a collection is, in whole batches: the sums, the chunks behind them, and what the perplexity is made of
    (sum of negative log-likelihoods, tokens scored)."""

    imatrix: IMatrix = field(default_factory=IMatrix)
    chunks: int = 0
    nll: float = 0.0
    scored: int = 0

    @property
    def ppl(self) -> float | None:
        return float(np.exp(self.nll / self.scored)) if self.scored else None


def collect(
    session: Session,
    tokens: Sequence[int] | np.ndarray,
    n_ctx: int = N_CTX,
    chunks: int | None = None,
    n_batch: int = N_BATCH,
    process_output: bool = False,
    score: bool = True,
    on_chunk: OnChunk | None = None,
    from_chunk: int = 0,
    state: Collection | None = None,
    all_experts: bool = False,
) -> IMatrix:
    """The importance matrix of the model over `tokens`, in chunks of n_ctx that begin with BOS as in `scoring`.

    All positions of a chunk count; n_batch tokens run at once, at least one chunk. Weights outside of the blocks (the
    output matrix) are left out unless `process_output`. score: also compute the perplexity of each chunk's second half,
    for `on_chunk`. from_chunk: chunks of the text that are left out at its beginning. state: where the sums go; one
    that has chunks already is continued behind them, and it is whole after every batch, whatever ends the run.
    all_experts: every token counts for every expert, not only for those that it is routed to; what the model computes,
    and with it the inputs of all other weights and the perplexity, stays that of its routing.

    Raises EngineError for a text shorter than two chunks and for `all_experts` of a model without any, QuantError for
    activations that are not finite.
    """
    session.check_context(n_ctx)
    if all_experts:
        session.check_experts()
    tokenizer = session.tokenizer
    windows = cut(tokens, n_ctx, chunks, tokenizer.bos if tokenizer.add_bos else None, from_chunk)
    state = state if state is not None else Collection()
    state.imatrix.chunk_size = n_ctx
    step = max(1, n_batch // n_ctx)
    for lo in range(state.chunks, len(windows), step):
        hi = min(lo + step, len(windows))
        part = IMatrix(chunk_size=n_ctx, chunk_count=hi - lo)

        def observe(
            name: str, x: np.ndarray, ids: np.ndarray | None = None, n_mat: int = 1, into: IMatrix = part
        ) -> None:
            if ids is not None:
                into.observe_experts(name, x, ids, n_mat)
            elif process_output or name.startswith("blk."):
                into.observe(name, x, n_mat)

        hidden = session.hidden(windows.inputs(lo, hi), observe=observe, all_experts=all_experts)
        hidden = hidden.reshape(hi - lo, n_ctx, -1)
        if process_output:
            for states in hidden:
                for at in range(0, n_ctx, HEAD_ROWS):
                    session.head(states[at : at + HEAD_ROWS], observe)
        nll = (
            _score(session, hidden[:, windows.first : windows.last], windows.targets(lo, hi)) if score else np.empty(0)
        )
        state.imatrix.merge(part)
        state.chunks, state.nll, state.scored = hi, state.nll + float(nll.sum()), state.scored + len(nll)
        if on_chunk is not None:
            on_chunk(hi, len(windows), state.ppl)
    return state.imatrix


def _score(session: Session, hidden: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Negative log-likelihoods, float64 [n], of hidden states [..., n_embd]."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    parts = [
        negative_log_likelihood(session.head(rows[at : at + HEAD_ROWS]), targets[at : at + HEAD_ROWS])
        for at in range(0, len(rows), HEAD_ROWS)
    ]
    return np.concatenate(parts)
