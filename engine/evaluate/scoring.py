"""Perplexity, and divergence from a base model, over windows of a text.

The window is llama.cpp's: the text is cut into chunks of n_ctx tokens, the first token of each is replaced by BOS where
the model wants one, and the second half of each chunk is scored: positions n_ctx / 2 .. n_ctx - 2 predict the token
behind them. What is left of the text is not used.

Base and models run side by side, chunk by chunk, and a few hundred rows of logits at a time: nothing is stored, and
memory does not grow with the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.errors import EngineError
from engine.evaluate import statistics as stats
from engine.evaluate.statistics import Estimate
from engine.session import HEAD_ROWS, Session
from quant.quantize import run_rows

N_CTX = 512
N_BATCH = 512


@dataclass
class Scores:
    """Per-token scores of one model, in the text's order: negative log-likelihood; with a base also its
    log-likelihoods, the divergence from it in nats, and whether both have the same most likely token."""

    nll: list[np.ndarray] = field(default_factory=list)
    base_nll: list[np.ndarray] = field(default_factory=list)
    kld: list[np.ndarray] = field(default_factory=list)
    same_top: list[np.ndarray] = field(default_factory=list)

    def running_ppl(self) -> float:
        """Perplexity of everything so far."""
        return float(np.exp(sum(part.sum() for part in self.nll) / sum(map(len, self.nll))))

    def joined(self, name: str) -> np.ndarray:
        parts = getattr(self, name)
        return np.concatenate(parts) if parts else np.empty(0)


@dataclass(frozen=True)
class Divergence:
    """How far a model is from its base: KL(base || model) in nats a token; shifts of the true token's probability."""

    base_ppl: Estimate
    ln_ppl_ratio: Estimate
    mean_kld: Estimate
    max_kld: float
    min_kld: float
    kld_percentiles: dict[float, float]
    mean_dp: Estimate
    rms_dp: Estimate
    dp_percentiles: dict[float, float]
    same_top: Estimate


@dataclass(frozen=True)
class Evaluation:
    """What was measured, and over what: n_ctx tokens a chunk, n_tokens scored in all."""

    n_ctx: int
    n_chunks: int
    n_tokens: int
    ppl: Estimate
    running: list[float]
    divergence: Divergence | None = None


#: Called after every batch with the chunks done, the number of chunks, and the scores so far of every model.
OnChunk = Callable[[int, int, list[Scores]], None]


