"""Progress of runs that count chunks of a text: a bar with the remaining time where a person watches, one line with all
values elsewhere, with a word on the remaining time now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

SECONDS = 30  # between two words on the remaining time


class Step(Protocol):
    def __call__(self, done: int, total: int, value: float | None = None) -> None: ...


@contextmanager
def running(what: str, name: str = "PPL", unit: str = "chunks") -> Iterator[Step]:
    """The block gets a function to call after every chunk: chunks done, chunks in all, running value."""
    from tqdm import tqdm

    watched = sys.stderr.isatty()
    bar: tqdm | None = None
    started = said = time.monotonic()
    first = last = 0
    open_line = False

    def say(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()

    def step(done: int, total: int, value: float | None = None) -> None:
        nonlocal bar, first, last, said, started, open_line
        if not last and done > 1:  # a run that was taken up again: what was done before says nothing of the speed
            first, started = done, time.monotonic()
        last = done
        if watched:
            bar = bar or tqdm(
                total=total, initial=first, desc=what, unit=f" {unit}", file=sys.stderr, dynamic_ncols=True
            )
            if value is not None:
                bar.set_postfix_str(f"{name} {value:.4f}", refresh=False)
            bar.update(done - bar.n)
            return
        if value is not None:
            say(f"[{done}]{value:.4f}" + ("\n" if done == total else ","))
            open_line = done != total
        now = time.monotonic()
        if done < total and done > first and now - said > SECONDS:
            said = now
            left = (now - started) / (done - first) * (total - done)
            say(("\n" if open_line else "") + f"{what}: {done:,} of {total:,} {unit}, about {duration(left)} left\n")
            open_line = False

    try:
        yield step
    finally:
        if bar is not None:
            bar.close()
        elif open_line:
            say("\n")


def duration(seconds: float) -> str:
    """For people.

    >>> duration(7.4), duration(200), duration(9000)
    ('8 s', '4 min', '2 h 30 min')
    """
    if seconds < 90:
        return f"{int(-(-seconds // 1))} s"
    minutes = int(-(-seconds // 60))
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def warn(lines: Iterable[str]) -> None:
    """Warnings on stderr."""
    for line in lines:
        sys.stderr.write(f"warning: {line}\n")
