"""Speculative decoding without a model: how drafts are made from what was said, and which of their tokens are kept.

Leviathan, Kalman and Matias 2023, "Fast inference from transformers via speculative decoding", arXiv 2211.17192: a
drafted token x is kept with probability min(1, p(x) / q(x)), where p is the target's distribution and q the draft's;
else the token is drawn from the positive part of p - q, normalised. What comes out has the distribution p.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from engine.errors import EngineError
from engine.sampling.chain import Chain
from engine.sampling.rng import Stream


def residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The distribution max(p - q, 0), normalised; p itself where q covers it all (up to rounding)."""
    rest = np.maximum(p - q, 0)
    total = rest.sum()
    return rest / total if total > 0 else p


def verify_by_rejection(p: np.ndarray, q: np.ndarray, draft: Sequence[int], stream: Stream) -> tuple[int, list[int]]:
    """Which drafted tokens are kept, and one more: (number kept, the kept ones and the token behind them).

    p: the target's distributions [n + 1, n_vocab] before each drafted token and behind the last; q: the draft's [n,
    n_vocab], from which the tokens were drawn (one-hot for a draft that was looked up or greedy); draft: n tokens;
    stream: random numbers that the draft did not use.
    Raises EngineError for shapes that do not fit, and for a token that its q excludes.
    """
    n = len(draft)
    if p.ndim != 2 or len(p) != n + 1 or q.shape != (n, p.shape[1]):
        raise EngineError(
            f"{n} drafted tokens need p [{n + 1}, n_vocab] and q [{n}, n_vocab]; got {p.shape}, {q.shape}"
        )
    for i, token in enumerate(draft):
        if not (0 <= token < p.shape[1] and q[i, token] > 0):
            raise EngineError(f"drafted token {token} cannot have been drawn from its distribution")
        if stream.uniform() * q[i, token] >= p[i, token]:
            return i, [*draft[:i], stream.choice(residual(p[i], q[i]))]
    return n, [*draft, stream.choice(p[n])]


def target_distributions(chain: Chain, logits: np.ndarray, draft: Sequence[int]) -> np.ndarray:
    """`p` for `verify_by_rejection`: what a chain makes of the target's logits [n + 1, n_vocab] along a draft.

    The chain itself does not move (it is told the tokens that were kept, by `accept`); only its random numbers are
    used up. Behind a drafted token that the chain excludes the rows are zero: they are not looked at.
    """
    p = np.zeros(logits.shape)
    twin = chain.fork()
    for i, row in enumerate(logits):
        p[i] = twin.distribution(row)
        if i < len(draft):
            if p[i, draft[i]] == 0:
                break
            twin.accept(draft[i])
    return p


def verify_by_matching(
    draft: Sequence[int], sample: Callable[[int], int], eog: Collection[int] = ()
) -> tuple[int, list[int]]:
    """Keep drafted tokens as long as the target chooses the same: (number kept, the chosen tokens).

    sample(i) chooses and accepts the token of the target's row i, with any chain; so the text is the one that plain
    decoding with this chain gives, random numbers included. Ends behind a token of `eog`.
    """
    out: list[int] = []
    for i, token in enumerate(draft):
        out.append(sample(i))
        if out[i] != token:
            return i, out
        if token in eog:
            return i + 1, out
    return len(draft), [*out, sample(len(draft))]


def one_hot(draft: Sequence[int], n_vocab: int) -> np.ndarray:
    """The distributions [n, n_vocab] of drafted tokens that were not drawn but looked up."""
    q = np.zeros((len(draft), n_vocab))
    q[np.arange(len(draft)), np.asarray(draft, np.int64)] = 1
    return q


def look_up(tokens: Sequence[int], longest: int = 12, shortest: int = 2, n_draft: int = 16) -> list[int]:
    """A draft from the text itself: what followed the last tokens when they came before (prompt look-up).

    The last `longest` tokens are looked for first, then fewer, down to `shortest`; of several places the latest counts.
    Empty if there is none (Saxena 2023, "Prompt lookup decoding"). Raises EngineError for lengths below 1.
    """
    if min(longest, shortest, n_draft) < 1:
        raise EngineError("the lengths of a prompt look-up are 1 or more")
    x = np.asarray(tokens, np.int64)
    # runs[j]: how many tokens up to j, at most `longest`, agree with as many at the end
    last = len(x) - 1
    runs = np.zeros(max(last, 0), np.int64)
    alive = np.arange(max(last, 0))
    for n in range(min(longest, last)):
        alive = alive[alive >= n]
        alive = alive[x[alive - n] == x[last - n]]
        if not len(alive):
            break
        runs[alive] = n + 1
    best = int(runs.max(initial=0))
    if best < shortest:
        return []
    at = int(np.flatnonzero(runs == best)[-1])
    return x[at + 1 : at + 1 + n_draft].tolist()
