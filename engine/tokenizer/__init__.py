"""Text to token ids and back, from the `tokenizer.*` keys of a model file.

Files: `vocab.py` reads and checks the vocabulary and cuts special tokens out of a text, `bpe.py` encodes what lies
between them, `pretokenizers.py` is the table of splitting patterns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import index
from typing import Any

from engine.errors import EngineError
from engine.tokenizer.bpe import ByteLevelBPE
from engine.tokenizer.pretokenizers import get_pretokenizer
from engine.tokenizer.vocab import TokenType, Vocab, log, read_vocab

__all__ = ["Tokenizer", "from_metadata"]

#: `tokenizer.ggml.model` of other kinds -> what they are
_OTHERS = {
    "llama": "SentencePiece",
    "bert": "WordPiece",
    "t5": "Unigram",
    "rwkv": "RWKV",
    "plamo2": "PLaMo 2",
    "gemma4": "BPE over characters",
    "whitespace": "words",
    "hybriddna": "DNA k-mers",
    "no_vocab": "no vocabulary",
    "none": "no vocabulary",
}


class Tokenizer:
    """The tokenizer of one model.

    n_vocab: number of ids; bos, eos: ids or None; eog: ids that end generation; add_bos, add_eos: whether `tokenize`
    puts them around a text. Texts survive a round trip: no spaces are added or cleaned up.
    """

    def __init__(self, vocab: Vocab, model: ByteLevelBPE, add_bos: bool, add_eos: bool):
        self.vocab = vocab
        self.n_vocab = len(vocab.tokens)
        self.bos, self.eos = vocab.special.get("bos"), vocab.special.get("eos")
        self.eog = vocab.eog
        self.add_bos, self.add_eos = add_bos, add_eos
        self._model = model

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Ids of a text.

        add_special: BOS and EOS around it, as far as the model wants them; parse_special: texts of control tokens
        (`<|im_start|>`) become these tokens; leave it off for text that you do not trust.
        Raises EngineError for text that is not valid Unicode.
        """
        parts = self.vocab.cut(text, parse_special)
        encoded = iter(self._model.encode([part for part in parts if isinstance(part, str)]))
        ids = [i for part in parts for i in ([part] if isinstance(part, int) else next(encoded))]
        before = [self.bos] if add_special and self.add_bos and self.bos is not None else []
        after = [self.eos] if add_special and self.add_eos and self.eos is not None else []
        return before + ids + after

    def token_to_piece(self, token: int, special: bool = False) -> bytes:
        """The bytes of one token: a part of a character, perhaps. Control tokens give b"" unless `special`.

        Raises EngineError for an id that is not in the vocabulary.
        """
        i = index(token)
        if not 0 <= i < self.n_vocab:
            raise EngineError(f"token id {i} is not in the vocabulary of {self.n_vocab}")
        if not special and self.vocab.types[i] in (TokenType.CONTROL, TokenType.UNKNOWN):
            return b""
        return self._model.piece(i)

    def detokenize(self, ids: Iterable[int], special: bool = False) -> str:
        """The text of ids; bytes that are not UTF-8 become U+FFFD. Control tokens are left out unless `special`."""
        return b"".join(self.token_to_piece(i, special) for i in ids).decode(errors="replace")


def from_metadata(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a model file's metadata.

    Raises EngineError for a kind that is not supported, and for a vocabulary that is missing or damaged.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        known = f" ({_OTHERS[kind]})" if isinstance(kind, str) and kind in _OTHERS else ""
        what = "is missing" if kind is None else f"is {kind!r}{known}"
        raise EngineError(f"key 'tokenizer.ggml.model' {what}; this version has: gpt2 (byte-level BPE)")
    name = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(name, str):
        raise EngineError(f"key 'tokenizer.ggml.pre' is {name!r}, expected a name: the file is damaged")
    if "tokenizer.ggml.pre" not in metadata:
        log.warning("key 'tokenizer.ggml.pre' is missing: 'default' is used, and texts may be cut in other places")
    pre = get_pretokenizer(name)
    vocab = read_vocab(metadata)
    add_bos = pre.add_bos if vocab.add_bos is None else vocab.add_bos
    for name, wanted in (("bos", add_bos), ("eos", vocab.add_eos)):
        if wanted and name not in vocab.special:
            log.warning("the vocabulary asks for %s around texts but names no such token: none is added", name.upper())
    return Tokenizer(vocab, ByteLevelBPE(vocab, pre, metadata), add_bos, bool(vocab.add_eos))
