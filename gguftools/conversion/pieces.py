"""Vocabularies that write spaces as U+2581 as metadata keys: SentencePiece files, and tokenizer.json of BPE over
characters, Unigram and WordPiece."""

from __future__ import annotations

import base64
import binascii
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from engine.tokenizer.normalizer import ADD_SPACE, CHARSMAP, MERGE_SPACES
from engine.tokenizer.vocab import TokenType, byte_of
from gguftools.conversion.byte_level import merges_of
from gguftools.conversion.card import Pair
from gguftools.conversion.hf import load_json
from gguftools.conversion.sentencepiece_file import BPE, SentencePieceModel, read_model
from gguftools.conversion.structure import (
    Folder,
    added_tokens,
    is_control,
    normalizers,
    padded,
    pretokenizers,
    texts_by_id,
    vocab_size,
)
from gguftools.errors import GGUFError

log = logging.getLogger(__name__)

#: scores of ids without a piece, and of tokens that were added to the vocabulary
_UNUSED_SCORE, _ADDED_SCORE = -10000.0, -1000.0

#: tokens of Gemma 4 that a reply shows, although they are special
_GEMMA4_SHOWN = frozenset(
    ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>')
)


def _keys(model: str, tokens: list[str], types: list[int], scores: list[float] | None = None) -> list[Pair]:
    pairs: list[Pair] = [("tokenizer.ggml.model", model), ("tokenizer.ggml.pre", "default")]
    pairs.append(("tokenizer.ggml.tokens", tokens))
    pairs += [] if scores is None else [("tokenizer.ggml.scores", scores)]
    return [*pairs, ("tokenizer.ggml.token_type", types)]


# --- SentencePiece files ----------------------------------------------------------------------------------------------


def sentencepiece_keys(folder: Folder, path: Path) -> tuple[list[Pair], SentencePieceModel]:
    """Keys of a SentencePiece file and the tokens that are added to it; and the file's content.

    Raises GGUFError for a damaged file, and for tokens beyond the model's rows.
    """
    model = read_model(path)
    added = list(_added_to(folder, path))
    highest = max([len(model.tokens) - 1, *(i for i, _, _ in added)])
    size = vocab_size(path, highest, folder.config)
    tokens, types = padded(dict(enumerate(model.tokens)), size)
    scores = model.scores + [_UNUSED_SCORE] * (size - len(model.tokens))
    types[: len(model.types)] = model.types
    for i, text, kind in added:
        if types[i] != TokenType.UNUSED and tokens[i] != text:
            log.warning("%s: token %d, %r, is replaced by the added token %r", path, i, tokens[i], text)
        tokens[i], types[i], scores[i] = text, int(kind), _ADDED_SCORE
    pairs = _keys("llama" if model.model_type == BPE else "t5", tokens, types, scores)
    if model.model_type == BPE:  # the defaults are those of nearly all: nothing is written for these
        pairs += [] if model.adds_space else [(ADD_SPACE, False)]
        pairs += [(MERGE_SPACES, True)] if model.merges_spaces else []
    else:
        pairs += [(ADD_SPACE, model.adds_space), (MERGE_SPACES, model.merges_spaces)]
    return pairs + _charsmap(model.charsmap), model


def _added_to(folder: Folder, path: Path) -> Iterator[tuple[int, str, TokenType]]:
    """id, text and type of tokens that are added to a SentencePiece file, in the order in which they count."""
    here = dict(enumerate(read_model(path).tokens))
    for text, i in load_json(folder.path / "added_tokens.json", required=False).items():
        _check_id(folder.path / "added_tokens.json", i)
        if here.get(i) != text:  # some list tokens that the file has already: these keep their types
            here[i] = text
            yield i, text, TokenType.USER_DEFINED
    decoder = folder.settings.get("added_tokens_decoder")
    for key, token in (decoder if isinstance(decoder, dict) else {}).items():
        if not key.isdecimal() or not isinstance(token, dict) or not isinstance(token.get("content"), str):
            raise GGUFError(
                f"{folder.path / 'tokenizer_config.json'}: 'added_tokens_decoder' is damaged at {key[:40]!r}"
            )
        _check_id(folder.path / "tokenizer_config.json", int(key))
        here[int(key)] = token["content"]
        yield int(key), *_added(token)
    for token in added_tokens(folder.json, folder.tokenizer):
        if here.get(token["id"]) != token["content"]:
            yield token["id"], *_added(token)


