"""Batches of tokens of several sequences, and how they are cut into pieces that run at once (ubatches)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.errors import EngineError

MAX_SEQUENCES = 256


@dataclass
class Batch:
    """Tokens to be decoded, in order. What is left out is filled in by `complete`.

    tokens: ids; embd: float32 [n, n_embd], instead of tokens; pos: the position of each in its sequences; seqs: the
    sequences that each belongs to; outputs: whose results are wanted.
    """

    tokens: list[int] | None = field(default_factory=list)
    embd: np.ndarray | None = None
    pos: list[int] | None = None
    seqs: list[tuple[int, ...]] | None = None
    outputs: list[bool] | None = None

    @classmethod
    def of(cls, tokens: Iterable[int]) -> Batch:
        """The next tokens of sequence 0; the result of the last one is wanted."""
        return cls([int(t) for t in tokens])

    @property
    def n_tokens(self) -> int:
        return len(self.embd) if self.embd is not None else len(self.tokens or ())

    def add(self, token: int, pos: int, seqs: Sequence[int] = (0,), output: bool = False) -> None:
        """One more token."""
        self.tokens = [*(self.tokens or ()), int(token)]
        self.pos = [*(self.pos or ()), pos]
        self.seqs = [*(self.seqs or ()), tuple(seqs)]
        self.outputs = [*(self.outputs or ()), output]

    def clear(self) -> None:
        """No tokens."""
        self.tokens, self.embd, self.pos, self.seqs, self.outputs = [], None, None, None, None


@dataclass(frozen=True)
class Ubatch:
    """Tokens that run at once, those of one sequence side by side where sequences have the same number.

    index: their places in the batch; n_seqs: groups of n_seq_tokens tokens each; n_seqs_unq: different sequences.
    The rest as in `Batch`, as arrays.
    """

    index: np.ndarray
    tokens: np.ndarray | None
    embd: np.ndarray | None
    pos: np.ndarray
    seqs: list[tuple[int, ...]]
    outputs: np.ndarray
    n_seqs: int

    @property
    def n_tokens(self) -> int:
        return len(self.index)

    @property
    def n_seq_tokens(self) -> int:
        return self.n_tokens // self.n_seqs

    @property
    def n_outputs(self) -> int:
        return int(self.outputs.sum())

    @property
    def n_seqs_unq(self) -> int:
        return len({s for seqs in self.seqs for s in seqs})

    def first_positions(self) -> dict[int, int]:
        """Sequence -> its first position."""
        found: dict[int, int] = {}
        for seqs, pos in zip(self.seqs, self.pos):
            for s in seqs:
                found[s] = min(found.get(s, int(pos)), int(pos))
        return found


@dataclass(frozen=True)
class FullBatch:
    """A batch with nothing left out, checked."""

    tokens: np.ndarray | None
    embd: np.ndarray | None
    pos: np.ndarray
    seqs: list[tuple[int, ...]]
    outputs: np.ndarray

    @property
    def n_tokens(self) -> int:
        return len(self.pos)

    @property
    def is_coupled(self) -> bool:
        """Whether a token belongs to several sequences."""
        return any(len(s) > 1 for s in self.seqs)

    def pick(self, index: Sequence[int] | np.ndarray, n_seqs: int) -> Ubatch:
        """Some of the tokens."""
        at = np.asarray(index, np.int64)
        return Ubatch(
            at,
            None if self.tokens is None else self.tokens[at],
            None if self.embd is None else self.embd[at],
            self.pos[at],
            [self.seqs[i] for i in at],
            self.outputs[at],
            n_seqs,
        )


def complete(
    batch: Batch,
    n_vocab: int,
    n_seq_max: int,
    pos_max: Callable[[int], int] | None,
    all_outputs: bool = False,
    n_embd: int = 0,
) -> FullBatch:
    """Fill in sequence 0, the positions behind what sequences have, and the output of the last token; check it all.

    pos_max: the last position that a sequence has in memory, -1 for none; None without a memory. all_outputs: whatever
    the batch says. Raises EngineError for what cannot be decoded.
    """
    n = batch.n_tokens
    if n == 0:
        raise EngineError("the batch is empty: add a token")
    tokens = None
    if batch.embd is None:
        tokens = _whole(batch.tokens, "token ids")
        bad = np.flatnonzero((tokens < 0) | (tokens >= n_vocab))
        if bad.size:
            i = int(bad[0])
            raise EngineError(f"token {i} of the batch is {tokens[i]}: ids of this model are 0 to {n_vocab - 1}")
    elif batch.embd.ndim != 2 or batch.embd.shape[1] != n_embd:
        raise EngineError(f"embeddings of shape {list(batch.embd.shape)} in the batch, expected [{n}, {n_embd}]")
    for what, given in (("positions", batch.pos), ("sequences", batch.seqs), ("output flags", batch.outputs)):
        if given is not None and len(given) != n:
            raise EngineError(f"the batch has {n} tokens and {len(given)} {what}: give one for each")
    seqs: list[tuple[int, ...]] = [(0,)] * n
    if batch.seqs is not None:
        seqs = [tuple(int(s) for s in of) for of in batch.seqs]
    for i, of in enumerate(seqs):
        for s in of:
            if not 0 <= s < n_seq_max:
                raise EngineError(
                    f"token {i} of the batch belongs to sequence {s}: there are {n_seq_max}, from 0 on (n_seq_max)"
                )
        if not of:
            raise EngineError(f"token {i} of the batch belongs to no sequence")
    pos = _whole(batch.pos, "positions") if batch.pos is not None else _positions(seqs, pos_max)
    if pos.min() < 0:
        raise EngineError(f"position {pos.min()} in the batch: positions are 0 or more")
    _check_sequences(seqs, pos, pos_max)
    if all_outputs:
        outputs = np.ones(n, bool)
    elif batch.outputs is not None:
        outputs = np.asarray(batch.outputs, bool)
    else:
        outputs = np.arange(n) == n - 1
    embd = None if batch.embd is None else np.asarray(batch.embd, np.float32)
    return FullBatch(None if tokens is None else tokens.astype(np.int32), embd, pos.astype(np.int32), seqs, outputs)


def _whole(values: Sequence[int] | None, what: str) -> np.ndarray:
    found = np.asarray(values)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise EngineError(f"{what} of a batch are whole numbers in one row")
    return found.astype(np.int64)


def _positions(seqs: Sequence[tuple[int, ...]], pos_max: Callable[[int], int] | None) -> np.ndarray:
    following: dict[int, int] = {}
    out = np.empty(len(seqs), np.int64)
    for i, of in enumerate(seqs):
        for s in of:
            following.setdefault(s, pos_max(s) + 1 if pos_max is not None else 0)
        out[i] = following[of[0]]
        for s in of:
            following[s] = int(out[i]) + 1
    return out


def _check_sequences(seqs: Sequence[tuple[int, ...]], pos: np.ndarray, pos_max: Callable[[int], int] | None) -> None:
    """Positions of a sequence follow each other and what is in memory; sequences that share tokens share all before."""
    held: dict[int, list[int]] = {}
    sets: dict[int, frozenset[int]] = {}
    for i, of in enumerate(seqs):
        for s in of:
            if not set(of) <= sets.get(s, frozenset(of)):
                raise EngineError(f"sequence {s} belongs to incompatible sets of sequences in the batch")
            sets[s] = frozenset(of)
            mine = held.setdefault(s, [])
            if mine and pos[i] < mine[-1]:
                raise EngineError(f"positions of sequence {s} decrease in the batch")
            mine.append(int(pos[i]))
    for s, mine in held.items():
        if mine[-1] - mine[0] + 1 > len(mine):
            raise EngineError(f"positions of sequence {s} have gaps in the batch")
        last = pos_max(s) if pos_max is not None else -1
        if last >= 0 and mine[0] != last + 1:
            raise EngineError(
                f"sequence {s} ends at position {last} in memory, the batch begins at {mine[0]}: give {last + 1}, or "
                "remove the positions from there on"
            )
    if pos_max is not None:
        for of in {of for of in seqs if len(of) > 1}:
            if len({pos_max(s) for s in of}) > 1:
                raise EngineError(f"sequences {', '.join(map(str, of))} share tokens in the batch, but have diverged")


# --- splits -----------------------------------------------------------------------------------------------------------


def split_simple(batch: FullBatch, n_ubatch: int) -> Iterator[Ubatch]:
    """The tokens as they come, `n_ubatch` at a time: for memories in which all sequences lie together."""
    for lo in range(0, batch.n_tokens, n_ubatch):
        index = np.arange(lo, min(batch.n_tokens, lo + n_ubatch))
        yield batch.pick(index, len(index))


def split_equal(batch: FullBatch, n_ubatch: int, sequential: bool) -> Iterator[Ubatch]:
    """As many tokens of each of several sequences; sequential: whose numbers follow each other. Raises EngineError for
    sequences that share tokens where they must not."""
    if sequential and batch.is_coupled:
        raise EngineError("sequences that share tokens need a context with kv_unified")
    waiting = _by_sequences(batch)
    while waiting:
        chosen: list[tuple[int, ...]] = []
        for of in sorted(waiting, key=lambda of: waiting[of][0]):
            apart = all(not set(of) & set(other) for other in chosen)
            if apart and (not sequential or not chosen or of[0] == chosen[-1][0] + 1):
                chosen.append(of)
            if len(chosen) == n_ubatch:
                break
        n = max(1, min(n_ubatch // len(chosen), *(len(waiting[of]) for of in chosen)))
        index = [i for of in chosen for i in waiting[of][:n]]
        for of in chosen:
            waiting[of] = waiting[of][n:]
        waiting = {of: rest for of, rest in waiting.items() if rest}
        yield batch.pick(index, len(chosen))


def split_seq(batch: FullBatch, n_ubatch: int) -> Iterator[Ubatch]:
    """Tokens of one sequence at a time."""
    for index in _by_sequences(batch).values():
        for lo in range(0, len(index), n_ubatch):
            yield batch.pick(index[lo : lo + n_ubatch], 1)


def _by_sequences(batch: FullBatch) -> dict[tuple[int, ...], list[int]]:
    found: dict[tuple[int, ...], list[int]] = {}
    for i, of in enumerate(batch.seqs):
        found.setdefault(of, []).append(i)
    return found
