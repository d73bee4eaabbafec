"""A tokenizer.json as `tokenizer.*` keys: tokens, types, merges, special tokens, chat template, pre-tokenizer name.

The name is found from the structure of tokenizer.json, by the table that the engine tokenizes with; then a text is
tokenized both ways, so that a wrong name cannot slip through.
"""

from __future__ import annotations

import logging
import re
import string
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from engine.tokenizer import from_metadata
from engine.tokenizer.pretokenizers import DIGIT, DIGITS, GPT2, PUNCTUATION, find, get_pretokenizer, nearest
from engine.tokenizer.vocab import SPECIAL_KEYS, TokenType
from gguftools.conversion.card import Pair
from gguftools.conversion.hf import load_json
from gguftools.errors import GGUFError

log = logging.getLogger(__name__)

MAX_VOCAB = 1 << 24  # tokens

#: kinds of special tokens, in the order in which they are written
_SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_KEYS = {**SPECIAL_KEYS, "cls": "tokenizer.ggml.cls_token_id"}
#: vocabularies of this size are not to begin texts with BOS, whatever else the files say
_NO_BOS_SIZE = 49152

#: added tokens that are control tokens although the file does not call them special
_LOOKS_SPECIAL = re.compile(r"<pad>|<mask>|<2mass>|\[@BOS@\]|<\|.*\|>|<\uff5c.*\uff5c>|<unused.*>", re.DOTALL)

#: what is tokenized both ways: spaces, newlines, digits, case, contractions, punctuation, scripts, emoji
_SAMPLE = (
    "Hello WORLD, I'd say: it's 3 33 333 3333 (3.14) ... and 'we'LL see'!"
    "\n \n\n  def f(x):\n\t\treturn x_1**2  # ok"
    "\r\nÄpfel, naïve café; Привет мир! 你好\uff0c世界。こんにちは "
    "안녕하세요 สวัสดี नमस्ते ½ 🙂👍🏽 ``'' --- ///\n\n   end   "
)


def vocab_keys(folder: Path, config: Mapping[str, Any], pre: str | None = None) -> list[Pair]:
    """The `tokenizer.*` keys of a model folder, in the reference's order.

    pre: name of the pre-tokenizer, to use instead of the one found.
    Raises GGUFError for vocabularies of other kinds, unknown structure, and damaged files.
    """
    path = folder / "tokenizer.json"
    tokenizer = _load(folder)
    settings = load_json(folder / "tokenizer_config.json", required=False)
    _check_kind(path, tokenizer)
    name = _name_of(path, tokenizer, pre)
    tokens, types = _tokens(path, tokenizer, config)
    pairs: list[Pair] = []
    if isinstance(prefix := settings.get("add_prefix_space"), bool):
        pairs.append(("tokenizer.ggml.add_space_prefix", prefix))
    pairs += [
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", name),
        ("tokenizer.ggml.tokens", tokens),
        ("tokenizer.ggml.token_type", types),
        ("tokenizer.ggml.merges", _merges(folder, tokenizer)),
    ]
    pairs += _special_keys(tokenizer, settings, config, len(tokens))
    pairs += _template_keys(folder, settings)
    if len(tokens) == _NO_BOS_SIZE:
        pairs = list((dict(pairs) | {"tokenizer.ggml.add_bos_token": False}).items())
    _check_same(path, dict(pairs), forced=pre is not None)
    return pairs


# --- kind and pre-tokenizer -------------------------------------------------------------------------------------------


def _load(folder: Path) -> dict[str, Any]:
    if (folder / "tokenizer.json").is_file():
        return load_json(folder / "tokenizer.json")
    if (folder / "tokenizer.model").is_file():
        raise GGUFError(
            f"{folder}: has a SentencePiece vocabulary only (tokenizer.model), which this version does not convert; "
            "it needs a byte-level tokenizer.json"
        )
    raise GGUFError(f"{folder}: has no tokenizer.json; save the tokenizer there with transformers")


def _check_kind(path: Path, tokenizer: Mapping[str, Any]) -> None:
    """Raises GGUFError unless this is a byte-level BPE vocabulary."""
    model = tokenizer.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), (dict, list)):
        raise GGUFError(f"{path}: holds no vocabulary; the file is damaged")
    kind = model.get("type")
    steps = [step.get("type") for step in _steps(tokenizer.get("pre_tokenizer"), "pretokenizers")]
    if kind != "BPE" or model.get("byte_fallback") or "ByteLevel" not in steps or not isinstance(model["vocab"], dict):
        what = "BPE over characters (SentencePiece)" if kind == "BPE" else kind
        raise GGUFError(f"{path}: the vocabulary is {what}; this version converts byte-level BPE only")
    for setting in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(setting):
            raise GGUFError(f"{path}: '{setting}' is {model[setting]!r}; GGUF has no place for it")


