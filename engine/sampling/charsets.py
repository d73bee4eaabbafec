"""Sets of code points, and automata that read their UTF-8 byte by byte.

A set is a tuple of ranges (first, last), sorted and apart. Its automaton answers at every byte whether it still can end
in a character of the set, so a token that stops in the middle of a character is nothing special.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

Ranges = tuple[tuple[int, int], ...]

LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
#: number of bytes -> (first code point, last, what the leading byte holds beside the bits)
_LENGTHS = ((1, 0, 0x7F, 0), (2, 0x80, 0x7FF, 0xC0), (3, 0x800, 0xFFFF, 0xE0), (4, 0x10000, LAST, 0xF0))


def normal(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sorted, joined where they touch."""
    out: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if out and first <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(out[-1][1], last))
        elif first <= last:
            out.append((first, last))
    return tuple(out)


def invert(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """All other code points."""
    out, at = [], 0
    for first, last in normal(ranges):
        if first > at:
            out.append((at, first - 1))
        at = last + 1
    return (*out, (at, LAST)) if at <= LAST else tuple(out)


def intersect(a: Ranges, b: Ranges) -> Ranges:
    """Code points of both."""
    return normal((max(p, r), min(q, s)) for p, q in a for r, s in b if max(p, r) <= min(q, s))


ANY: Ranges = invert([_SURROGATES])

#: A node of an automaton: 256 entries: None (dead), True (a character is complete) or the next node.
Node = tuple["Node | bool | None", ...]


@lru_cache(maxsize=4096)
def automaton(ranges: Ranges) -> Node:
    """The node before the first byte of a character of the set. Equal sets share their nodes."""
    ranges = intersect(ranges, ANY)
    table: list[Node | bool | None] = [None] * 256
    for n, first, last, mark in _LENGTHS:
        bits = 6 * (n - 1)  # below the leading byte
        for lead in range(first >> bits, (last >> bits) + 1):
            low = max(first, lead << bits)
            part = _below(ranges, low, min(last, (lead << bits) | ((1 << bits) - 1)), lead << bits)
            if part:
                table[mark | lead] = _continuation(part, n - 1) if n > 1 else True
    return tuple(table)


@lru_cache(maxsize=65536)
def _continuation(ranges: Ranges, n: int) -> Node:
    """The node before n bytes of 6 bits, for values of `ranges`."""
    bits = 6 * (n - 1)
    table: list[Node | bool | None] = [None] * 256
    for value in range(64):
        part = _below(ranges, value << bits, ((value + 1) << bits) - 1, value << bits)
        if part:
            table[0x80 | value] = _continuation(part, n - 1) if n > 1 else True
    return tuple(table)


def _below(ranges: Ranges, first: int, last: int, base: int) -> Ranges:
    """What of `ranges` lies within first .. last, less `base`."""
    return tuple((max(a, first) - base, min(b, last) - base) for a, b in ranges if a <= last and b >= first)
