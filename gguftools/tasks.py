"""Task suites as llama.cpp's perplexity tool reads them: HellaSwag, WinoGrande, multiple choice.

- HellaSwag: text, six lines a task: context, number of the right ending from 0, four endings.
- WinoGrande: CSV without header: index, sentence with `_` for the blank (in double quotes if it has commas), two
choices,
  1 or 2.
- multiple choice, binary, little-endian: uint32 n, uint32 offsets[n] of the tasks from the file's beginning; a task is
a
  question (uint32 length, UTF-8) and twice (one right answer; several right ones, which are not used) uint32 k, k
  texts, int32 labels[k].

Random subsets are those that the reference draws (std::mt19937 seeded with 1).
"""

from __future__ import annotations

import csv
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gguftools.errors import GGUFError
from gguftools.files import map_file
from gguftools.measure import N_BATCH, opened
from gguftools.text import read_text

if TYPE_CHECKING:
    from engine.evaluate.choice import Accuracy, Question
    from engine.session import Session

SUITES = ("hellaswag", "winogrande", "multiple-choice")
ENDINGS = 4
MAX_ANSWERS = 100


def run(
    model: str | os.PathLike,
    file: str | os.PathLike,
    suite: str,
    n: int = 0,
    n_batch: int = N_BATCH,
    threads: int | None = None,
    on_task: Callable[[int, int, float | None], None] | None = None,
) -> Accuracy:
    """How many tasks of a file a model gets right. suite: one of SUITES; n: tasks to do, 0 means all.

    Raises GGUFError for a file that is not of this kind, naming the first fault, and EngineError for tasks that the
    model cannot do.
    """
    from engine.evaluate.choice import choose

    read = {"hellaswag": _hellaswag, "winogrande": _winogrande, "multiple-choice": _multiple_choice}[suite]
    with opened(model, threads) as (session, _):
        return choose(
            session, read(Path(file), n, session), n_batch, on_task, last_of_equals=suite == "winogrande", partial=True
        )


class Draw:
    """Numbers of the reference's generator: std::mt19937 with the seed 1."""

    def __init__(self) -> None:
        self._state = np.random.RandomState(1)

    def bits(self) -> int:
        """32 of them."""
        return int(self._state.randint(0, 1 << 32, dtype=np.uint32))

    def below(self, n: int) -> int:
        """As libstdc++'s std::uniform_int_distribution draws 0..n-1 (Lemire 2019)."""
        product = self.bits() * n
        if product & 0xFFFFFFFF < n:
            least = (1 << 32) % n
            while product & 0xFFFFFFFF < least:
                product = self.bits() * n
        return product >> 32

    def scaled(self, n: int) -> int:
        """The reference's other way: 32 bits as a float32 fraction of n."""
        fraction = np.float32(2.0**-32) * np.float32(self.bits())
        return min(n - 1, int(np.float32(fraction * np.float32(n))))


def hellaswag_order(n_tasks: int, n: int) -> list[int]:
    """Which tasks are done, in their order: drawn one by one from those that are left."""
    draw, left = Draw(), list(range(n_tasks))
    return [left.pop(draw.below(len(left))) for _ in range(min(n or n_tasks, n_tasks))]


def subset(n_tasks: int, n: int) -> list[int]:
    """Which tasks are done: all in order, or a random choice in which the last one left takes the place of one
    drawn."""
    if not 0 < n < n_tasks:
        return list(range(n_tasks))
    draw, left, chosen = Draw(), list(range(n_tasks)), []
    for _ in range(n):
        j = draw.scaled(len(left))
        chosen.append(left[j])
        left[j] = left[-1]
        left.pop()
    return chosen


def _hellaswag(path: Path, n: int, session: Session) -> list[Question]:
    from engine.evaluate.choice import endings

    lines = read_text(path).split("\n")
    per_task = 2 + ENDINGS
    if len(lines) % per_task:
        raise GGUFError(f"{path}: has {len(lines):,} lines, which is no multiple of {per_task}; not HellaSwag tasks")
    questions = []
    for i in hellaswag_order(len(lines) // per_task, n):
        context, right, *answers = lines[per_task * i : per_task * (i + 1)]
        if right.strip() not in "0123" or not right.strip():
            raise GGUFError(
                f"{path}: line {per_task * i + 2} is {right[:20]!r}, expected the number of an ending, 0 to 3"
            )
        sequences = [session.tokenize(f"{context} {answer}") for answer in answers]
        questions.append(endings(sequences, frozenset({int(right)})))
    return questions


def _winogrande(path: Path, n: int, session: Session) -> list[Question]:
    from engine.evaluate.choice import winogrande

    tasks = list(_csv_tasks(path))
    questions = []
    for i in subset(len(tasks), n):
        first, second, choices, right = tasks[i]
        sequences = [session.tokenize(first + choice + second) for choice in choices]
        with_choice = [len(session.tokenize(first + choice)) for choice in choices]
        questions.append(winogrande(sequences, with_choice, right))
    return questions


def _csv_tasks(path: Path) -> Iterator[tuple[str, str, list[str], int]]:
    for i, row in enumerate(csv.reader(read_text(path).splitlines()), 1):
        if not row:
            continue
        if len(row) != 5 or "_" not in row[1] or row[4].strip() not in ("1", "2"):
            raise GGUFError(f"{path}: line {i} is not `index,sentence with _,choice,choice,1 or 2`")
        first, _, second = row[1].partition("_")
        yield first, second, row[2:4], int(row[4]) - 1


def _multiple_choice(path: Path, n: int, session: Session) -> list[Question]:
    from engine.evaluate.choice import endings

    file = _Binary(path)
    n_tasks = file.number("the number of tasks")
    if not 0 < n_tasks <= file.left // 4:
        raise GGUFError(f"{path}: announces {n_tasks:,} tasks, more than it can hold; not multiple choice tasks")
    offsets = [file.number("the offsets") for _ in range(n_tasks)]
    questions = []
    for i in subset(n_tasks, n):
        file.at = offsets[i]
        question, answers, labels = file.task(i)
        right = frozenset(k for k, label in enumerate(labels) if label == 1)
        if not question or not answers or not all(answers) or not right:
            raise GGUFError(f"{path}: task {i} has no question, an empty answer, or no right one; repair it")
        questions.append(endings([session.tokenize(f"{question} {answer}") for answer in answers], right))
    return questions


class _Binary:
    """A file of numbers and texts; every size is checked against what is there."""

    def __init__(self, path: Path):
        self.path, self.at, self._data = path, 0, map_file(path)

    @property
    def left(self) -> int:
        return len(self._data) - self.at

    def take(self, size: int, what: str) -> bytes:
        if not 0 <= size <= self.left:
            raise GGUFError(
                f"{self.path}: truncated: {what} would end at byte {self.at + size:,} of {len(self._data):,}"
            )
        self.at += size
        return bytes(self._data[self.at - size : self.at])

    def number(self, what: str) -> int:
        return struct.unpack("<I", self.take(4, what))[0]

    def text(self, what: str) -> str:
        return self.take(self.number(what), what).decode(errors="replace")

    def task(self, i: int) -> tuple[str, list[str], Sequence[int]]:
        what = f"task {i}"
        question = self.text(what)
        k = self.number(what)
        if k > MAX_ANSWERS:
            raise GGUFError(f"{self.path}: {what} announces {k:,} answers, at most {MAX_ANSWERS} are allowed")
        answers = [self.text(what) for _ in range(k)]
        return question, answers, struct.unpack(f"<{k}i", self.take(4 * k, what))