def _steps(found: Any, key: str) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, nested sequences flattened."""
    if not isinstance(found, dict):
        return
    if found.get("type") != "Sequence":
        yield found
    elif isinstance(found.get(key), list):
        for step in found[key]:
            yield from _steps(step, key)


def _name_of(path: Path, tokenizer: Mapping[str, Any], pre: str | None) -> str:
    """`tokenizer.ggml.pre`: the name asked for, or that of the structure."""
    others = [s.get("type") for s in _steps(tokenizer.get("normalizer"), "normalizers") if s.get("type") != "NFC"]
    if others:
        raise GGUFError(f"{path}: changes texts before it cuts them ({', '.join(map(str, others))}); GGUF's BPE cannot")
    if pre is not None:
        try:
            get_pretokenizer(pre)
        except EngineError as error:
            raise GGUFError(str(error)) from None
        return pre
    patterns = _patterns(tokenizer)
    name = find(patterns, bool(tokenizer["model"].get("ignore_merges")))
    if name is None:
        raise GGUFError(
            f"{path}: cuts words in a way that has no name here; the nearest are {', '.join(nearest(patterns))}: "
            "choose one with --pre if you are sure"
        )
    return name


def _patterns(tokenizer: Mapping[str, Any]) -> tuple[str, ...]:
    """The pre-tokenizer's steps as the splitting patterns of our table."""
    patterns = (_pattern(step) for step in _steps(tokenizer.get("pre_tokenizer"), "pretokenizers"))
    return tuple(pattern for pattern in patterns if pattern)


def _pattern(step: Mapping[str, Any]) -> str:
    """One step's pattern; "" for a step that cuts nothing; for one that we do not know, a text that is no pattern."""
    match step:
        case {"type": "ByteLevel", "add_prefix_space": True}:
            return "<ByteLevel that adds a space>"
        case {"type": "ByteLevel", "use_regex": False}:
            return ""
        case {"type": "ByteLevel"}:
            return GPT2
        case {"type": "Digits"}:
            return DIGIT if step.get("individual_digits") else DIGITS
        case {"type": "Punctuation", "behavior": "Contiguous"}:
            return PUNCTUATION
        case {"type": "Split", "pattern": {"Regex": str(pattern)}} if _keeps_all(step):
            return pattern
        case {"type": "Split", "pattern": {"String": str(text)}} if _keeps_all(step):
            return re.escape(text)
    return f"<{step.get('type')}>"


def _keeps_all(step: Mapping[str, Any]) -> bool:
    """Whether a split keeps matches and what lies between as pieces; "removed, inverted" does for patterns that cover
    every text, as those of this form do."""
    behavior, inverted = step.get("behavior"), bool(step.get("invert"))
    return (behavior, inverted) in (("Isolated", False), ("Removed", True))


# --- tokens and merges ------------------------------------------------------------------------------------------------


def _tokens(path: Path, tokenizer: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """Text and type of every id below the config's `vocab_size`; unused ids are `[PAD7]`."""
    added = _added(path, tokenizer)
    by_id: dict[int, str] = {}
    for text, i in tokenizer["model"]["vocab"].items():
        if type(i) is not int or not 0 <= i < MAX_VOCAB:
            raise GGUFError(f"{path}: token {text!r} has the id {i!r}; the file is damaged")
        by_id[i] = text
    by_id |= {token["id"]: token["content"] for token in added}
    size = config.get("vocab_size", max(by_id, default=-1) + 1)
    if type(size) is not int or not max(by_id, default=-1) < size <= MAX_VOCAB:
        raise GGUFError(f"{path}: has ids up to {max(by_id, default=-1)}, but config.json's 'vocab_size' is {size!r}")
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(size)]
    types = [int(TokenType.NORMAL if i in by_id else TokenType.UNUSED) for i in range(size)]
    rendered = _rendered(path, added)
    for token in added:
        i, text = token["id"], rendered.get(token["id"], token["content"])
        if token.get("special") or _LOOKS_SPECIAL.fullmatch(text):
            tokens[i], types[i] = text, int(TokenType.CONTROL)
        else:  # user-defined tokens are compared with the text as it is
            tokens[i], types[i] = text.replace("▁", " "), int(TokenType.USER_DEFINED)
    return tokens, types


