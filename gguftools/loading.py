"""From a file to a model that can be run."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gguftools.errors import naming
from gguftools.gguf.reader import GGUF

if TYPE_CHECKING:
    from engine.backends import Backend
    from engine.session import Session


def load(
    path: str | os.PathLike, backend: str | Backend = "cpu", threads: int | None = None, vocab_only: bool = False
) -> Session:
    """Open a GGUF model for running; its weights stay in the file's memory map.

    backend: `cpu` or `reference`; threads: None means all cores; vocab_only: the tokenizer alone.

    >>> import gguftools
    >>> m = gguftools.load(gguftools.demo_model())
    >>> ids = m.tokenize("The first program")
    >>> m.logits(ids).shape == (len(ids), m.n_vocab)
    True

    Raises GGUFError for a damaged file, EngineError for a model that cannot be run; both name the file.
    """
    from engine.session import Session

    file = GGUF(path)
    with naming(path):
        return Session(file.metadata, None if vocab_only else file.tensors, backend, threads)
