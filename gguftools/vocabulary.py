"""The tokenizer of a GGUF file or of a Hugging Face folder, and what it makes of a text."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gguftools.errors import GGUFError

if TYPE_CHECKING:
    from engine.tokenizer import Tokenizer


def open_vocabulary(path: str | os.PathLike, pre: str | None = None) -> tuple[Mapping[str, Any], Tokenizer]:
    """Metadata and tokenizer of a GGUF file, or of a Hugging Face folder as conversion would write them.

    pre: name of the pre-tokenizer to use for a folder, instead of the one found.

    >>> import gguftools
    >>> metadata, tokenizer = gguftools.open_vocabulary(gguftools.demo_folder())
    >>> metadata["tokenizer.ggml.pre"], tokenizer.detokenize(tokenizer.tokenize("Café", add_special=False))
    ('llama-bpe', 'Café')

    Raises GGUFError for a file that is damaged and a folder without vocabulary, EngineError for a vocabulary that is
    not supported; both name the path.
    """
    from engine.errors import EngineError
    from engine.tokenizer import from_metadata

    metadata: Mapping[str, Any]
    if Path(path).is_dir():
        from gguftools.conversion.hf import load_json
        from gguftools.conversion.vocab import vocab_keys

        metadata = dict(vocab_keys(Path(path), load_json(Path(path) / "config.json", required=False), pre))
    else:
        from gguftools.gguf.reader import GGUF

        if pre is not None:
            raise GGUFError(f"{path}: a file names its pre-tokenizer itself; another can be chosen for a folder only")
        metadata = GGUF(path).metadata
    try:
        return metadata, from_metadata(metadata)
    except EngineError as error:
        raise EngineError(f"{path}: {error}") from None


@dataclass(frozen=True)
class Tokens:
    """A text's ids; pieces: the bytes of each; round_trip: whether the ids give the text again; expected: whether the
    vocabulary promises that."""

    ids: list[int]
    pieces: list[bytes]
    n_characters: int
    n_bytes: int
    round_trip: bool
    expected: bool


def tokenize(tokenizer: Tokenizer, text: str, add_special: bool = True, parse_special: bool = True) -> Tokens:
    """What a tokenizer makes of a text. Raises EngineError for text that is not valid Unicode."""
    ids = tokenizer.tokenize(text, add_special, parse_special)
    plain = tokenizer.tokenize(text, False, parse_special)
    return Tokens(
        ids=ids,
        pieces=[tokenizer.token_to_piece(i, special=True) for i in ids],
        n_characters=len(text),
        n_bytes=len(text.encode()),
        round_trip=tokenizer.detokenize(plain, special=True, clean=False) == text,
        expected=tokenizer.lossless,
    )