def _check_id(path: Path, i: Any) -> None:
    if type(i) is not int or i < 0:
        raise GGUFError(f"{path}: an added token has the id {i!r}; the file is damaged")


def _added(token: Mapping[str, Any]) -> tuple[str, TokenType]:
    """Text and type of an added token; user-defined ones are compared with the text as it is."""
    text = token["content"]
    if is_control(token, text):
        return text, TokenType.CONTROL
    return text.replace("▁", " "), TokenType.USER_DEFINED


def _charsmap(charsmap: bytes) -> list[Pair]:
    return [(CHARSMAP, np.frombuffer(charsmap, np.uint8))] if charsmap else []


# --- tokenizer.json ---------------------------------------------------------------------------------------------------


def character_keys(folder: Folder) -> list[Pair]:
    """A BPE over characters: merges become scores, as SentencePiece has them, but for Gemma 4, which keeps merges."""
    tokens, types = _tokens(folder)
    merges = merges_of(folder)
    if str(folder.config.get("model_type", "")).startswith("gemma4"):
        shown = [i for i, token in enumerate(tokens) if token in _GEMMA4_SHOWN]
        for i in shown:
            types[i] = int(TokenType.USER_DEFINED)
        pairs = _keys("gemma4", tokens, types, [_ADDED_SCORE] * len(tokens))
        pairs = [(key, "gemma4" if key == "tokenizer.ggml.pre" else value) for key, value in pairs]
        return [*pairs, ("tokenizer.ggml.merges", merges), (ADD_SPACE, False), ("tokenizer.ggml.add_bos_token", True)]
    others = [s for s in normalizers(folder.tokenizer) if not _writes_spaces(s)]
    _refuse(folder, others)
    scores = _scores_of_merges(tokens, merges)
    pairs = _keys("llama", tokens, types, scores)
    return pairs if _adds_space(folder) else [*pairs, (ADD_SPACE, False)]


def unigram_keys(folder: Folder) -> list[Pair]:
    """A Unigram vocabulary and its normalizer map."""
    model = folder.tokenizer["model"]
    unknown = model.get("unk_id")
    if type(unknown) is not int or not 0 <= unknown < len(model["vocab"]):
        raise GGUFError(f"{folder.json}: the Unigram vocabulary names no unknown token ('unk_id' is {unknown!r})")
    tokens, types = _tokens(folder, unknown)
    scores = [float(entry[1]) for entry in model["vocab"]]
    scores += [_UNUSED_SCORE] * (len(tokens) - len(scores))
    found = normalizers(folder.tokenizer)
    _refuse(folder, [s for s in found if s.get("type") != "Precompiled" and not _writes_spaces(s) and not _joins(s)])
    maps = [s.get("precompiled_charsmap") for s in found if s.get("type") == "Precompiled"]
    try:
        charsmap = base64.b64decode(maps[0] or "", validate=True) if maps else b""
    except (binascii.Error, TypeError, ValueError):
        raise GGUFError(f"{folder.json}: 'precompiled_charsmap' is not base64; the file is damaged") from None
    splits = any(step.get("type") == "WhitespaceSplit" for step in pretokenizers(folder.tokenizer))
    pairs = _keys("t5", tokens, types, scores)
    pairs += [(ADD_SPACE, _adds_space(folder)), (MERGE_SPACES, splits or any(map(_joins, found)))]
    return _token_types(folder, required=False) + pairs + _charsmap(charsmap)


def wordpiece_keys(folder: Folder) -> list[Pair]:
    """A WordPiece vocabulary: tokens that begin a word get U+2581 in front, the others lose their `##`."""
    model = folder.tokenizer["model"]
    if (prefix := model.get("continuing_subword_prefix", "##")) != "##":
        raise GGUFError(f"{folder.json}: 'continuing_subword_prefix' is {prefix!r}; GGUF has only '##'")
    _refuse(folder, [s for s in normalizers(folder.tokenizer) if s.get("type") not in _BERT_NORMALIZERS])
    tokens, types = _tokens(folder)
    spelled = [
        text if kind == TokenType.CONTROL else text[2:] if text.startswith("##") else "▁" + text
        for text, kind in zip(tokens, types)
    ]
    return _token_types(folder, required=True) + _keys("bert", spelled, types)


