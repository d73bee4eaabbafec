"""Perplexity, and divergence from a base model, over windows of a text.

The window is llama.cpp's: the text is cut into chunks of n_ctx tokens, the first token of each is replaced by BOS where
the model wants one, and the second half of each chunk is scored: positions n_ctx / 2 .. n_ctx - 2 predict the token
behind them. What is left of the text is not used. With a stride S, windows of n_ctx + S / 2 tokens begin every S
tokens, and only the last S positions of each are scored.

Base and models run side by side, chunk by chunk, and a few hundred rows of logits at a time: nothing is stored, and
memory does not grow with the text. A base that was stored (`StoredBase`) is read the same way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

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

    def joined(self, name: str, n: int | None = None) -> np.ndarray:
        """The first n scores of this name, all by default."""
        parts = getattr(self, name)
        return np.concatenate(parts)[:n] if parts else np.empty(0)


@dataclass(frozen=True)
class Divergence:
    """How far a model is from its base: KL(base || model) in nats a token, and shifts of the true token's probability.

    correlation: of both models' log-likelihoods, None where one of them has no spread; kld_histogram: tokens per bin of
    `statistics.HISTOGRAM_EDGES`; same_top_interval: 95 % confidence interval of same_top.
    """

    base_ppl: Estimate
    ln_ppl_ratio: Estimate
    ppl_ratio: Estimate
    ppl_difference: Estimate
    correlation: float | None
    mean_kld: Estimate
    max_kld: float
    min_kld: float
    kld_percentiles: dict[float, float]
    kld_histogram: list[int]
    mean_dp: Estimate
    rms_dp: Estimate
    max_dp: float
    min_dp: float
    dp_percentiles: dict[float, float]
    same_top: Estimate
    same_top_interval: tuple[float, float]


@dataclass(frozen=True)
class Evaluation:
    """What was measured, and over what.

    n_ctx: tokens of a window; stride: 0 for the standard window; n_tokens: scored in all; n_chunks: of them;
    tokens_sha256: of the text's tokens as int32, little-endian, all windows that were run; complete: False after an
    interruption; bits_per_byte: of the scored text, None where it has no bytes.
    """

    n_ctx: int
    stride: int
    n_chunks: int
    n_tokens: int
    tokens_sha256: str
    complete: bool
    ppl: Estimate
    bits_per_byte: float | None
    running: list[float]
    divergence: Divergence | None = None


class StoredBase(Protocol):
    """Log-probabilities of a base model that ran before. n_ctx: of its windows, which are the standard ones; tokens: of
    the text, int32 [n_chunks * n_ctx]."""

    @property
    def n_ctx(self) -> int: ...
    @property
    def n_vocab(self) -> int: ...
    @property
    def tokens(self) -> np.ndarray: ...

    def rows(self, lo: int, hi: int) -> np.ndarray:
        """Log-probabilities of scored positions lo..hi-1, counted through all windows: float32 [hi - lo, n_vocab]."""
        ...


#: Called after every batch with the chunks done, the number of chunks, and the scores so far of every model.
OnChunk = Callable[[int, int, list[Scores]], None]

#: Called with the first model's logits of scored positions, in order: float32 [n, n_vocab], valid during the call.
OnLogits = Callable[[np.ndarray], None]


@dataclass(frozen=True)
class Windows:
    """Where a text is cut, and which positions of each window are scored: first..last - 1 predict the next token.

    text: int32 [n, n_ctx], a view of the tokens; bos: what the model sees instead of each window's first token.
    """

    text: np.ndarray
    bos: int | None
    first: int
    last: int

    def __len__(self) -> int:
        return len(self.text)

    @property
    def n_ctx(self) -> int:
        return self.text.shape[1]

    @property
    def scored(self) -> int:
        """Scored positions of one window."""
        return self.last - self.first

    def inputs(self, lo: int, hi: int) -> np.ndarray:
        """What the model is given, int32 [hi - lo, n_ctx]."""
        batch = self.text[lo:hi].copy()
        if self.bos is not None:
            batch[:, 0] = self.bos
        return batch

    def targets(self, lo: int, hi: int) -> np.ndarray:
        """What it has to predict, int32 [(hi - lo) * scored]."""
        return self.text[lo:hi, self.first + 1 : self.last + 1].reshape(-1)

    def sha256(self, n: int) -> str:
        """Of the tokens of the first n windows."""
        return hashlib.sha256(np.ascontiguousarray(self.text[:n], "<i4").tobytes()).hexdigest()


def cut(
    tokens: Sequence[int] | np.ndarray, n_ctx: int, chunks: int | None, bos: int | None, skip: int = 0, least: int = 2
) -> Windows:
    """The standard windows, of which the first `skip` are left out.

    Raises EngineError for a text shorter than `least` windows.
    """
    _check_cut(len(tokens), n_ctx, chunks, least)
    if skip < 0 or (skip and (skip + 2) * n_ctx > len(tokens)):
        raise EngineError(
            f"the text has {len(tokens)} tokens, which does not leave two contexts of {n_ctx} behind chunk {skip}; "
            "begin earlier"
        )
    rest = np.asarray(tokens, np.int32)[skip * n_ctx :]
    n = len(rest) // n_ctx
    n = n if chunks is None else min(n, chunks)
    return Windows(rest[: n * n_ctx].reshape(n, n_ctx), bos, n_ctx // 2, n_ctx - 1)


def cut_strided(
    tokens: Sequence[int] | np.ndarray, n_ctx: int, stride: int, chunks: int | None, bos: int | None
) -> Windows:
    """Windows of n_ctx + stride / 2 tokens, one every `stride` tokens, whose last `stride` positions are scored.

    The reference pads its window to a multiple of 256 and replaces the first token too late to matter; here the window
    is as long as asked for, and begins with BOS. Raises EngineError for a text shorter than two contexts.
    """
    _check_cut(len(tokens), n_ctx, chunks)
    window = n_ctx + stride // 2
    if not 0 < stride < n_ctx:
        raise EngineError(f"a stride of {stride} does not fit a context of {n_ctx}; use 1 to {n_ctx - 1}")
    n = -(-(len(tokens) - window) // stride)
    n = n if chunks is None else min(n, chunks)
    if n < 1:
        raise EngineError(f"the text has {len(tokens)} tokens, windows of {window} need more; use a longer text")
    text = np.lib.stride_tricks.sliding_window_view(np.asarray(tokens, np.int32), window)[::stride][:n]
    return Windows(text, bos, window - 1 - stride, window - 1)


def _check_cut(n: int, n_ctx: int, chunks: int | None, least: int = 2) -> None:
    if n_ctx < 4:
        raise EngineError(f"a context of {n_ctx} tokens leaves nothing to score; use 4 or more")
    if chunks is not None and chunks < 1:
        raise EngineError(f"cannot score {chunks} chunks; ask for 1 or more")
    if n < least * n_ctx:
        raise EngineError(
            f"the text has {n} tokens, two contexts of {n_ctx} are needed; use a longer text or a smaller -c"
        )


def evaluate(
    models: Sequence[Session],
    tokens: Sequence[int] | np.ndarray,
    base: Session | StoredBase | None = None,
    n_ctx: int = N_CTX,
    chunks: int | None = None,
    n_batch: int = N_BATCH,
    on_chunk: OnChunk | None = None,
    stride: int = 0,
    on_logits: OnLogits | None = None,
    partial: bool = False,
) -> list[Evaluation]:
    """Score `tokens` with every model; with a base, also measure how far each is from it.

    tokens: of the whole text, as `Session.tokenize` gives them; n_batch: tokens that run at once, at least one window.
    A stored base brings its own tokens and context. partial: an interruption (KeyboardInterrupt) after the first batch
    ends the run, and what is measured by then is returned.

    Raises EngineError for a text shorter than two windows, a context beyond the model's, vocabularies that differ, and
    logits that are not finite.
    """
    running = base if isinstance(base, Session) else None
    stored = None if isinstance(base, Session) else base
    everyone = [*([running] if running else []), *models]
    check_vocabularies(everyone)
    if stored is not None:
        tokens, n_ctx, stride = stored.tokens, stored.n_ctx, 0
        if stored.n_vocab != everyone[0].n_vocab:
            raise EngineError(
                f"the stored logits are over {stored.n_vocab:,} tokens, the model has {everyone[0].n_vocab:,}: they "
                "belong to another model"
            )
    tokenizer = everyone[0].tokenizer
    bos = tokenizer.bos if tokenizer.add_bos else None
    if stride:
        windows = cut_strided(tokens, n_ctx, stride, chunks, bos)
    else:
        windows = cut(tokens, n_ctx, chunks, bos, least=2 if stored is None else 1)
    for session in everyone:
        session.check_context(windows.n_ctx)
    scores = [Scores() for _ in models]
    step, done = max(1, n_batch // windows.n_ctx), 0
    try:
        for lo in range(0, len(windows), step):
            hi = min(lo + step, len(windows))
            for part in _score(running, stored, models, windows, lo, hi, on_logits):
                for mine, new in zip(scores, part):
                    for name, values in new.items():
                        getattr(mine, name).append(values)
            done = hi
            if on_chunk is not None:
                on_chunk(done, len(windows), scores)
    except KeyboardInterrupt:
        if not done or not partial:
            raise
    n_bytes = _bytes_of(windows.targets(0, done), everyone[0])
    return [_conclude(s, windows, stride, done, n_bytes) for s in scores]


def check_vocabularies(sessions: Sequence[Session]) -> None:
    """Raises EngineError unless all models have the same tokens."""
    first = sessions[0]
    for session in sessions[1:]:
        if session.n_vocab != first.n_vocab:
            raise EngineError(
                f"the models have different vocabularies, of {first.n_vocab:,} and {session.n_vocab:,} tokens: their "
                "predictions cannot be compared"
            )
        a, b = (s.metadata.get("tokenizer.ggml.tokens") for s in (first, session))
        if a is None or b is None:
            continue
        different = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), None)
        if different is not None:
            raise EngineError(
                f"the models have different vocabularies: token {different} is {a[different]!r} in one and "
                f"{b[different]!r} in the other; their predictions cannot be compared"
            )


def _score(
    base: Session | None,
    stored: StoredBase | None,
    models: Sequence[Session],
    windows: Windows,
    lo: int,
    hi: int,
    on_logits: OnLogits | None,
):
    """Yields, per block of rows, each model's new scores."""
    batch, targets = windows.inputs(lo, hi), windows.targets(lo, hi)
    hidden = [m.hidden(batch, windows.first, windows.last) for m in models]
    base_hidden = base.hidden(batch, windows.first, windows.last) if base else None
    for at in range(0, len(targets), HEAD_ROWS):
        rows, goal = slice(at, at + HEAD_ROWS), targets[at : at + HEAD_ROWS]
        base_logits = base_nll = None
        if base is not None and base_hidden is not None:
            base_logits = base.head(base_hidden[rows])
            base_nll = negative_log_likelihood(base_logits, goal)
        elif stored is not None:
            start = lo * windows.scored + at
            base_logits = stored.rows(start, start + len(goal))
            base_nll = -base_logits[np.arange(len(goal)), goal].astype(np.float64)
        part = []
        for i, (model, states) in enumerate(zip(models, hidden)):
            logits = base_logits if model is base and base_logits is not None else model.head(states[rows])
            if i == 0 and on_logits is not None:
                on_logits(logits)
            new = {"nll": negative_log_likelihood(logits, goal)}
            if base_logits is not None and base_nll is not None:
                new["base_nll"] = base_nll
                new["kld"], new["same_top"] = divergence(base_logits, logits, normalized=stored is not None)
            part.append(new)
        yield part


