"""The vocabulary of a GGUF file as files of a Hugging Face folder: tokenizer.json of byte-level BPE, tokenizer.model
of SentencePiece, and tokenizer_config.json."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from engine.tokenizer.normalizer import ADD_SPACE, CHARSMAP, MERGE_SPACES
from engine.tokenizer.pretokenizers import DIGIT, DIGITS, GPT2, PUNCTUATION, get_pretokenizer
from engine.tokenizer.vocab import LSTRIP_IDS, RSTRIP_IDS, SPECIAL_KEYS, TokenType
from gguftools.conversion.sentencepiece_file import BPE
from gguftools.errors import GGUFError

File = bytes | dict[str, Any]  # as it is, or as JSON

_TOKENS, _TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
_NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def vocabulary_of(metadata: Mapping[str, Any]) -> dict[str, File]:
    """File name -> content. Raises GGUFError for kinds of vocabulary that have no form here."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in _KINDS:
        known = ", ".join(_KINDS)
        raise GGUFError(f"the vocabulary is of the kind {kind!r}; {known} can be exported")
    tokens = list(metadata[_TOKENS])
    types = [int(t) for t in metadata.get(_TYPES, [TokenType.NORMAL] * len(tokens))]
    return _KINDS[kind](metadata, tokens, types) | {"tokenizer_config.json": _settings(metadata, tokens)}


def _settings(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in _NAMED:
        i = metadata.get(SPECIAL_KEYS[kind])
        if i is not None and 0 <= i < len(tokens):
            found[f"{kind}_token"] = tokens[i]
    for kind in ("bos", "eos", "sep"):
        if f"tokenizer.ggml.add_{kind}_token" in metadata:
            found[f"add_{kind}_token"] = bool(metadata[f"tokenizer.ggml.add_{kind}_token"])
    if ADD_SPACE in metadata and metadata["tokenizer.ggml.model"] == "gpt2":
        found["add_prefix_space"] = bool(metadata[ADD_SPACE])
    template = metadata.get("tokenizer.chat_template")
    named = [
        {"name": str(name), "template": metadata[f"tokenizer.chat_template.{name}"]}
        for name in metadata.get("tokenizer.chat_templates", ())
        if f"tokenizer.chat_template.{name}" in metadata
    ]
    if named:
        found["chat_template"] = [*([{"name": "default", "template": template}] if template else []), *named]
    elif template:
        found["chat_template"] = template
    bpe = metadata["tokenizer.ggml.model"] == "gpt2"
    found["tokenizer_class"] = "PreTrainedTokenizerFast" if bpe else "LlamaTokenizer"
    return found


# --- byte-level BPE ---------------------------------------------------------------------------------------------------


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> dict[str, File]:
    merges = list(metadata.get("tokenizer.ggml.merges", ()))
    row = get_pretokenizer(metadata.get("tokenizer.ggml.pre", "default"))
    joined = {merge.replace(" ", "", 1) if merge[:1] != " " else merge for merge in merges}
    joined |= {part for merge in merges for part in merge.split(" ", 1)}
    apart = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
    ids = enumerate(zip(tokens, types))
    vocab = {t: i for i, (t, kind) in ids if kind != TokenType.UNUSED and (kind not in apart or t in joined)}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": row.ignore_merges,
        "vocab": vocab,
        "merges": [merge.split(" ", 1) for merge in merges],
    }
    strips = {key: set(metadata.get(key, ())) for key in (LSTRIP_IDS, RSTRIP_IDS)}
    added = [
        {
            "id": i,
            "content": text,
            "single_word": False,
            "lstrip": i in strips[LSTRIP_IDS],
            "rstrip": i in strips[RSTRIP_IDS],
            "normalized": False,
            "special": kind != TokenType.USER_DEFINED,
        }
        for i, (text, kind) in enumerate(zip(tokens, types))
        if kind in apart
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _steps(row.written or row.patterns)},
        "post_processor": _post_processor(metadata, tokens),
        "decoder": _byte_step(False) | {"use_regex": True},
        "model": model,
    }
    return {"tokenizer.json": tokenizer}


def _byte_step(by_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": by_regex}


def _steps(patterns: tuple[str, ...]) -> list[dict[str, Any]]:
    """Patterns as the steps of a pre-tokenizer; one of them writes bytes as letters."""
    plain: dict[str, dict[str, Any]] = {
        GPT2: _byte_step(True),
        DIGIT: {"type": "Digits", "individual_digits": True},
        DIGITS: {"type": "Digits", "individual_digits": False},
        PUNCTUATION: {"type": "Punctuation", "behavior": "Contiguous"},
    }
    steps = [
        plain.get(pattern) or {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    return steps if GPT2 in patterns else [*steps, _byte_step(False)]


def _post_processor(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any] | None:
    """What puts special tokens around texts."""
    flags = {kind: metadata.get(f"tokenizer.ggml.add_{kind}_token") for kind in ("bos", "eos")}
    ids = {
        kind: metadata[SPECIAL_KEYS[kind]] for kind, flag in flags.items() if flag and SPECIAL_KEYS[kind] in metadata
    }
    if not ids:
        return None

    def special(kind: str, n: int) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": tokens[ids[kind]], "type_id": n}}] if kind in ids else []

    def text(name: str, n: int) -> dict[str, Any]:
        return {"Sequence": {"id": name, "type_id": n}}

    between = special("eos", 0) if metadata.get("tokenizer.ggml.add_sep_token") else []

    return {
        "type": "TemplateProcessing",
        "single": [*special("bos", 0), text("A", 0), *special("eos", 0)],
        "pair": [*special("bos", 0), text("A", 0), *between, text("B", 1), *special("eos", 1)],
        "special_tokens": {
            tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in dict.fromkeys(ids.values())
        },
    }


# --- SentencePiece ----------------------------------------------------------------------------------------------------


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> dict[str, File]:
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise GGUFError("the vocabulary has no score for every token; it cannot be exported")
    n = len(tokens)
    while n and types[n - 1] == TokenType.UNUSED and tokens[n - 1] == f"[PAD{n - 1}]":
        n -= 1  # conversion adds these again
    pieces = b"".join(
        _field(1, _field(1, tokens[i].encode()) + b"\x15" + struct.pack("<f", scores[i]) + _number(3, types[i]))
        for i in range(n)
    )
    ids = {"unk": 40, "bos": 41, "eos": 42, "pad": 43}
    trainer = _number(3, BPE) + _number(4, n) + _number(35, int(TokenType.BYTE in types))
    for kind, number in ids.items():
        trainer += _number(number, int(metadata.get(SPECIAL_KEYS[kind], -1)))
    normalizer = _field(1, b"identity") + _field(2, bytes(metadata.get(CHARSMAP, b"")))
    normalizer += _number(3, int(bool(metadata.get(ADD_SPACE, True))))
    normalizer += _number(4, int(bool(metadata.get(MERGE_SPACES, False))))
    return {"tokenizer.model": pieces + _field(2, trainer) + _field(3, normalizer)}


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


_KINDS: dict[str, Callable[[Mapping[str, Any], list[str], list[int]], dict[str, File]]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}