def _added(path: Path, tokenizer: Mapping[str, Any]) -> list[dict[str, Any]]:
    added = tokenizer.get("added_tokens") or []
    for token in added if isinstance(added, list) else [added]:
        fits = isinstance(token, dict) and type(token.get("id")) is int and isinstance(token.get("content"), str)
        if not fits or not 0 <= token["id"] < MAX_VOCAB:
            raise GGUFError(f"{path}: added token {str(token)[:60]} has no id or text; the file is damaged")
    return added


def _rendered(path: Path, added: list[dict[str, Any]]) -> dict[int, str]:
    """id -> what comes out when an added token's text goes in, for those that are matched before normalization."""
    wanted = [token for token in added if not token.get("normalized")]
    if not wanted:
        return {}
    whole = _library_tokenizer(path)
    ids = whole.encode_batch([token["content"] for token in wanted], add_special_tokens=False)
    texts = [whole.decode(encoding.ids, skip_special_tokens=False) for encoding in ids]
    return {token["id"]: text for token, text in zip(wanted, texts)}


def _library_tokenizer(path: Path) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more special
        raise GGUFError(f"{path}: is refused by the tokenizers library: {str(error).splitlines()[0]}") from None


def _merges(folder: Path, tokenizer: Mapping[str, Any]) -> list[str]:
    """Merges as "first second"; spaces within a part are spelled as the byte-level alphabet does."""
    found = tokenizer["model"].get("merges") or _merges_of_text(folder / "merges.txt")
    if not isinstance(found, list) or not found:
        raise GGUFError(f"{folder}: neither tokenizer.json nor merges.txt holds merges")
    merges = []
    for merge in found:
        if isinstance(merge, list) and len(merge) == 2 and all(isinstance(part, str) for part in merge):
            merge = " ".join(part.replace(" ", "Ġ") for part in merge)
        if not isinstance(merge, str) or " " not in merge:
            raise GGUFError(f"{folder}: tokenizer.json holds the merge {str(merge)[:60]!r}; the file is damaged")
        merges.append(merge)
    return merges


def _merges_of_text(path: Path) -> list[str]:
    if not path.is_file():
        return []
    lines = path.read_text("utf-8", errors="replace").splitlines()
    pairs = (line.split() for line in lines[bool(lines) and lines[0].startswith("#") :])
    return [" ".join(pair) for pair in pairs if len(pair) == 2]


# --- special tokens ---------------------------------------------------------------------------------------------------


def _special_keys(
    tokenizer: Mapping[str, Any], settings: Mapping[str, Any], config: Mapping[str, Any], n_vocab: int
) -> list[Pair]:
    """Ids of special tokens, and whether texts begin and end with them.

    Ids come from the texts in tokenizer_config.json, then from config.json. Whether they are added comes from the
    post-processor of tokenizer.json, then from tokenizer_config.json.
    """
    texts = {kind: text for kind in _SPECIAL if (text := _content(settings.get(f"{kind}_token")))}
    if texts.get("cls"):
        texts.setdefault("bos", texts["cls"])
    if texts.get("sep"):
        texts.setdefault("eos", texts["sep"])
    added = _added_by_template(tokenizer, texts)
    kinds = [*_SPECIAL, *(kind for kind in ("eot", "eom") if kind in texts)]
    for kind in kinds:
        if isinstance(flag := settings.get(f"add_{kind}_token"), bool):
            added.setdefault(kind, flag)
    ids: dict[str, int] = {}
    if settings:
        known: dict[str, int] = {}
        for token in tokenizer.get("added_tokens") or []:
            known.setdefault(token["content"], token["id"])
        ids = {kind: known[texts[kind]] for kind in kinds if texts.get(kind) in known}
    text_config = config.get("text_config")
    for kind in kinds:
        key = f"{kind}_token_id"
        i = config.get(key)
        if i is None and isinstance(text_config, dict):
            i = text_config.get(key)
        if type(i) is int and kind not in ids:
            if 0 <= i < n_vocab:
                ids[kind] = i
            else:
                log.warning("config.json: '%s' is %d, which is not in the vocabulary of %d: left out", key, i, n_vocab)
    pairs: list[Pair] = [(_KEYS[kind], i) for kind, i in ids.items()]
    return pairs + [(f"tokenizer.ggml.add_{k}_token", added[k]) for k in added if k in ("bos", "eos", "sep")]


