"""Work on threads: everything is done once, little waits, and the first error ends it."""

from __future__ import annotations

import threading
import time
from itertools import count

import pytest

from gguftools.quantizing.pipeline import in_parallel


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("n", [0, 1, 100])
def test_everything_is_done_once(threads, n):
    seen = []
    found = list(in_parallel(iter(range(n)), lambda i: i * i, threads, ahead=seen.append))
    assert sorted(found) == [i * i for i in range(n)]
    assert seen == list(range(n))


def threads() -> int:
    return threading.active_count()


@pytest.mark.parametrize("where", ["items", "ahead", "work", "taker"])
def test_the_first_error_ends_all_threads(where):
    before = threads()

    def items():
        for i in range(1000):
            if where == "items" and i == 20:
                raise ValueError("here")
            yield i

    def work(i):
        if where == "work" and i == 20:
            raise ValueError("here")
        return i

    def ahead(i):
        if where == "ahead" and i == 20:
            raise ValueError("here")

    def take():
        for i in in_parallel(items(), work, 3, ahead):
            if where == "taker" and i == 20:
                raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        take()
    assert threads() == before


def test_a_taker_that_leaves():
    before = threads()
    found = in_parallel(count(), lambda i: i, 2)
    assert next(found) == 0
    found.close()
    assert threads() == before


def test_little_is_ahead_of_a_slow_taker():
    """What was read and not yet taken is bounded by the number of threads, not by how much there is."""
    begun, most, taken = [], 0, 0
    for _ in in_parallel(iter(range(100)), begun.append, 2):
        taken += 1
        time.sleep(0.002)
        most = max(most, len(begun) - taken)
    assert taken == 100
    assert most <= 2 * 2 + 2


def test_reading_work_and_writing_overlap():
    """The reader is ahead while a piece is in work, and another is in work while one is written."""
    reading, working, both = threading.Event(), threading.Event(), []

    def ahead(i):
        if i == 3:
            reading.set()

    def work(i):
        if i == 0:
            both.append(reading.wait(10))
        if i == 2:
            working.set()
        return i

    for _ in in_parallel(iter(range(8)), work, 2, ahead):
        if not both[1:]:
            both.append(working.wait(10))
    assert both == [True, True]
