"""Byte-level BPE (`tokenizer.ggml.model` = gpt2): words cut by patterns, bytes spelled as characters, pairs merged by
rank. The work is done by the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import EngineError
from engine.tokenizer.pretokenizers import PreTokenizer
from engine.tokenizer.vocab import TokenType, Vocab, read_strings

MERGES = "tokenizer.ggml.merges"


def _spelling() -> dict[str, int]:
    """Character -> byte, as GPT-2 spells bytes: printable Latin-1 stands for itself, the rest for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


BYTE_OF = _spelling()


class ByteLevelBPE:
    """Encoder and decoder of plain text for one vocabulary. Raises EngineError for merges that do not fit it."""

    def __init__(self, vocab: Vocab, pre: PreTokenizer, metadata: Mapping[str, Any]):
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers

        self.vocab = vocab
        merges = dict.fromkeys(_pair(merge) for merge in read_strings(metadata, MERGES))
        try:
            model = models.BPE(vocab.ids, list(merges), ignore_merges=pre.ignore_merges)
        except Exception as error:  # the library raises nothing more special
            raise EngineError(f"key '{MERGES}' does not fit the vocabulary: {str(error).splitlines()[0]}") from None
        self._tokenizer = Tokenizer(model)
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
            + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text. Raises EngineError for text that is not Unicode (lone surrogates)."""
        try:
            return [e.ids for e in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        except (TypeError, UnicodeError):
            raise EngineError("the text holds characters that are not valid Unicode (lone surrogates)") from None

    def piece(self, i: int) -> bytes:
        """The bytes that a token stands for; special tokens stand for their text, unused ones for nothing."""
        token, kind = self.vocab.tokens[i], self.vocab.types[i]
        if kind == TokenType.NORMAL:
            return b"".join(bytes([BYTE_OF[c]]) if c in BYTE_OF else c.encode() for c in token)
        if kind == TokenType.BYTE:
            return _byte(token)
        return b"" if kind == TokenType.UNUSED else token.encode()


def _pair(merge: str) -> tuple[str, str]:
    at = merge.find(" ", 1)  # the first part may be a space itself
    if at < 0:
        raise EngineError(f"key '{MERGES}' holds {merge!r}, which is not a pair: the file is damaged")
    return merge[:at], merge[at + 1 :]


def _byte(token: str) -> bytes:
    """The byte of a token of the form `<0x0A>`; others stand for their text."""
    try:
        return bytes([int(token.removeprefix("<0x").removesuffix(">"), 16)])
    except ValueError:
        return token.encode()
