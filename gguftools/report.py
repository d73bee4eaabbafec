"""What commands print: tables and JSON on stdout. On a terminal tables are drawn by rich and fold long cells; into a
pipe or a file they are plain columns, never cut."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gguftools.errors import GGUFError

_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def size(n_bytes: int) -> str:
    """Bytes for people, as llama.cpp writes them.

    >>> size(98_362_432), size(5 << 30), size(12)
    ('93.81 MiB', '5.00 GiB', '12 B')
    """
    for unit, factor in _UNITS:
        if n_bytes >= factor:
            return f"{n_bytes / factor:.2f} {unit}"
    return f"{n_bytes} B"


def bpw(n_bytes: int, n_weights: int) -> float | None:
    """Bits per weight, None if there are no weights.

    >>> bpw(18, 32)
    4.5
    """
    return 8 * n_bytes / n_weights if n_weights else None


def plain(text: str) -> str:
    """`text` without characters that steer terminals: those that do not print are written as escapes.

    >>> plain("a\\x1b[31m")
    'a\\\\x1b[31m'
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def write(text: str = "") -> None:
    """A line on stdout; characters that its encoding lacks are written as escapes."""
    encoding = sys.stdout.encoding or "utf-8"
    with _named():
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")


def flush() -> None:
    """Everything written so far leaves the process. Raises GGUFError where stdout takes no more."""
    with _named():
        sys.stdout.flush()


def discard() -> None:
    """What is still to be written to stdout goes nowhere: for a reader that has gone, or a disk that is full."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """Failures of stdout say so. A reader that has gone is another matter, and for the caller."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        discard()
        raise GGUFError(f"standard output: cannot be written: {error.strerror or error}") from None


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "") -> None:
    """Print a table. Cells: numbers are written with thousands separators and align right, None is empty."""
    found = [list(row) for row in rows]
    right = [all(isinstance(row[i], (int, float, type(None))) for row in found) for i in range(len(columns))]
    cells = [[_cell(value) for value in row] for row in found]
    if sys.stdout.isatty():
        _draw(columns, cells, right, title)
        return
    if title:
        write(title)
    for line in columns_of_text([list(columns), *cells], right):
        write(line)


def columns_of_text(rows: Sequence[Sequence[str]], right: Sequence[bool]) -> list[str]:
    """Rows of cells as lines with aligned columns, two spaces apart.

    >>> columns_of_text([["a", "n"], ["long", "10"]], [False, True])
    ['a      n', 'long  10']
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right)).rstrip()
        for row in rows
    ]


def print_json(value: Any) -> None:
    """Print as JSON, ASCII only; numbers that JSON lacks become the strings "NaN", "Infinity", "-Infinity"."""
    write(json.dumps(_finite(value), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, (list, tuple)) else value


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, (int, float)) and not isinstance(value, bool) else plain(str(value))


def _draw(columns: Sequence[str], cells: list[list[str]], right: list[bool], title: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=title or None, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for name, is_right in zip(columns, right):
        drawn.add_column(name, justify="right" if is_right else "left", overflow="fold")
    for row in cells:
        drawn.add_row(*map(Text, row))
    with _named():
        Console(file=sys.stdout).print(drawn)
