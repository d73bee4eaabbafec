"""The one exception of this package: anything that a user can cause."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from engine.errors import EngineError
from quant.errors import QuantError


def plain(text: str) -> str:
    """`text` without characters that steer terminals: those that do not print are written as escapes.

    >>> plain("a\\x1b[31m")
    'a\\\\x1b[31m'
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


MAX_MESSAGE = 800  # characters: a name out of a file may be of megabytes


class GGUFError(ValueError):
    """A request that cannot be met; the message is one line that says what, where and what to do.

    Names out of files go into messages, so what does not print is escaped. offset: byte of the file where the fault
    lies, None where no single byte is at fault.
    """

    def __init__(self, message: str, offset: int | None = None) -> None:
        if len(message) > MAX_MESSAGE:
            message = f"{message[: MAX_MESSAGE // 2]}...{message[-MAX_MESSAGE // 2 :]}"
        super().__init__(plain(message))
        self.offset = offset


@contextmanager
def naming(path: str | os.PathLike) -> Iterator[None]:
    """Errors of quant and engine, which know no files, leave the block with the file's name in front."""
    try:
        yield
    except (EngineError, QuantError) as error:
        raise type(error)(f"{path}: {error}") from None
