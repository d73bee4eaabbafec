"""Text to token ids and back, from the `tokenizer.*` keys of a model file.

Files: `vocab.py` reads and checks the vocabulary and cuts special tokens out of a text; what lies between them is
encoded by the kind of vocabulary: `bpe.py` (with `pretokenizers.py`, the table of splitting patterns),
`sentencepiece.py`, `unigram.py`, `wordpiece.py`. `selftest.py` compares with texts and ids that a file carries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import index
from typing import Any, Protocol

from engine.errors import EngineError
from engine.tokenizer.bpe import ByteLevelBPE, CharacterBPE
from engine.tokenizer.cleanup import clean_up
from engine.tokenizer.pretokenizers import CHARACTER_NAMES, get_pretokenizer
from engine.tokenizer.selftest import selftest_keys, verify_selftest
from engine.tokenizer.sentencepiece import SentencePieceBPE
from engine.tokenizer.unigram import Unigram
from engine.tokenizer.vocab import TokenType, Vocab, log, read_vocab
from engine.tokenizer.wordpiece import WordPiece

__all__ = ["KINDS", "Tokenizer", "from_metadata", "selftest_keys", "verify_selftest"]

_HIDDEN = (TokenType.CONTROL, TokenType.UNKNOWN)
_CUT = (TokenType.CONTROL, TokenType.USER_DEFINED)


class Model(Protocol):
    """What encodes the text between special tokens.

    lossless: whether every text comes back; adds_space: whether a space is put before each stretch of text.
    """

    lossless: bool
    adds_space: bool

    def encode(self, texts: list[str]) -> list[list[int]]: ...
    def piece(self, i: int) -> bytes: ...


@dataclass(frozen=True)
class Kind:
    """One value of `tokenizer.ggml.model`. name: for people; build: makes the model of a vocabulary; special: ids and
    flags where the file names none; around: special tokens that are put around texts whatever the file's flags say."""

    name: str
    build: Callable[[Vocab, Mapping[str, Any]], Model]
    special: Mapping[str, int] = field(default_factory=dict)
    add_bos: bool = False
    add_eos: bool = False
    around: tuple[str, str] | None = None


def _build_bpe(vocab: Vocab, metadata: Mapping[str, Any]) -> Model:
    name = _pre_name(metadata)
    if name in CHARACTER_NAMES:
        return CharacterBPE(vocab, metadata)
    return ByteLevelBPE(vocab, get_pretokenizer(name), metadata)


#: `tokenizer.ggml.model` -> how its vocabularies work
KINDS: dict[str, Kind] = {
    "gpt2": Kind("byte-level BPE", _build_bpe),
    "llama": Kind("SentencePiece BPE", SentencePieceBPE, {"bos": 1, "eos": 2, "unk": 0}, add_bos=True),
    "t5": Kind("Unigram", Unigram, {"eos": 1, "unk": 2, "pad": 0}, add_eos=True),
    "bert": Kind(
        "WordPiece", WordPiece, {"bos": 101, "unk": 100, "sep": 102, "pad": 0, "mask": 103}, around=("bos", "sep")
    ),
    "gemma4": Kind("BPE over characters", CharacterBPE, add_bos=True),
}
#: kinds that are not supported -> what they are
_OTHERS = {
    "rwkv": "RWKV, a trie of byte strings",
    "plamo2": "PLaMo 2",
    "whitespace": "words",
    "hybriddna": "DNA k-mers",
    "no_vocab": "no vocabulary",
    "none": "no vocabulary",
}


