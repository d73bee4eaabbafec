"""Questions with several answers: a model chooses the answer whose tokens it finds most likely on average.

Scores are those of llama.cpp's perplexity tool. HellaSwag and multiple choice: mean log-probability of the tokens that
are not common to all answers. WinoGrande: see `winogrande`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from engine.errors import EngineError
from engine.evaluate import statistics as stats
from engine.evaluate.scoring import negative_log_likelihood
from engine.evaluate.statistics import Estimate
from engine.session import HEAD_ROWS, Session

N_BATCH = 512
PAD = 32  # lengths are rounded up to it, so that few graphs are built; what is behind a token does not change its score

#: fewer tokens than this behind the choice are no evidence: then the choice itself is scored (WinoGrande)
MIN_TRAILING = 3


@dataclass(frozen=True)
class Answer:
    """One answer: its tokens, and which of them are scored, first..last - 1 (0 is never scored)."""

    tokens: list[int]
    first: int
    last: int


@dataclass(frozen=True)
class Question:
    """Answers, and the number of the right one (or of the right ones)."""

    answers: list[Answer]
    right: frozenset[int]


@dataclass(frozen=True)
class Accuracy:
    """correct of n questions; interval: 95 % confidence (Wilson); chance: share that guessing gets right; choices: what
    the model chose; complete: False after an interruption."""

    n: int
    correct: int
    accuracy: Estimate
    interval: tuple[float, float]
    chance: float
    choices: list[int]
    complete: bool


def common_prefix(sequences: Sequence[Sequence[int]]) -> int:
    """Number of tokens at the beginning that all have in common.

    >>> common_prefix([[1, 2, 3], [1, 2, 4, 5]])
    2
    """
    shortest = min(map(len, sequences))
    return next((i for i in range(shortest) if len({s[i] for s in sequences}) > 1), shortest)


def endings(sequences: Sequence[list[int]], right: frozenset[int]) -> Question:
    """A question whose answers are scored from where they part.

    Raises EngineError where an answer adds no token, or nothing comes before.
    """
    start = common_prefix(sequences)
    if start < 1 or any(len(s) == start for s in sequences):
        raise EngineError("an answer adds no tokens to its question, or the question has none; repair the tasks")
    return Question([Answer(s, start, len(s)) for s in sequences], right)


def winogrande(sequences: Sequence[list[int]], with_choice: Sequence[int], right: int) -> Question:
    """A question whose two answers differ by a word in the middle.

    with_choice: tokens up to and with the word. Where both have more than MIN_TRAILING tokens from where they part,
    what comes behind the word is scored, else everything from there; the last token (the full stop) is left out, unless
    it is the only one. (For the second answer of the other kind the reference reads the first score from the wrong
    place; here both are scored alike.)
    """
    start = common_prefix(sequences)
    if start < 1:
        raise EngineError("the two sentences of a task have no common beginning; does the vocabulary lack BOS?")
    skip = all(len(s) - start > MIN_TRAILING for s in sequences)
    answers = []
    for tokens, base in zip(sequences, with_choice):
        first = min(base if skip else start, len(tokens) - 1)
        answers.append(Answer(tokens, first, len(tokens) - (1 if len(tokens) - first > 1 else 0)))
    return Question(answers, frozenset({right}))


def choose(
    session: Session,
    questions: Sequence[Question],
    n_batch: int = N_BATCH,
    on_question: Callable[[int, int, float | None], None] | None = None,
    last_of_equals: bool = False,
    partial: bool = False,
) -> Accuracy:
    """Let the model answer. n_batch: tokens that run at once; on_question: called with questions done, their number,
    and the share that is right; last_of_equals: of answers with equal scores the last is taken, else the first;
    partial: an interruption returns what is done.

    Raises EngineError for a task that is longer than the model's context, and for no tasks at all.
    """
    if not questions:
        raise EngineError("there are no tasks; is the file of the right kind?")
    for i, question in enumerate(questions):
        longest = max(len(a.tokens) for a in question.answers)
        if longest > session.n_ctx_train:
            raise EngineError(
                f"task {i} has {longest} tokens, the model was trained for {session.n_ctx_train}; leave it out"
            )
    choices: list[int] = []
    correct, complete = 0, True
    try:
        for lo, hi in _batches(questions, n_batch):
            answers = [a for q in questions[lo:hi] for a in q.answers]
            scores = iter(_mean_log_likelihoods(session, answers))
            for question in questions[lo:hi]:
                mine = np.array([next(scores) for _ in question.answers])
                best = len(mine) - 1 - int(mine[::-1].argmax()) if last_of_equals else int(mine.argmax())
                choices.append(best)
                correct += best in question.right
            if on_question is not None:
                on_question(len(choices), len(questions), correct / len(choices))
    except KeyboardInterrupt:
        if not choices or not partial:
            raise
        complete = False
    n = len(choices)
    return Accuracy(
        n=n,
        correct=correct,
        accuracy=stats.share(np.array([i < correct for i in range(n)])),
        interval=stats.wilson(correct, n),
        chance=float(np.mean([len(q.right) / len(q.answers) for q in questions[:n]])),
        choices=choices,
        complete=complete,
    )


def _padded(n: int) -> int:
    return -(-n // PAD) * PAD


def _batches(questions: Sequence[Question], n_batch: int) -> Iterator[tuple[int, int]]:
    lo = tokens = 0
    for i, question in enumerate(questions):
        size = sum(_padded(len(a.tokens)) for a in question.answers)
        if tokens and tokens + size > n_batch:
            yield lo, i
            lo, tokens = i, 0
        tokens += size
    yield lo, len(questions)


def _mean_log_likelihoods(session: Session, answers: Sequence[Answer]) -> list[float]:
    """Mean log-probability of each answer's scored tokens."""
    found = [0.0] * len(answers)
    by_length: dict[int, list[int]] = {}
    for i, answer in enumerate(answers):
        by_length.setdefault(min(_padded(len(answer.tokens)), session.n_ctx_train), []).append(i)
    for length, members in by_length.items():
        windows = np.zeros((len(members), length), np.int64)
        rows, targets = [], []
        for k, i in enumerate(members):
            answer = answers[i]
            windows[k, : len(answer.tokens)] = answer.tokens
            rows.append(k * length + np.arange(answer.first - 1, answer.last - 1))
            targets.append(np.asarray(answer.tokens[answer.first : answer.last], np.int64))
        hidden = session.hidden(windows)[np.concatenate(rows)]
        goal = np.concatenate(targets)
        nll = np.concatenate(
            [
                negative_log_likelihood(session.head(hidden[at : at + HEAD_ROWS]), goal[at : at + HEAD_ROWS])
                for at in range(0, len(goal), HEAD_ROWS)
            ]
        )
        for i, part in zip(members, np.split(nll, np.cumsum([len(t) for t in targets])[:-1])):
            found[i] = -float(part.mean())
    return found
