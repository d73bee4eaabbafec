"""The special tokens of a model folder as metadata keys: their ids, which go around texts, which end a reply."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from engine.tokenizer.vocab import EOS_IDS, LSTRIP_IDS, RSTRIP_IDS, SPECIAL_KEYS
from gguftools.conversion.card import Pair
from gguftools.conversion.hf import load_json
from gguftools.conversion.structure import Folder, added_tokens, steps

log = logging.getLogger(__name__)

#: kinds of special tokens, in the order in which they are written
_SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def special_keys(folder: Folder, n_vocab: int, known: Mapping[str, int]) -> list[Pair]:
    """Ids of special tokens, and whether texts begin and end with them.

    Ids come from the texts in tokenizer_config.json, then from config.json, then from `known`, the vocabulary's own.
    Whether they are added comes from the post-processor of tokenizer.json, then from tokenizer_config.json.
    """
    tokenizer, settings, config = folder.tokenizer, folder.settings, folder.config
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
        by_text: dict[str, int] = {}
        for token in added_tokens(folder.json, tokenizer):
            by_text.setdefault(token["content"], token["id"])
        ids = {kind: by_text[texts[kind]] for kind in kinds if texts.get(kind) in by_text}
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
    ids |= {kind: i for kind, i in known.items() if kind not in ids}
    pairs: list[Pair] = [(SPECIAL_KEYS[kind], i) for kind, i in ids.items()]
    return pairs + [(f"tokenizer.ggml.add_{k}_token", added[k]) for k in added if k in ("bos", "eos", "sep")]


def ending_keys(folder: Folder, keys: Mapping[str, Any], known: Collection[int]) -> list[Pair]:
    """Keys for ids that end generation according to generation_config.json and config.json, but are not `known` to.

    The first two become end of turn and end of message, where these are free; more than that, a list of all.
    """
    n_vocab = len(keys["tokenizer.ggml.tokens"])
    wanted: list[int] = []
    for name, source in (
        ("generation_config.json", load_json(folder.path / "generation_config.json", required=False)),
        ("config.json", folder.config),
    ):
        found = source.get("eos_token_id")
        for i in found if isinstance(found, list) else [found]:
            if type(i) is int and not 0 <= i < n_vocab:
                log.warning(
                    "%s: 'eos_token_id' has %d, which is not in the vocabulary of %d: left out", name, i, n_vocab
                )
            elif type(i) is int and i not in wanted:
                wanted.append(i)
    free = [SPECIAL_KEYS[kind] for kind in ("eos", "eot", "eom") if SPECIAL_KEYS[kind] not in keys]
    missing = [i for i in wanted if i not in known or SPECIAL_KEYS["eos"] in free]
    pairs: list[Pair] = list(zip(free, missing))
    return pairs + ([(EOS_IDS, np.array(wanted, np.int32))] if len(missing) > len(free) else [])


def stripping_keys(folder: Folder, n_vocab: int) -> list[Pair]:
    """Ids of added tokens that take the white space before or after them along."""
    found = added_tokens(folder.json, folder.tokenizer)
    decoder = folder.settings.get("added_tokens_decoder")
    if not found and isinstance(decoder, dict):
        found = [{**token, "id": int(i)} for i, token in decoder.items() if isinstance(token, dict) and i.isdecimal()]
    pairs: list[Pair] = []
    for key, flag in ((LSTRIP_IDS, "lstrip"), (RSTRIP_IDS, "rstrip")):
        ids = sorted(token["id"] for token in found if token.get(flag) is True and token["id"] < n_vocab)
        pairs += [(key, np.array(ids, np.int32))] if ids else []
    return pairs


def _content(token: Any) -> str | None:
    """The text of a special token: written as such, or as an object."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) and found else None


def _added_by_template(tokenizer: Mapping[str, Any], texts: dict[str, str]) -> dict[str, bool]:
    """Which special tokens the post-processor puts around texts; `texts` learns those that only it names."""
    added: dict[str, bool] = {}
    for step in steps(tokenizer.get("post_processor"), "processors"):
        match step:
            case {"type": "ByteLevel"}:
                added.setdefault("bos", False)
                added.setdefault("eos", False)
            case {"type": "RobertaProcessing"}:
                added |= {"bos": True, "eos": True, "sep": True}
            case {"type": "TemplateProcessing"}:
                _read_template(step, texts, added)
    return added


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
