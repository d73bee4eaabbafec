"""LoRA adapters and control vectors from GGUF files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gguftools.errors import GGUFError, naming
from gguftools.gguf.reader import GGUF

if TYPE_CHECKING:
    from engine.adapters import ControlVector, Lora
    from engine.session import Session

Scaled = tuple[str | os.PathLike, float]


def load_lora(path: str | os.PathLike, session: Session) -> Lora:
    """An adapter, as `convert` writes it; a context takes it by `set_adapters`.

    >>> import gguftools
    >>> session = gguftools.load(gguftools.demo_model(), threads=1)
    >>> gguftools.load_lora(gguftools.demo_model(), session)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    engine.errors.EngineError: ...: key 'general.type' is 'model', expected 'adapter': no LoRA adapter

    Raises GGUFError for a damaged file, EngineError for one that is no adapter of this model; both name it.
    """
    from engine.adapters import Lora

    with naming(path):
        file = GGUF(path)
        return Lora.of(session, file.metadata, file.tensors)


def load_control(
    files: Sequence[Scaled], session: Session, first: int | None = None, last: int | None = None
) -> ControlVector:
    """The sum of control vectors, each with its strength, for layers first..last.

    >>> import gguftools
    >>> session = gguftools.load(gguftools.demo_model(), threads=1)
    >>> gguftools.load_control([(gguftools.demo_model(), 1.0)], session)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    engine.errors.EngineError: ...: tensor 'token_embd.weight' of the control vector is no direction...

    Raises as `load_lora`.
    """
    from engine.adapters import ControlVector

    with naming(", ".join(str(path) for path, _ in files)):
        return ControlVector.of(session, [(GGUF(path).tensors, scale) for path, scale in files], first, last)


def read_scaled(text: str, option: str) -> Scaled:
    """`FILE:SCALE` as (file, scale).

    >>> read_scaled("a.gguf:0.5", "--lora-scaled")
    ('a.gguf', 0.5)

    Raises GGUFError for anything else.
    """
    path, _, scale = text.rpartition(":")
    try:
        if path:
            return path, float(scale)
    except ValueError:
        pass
    raise GGUFError(f"{option} {text}: expected FILE:SCALE")