_BERT_NORMALIZERS = ("BertNormalizer", "Lowercase", "StripAccents", "NFD", "NFC")


def normalizer_keys(folder: Folder) -> list[Pair]:
    """Whether WordPiece lowers and strips accents."""
    found: dict[str, Any] = {}
    for step in normalizers(folder.tokenizer):
        match step:
            case {"type": "Lowercase"}:
                found["lowercase"] = True
            case {"type": "StripAccents"}:
                found["strip_accents"] = True
            case {"type": "BertNormalizer"}:
                found |= {name: step.get(name) for name in ("lowercase", "strip_accents") if name in step}
    return [(f"tokenizer.ggml.normalizer.{name}", flag) for name, flag in found.items() if isinstance(flag, bool)]


def _token_types(folder: Folder, required: bool) -> list[Pair]:
    """How many kinds of segments (sentence A, sentence B) the embeddings know."""
    n = folder.config.get("type_vocab_size", 1 if required else None)
    return [("tokenizer.ggml.token_type_count", n)] if type(n) is int and n >= 0 else []


def unknown_id(folder: Folder) -> dict[str, int]:
    """The id of the unknown token, by the kind's name, as far as the vocabulary itself names it."""
    model = folder.tokenizer["model"]
    i = model.get("unk_id") if "unk_id" in model else model["vocab"].get(model.get("unk_token"))
    return {"unk": i} if type(i) is int else {}


def _tokens(folder: Folder, unknown: int | None = None) -> tuple[list[str], list[int]]:
    """Text and type of every id below the config's `vocab_size`."""
    path = folder.json
    by_id = texts_by_id(path, folder.tokenizer)
    tokens, types = padded(by_id, vocab_size(path, max(by_id, default=-1), folder.config))
    if folder.tokenizer["model"].get("byte_fallback"):
        for i in by_id:
            if byte_of(tokens[i]) is not None:
                types[i] = int(TokenType.BYTE)
    for token in added_tokens(path, folder.tokenizer):
        text, kind = _added(token)
        tokens[token["id"]], types[token["id"]] = text, int(kind)
    if type(unknown) is int and 0 <= unknown < len(types):
        types[unknown] = int(TokenType.UNKNOWN)
    return tokens, types


def _scores_of_merges(tokens: list[str], merges: list[str]) -> list[float]:
    """Scores by which SentencePiece joins what the merges join, in their order: the nth result has -n."""
    results = dict.fromkeys(merge.replace(" ", "", 1) if merge[0] != " " else merge for merge in merges)
    place = {text: -float(n) for n, text in enumerate(results)}
    return [place.get(text, -float(len(place))) for text in tokens]


def _refuse(folder: Folder, others: list[dict[str, Any]]) -> None:
    if others:
        names = ", ".join(str(step.get("type")) for step in others)
        raise GGUFError(f"{folder.json}: changes texts before it cuts them ({names}); GGUF has no place for that")


_RUN_OF_SPACES = re.compile(r" (?:\+|\{2,\})|\\s\+")


def _writes_spaces(step: Mapping[str, Any]) -> bool:
    """Whether a normalizer writes spaces as U+2581, or puts one in front."""
    match step:
        case {"type": "Prepend", "prepend": "▁"} | {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
            return True
    return False


def _joins(step: Mapping[str, Any]) -> bool:
    """Whether a normalizer joins runs of spaces or takes them from the ends."""
    match step:
        case {"type": "Strip"}:
            return True
        case {"type": "Replace", "pattern": {"Regex": str(pattern)}, "content": " " | "▁"}:
            return _RUN_OF_SPACES.fullmatch(pattern) is not None
    return False


def _adds_space(folder: Folder) -> bool:
    """Whether a space is put before texts."""
    if any(step.get("type") == "Prepend" for step in normalizers(folder.tokenizer)):
        return True
    for step in pretokenizers(folder.tokenizer):
        if step.get("type") == "Metaspace":
            return bool(step.get("add_prefix_space", True)) and step.get("prepend_scheme", "always") != "never"
    return False
