"""The vocabulary of a model folder as `tokenizer.*` keys.

What kind it is, and all it does, is read from the structure of tokenizer.json or from the SentencePiece file. Then a
text is tokenized both ways, by the engine and by the `tokenizers` library, so that a wrong guess cannot slip through.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from engine.tokenizer import KINDS, Tokenizer, from_metadata, selftest_keys
from engine.tokenizer.normalizer import ADD_SPACE
from engine.tokenizer.vocab import read_vocab
from gguftools.conversion.byte_level import byte_level_keys
from gguftools.conversion.card import Pair
from gguftools.conversion.chat import template_keys
from gguftools.conversion.hf import load_json
from gguftools.conversion.pieces import (
    character_keys,
    normalizer_keys,
    sentencepiece_keys,
    unigram_keys,
    unknown_id,
    wordpiece_keys,
)
from gguftools.conversion.special import ending_keys, special_keys, stripping_keys
from gguftools.conversion.structure import Folder, library_tokenizer, pretokenizers
from gguftools.conversion.tekken import tekken_keys
from gguftools.errors import GGUFError

log = logging.getLogger(__name__)

#: SentencePiece files, the first that is there counts
_SENTENCEPIECE = ("tokenizer.model", "spiece.model")
#: files and tokenizer classes of kinds that GGUF has but this package does not
_OTHERS = {"rwkv_vocab_v20230424.txt": "RWKV", "tokenizer.jsonl": "PLaMo 2"}

#: vocabularies of this size are not to begin texts with BOS, whatever else the files say
_NO_BOS_SIZE = 49152
#: Code Llama: its size, and the ids that fill in the middle
_FILL_SIZE = 32016
_FILL_IDS = {"prefix": 32007, "suffix": 32008, "middle": 32009, "eot": 32010}

#: what is tokenized both ways: spaces, newlines, digits, case, contractions, punctuation, scripts, emoji
_SAMPLE = (
    "Hello WORLD, I'd say: it's 3 33 333 3333 (3.14) ... and 'we'LL see'!"
    "\n \n\n  def f(x):\n\t\treturn x_1**2  # ok"
    "\r\nÄpfel, naïve café; Привет мир! 你好\uff0c世界。こんにちは "
    "안녕하세요 สวัสดี नमस्ते ½ 🙂👍🏽 ``'' --- ///\n\n   end   "
)


def vocab_keys(folder: Path, config: Mapping[str, Any], pre: str | None = None, selftest: bool = False) -> list[Pair]:
    """The `tokenizer.*` keys of a model folder, in the reference's order.

    pre: name of the pre-tokenizer, to use instead of the one found. selftest: also probe texts with their ids, which
    `engine.tokenizer.verify_selftest` compares. Keys that the reference does not have are written only for what would
    be lost without them: tokens that end generation or take white space along, normalizers of SentencePiece BPE.

    Raises GGUFError for kinds that are not supported, unknown structure, and damaged files.
    """
    found = _read(folder, config)
    kind = _kind(found)
    if pre is not None and kind != "bytes":
        raise GGUFError(f"{folder}: --pre names how byte-level BPE cuts words; this vocabulary is of another kind")
    body, known = _body(found, kind, pre)
    tokens = dict(body)["tokenizer.ggml.tokens"]
    prefix = found.settings.get("add_prefix_space")
    first = (
        [(ADD_SPACE, prefix)] if isinstance(prefix, bool) and kind in ("bytes", "characters", *_SENTENCEPIECE) else []
    )
    keys: dict[str, Any] = {}
    for key, value in [*first, *body, *special_keys(found, len(tokens), known), *template_keys(folder, found.settings)]:
        keys.setdefault(key, value)
    if keys["tokenizer.ggml.model"] in ("llama", "gemma4") and ADD_SPACE in keys and not first:
        keys[ADD_SPACE] = keys.pop(ADD_SPACE)  # the reference writes it last
    if kind == "words":
        keys |= dict(normalizer_keys(found))
    if len(tokens) == _FILL_SIZE and keys["tokenizer.ggml.model"] == "llama":
        keys |= {f"tokenizer.ggml.{name}_token_id": i for name, i in _FILL_IDS.items()}
    if len(tokens) == _NO_BOS_SIZE:
        keys["tokenizer.ggml.add_bos_token"] = False
    keys |= dict(stripping_keys(found, len(tokens)))
    try:
        known_ends = read_vocab(keys, KINDS[keys["tokenizer.ggml.model"]].special).eog
        keys |= dict(ending_keys(found, keys, known_ends))
        ours = from_metadata(keys)
    except EngineError as error:
        raise GGUFError(f"{folder}: the vocabulary cannot be used: {error}") from None
    library = library_tokenizer(found.json) if found.tokenizer else None
    if library is not None:
        _check_same(found.json, ours, library, keys, strict=pre is None and kind not in _SENTENCEPIECE)
    if selftest:
        keys |= dict(selftest_keys(ours, library and _library_ids(library)))
    return list(keys.items())


def _read(folder: Path, config: Mapping[str, Any]) -> Folder:
    tokenizer = load_json(folder / "tokenizer.json", required=False)
    return Folder(folder, tokenizer, load_json(folder / "tokenizer_config.json", required=False), config)


_FROM_JSON: dict[str, Callable[[Folder], list[Pair]]] = {
    "characters": character_keys,
    "unigram": unigram_keys,
    "words": wordpiece_keys,
}


def _body(found: Folder, kind: str, pre: str | None) -> tuple[list[Pair], dict[str, int]]:
    """Tokens, types, scores and merges; and special ids that the vocabulary itself knows."""
    if kind == "bytes":
        return byte_level_keys(found, pre), {}
    if kind in _SENTENCEPIECE:
        body, model = sentencepiece_keys(found, found.path / kind)
        return body, model.special
    if kind == "tekken.json":
        return tekken_keys(found.path / kind), {}
    return _FROM_JSON[kind](found), unknown_id(found)


def _kind(found: Folder) -> str:
    """`bytes`, a key of _FROM_JSON, or the name of the file that holds the vocabulary.

    Raises GGUFError for kinds that have no place here.
    """
    for name, what in _OTHERS.items():
        if (found.path / name).is_file():
            raise GGUFError(f"{found.path}: has a vocabulary of {what} ({name}), which is not supported")
    file = next((name for name in _SENTENCEPIECE if (found.path / name).is_file()), None)
    if not found.tokenizer:
        file = file or ("tekken.json" if (found.path / "tekken.json").is_file() else None)
        if file is None:
            raise GGUFError(
                f"{found.path}: has no tokenizer.json or tokenizer.model; save them there with transformers"
            )
        return file
    model = found.tokenizer.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), list if _is(model, "Unigram") else dict):
        raise GGUFError(f"{found.json}: holds no vocabulary; the file is damaged")
    if _is(model, "WordPiece"):
        return "words"
    if _is(model, "Unigram"):
        return file or "unigram"
    if not _is(model, "BPE"):
        raise GGUFError(f"{found.json}: the vocabulary is {model.get('type')}, which is not supported")
    for setting in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(setting):
            raise GGUFError(f"{found.json}: '{setting}' is {model[setting]!r}; GGUF has no place for it")
    by_bytes = any(step.get("type") == "ByteLevel" for step in pretokenizers(found.tokenizer))
    return "bytes" if by_bytes and not model.get("byte_fallback") else file or "characters"


def _is(model: Mapping[str, Any], kind: str) -> bool:
    return model.get("type") == kind


# --- check ------------------------------------------------------------------------------------------------------------


def _library_ids(library: Any) -> Callable[[str], list[int]]:
    return lambda text: library.encode(text, add_special_tokens=False).ids


def _check_same(path: Path, ours: Tokenizer, library: Any, keys: Mapping[str, Any], strict: bool) -> None:
    """A text must become the same tokens before and after; where the user chose, a difference only warns."""
    by_bytes = keys["tokenizer.ggml.model"] == "gpt2"
    sample = _SAMPLE if by_bytes else _SAMPLE.rstrip()  # the library keeps spaces there that SentencePiece drops
    if ours.tokenize(sample, add_special=False) == _library_ids(library)(sample):
        return
    what = f"the pre-tokenizer '{keys['tokenizer.ggml.pre']}'" if by_bytes else f"{ours.kind} as GGUF has it"
    message = f"{path}: tokenizes differently from {what}"
    if strict:
        raise GGUFError(message + ("; choose another with --pre" if by_bytes else "; it cannot be converted"))
    log.warning("%s", message)