def cut(tokens: Sequence[int], n_ctx: int, chunks: int | None, bos: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Tokens -> (windows to run, with BOS in front; the same windows as in the text), int32 [n_chunks, n_ctx].

    Raises EngineError for a text shorter than two windows.
    """
    if n_ctx < 4:
        raise EngineError(f"a context of {n_ctx} tokens leaves nothing to score; use 4 or more")
    if chunks is not None and chunks < 1:
        raise EngineError(f"cannot score {chunks} chunks; ask for 1 or more")
    if len(tokens) < 2 * n_ctx:
        raise EngineError(
            f"the text has {len(tokens)} tokens, two contexts of {n_ctx} are needed; use a longer text or a smaller -c"
        )
    n = len(tokens) // n_ctx
    n = n if chunks is None else min(n, chunks)
    text = np.asarray(tokens[: n * n_ctx], np.int32).reshape(n, n_ctx)
    windows = text.copy()
    if bos is not None:
        windows[:, 0] = bos
    return windows, text


def evaluate(
    models: Sequence[Session],
    tokens: Sequence[int],
    base: Session | None = None,
    n_ctx: int = N_CTX,
    chunks: int | None = None,
    n_batch: int = N_BATCH,
    on_chunk: OnChunk | None = None,
) -> list[Evaluation]:
    """Score `tokens` with every model; with a base, also measure how far each is from it.

    tokens: of the whole text, as `Session.tokenize` gives them; n_batch: tokens that run at once, at least one window.
    Raises EngineError for a text shorter than two windows, a context beyond the model's, vocabularies that differ, and
    logits that are not finite.
    """
    everyone = [*([base] if base else []), *models]
    for session in everyone:
        session.check_context(n_ctx)
        if session.n_vocab != everyone[0].n_vocab:
            raise EngineError(
                f"the models have different vocabularies: {everyone[0].n_vocab} and {session.n_vocab} tokens"
            )
    tokenizer = everyone[0].tokenizer
    windows, text = cut(tokens, n_ctx, chunks, tokenizer.bos if tokenizer.add_bos else None)
    first, last = n_ctx // 2, n_ctx - 1
    scores = [Scores() for _ in models]
    step = max(1, n_batch // n_ctx)
    for lo in range(0, len(windows), step):
        batch = windows[lo : lo + step]
        targets = text[lo : lo + step, first + 1 :].reshape(-1)
        for part in _score(base, models, batch, targets, first, last):
            for mine, new in zip(scores, part):
                for name, values in new.items():
                    getattr(mine, name).append(values)
        if on_chunk is not None:
            on_chunk(lo + len(batch), len(windows), scores)
    return [_conclude(s, n_ctx, len(windows)) for s in scores]


def _score(
    base: Session | None, models: Sequence[Session], batch: np.ndarray, targets: np.ndarray, first: int, last: int
):
    """Yields, per block of rows, each model's new scores."""
    hidden = [m.hidden(batch, first, last) for m in models]
    base_hidden = base.hidden(batch, first, last) if base else None
    for lo in range(0, len(targets), HEAD_ROWS):
        rows, goal = slice(lo, lo + HEAD_ROWS), targets[lo : lo + HEAD_ROWS]
        base_logits = base.head(base_hidden[rows]) if base and base_hidden is not None else None
        base_nll = None if base_logits is None else negative_log_likelihood(base_logits, goal)
        part = []
        for model, states in zip(models, hidden):
            logits = base_logits if model is base and base_logits is not None else model.head(states[rows])
            new = {"nll": negative_log_likelihood(logits, goal)}
            if base_logits is not None and base_nll is not None:
                new["base_nll"] = base_nll
                new["kld"], new["same_top"] = divergence(base_logits, logits)
            part.append(new)
        yield part


def negative_log_likelihood(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """-log softmax(logits)[target] of each row: float64 [n]. Raises EngineError for logits that are not finite."""
    from engine.kernels import score

    out = np.empty(len(targets))
    run_rows(
        lambda lo, hi: score.score_rows(logits[lo:hi], targets[lo:hi], out[lo:hi]), len(logits), logits.shape[1], None
    )
    if not np.isfinite(out).all():
        raise EngineError("the model's logits are not finite: its weights are damaged")
    return out


def divergence(base: np.ndarray, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """KL(softmax(base) || softmax(logits)) of each row, float64 [n], and whether the largest logit is the same's."""
    from engine.kernels import score

    kld, same = np.empty(len(base)), np.empty(len(base), bool)
    run_rows(
        lambda lo, hi: score.diverge_rows(base[lo:hi], logits[lo:hi], kld[lo:hi], same[lo:hi]),
        len(base),
        base.shape[1],
        None,
    )
    return kld, same


def _conclude(scores: Scores, n_ctx: int, n_chunks: int) -> Evaluation:
    nll = scores.joined("nll")
    so_far = np.exp(np.cumsum(nll) / np.arange(1, len(nll) + 1))
    running = so_far[len(nll) // n_chunks - 1 :: len(nll) // n_chunks]  # after each chunk
    far = None
    if scores.kld:
        base_nll, kld = scores.joined("base_nll"), scores.joined("kld")
        shift = np.exp(-nll) - np.exp(-base_nll)
        far = Divergence(
            base_ppl=stats.perplexity(base_nll),
            ln_ppl_ratio=stats.log_ratio(nll, base_nll),
            mean_kld=stats.mean(kld),
            max_kld=float(kld.max()),
            min_kld=float(kld.min()),
            kld_percentiles=stats.percentiles(kld),
            mean_dp=stats.mean(shift),
            rms_dp=stats.root_mean_square(shift),
            dp_percentiles=stats.percentiles(shift, (99.9, 99.0, 95.0, 90.0, 75.0, 50.0, 25.0, 10.0, 5.0, 1.0, 0.1)),
            same_top=stats.share(scores.joined("same_top")),
        )
    return Evaluation(n_ctx, n_chunks, len(nll), stats.perplexity(nll), running.tolist(), far)
