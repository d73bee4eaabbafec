"""Progress of runs that count chunks of a text: a bar where a person watches, one line with all values elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Step(Protocol):
    def __call__(self, done: int, total: int, value: float | None = None) -> None: ...


@contextmanager
def running(what: str, name: str = "PPL") -> Iterator[Step]:
    """The block gets a function to call after every chunk: chunks done, chunks in all, running value."""
    from tqdm import tqdm

    watched = sys.stderr.isatty()
    bar: tqdm | None = None

    def step(done: int, total: int, value: float | None = None) -> None:
        nonlocal bar
        if watched:
            bar = bar or tqdm(total=total, desc=what, unit=" chunks", file=sys.stderr, dynamic_ncols=True)
            if value is not None:
                bar.set_postfix_str(f"{name} {value:.4f}", refresh=False)
            bar.update(done - bar.n)
        elif value is not None:
            sys.stderr.write(f"[{done}]{value:.4f}" + ("\n" if done == total else ","))
            sys.stderr.flush()

    try:
        yield step
    finally:
        if bar is not None:
            bar.close()