def _content(token: Any) -> str | None:
    """The text of a special token: written as such, or as an object."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) and found else None


def _added_by_template(tokenizer: Mapping[str, Any], texts: dict[str, str]) -> dict[str, bool]:
    """Which special tokens the post-processor puts around texts; `texts` learns those that only it names."""
    added: dict[str, bool] = {}
    for step in _steps(_as_sequence(tokenizer.get("post_processor")), "processors"):
        match step:
            case {"type": "ByteLevel"}:
                added.setdefault("bos", False)
                added.setdefault("eos", False)
            case {"type": "RobertaProcessing"}:
                added |= {"bos": True, "eos": True, "sep": True}
            case {"type": "TemplateProcessing"}:
                _read_template(step, texts, added)
    return added


def _as_sequence(found: Any) -> Any:
    return {**found, "type": "Sequence"} if isinstance(found, dict) and "processors" in found else found


def _read_template(step: Mapping[str, Any], texts: dict[str, str], added: dict[str, bool]) -> None:
    single, pair = _template(step.get("single")), _template(step.get("pair"))
    first = last = None
    if len(single) > 1:
        first, last = single[0][1], single[-1][1]
        if first is not None:
            if "bos" not in texts:
                texts["bos"] = first
            added["bos"] = first in (texts["bos"], texts.get("cls", first))
        if last is not None:
            if texts.get("eos", last) != last:  # texts end with another token than generation does: keep both
                texts["eot" if "eot" not in texts else "eom"] = texts["eos"]
            texts["eos"] = last
            added["eos"] = True
    if first is not None and pair[:1] == [("SpecialToken", first)]:
        pair = pair[1:]
    if last is not None and pair[-1:] == [("SpecialToken", last)]:
        pair = pair[:-1]
    between = [token for kind, token in pair[1:-1] if kind == "SpecialToken"]
    if between:
        ends = (texts.get("sep", texts.get("eos")), texts.get("eos"))
        added["sep"] = (between[0] in ends and last is None) or (len(between) == 2 and between[1] in ends)


def _template(found: Any) -> list[tuple[str, str | None]]:
    """A template's parts as ("SpecialToken", text) or ("Sequence", None)."""
    parts: list[tuple[str, str | None]] = []
    for part in found if isinstance(found, list) else []:
        match part:
            case {"SpecialToken": {"id": str(text)}}:
                parts.append(("SpecialToken", text))
            case _:
                parts.append(("Sequence", None))
    return parts


# --- chat template ----------------------------------------------------------------------------------------------------


def _template_keys(folder: Path, settings: Mapping[str, Any]) -> list[Pair]:
    """The chat template: of tokenizer_config.json, else chat_template.jinja, else chat_template.json."""
    found = settings.get("chat_template")
    if found is None:
        found = _template_files(folder)
    if isinstance(found, str):
        return [("tokenizer.chat_template", found)]
    named: dict[str, str] = {}
    for entry in found if isinstance(found, list) else []:
        match entry:
            case {"name": str(name), "template": str(template)} if name:
                named["".join(c if c in string.ascii_letters + string.digits else "_" for c in name)] = template
    default = named.pop("default", None)
    pairs: list[Pair] = [(f"tokenizer.chat_template.{name}", template) for name, template in named.items()]
    pairs += [("tokenizer.chat_templates", sorted(named))] if named else []
    return pairs + ([("tokenizer.chat_template", default)] if default is not None else [])


def _template_files(folder: Path) -> Any:
    main = folder / "chat_template.jinja"
    if not main.is_file():
        return load_json(folder / "chat_template.json", required=False).get("chat_template")
    others = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    if not others:
        return _read_text(main)
    return [{"name": "default", "template": _read_text(main)}] + [
        {"name": path.stem, "template": _read_text(path)} for path in others
    ]


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GGUFError(f"{path}: cannot be read as text: {error}") from None


# --- check ------------------------------------------------------------------------------------------------------------


def _check_same(path: Path, keys: Mapping[str, Any], forced: bool) -> None:
    """A text must become the same tokens before and after; with a name that the user chose, a difference only warns."""
    try:
        ours = from_metadata(keys).tokenize(_SAMPLE, add_special=False)
    except EngineError as error:
        raise GGUFError(f"{path}: the vocabulary cannot be used: {error}") from None
    if ours == _library_tokenizer(path).encode(_SAMPLE, add_special_tokens=False).ids:
        return
    message = f"{path}: tokenizes differently from the pre-tokenizer '{keys['tokenizer.ggml.pre']}'"
    if not forced:
        raise GGUFError(f"{message}; choose another with --pre")
    log.warning("%s", message)
