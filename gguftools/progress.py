"""How far a long command is: a bar with the remaining time, on stderr, and only where a person watches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(what: str, total: int, unit: str = "B") -> Iterator[Callable[[int], None]]:
    """A bar from 0 to `total`; the block gets a function that moves it on by so many units. Bytes count in 1024s.

    >>> with progress("converting", 100) as advance:
    ...     advance(100)
    """
    from tqdm import tqdm

    is_bytes = unit == "B"
    with tqdm(
        total=total,
        desc=what,
        unit=unit,
        unit_scale=is_bytes,
        unit_divisor=1024 if is_bytes else 1000,
        file=sys.stderr,
        disable=not sys.stderr.isatty(),
        dynamic_ncols=True,
    ) as bar:
        yield lambda n: bar.update(n) and None
