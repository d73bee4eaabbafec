"""The one exception of this package: anything that a user can cause."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from engine.errors import EngineError
from quant.errors import QuantError


class GGUFError(ValueError):
    """A request that cannot be met; the message is one line that says what, where and what to do."""


@contextmanager
def naming(path: str | os.PathLike) -> Iterator[None]:
    """Errors of quant and engine, which know no files, leave the block with the file's name in front."""
    try:
        yield
    except (EngineError, QuantError) as error:
        raise type(error)(f"{path}: {error}") from None
