"""WordPiece (`tokenizer.ggml.model` = bert): words are cut at spaces, punctuation and Chinese characters, lowered and
stripped of accents where the model wants it, then spelled by the longest tokens from left to right (Devlin 2018).

In a file, tokens that begin a word start with U+2581 and the others stand as they are. The work is done by the
`tokenizers` library.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import EngineError
from engine.tokenizer.vocab import TokenType, Vocab, escaped_piece, read_bool

#: what marks tokens that go on in a word, for the library; normalized texts have no such character
_INNER = "\0"
#: longer words are unknown, as in the original
_MAX_WORD = 100


class WordPiece:
    """Encoder and decoder of plain text. Raises EngineError for a vocabulary without an unknown token."""

    lossless, adds_space = False, True

    def __init__(self, vocab: Vocab, metadata: Mapping[str, Any]):
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

        self.vocab = vocab
        if "unk" not in vocab.special:
            raise EngineError("the vocabulary has no token for unknown words (tokenizer.ggml.unknown_token_id)")
        lower = read_bool(metadata, "tokenizer.ggml.normalizer.lowercase")
        lower = lower is None or lower
        strip = read_bool(metadata, "tokenizer.ggml.normalizer.strip_accents")
        unknown = _INNER * 2  # a name that no word has
        pieces = {_library_name(vocab.tokens[i]): i for i, t in enumerate(vocab.types) if t == TokenType.NORMAL}
        pieces[unknown] = vocab.special["unk"]
        self._tokenizer = Tokenizer(
            models.WordPiece(
                pieces, unk_token=unknown, max_input_chars_per_word=_MAX_WORD, continuing_subword_prefix=_INNER
            )
        )
        self._tokenizer.normalizer = normalizers.BertNormalizer(True, True, lower if strip is None else strip, lower)
        self._tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text."""
        return [e.ids for e in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def piece(self, i: int) -> bytes:
        """The bytes that a token stands for: a space stands before each word."""
        return escaped_piece(self.vocab, i)


def _library_name(token: str) -> str:
    return token[1:] if token.startswith("▁") else _INNER + token