def negative_log_likelihood(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """-log softmax(logits)[target] of each row: float64 [n]. Raises EngineError for logits that are not finite."""
    from engine.kernels import score

    out = np.empty(len(targets))
    n, n_vocab = logits.shape
    run_rows(lambda lo, hi: score.score_rows(logits[lo:hi], targets[lo:hi], out[lo:hi]), n, n_vocab, None)
    if not np.isfinite(out).all():
        raise EngineError("the model's logits are not finite: its weights are damaged")
    return out


def divergence(base: np.ndarray, logits: np.ndarray, normalized: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """KL(softmax(base) || softmax(logits)) of each row, float64 [n], and whether the largest logit is the same's.

    normalized: `base` holds log-probabilities already, and is taken as it is.
    """
    from engine.kernels import score

    kld, same = np.empty(len(base)), np.empty(len(base), bool)

    def work(lo: int, hi: int) -> None:
        score.diverge_rows(base[lo:hi], logits[lo:hi], normalized, kld[lo:hi], same[lo:hi])

    run_rows(work, base.shape[0], base.shape[1], None)
    return kld, same


def _bytes_of(targets: np.ndarray, session: Session) -> int:
    """Bytes of text behind the tokens; control tokens have none."""
    ids, counts = np.unique(targets, return_counts=True)
    return sum(int(n) * len(session.tokenizer.token_to_piece(int(i))) for i, n in zip(ids, counts))


def _conclude(scores: Scores, windows: Windows, stride: int, n_chunks: int, n_bytes: int) -> Evaluation:
    n = n_chunks * windows.scored
    nll = scores.joined("nll", n)
    so_far = np.exp(np.cumsum(nll) / np.arange(1, n + 1))
    return Evaluation(
        n_ctx=windows.n_ctx,
        stride=stride,
        n_chunks=n_chunks,
        n_tokens=n,
        tokens_sha256=windows.sha256(n_chunks),
        complete=n_chunks == len(windows),
        ppl=stats.perplexity(nll),
        bits_per_byte=float(nll.sum() / np.log(2) / n_bytes) if n_bytes else None,
        running=so_far[windows.scored - 1 :: windows.scored].tolist(),  # after each chunk
        divergence=_diverged(scores, nll) if scores.kld else None,
    )


def _diverged(scores: Scores, nll: np.ndarray) -> Divergence:
    base_nll, kld, same = (scores.joined(name, len(nll)) for name in ("base_nll", "kld", "same_top"))
    shift = np.exp(-nll) - np.exp(-base_nll)
    return Divergence(
        base_ppl=stats.perplexity(base_nll),
        ln_ppl_ratio=stats.log_ratio(nll, base_nll),
        ppl_ratio=stats.ratio(nll, base_nll),
        ppl_difference=stats.difference(nll, base_nll),
        correlation=stats.correlation(nll, base_nll),
        mean_kld=stats.mean(kld),
        max_kld=float(kld.max()),
        min_kld=float(kld.min()),
        kld_percentiles=stats.percentiles(kld),
        kld_histogram=stats.histogram(kld),
        mean_dp=stats.mean(shift),
        rms_dp=stats.root_mean_square(shift),
        max_dp=float(shift.max()),
        min_dp=float(shift.min()),
        dp_percentiles=stats.percentiles(shift, (99.9, 99.0, 95.0, 90.0, 75.0, 50.0, 25.0, 10.0, 5.0, 1.0, 0.1)),
        same_top=stats.share(same),
        same_top_interval=stats.wilson(int(same.sum()), len(same)),
    )
