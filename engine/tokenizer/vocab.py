"""The vocabulary in GGUF metadata: tokens, their types, special ids, and the cutting of special tokens out of a text.

Metadata is whatever a file says, so everything is checked here, once.
"""

from __future__ import annotations

import logging
import re
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
    "cls": "tokenizer.ggml.cls_token_id",
    "fim_pad": "tokenizer.ggml.fim_pad_token_id",
    "fim_rep": "tokenizer.ggml.fim_rep_token_id",
    "fim_sep": "tokenizer.ggml.fim_sep_token_id",
}

#: All ids that end generation, where they are more than the keys above can name.
EOS_IDS = "tokenizer.ggml.eos_token_ids"
#: Ids of tokens that take the white space before or after them along, where the rules below do not say so.
LSTRIP_IDS, RSTRIP_IDS = "gguftools.tokenizer.lstrip_token_ids", "gguftools.tokenizer.rstrip_token_ids"

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
    add_bos, add_eos: what the file says, or None; cuttable: special tokens in the order in which they are cut out;
    lstrip, rstrip: ids of those that take the white space before or after them along."""

    tokens: list[str]
    types: list[int]
    ids: dict[str, int]
    special: dict[str, int]
    eog: frozenset[int]
    add_bos: bool | None
    add_eos: bool | None
    cuttable: tuple[int, ...]
    lstrip: frozenset[int]
    rstrip: frozenset[int]

    def cut(self, text: str, parse_special: bool) -> list[str | int]:
        """`text` as stretches of plain text and ids of special tokens, longest tokens cut first.

        User-defined tokens are always cut out, control and unknown ones only with `parse_special`.
        """
        parts: list[str | int] = [text] if text else []
        for i in self.cuttable:
            if (parse_special or self.types[i] == TokenType.USER_DEFINED) and self.tokens[i] in text:
                parts = [piece for part in parts for piece in self._cut_one(part, i)]
        return parts

    def _cut_one(self, part: str | int, i: int) -> list[str | int]:
        token = self.tokens[i]
        if isinstance(part, int) or token not in part:
            return [part]
        pieces: list[str | int] = []
        stretches = part.split(token)
        for n, stretch in enumerate(stretches):
            if i in self.lstrip and n < len(stretches) - 1:
                stretch = stretch.rstrip()
            if i in self.rstrip and n:
                stretch = stretch.lstrip()
            pieces += ([i] if n else []) + ([stretch] if stretch else [])
        return pieces


def read_vocab(metadata: Mapping[str, Any], defaults: Mapping[str, int] | None = None) -> Vocab:
    """The vocabulary of a model. `defaults`: special ids where the file names none.

    Raises EngineError, naming the key, for what is missing, damaged or contradictory.
    """
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(read_strings(metadata, "tokenizer.ggml.tokens"))]
    if not tokens:
        raise EngineError("key 'tokenizer.ggml.tokens' is empty: the file has no vocabulary")
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        twice = next(token for i, token in enumerate(tokens) if ids[token] != i)
        raise EngineError(f"key 'tokenizer.ggml.tokens' has {twice!r} more than once: the file is damaged")
    types = _read_types(metadata, len(tokens))
    special = {name: i for name, key in SPECIAL_KEYS.items() if (i := _read_id(metadata, key, len(tokens))) is not None}
    special = {name: i for name, i in (defaults or {}).items() if i < len(tokens)} | special
    eog = _mark_endings(ids, types, special) | _read_ids(metadata, EOS_IDS, len(tokens))
    lstrip, rstrip = _stripping(metadata, ids, types)
    cuttable = [i for i, t in enumerate(types) if t in (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)]
    cuttable.sort(key=lambda i: len(tokens[i].encode()), reverse=True)
    add_bos, add_eos = (read_bool(metadata, f"tokenizer.ggml.add_{name}_token") for name in ("bos", "eos"))
    return Vocab(tokens, types, ids, special, eog, add_bos, add_eos, tuple(cuttable), lstrip, rstrip)


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


#: Rules of llama.cpp for files that do not say which tokens strip: (key, part of its value in lower case, token).
_LSTRIP_RULES = (
    ("tokenizer.ggml.pre", "jina-v2-de jina-v2-es jina-v2-code mmbert", "<mask>"),
    ("general.architecture", "nomic-bert-moe jina-bert-v3", "<mask>"),
    ("general.name", "modern-bert", "[MASK]"),
)
#: Phi-3: all special tokens strip what follows, but for these.
_RSTRIP_NAMES, _NOT_RSTRIP = ("phi-3", "phi3"), ("<unk>", "<s>", "<|endoftext|>")


def _stripping(
    metadata: Mapping[str, Any], ids: dict[str, int], types: list[int]
) -> tuple[frozenset[int], frozenset[int]]:
    """Ids of tokens that take white space before and after them along: those that the file names, else by rules."""
    lstrip, rstrip = (set(_read_ids(metadata, key, len(types))) for key in (LSTRIP_IDS, RSTRIP_IDS))
    for key, names, token in _LSTRIP_RULES:
        if token in ids and any(name in str(metadata.get(key, "")).lower() for name in names.split()):
            lstrip.add(ids[token])
    if any(name in str(metadata.get("general.name", "")).lower() for name in _RSTRIP_NAMES):
        special = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
        rstrip |= {i for text, i in ids.items() if types[i] in special and text not in _NOT_RSTRIP}
    return frozenset(lstrip), frozenset(rstrip)


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


def read_scores(metadata: Mapping[str, Any], n: int) -> list[float]:
    """`tokenizer.ggml.scores` of n tokens. Raises EngineError if they are missing, too few or not finite numbers."""
    key = "tokenizer.ggml.scores"
    scores = read_numbers(metadata, key, "iuf")
    if scores.size < n:
        raise EngineError(f"key '{key}' has {scores.size} entries for {n} tokens: the file is damaged")
    if not np.isfinite(scores[:n]).all():
        raise EngineError(f"key '{key}' holds values that are not finite: the file is damaged")
    return scores[:n].tolist()


def byte_tokens(vocab: Vocab) -> dict[int, int]:
    """Byte -> id of the token `<0x0A>` that stands for it, as far as there are any."""
    found = {}
    for i, kind in enumerate(vocab.types):
        if kind == TokenType.BYTE and (byte := byte_of(vocab.tokens[i])) is not None:
            found[byte] = i
    return found


_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_of(token: str) -> int | None:
    """The byte of a token of the form `<0x0A>`, None for others."""
    found = _BYTE.fullmatch(token)
    return int(found[1], 16) if found else None


def escaped_piece(vocab: Vocab, i: int) -> bytes:
    """The bytes of a token of a vocabulary that writes spaces as U+2581."""
    token, kind = vocab.tokens[i], vocab.types[i]
    if kind == TokenType.UNUSED:
        return b""
    if kind == TokenType.BYTE and (byte := byte_of(token)) is not None:
        return bytes([byte])
    return (token.replace("▁", " ") if kind == TokenType.NORMAL else token).encode()


def read_numbers(metadata: Mapping[str, Any], key: str, kinds: str) -> np.ndarray:
    """An array of numbers of these NumPy kinds, one axis. Raises EngineError if it is missing or something else."""
    value = metadata.get(key)
    if value is None:
        raise EngineError(f"key '{key}' is missing: the file has no usable vocabulary")
    numbers = None if isinstance(value, (str, bytes)) else np.asarray(value)
    if numbers is None or numbers.ndim != 1 or numbers.dtype.kind not in kinds:
        what = "numbers" if "f" in kinds else "whole numbers"
        raise EngineError(f"key '{key}' is not an array of {what}: the file is damaged")
    return numbers


def _read_ids(metadata: Mapping[str, Any], key: str, n: int) -> frozenset[int]:
    """A list of token ids; empty if it is not there."""
    if metadata.get(key) is None:
        return frozenset()
    ids = read_numbers(metadata, key, "iu")
    if not ((ids >= 0) & (ids < n)).all():
        raise EngineError(f"key '{key}' holds ids that are not in the vocabulary of {n}: the file is damaged")
    return frozenset(ids.tolist())


def _read_types(metadata: Mapping[str, Any], n: int) -> list[int]:
    key = "tokenizer.ggml.token_type"
    if metadata.get(key) is None:
        return [TokenType.NORMAL] * n
    types = read_numbers(metadata, key, "iu")
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
