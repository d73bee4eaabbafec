"""BPE with a list of merges: pairs of pieces are joined by rank. The work is done by the `tokenizers` library.

`ByteLevelBPE` (`tokenizer.ggml.model` = gpt2) cuts words by patterns and spells bytes as characters; `CharacterBPE`
(gemma4) merges the characters of whole lines, writes spaces as U+2581, and falls back to tokens of single bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import EngineError
from engine.tokenizer.pretokenizers import PreTokenizer
from engine.tokenizer.vocab import TokenType, Vocab, byte_of, escaped_piece, read_strings

MERGES = "tokenizer.ggml.merges"


def _spelling() -> dict[str, int]:
    """Character -> byte, as GPT-2 spells bytes: printable Latin-1 stands for itself, the rest for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


BYTE_OF = _spelling()


class ByteLevelBPE:
    """Encoder and decoder of plain text for one vocabulary. Raises EngineError for merges that do not fit it."""

    lossless, adds_space = True, False

    def __init__(self, vocab: Vocab, pre: PreTokenizer, metadata: Mapping[str, Any]):
        from tokenizers import Regex, Tokenizer, pre_tokenizers

        self.vocab = vocab
        self._tokenizer = Tokenizer(_model(vocab, metadata, ignore_merges=pre.ignore_merges))
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
            + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text."""
        return [e.ids for e in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def piece(self, i: int) -> bytes:
        """The bytes that a token stands for; special tokens stand for their text, unused ones for nothing."""
        token, kind = self.vocab.tokens[i], self.vocab.types[i]
        if kind == TokenType.NORMAL:
            return b"".join(bytes([BYTE_OF[c]]) if c in BYTE_OF else c.encode() for c in token)
        if kind == TokenType.BYTE and (byte := byte_of(token)) is not None:
            return bytes([byte])
        return b"" if kind == TokenType.UNUSED else token.encode()


class CharacterBPE:
    """The same over characters: spaces are U+2581, characters without a token become tokens of bytes."""

    lossless, adds_space = True, False

    def __init__(self, vocab: Vocab, metadata: Mapping[str, Any]):
        from tokenizers import Regex, Tokenizer, pre_tokenizers

        self.vocab = vocab
        unknown = vocab.tokens[vocab.special["unk"]] if "unk" in vocab.special else None
        self._tokenizer = Tokenizer(_model(vocab, metadata, byte_fallback=True, fuse_unk=True, unk_token=unknown))
        self._tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text."""
        escaped = [text.replace(" ", "▁") for text in texts]
        return [e.ids for e in self._tokenizer.encode_batch_fast(escaped, add_special_tokens=False)]

    def piece(self, i: int) -> bytes:
        """The bytes that a token stands for."""
        return escaped_piece(self.vocab, i)


def _model(vocab: Vocab, metadata: Mapping[str, Any], **options: Any) -> Any:
    """The library's BPE model. Raises EngineError for merges that are missing or do not fit the vocabulary."""
    from tokenizers import models

    merges = dict.fromkeys(_pair(merge) for merge in read_strings(metadata, MERGES))
    try:
        return models.BPE(vocab.ids, list(merges), **options)
    except Exception as error:  # the library raises nothing more special
        raise EngineError(f"key '{MERGES}' does not fit the vocabulary: {str(error).splitlines()[0]}") from None


def _pair(merge: str) -> tuple[str, str]:
    at = merge.find(" ", 1)  # the first part may be a space itself
    if at < 0:
        raise EngineError(f"key '{MERGES}' holds {merge!r}, which is not a pair: the file is damaged")
    return merge[:at], merge[at + 1 :]
