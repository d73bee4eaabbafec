"""A SentencePiece model file (`tokenizer.model`): the few fields of its protocol buffer that a vocabulary needs.

ModelProto: 1 pieces, 2 trainer_spec, 3 normalizer_spec. SentencePiece: 1 piece, 2 score, 3 type (the numbers are those
of GGUF's token types). TrainerSpec: 3 model_type, 24 treat_whitespace_as_suffix, 40 to 43 ids of unknown, begin, end
and padding. NormalizerSpec: 2 precompiled_charsmap, 3 add_dummy_prefix, 4 remove_extra_whitespaces.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguftools.errors import GGUFError

UNIGRAM, BPE = 1, 2
_MODEL_TYPES = {UNIGRAM: "Unigram", BPE: "BPE", 3: "words", 4: "characters"}
_MAX_FILE = 1 << 28  # bytes
_NORMAL, _BYTE = 1, 6


@dataclass(frozen=True)
class SentencePieceModel:
    """tokens, scores, types: of every id; model_type: UNIGRAM or BPE; special: ids by name, as trained;
    charsmap: normalizer map, b"" if texts are not changed; adds_space, merges_spaces: as the normalizer does."""

    tokens: list[str]
    scores: list[float]
    types: list[int]
    model_type: int
    special: dict[str, int]
    charsmap: bytes
    adds_space: bool
    merges_spaces: bool


def read_model(path: Path) -> SentencePieceModel:
    """The vocabulary of a SentencePiece model file.

    Raises GGUFError for a file that is none, is damaged, or holds a kind of model that GGUF has no place for.
    """
    try:
        if path.stat().st_size > _MAX_FILE:
            raise GGUFError(f"{path}: has more than {_MAX_FILE:,} bytes; this is no SentencePiece model")
        return _read(path, memoryview(path.read_bytes()))
    except OSError as error:
        raise GGUFError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, IndexError, struct.error) as error:
        if isinstance(error, GGUFError):
            raise
        raise GGUFError(f"{path}: is no SentencePiece model, or is damaged; download it again") from None


def _read(path: Path, data: memoryview) -> SentencePieceModel:
    tokens, scores, types = [], [], []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(value))
            tokens.append(bytes(piece[1]).decode() if 1 in piece else "")
            scores.append(struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0)
            types.append(piece.get(3, _NORMAL))
        elif number in (2, 3):
            (trainer if number == 2 else normalizer).update(_fields(value))
    if not tokens or not all(isinstance(kind, int) and _NORMAL <= kind <= _BYTE for kind in types):
        raise ValueError("no pieces")
    kind = trainer.get(3, UNIGRAM)
    if kind not in (UNIGRAM, BPE):
        raise GGUFError(f"{path}: is a SentencePiece model of {_MODEL_TYPES.get(kind, kind)}; GGUF has BPE and Unigram")
    if trainer.get(24):
        raise GGUFError(f"{path}: puts spaces after words (treat_whitespace_as_suffix); GGUF has no place for that")
    defaults = {"unk": (40, 0), "bos": (41, 1), "eos": (42, 2), "pad": (43, -1)}
    ids = {name: _signed(trainer.get(number, default)) for name, (number, default) in defaults.items()}
    return SentencePieceModel(
        tokens=tokens,
        scores=scores,
        types=types,
        model_type=kind,
        special={name: i for name, i in ids.items() if 0 <= i < len(tokens)},
        charsmap=bytes(normalizer.get(2, b"")),
        adds_space=bool(normalizer.get(3, True)),
        merges_spaces=bool(normalizer.get(4, True)),
    )


def _fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    """Number and value of each field: an int, or a view of its bytes. Raises ValueError and IndexError for damage."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind not in (1, 2, 5):
            raise ValueError("unknown wire type")
        size, at = _varint(data, at) if kind == 2 else (8 if kind == 1 else 4, at)
        if size > len(data) - at:
            raise ValueError("a field ends beyond the file")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number of more than ten bytes")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
