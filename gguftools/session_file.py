"""Sessions on disk: what a context remembers, as a GGUF file, so that a long prompt is computed once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gguftools.errors import GGUFError, naming
from gguftools.gguf.reader import GGUF
from gguftools.gguf.writer import Writer

if TYPE_CHECKING:
    from engine.contexts import ModelContext


def save_session(path: str | os.PathLike, context: ModelContext, tokens: Sequence[int]) -> None:
    """Write a context's memory, and the tokens that it is of.

    >>> import engine, gguftools, os, tempfile
    >>> context = engine.ModelContext(gguftools.load(gguftools.demo_model(), threads=1), n_ctx=256)
    >>> context.process([1, 2, 3])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_session(os.path.join(folder, "session.gguf"), context, [1, 2, 3])
    ...     context.memory.clear()
    ...     load_session(os.path.join(folder, "session.gguf"), context)
    [1, 2, 3]

    Raises GGUFError for a file that cannot be written, and for encoders, which remember nothing.
    """
    from engine.cache import snapshot

    if context.memory is None:
        raise GGUFError("this model remembers nothing: there is no session to save")
    context.update()
    metadata, tensors = snapshot.save(context.memory, context.session.fingerprint, tokens)
    with Writer(Path(path)) as writer:
        for key, value in metadata.items():
            writer.add(key, value, "int32" if isinstance(value, list) else None)
        for name, stored in tensors.items():
            writer.declare(name, stored.shape, stored.format)
        for name, stored in tensors.items():
            writer.write(name, [stored.data])


def load_session(path: str | os.PathLike, context: ModelContext) -> list[int]:
    """Read into a context what `save_session` wrote; returns the tokens.

    >>> import engine, gguftools
    >>> context = engine.ModelContext(gguftools.load(gguftools.demo_model(), threads=1), n_ctx=256)
    >>> load_session(gguftools.demo_model(), context)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    engine.errors.EngineError: ...: no saved session, or one of another version than 1

    Raises GGUFError for a damaged file, EngineError for one of another model, or with more than there is room for; both
    name the file.
    """
    from engine.cache import snapshot

    with GGUF(path) as file, naming(path):
        if context.memory is None:
            raise GGUFError("this model remembers nothing: there is no session to load")
        return snapshot.restore(context.memory, context.session.fingerprint, file.metadata, file.tensors)
