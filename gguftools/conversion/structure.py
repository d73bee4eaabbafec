"""Reading a tokenizer.json: its steps, its added tokens, its vocabulary by id, and the library that carries it out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.tokenizer.vocab import TokenType
from gguftools.errors import GGUFError

MAX_VOCAB = 1 << 24  # tokens

#: added tokens that are control tokens although the file does not call them special
_LOOKS_SPECIAL = re.compile(r"<pad>|<mask>|<2mass>|\[@BOS@\]|<\|.*\|>|<\uff5c.*\uff5c>|<unused.*>", re.DOTALL)


@dataclass(frozen=True)
class Folder:
    """What a model folder says about its tokenizer: tokenizer.json and tokenizer_config.json, {} where they are absent,
    and config.json."""

    path: Path
    tokenizer: Mapping[str, Any]
    settings: Mapping[str, Any]
    config: Mapping[str, Any]

    @property
    def json(self) -> Path:
        return self.path / "tokenizer.json"


def steps(found: Any, key: str) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or post-processor, nested sequences flattened."""
    if not isinstance(found, dict):
        return
    if found.get("type") != "Sequence" and key not in found:
        yield found
    elif isinstance(found.get(key), list):
        for step in found[key]:
            yield from steps(step, key)


def normalizers(tokenizer: Mapping[str, Any]) -> list[dict[str, Any]]:
    return list(steps(tokenizer.get("normalizer"), "normalizers"))


def pretokenizers(tokenizer: Mapping[str, Any]) -> list[dict[str, Any]]:
    return list(steps(tokenizer.get("pre_tokenizer"), "pretokenizers"))


def added_tokens(path: Path, tokenizer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tokens that are cut out before anything else. Raises GGUFError for entries without id or text."""
    added = tokenizer.get("added_tokens") or []
    for token in added if isinstance(added, list) else [added]:
        fits = isinstance(token, dict) and type(token.get("id")) is int and isinstance(token.get("content"), str)
        if not fits or not 0 <= token["id"] < MAX_VOCAB:
            raise GGUFError(f"{path}: added token {str(token)[:60]} has no id or text; the file is damaged")
    return added


def is_control(token: Mapping[str, Any], text: str) -> bool:
    """Whether an added token is a control token: it is called special, or looks so."""
    return bool(token.get("special") or _LOOKS_SPECIAL.fullmatch(text))


def texts_by_id(path: Path, tokenizer: Mapping[str, Any]) -> dict[int, str]:
    """id -> text, of the vocabulary and the added tokens. Raises GGUFError for ids and texts that cannot be."""
    vocab = tokenizer["model"]["vocab"]
    entries = [(text, i) for text, i in vocab.items()] if isinstance(vocab, dict) else _listed(path, vocab)
    by_id: dict[int, str] = {}
    for text, i in entries:
        if type(i) is not int or not 0 <= i < MAX_VOCAB:
            raise GGUFError(f"{path}: token {text!r} has the id {i!r}; the file is damaged")
        by_id[i] = text
    return by_id | {token["id"]: token["content"] for token in added_tokens(path, tokenizer)}


def _listed(path: Path, vocab: list[Any]) -> list[tuple[str, int]]:
    for i, entry in enumerate(vocab):
        match entry:
            case [str(), int() | float()]:
                continue
        raise GGUFError(f"{path}: entry {i} of the vocabulary is {str(entry)[:60]}, expected text and score")
    return [(entry[0], i) for i, entry in enumerate(vocab)]


def vocab_size(path: Path, highest: int, config: Mapping[str, Any]) -> int:
    """Rows that the model has for tokens, config.json's `vocab_size`. Raises GGUFError if there are ids beyond them."""
    size = config.get("vocab_size", highest + 1)
    if type(size) is not int or not highest < size <= MAX_VOCAB:
        raise GGUFError(
            f"{path}: has ids up to {highest}, but config.json's 'vocab_size' is {size!r}: the model has no rows for "
            "all tokens; take the tokens away, or resize the model's embeddings"
        )
    return size


def padded(by_id: Mapping[int, str], size: int) -> tuple[list[str], list[int]]:
    """Texts and types of all ids below `size`; ids without a token are `[PAD7]`, unused."""
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(size)]
    return tokens, [int(TokenType.NORMAL if i in by_id else TokenType.UNUSED) for i in range(size)]


def library_tokenizer(path: Path) -> Any:
    """The tokenizer that the `tokenizers` library makes of a file, for texts of any length: some files pad and cut.

    Raises GGUFError if it refuses.
    """
    from tokenizers import Tokenizer

    try:
        library = Tokenizer.from_file(str(path))
        library.no_padding()
        library.no_truncation()
        return library
    except Exception as error:  # the library raises nothing more special
        raise GGUFError(f"{path}: is refused by the tokenizers library: {str(error).splitlines()[0]}") from None