class Tokenizer:
    """The tokenizer of one model.

    n_vocab: number of ids; bos, eos: ids or None; eog: ids that end generation; add_bos, add_eos: whether `tokenize`
    puts them around a text (for WordPiece the second is SEP); kind: what vocabulary it is, for people; lossless:
    whether every text comes back from its ids.
    """

    def __init__(self, vocab: Vocab, model: Model, kind: Kind, before: int | None, after: int | None):
        self.vocab = vocab
        self.kind = kind.name
        self.n_vocab = len(vocab.tokens)
        self.bos, self.eos = vocab.special.get("bos"), vocab.special.get("eos")
        self.eog = vocab.eog
        self.add_bos, self.add_eos = before is not None, after is not None
        self.lossless = model.lossless
        self._before = [] if before is None else [before]
        self._after = [] if after is None else [after]
        self._model = model
        self._cleans = isinstance(model, WordPiece)

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Ids of a text.

        add_special: BOS and EOS around it, as far as the model wants them; parse_special: texts of control tokens
        (`<|im_start|>`) become these tokens; leave it off for text that you do not trust.
        Raises EngineError for text that is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise EngineError("the text holds characters that are not valid Unicode (lone surrogates)") from None
        parts = self.vocab.cut(text, parse_special)
        encoded = iter(self._model.encode([part for part in parts if isinstance(part, str)]))
        ids = [i for part in parts for i in ([part] if isinstance(part, int) else next(encoded))]
        if not add_special:
            return ids
        if self._before and ids[:1] == self._before:
            log.warning("the text begins with %r already: there are two now", self.vocab.tokens[ids[0]])
        return self._before + ids + self._after

    def token_to_piece(self, token: int, special: bool = False, lstrip: int = 0) -> bytes:
        """The bytes of one token: a part of a character, perhaps. Control tokens give b"" unless `special`.

        lstrip: spaces at its beginning that are left out, at most.
        Raises EngineError for an id that is not in the vocabulary.
        """
        i = index(token)
        if not 0 <= i < self.n_vocab:
            raise EngineError(f"token id {i} is not in the vocabulary of {self.n_vocab}")
        if not special and self.vocab.types[i] in _HIDDEN:
            return b""
        piece = self._model.piece(i)
        spaces = len(piece) - len(piece.lstrip(b" "))
        return piece[min(spaces, lstrip) :] if lstrip > 0 else piece

    def detokenize(self, ids: Iterable[int], special: bool = False, clean: bool | None = None) -> str:
        """The text of ids; bytes that are not UTF-8 become U+FFFD. Control tokens are left out unless `special`.

        The space that `tokenize` puts before a text, where it does, is taken away again. clean: take spaces before
        punctuation and English contractions away too; None does it for WordPiece, whose ids do not tell.
        """
        parts = []
        first = self._model.adds_space  # whether what comes next begins a stretch of text
        for i in ids:
            parts.append(self.token_to_piece(i, special, lstrip=int(first)))
            first = self._model.adds_space and self.vocab.types[i] in _CUT
        text = b"".join(parts).decode(errors="replace")
        return clean_up(text) if (self._cleans if clean is None else clean) else text


def from_metadata(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a model file's metadata.

    Raises EngineError for a kind that is not supported, and for a vocabulary that is missing or damaged.
    """
    kind = _kind(metadata)
    pre_adds_bos = _pre_adds_bos(metadata) if kind is KINDS["gpt2"] else False
    vocab = read_vocab(metadata, kind.special)
    model = kind.build(vocab, metadata)
    return Tokenizer(vocab, model, kind, *_around(vocab, kind, pre_adds_bos))


def _kind(metadata: Mapping[str, Any]) -> Kind:
    name = metadata.get("tokenizer.ggml.model")
    if isinstance(name, str) and name in KINDS:
        return KINDS[name]
    what = f" ({_OTHERS[name]})" if isinstance(name, str) and name in _OTHERS else ""
    have = ", ".join(f"{name} ({kind.name})" for name, kind in KINDS.items())
    found = "is missing" if name is None else f"is {str(name)[:60]!r}{what}, which is not supported"
    raise EngineError(f"key 'tokenizer.ggml.model' {found}; there are {have}")


def _around(vocab: Vocab, kind: Kind, pre_adds_bos: bool) -> tuple[int | None, int | None]:
    """Ids of the tokens before and after texts."""
    if kind.around is not None:
        first, last = kind.around
        return vocab.special.get("cls", vocab.special.get(first)), vocab.special.get(last)
    add_bos = (kind.add_bos or pre_adds_bos) if vocab.add_bos is None else vocab.add_bos
    add_eos = kind.add_eos if vocab.add_eos is None else vocab.add_eos
    found = []
    for name, wanted in (("bos", add_bos), ("eos", add_eos)):
        if wanted and name not in vocab.special:
            log.warning("the vocabulary asks for %s around texts but names no such token: none is added", name.upper())
        found.append(vocab.special.get(name) if wanted else None)
    return found[0], found[1]


def _pre_name(metadata: Mapping[str, Any]) -> str:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(name, str):
        raise EngineError(f"key 'tokenizer.ggml.pre' is {name!r}, expected a name: the file is damaged")
    return name


def _pre_adds_bos(metadata: Mapping[str, Any]) -> bool:
    if "tokenizer.ggml.pre" not in metadata:
        log.warning("key 'tokenizer.ggml.pre' is missing: 'default' is used, and texts may be cut in other places")
    name = _pre_name(metadata)
    return name not in CHARACTER_NAMES and get_pretokenizer(name).add_bos
