"""A byte-level BPE tokenizer.json as metadata keys.

The name of the pre-tokenizer is found from the structure of the file, by the table that the engine tokenizes with.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from engine.tokenizer.pretokenizers import DIGIT, DIGITS, GPT2, PUNCTUATION, find, get_pretokenizer, nearest
from engine.tokenizer.vocab import TokenType
from gguftools.conversion.card import Pair
from gguftools.conversion.structure import (
    Folder,
    added_tokens,
    is_control,
    library_tokenizer,
    normalizers,
    padded,
    pretokenizers,
    texts_by_id,
    vocab_size,
)
from gguftools.errors import GGUFError


def byte_level_keys(folder: Folder, pre: str | None) -> list[Pair]:
    """Tokens, types, merges and the pre-tokenizer's name; `pre` is a name to use instead of the one found.

    Raises GGUFError for a structure that has no name, and for what GGUF has no place for.
    """
    name = pretokenizer_name(folder.json, folder.tokenizer, pre)
    tokens, types = _tokens(folder)
    return [
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", name),
        ("tokenizer.ggml.tokens", tokens),
        ("tokenizer.ggml.token_type", types),
        ("tokenizer.ggml.merges", merges_of(folder)),
    ]


# --- pre-tokenizer ----------------------------------------------------------------------------------------------------


def pretokenizer_name(path: Path, tokenizer: Mapping[str, Any], pre: str | None) -> str:
    """`tokenizer.ggml.pre`: the name asked for, or that of the structure."""
    others = [s.get("type") for s in normalizers(tokenizer) if s.get("type") != "NFC"]
    if others:
        raise GGUFError(f"{path}: changes texts before it cuts them ({', '.join(map(str, others))}); GGUF's BPE cannot")
    if pre is not None:
        try:
            get_pretokenizer(pre)
        except EngineError as error:
            raise GGUFError(str(error)) from None
        return pre
    patterns = _patterns(tokenizer)
    name = find(patterns, bool(tokenizer["model"].get("ignore_merges")))
    if name is None:
        raise GGUFError(
            f"{path}: cuts words in a way that has no name here; the nearest are {', '.join(nearest(patterns))}: "
            "choose one with --pre if you are sure"
        )
    return name


def _patterns(tokenizer: Mapping[str, Any]) -> tuple[str, ...]:
    """The pre-tokenizer's steps as the splitting patterns of our table."""
    patterns = (_pattern(step) for step in pretokenizers(tokenizer))
    return tuple(pattern for pattern in patterns if pattern)


def _pattern(step: Mapping[str, Any]) -> str:
    """One step's pattern; "" for a step that cuts nothing; for one that we do not know, a text that is no pattern."""
    match step:
        case {"type": "ByteLevel", "add_prefix_space": True}:
            return "<ByteLevel that adds a space>"
        case {"type": "ByteLevel", "use_regex": False}:
            return ""
        case {"type": "ByteLevel"}:
            return GPT2
        case {"type": "Digits"}:
            return DIGIT if step.get("individual_digits") else DIGITS
        case {"type": "Punctuation", "behavior": "Contiguous"}:
            return PUNCTUATION
        case {"type": "Split", "pattern": {"Regex": str(pattern)}} if _keeps_all(step):
            return pattern
        case {"type": "Split", "pattern": {"String": str(text)}} if _keeps_all(step):
            return re.escape(text)
    return f"<{step.get('type')}>"


def _keeps_all(step: Mapping[str, Any]) -> bool:
    """Whether a split keeps matches and what lies between as pieces; "removed, inverted" does for patterns that cover
    every text, as those of this form do."""
    behavior, inverted = step.get("behavior"), bool(step.get("invert"))
    return (behavior, inverted) in (("Isolated", False), ("Removed", True))


# --- tokens and merges ------------------------------------------------------------------------------------------------


def _tokens(folder: Folder) -> tuple[list[str], list[int]]:
    """Text and type of every id below the config's `vocab_size`; unused ids are `[PAD7]`."""
    path = folder.json
    by_id = texts_by_id(path, folder.tokenizer)
    added = added_tokens(path, folder.tokenizer)
    tokens, types = padded(by_id, vocab_size(path, max(by_id, default=-1), folder.config))
    rendered = _rendered(path, added)
    for token in added:
        i, text = token["id"], rendered.get(token["id"], token["content"])
        if is_control(token, text):
            tokens[i], types[i] = text, int(TokenType.CONTROL)
        else:  # user-defined tokens are compared with the text as it is
            tokens[i], types[i] = text.replace("▁", " "), int(TokenType.USER_DEFINED)
    return tokens, types


def _rendered(path: Path, added: list[dict[str, Any]]) -> dict[int, str]:
    """id -> what comes out when an added token's text goes in, for those that are matched before normalization."""
    wanted = [token for token in added if not token.get("normalized")]
    if not wanted:
        return {}
    whole = library_tokenizer(path)
    ids = whole.encode_batch([token["content"] for token in wanted], add_special_tokens=False)
    texts = [whole.decode(encoding.ids, skip_special_tokens=False) for encoding in ids]
    return {token["id"]: text for token, text in zip(wanted, texts)}


def merges_of(folder: Folder) -> list[str]:
    """Merges as "first second"; spaces within a part are spelled as the byte-level alphabet does."""
    found = folder.tokenizer["model"].get("merges") or _merges_of_text(folder.path / "merges.txt")
    if not isinstance(found, list) or not found:
        raise GGUFError(f"{folder.path}: neither tokenizer.json nor merges.txt holds merges")
    merges = []
    for merge in found:
        if isinstance(merge, list) and len(merge) == 2 and all(isinstance(part, str) for part in merge):
            merge = " ".join(part.replace(" ", "Ġ") for part in merge)
        if not isinstance(merge, str) or " " not in merge:
            raise GGUFError(f"{folder.path}: tokenizer.json holds the merge {str(merge)[:60]!r}; the file is damaged")
        merges.append(merge)
    return merges


def _merges_of_text(path: Path) -> list[str]:
    if not path.is_file():
        return []
    lines = path.read_text("utf-8", errors="replace").splitlines()
    pairs = (line.split() for line in lines[bool(lines) and lines[0].startswith("#") :])
    return [" ".join(pair) for pair in pairs if len(pair) == 2]
