"""Unigram (`tokenizer.ggml.model` = t5): a text is normalized, then cut so that the scores of its tokens, which are
log-probabilities, have the greatest sum (Kudo 2018). The search is done by the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import EngineError
from engine.tokenizer.normalizer import Normalizer
from engine.tokenizer.vocab import TokenType, Vocab, byte_tokens, escaped_piece, read_scores


class Unigram:
    """Encoder and decoder of plain text. Raises EngineError for a vocabulary that is damaged."""

    lossless = False

    def __init__(self, vocab: Vocab, metadata: Mapping[str, Any]):
        from tokenizers import Tokenizer, models

        if "unk" not in vocab.special:
            raise EngineError("the vocabulary has no token for unknown characters (tokenizer.ggml.unknown_token_id)")
        scores = read_scores(metadata, len(vocab.tokens))
        found = byte_tokens(vocab)
        self.vocab = vocab
        self.normalize = Normalizer(metadata, by_default=False)
        self.adds_space = self.normalize.adds_space
        self._unknown = vocab.special["unk"]
        self._bytes = found if len(found) == 256 else {}
        self._tokenizer = Tokenizer(models.Unigram(_pieces(vocab, scores), self._unknown, False))

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text. Consecutive unknown characters are one unknown token, or their bytes if there are tokens
        for these."""
        normal = [self.normalize(text) for text in texts]
        if not self._bytes:
            return [e.ids for e in self._tokenizer.encode_batch_fast(normal, add_special_tokens=False)]
        encoded = self._tokenizer.encode_batch(normal, add_special_tokens=False)
        return [self._spelled(text, e) for text, e in zip(normal, encoded)]

    def _spelled(self, text: str, encoding: Any) -> list[int]:
        ids: list[int] = []
        for i, (start, stop) in zip(encoding.ids, encoding.offsets):
            ids += [self._bytes[b] for b in text[start:stop].encode()] if i == self._unknown else [i]
        return ids

    def piece(self, i: int) -> bytes:
        """The bytes that a token stands for."""
        return escaped_piece(self.vocab, i)


def _pieces(vocab: Vocab, scores: list[float]) -> list[tuple[str, float]]:
    """Tokens and scores as the library wants them.

    An unknown character costs 10 more than the least likely of all, so none may be below the normal ones. Tokens that
    no text may give get a name with a space, which no normalized text has.
    """
    usable = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
    lowest = min((scores[i] for i, kind in enumerate(vocab.types) if kind == TokenType.NORMAL), default=0.0)
    pieces = []
    for i, (token, kind) in enumerate(zip(vocab.tokens, vocab.types)):
        if i == vocab.special["unk"] or kind not in usable:
            pieces.append((f" {i}", lowest))
        else:
            pieces.append((token, 0.0 if kind == TokenType.USER_DEFINED else max(scores[i], lowest)))
    return pieces
