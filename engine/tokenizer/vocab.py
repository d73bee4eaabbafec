"""The vocabulary in GGUF metadata: tokens, their types, special ids, and the cutting of special tokens out of a text.

Metadata is whatever a file says, so everything is checked here, once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from engine.errors import EngineError

log = logging.getLogger(__name__)


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


#: special token -> metadata key of its id
SPECIAL_KEYS = {
    "bos": "tokenizer.ggml.bos_token_id",
    "eos": "tokenizer.ggml.eos_token_id",
    "eot": "tokenizer.ggml.eot_token_id",
    "eom": "tokenizer.ggml.eom_token_id",
    "unk": "tokenizer.ggml.unknown_token_id",
    "sep": "tokenizer.ggml.seperator_token_id",  # spelled like this in the format
    "pad": "tokenizer.ggml.padding_token_id",
    "mask": "tokenizer.ggml.mask_token_id",
    "fim_pad": "tokenizer.ggml.fim_pad_token_id",
    "fim_rep": "tokenizer.ggml.fim_rep_token_id",
    "fim_sep": "tokenizer.ggml.fim_sep_token_id",
}

#: Special ids that end generation.
_ENDING_IDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
#: Texts that end generation wherever a vocabulary has them; files seldom name them all by id.
_ENDING_WORDS = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> [e~[ "
    "<\uff5cend▁of▁sentence\uff5c> <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> "
    "<REPO> <reponame> <|file_sep|>"
)
_ENDING_TEXTS = frozenset(_ENDING_WORDS.split())
#: Markers of a chat format whose text belongs to the answer: never hidden.
_SHOWN_TEXTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
#: With all of these in a vocabulary, the first does not end generation: (texts, type it then has).
_NOT_ENDING = (
    (("<|end|>", "<|return|>", "<|call|>"), TokenType.USER_DEFINED),
    (("<|end|>", "<|flush|>", "<|calls|>"), TokenType.USER_DEFINED),
    (("</s>", "<|tool_response>"), TokenType.NORMAL),
)


@dataclass(frozen=True)
class Vocab:
    """tokens: text of each id, as the file spells it; types: TokenType of each; ids: text -> id;
    special: ids of special tokens by the names of SPECIAL_KEYS; eog: ids that end generation;
    add_bos, add_eos: what the file says, or None; cuttable: special tokens in the order in which they are cut out."""

    tokens: list[str]
    types: list[int]
    ids: dict[str, int]
    special: dict[str, int]
    eog: frozenset[int]
    add_bos: bool | None
    add_eos: bool | None
    cuttable: tuple[int, ...]

    def cut(self, text: str, parse_special: bool) -> list[str | int]:
        """`text` as stretches of plain text and ids of special tokens, longest tokens cut first.

        User-defined tokens are always cut out, control and unknown ones only with `parse_special`.
        """
        parts: list[str | int] = [text] if text else []
        for i in self.cuttable:
            token = self.tokens[i]
            if token in text and (parse_special or self.types[i] == TokenType.USER_DEFINED):
                parts = [piece for part in parts for piece in _cut_one(part, token, i)]
        return parts


def _cut_one(part: str | int, token: str, i: int) -> list[str | int]:
    if isinstance(part, int) or token not in part:
        return [part]
    pieces: list[str | int] = []
    for n, stretch in enumerate(part.split(token)):
        pieces += ([i] if n else []) + ([stretch] if stretch else [])
    return pieces


def read_vocab(metadata: Mapping[str, Any]) -> Vocab:
    """The vocabulary of a model. Raises EngineError, naming the key, for what is missing, damaged or contradictory."""
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(read_strings(metadata, "tokenizer.ggml.tokens"))]
    if not tokens:
        raise EngineError("key 'tokenizer.ggml.tokens' is empty: the file has no vocabulary")
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        twice = next(token for i, token in enumerate(tokens) if ids[token] != i)
        raise EngineError(f"key 'tokenizer.ggml.tokens' has {twice!r} more than once: the file is damaged")
    types = _read_types(metadata, len(tokens))
    special = {name: i for name, key in SPECIAL_KEYS.items() if (i := _read_id(metadata, key, len(tokens))) is not None}
    eog = _mark_endings(ids, types, special)
    cuttable = [i for i, t in enumerate(types) if t in (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)]
    cuttable.sort(key=lambda i: len(tokens[i].encode()), reverse=True)
    add_bos, add_eos = (read_bool(metadata, f"tokenizer.ggml.add_{name}_token") for name in ("bos", "eos"))
    return Vocab(tokens, types, ids, special, eog, add_bos, add_eos, tuple(cuttable))


def _mark_endings(ids: dict[str, int], types: list[int], special: dict[str, int]) -> frozenset[int]:
    """Ids that end generation; their types, and those of markers to be shown, are corrected in place."""
    eog = {special[name] for name in _ENDING_IDS if name in special}
    for text in _ENDING_TEXTS & ids.keys():
        eog.add(ids[text])
        types[ids[text]] = TokenType.CONTROL
    for text in _SHOWN_TEXTS:
        if text in ids:
            types[ids[text]] = TokenType.USER_DEFINED
    for texts, kind in _NOT_ENDING:
        if all(text in ids for text in texts):
            eog.discard(ids[texts[0]])
            types[ids[texts[0]]] = kind
    return frozenset(eog)


def read_strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    """An array of strings. Raises EngineError if it is missing, something else, or not Unicode."""
    value = metadata.get(key)
    if value is None:
        raise EngineError(f"key '{key}' is missing: the file has no usable vocabulary")
    strings = list(value) if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else None
    if strings is None or not all(type(s) is str for s in strings):
        raise EngineError(f"key '{key}' is not an array of strings: the file is damaged")
    try:
        "".join(strings).encode()
    except UnicodeEncodeError:
        raise EngineError(f"key '{key}' holds strings that are not UTF-8: the file is damaged") from None
    return strings


def read_bool(metadata: Mapping[str, Any], key: str) -> bool | None:
    """A flag, or None. Raises EngineError if it is something else."""
    value = metadata.get(key)
    if value is not None and not isinstance(value, (bool, np.bool_)):
        raise EngineError(f"key '{key}' is {value!r}, expected true or false: the file is damaged")
    return None if value is None else bool(value)


def _read_types(metadata: Mapping[str, Any], n: int) -> list[int]:
    key = "tokenizer.ggml.token_type"
    value = metadata.get(key)
    if value is None:
        return [TokenType.NORMAL] * n
    types = None if isinstance(value, (str, bytes)) else np.asarray(value)
    if types is None or types.ndim != 1 or types.dtype.kind not in "iu":
        raise EngineError(f"key '{key}' is not an array of whole numbers: the file is damaged")
    if types.size < n:
        raise EngineError(f"key '{key}' has {types.size} entries for {n} tokens: the file is damaged")
    return types[:n].tolist()


def _read_id(metadata: Mapping[str, Any], key: str, n: int) -> int | None:
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 0 <= value < n:
        raise EngineError(f"key '{key}' is {value!r}, expected a token id below {n}: the file is damaged")
    return int(value)
