"""Reading text files."""

from __future__ import annotations

import os
from pathlib import Path

from gguftools.errors import GGUFError
from gguftools.files import read_whole


def read_text(path: str | os.PathLike) -> str:
    """A text file, without its last line end. Raises GGUFError for one that is missing, empty or not UTF-8."""
    path = Path(path)
    try:
        text = read_whole(path, "a text file").decode("utf-8")
    except UnicodeDecodeError as error:
        raise GGUFError(f"{path}: is not UTF-8 text (byte {error.start:,}); convert it first") from None
    text = text.removesuffix("\n")
    if not text.strip():
        raise GGUFError(f"{path}: the text is empty")
    return text
