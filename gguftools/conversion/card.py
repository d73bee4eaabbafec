"""What a model's folder says about the model: the front matter of README.md, generation_config.json, its names.

Gives the `general.*` keys in the order in which the reference's converter writes them. Front matter beats what names
suggest. A card is written by hand: what is no text or list of texts is left out, and never stops a conversion.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gguftools.conversion.names import ModelName, expert_count, parse_name, size_label, title
from gguftools.errors import GGUFError

log = logging.getLogger(__name__)

MAX_CARD = 1 << 20  # bytes of README.md that are looked at

Pair = tuple[str, Any]  # key, value

#: key -> names in generation_config.json
SAMPLING = {
    "general.sampling.sequence": ("sequence",),
    "general.sampling.top_k": ("top_k",),
    "general.sampling.top_p": ("top_p",),
    "general.sampling.min_p": ("min_p",),
    "general.sampling.xtc_probability": ("xtc_probability",),
    "general.sampling.xtc_threshold": ("xtc_threshold",),
    "general.sampling.temp": ("temperature",),
    "general.sampling.penalty_last_n": ("penalty_last_n",),
    "general.sampling.penalty_repeat": ("penalty_repeat", "repetition_penalty"),
    "general.sampling.mirostat": ("mirostat",),
    "general.sampling.mirostat_tau": ("mirostat_tau",),
    "general.sampling.mirostat_eta": ("mirostat_eta",),
}
_WHOLE = ("top_k", "penalty_last_n", "mirostat")

#: part of the name -> names in the front matter; the first that is there counts
_NAMES = {
    "name": ("name", "model_name"),
    "organization": ("organization", "model_organization"),
    "basename": ("basename", "model_basename", "model_type"),
    "finetune": ("finetune", "model_finetune"),
    "version": ("version", "model_version"),
    "size_label": ("size_label", "model_size_label"),
}
#: the same for keys
_TEXTS = {
    "general.author": ("author", "model_author", "model_creator"),
    "general.description": ("description", "model_description"),
    "general.license": ("license",),
    "general.license.name": ("license_name",),
    "general.license.link": ("license_link",),
    "general.source.url": ("url", "model_url"),
    "general.source.doi": ("doi", "model_doi"),
    "general.source.uuid": ("uuid", "model_uuid"),
    "general.source.repo_url": ("repo_url", "model_repo_url"),
}
#: the order in which both are written
ORDER = (
    *("general.name", "general.author", "general.version", "general.organization", "general.finetune"),
    *("general.basename", "general.description", "general.size_label"),
    *("general.license", "general.license.name", "general.license.link"),
    *("general.source.url", "general.source.doi", "general.source.uuid", "general.source.repo_url"),
)
ORIGINS = (  # key, names in the front matter
    ("general.base_model", ("base_model", "base_models", "base_model_sources")),
    ("general.dataset", ("datasets", "dataset", "dataset_sources")),
)
_ORIGIN_FIELDS = ("name", "author", "version", "organization", "description", "url", "doi", "uuid", "repo_url")
_LISTS = {"general.tags": ("tags", "pipeline_tag"), "general.languages": ("languages", "language")}


def sampling(generation_config: Mapping[str, Any]) -> list[Pair]:
    """Keys of the recommended sampling. Raises GGUFError for a setting that is no number."""
    pairs = []
    for key, names in SAMPLING.items():
        name = next((n for n in names if generation_config.get(n) is not None), None)
        if name is None:
            continue
        value = generation_config[name]
        fits = isinstance(value, str) if name == "sequence" else is_number(value)
        if not fits or (name in _WHOLE and value != int(value)):
            raise GGUFError(f"generation_config.json: '{name}' is {value!r}; correct or remove it")
        pairs.append((key, int(value) if name in _WHOLE else value))
    return pairs


def is_number(value: Any) -> bool:
    """Whether a value out of JSON is a finite number; true and false are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def describe(
    folder: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[ModelName, list[Pair]]:
    """The model's name, complete as far as anything tells, and its `general.*` keys.

    config: of config.json; shapes: GGUF name -> NumPy shape of all tensors.
    """
    n_params = sum(map(math.prod, shapes.values()))
    n_experts, n_of_one = expert_count(shapes)
    size = size_label(n_of_one, n_experts) if n_experts else size_label(n_params)
    card = read_card(folder / "README.md")
    ids = [config.get("_name_or_path"), folder.resolve().name]
    # a path of somebody's machine is no name
    guesses = [parse_name(i, n_params) for i in ids if isinstance(i, str) and i and i.count("/") <= 1]
    parts: dict[str, str | None] = {}
    for part, names in _NAMES.items():
        guess = next((v for g in guesses if (v := getattr(g, part))), None)
        is_title = part in ("name", "organization")
        parts[part] = _first_text(card, names) or (title(guess) if guess and is_title else guess)
    name = ModelName(**parts)
    name = replace(name, name=name.name or "model", size_label=name.size_label or size)
    texts = {key: _first_text(card, names) for key, names in _TEXTS.items()}
    texts |= {f"general.{part}": getattr(name, part) for part in _NAMES}
    pairs: list[Pair] = [(key, text) for key in ORDER if (text := texts[key])]
    for key, names in ORIGINS:
        pairs += origins(key, next((card[n] for n in names if n in card), None), n_params)
    for key, names in _LISTS.items():
        if texts_found := [text for n in names for text in _texts(card.get(n))]:
            pairs.append((key, texts_found))
    return name, pairs


def write_card(metadata: Mapping[str, Any]) -> str:
    """A model card whose front matter says what the `general.*` keys do."""
    spellings = {f"general.{part}": names for part, names in _NAMES.items()} | _TEXTS
    lines = [
        f"{names[0]}: {json.dumps(metadata[key], ensure_ascii=False)}"
        for key, names in spellings.items()
        if isinstance(metadata.get(key), str)
    ]
    for key, names in _LISTS.items():
        if key in metadata:
            lines.append(f"{names[-1] if key.endswith('languages') else names[0]}: {json.dumps(list(metadata[key]))}")
    count = metadata.get("general.base_model.count", 0)
    addresses = [metadata.get(f"general.base_model.{i}.repo_url", "") for i in range(count)]
    bases = [url.partition("huggingface.co/")[2] for url in addresses if "huggingface.co/" in url]
    lines += [f"base_model: {json.dumps(bases)}"] if bases else []
    return "\n".join(["---", *lines, "---", ""])


def read_card(path: Path) -> dict[str, Any]:
    """The front matter of a model card: YAML between two lines of `---` at its top. {} without a usable one."""
    if not path.is_file():
        return {}
    with path.open("rb") as file:
        lines = file.read(MAX_CARD).decode(errors="replace").splitlines()
    if not lines or lines[0] != "---" or "---" not in lines[1:]:
        return {}
    text = "\n".join(lines[1 : lines.index("---", 1)]) + "\n"
    # "no" is a language here, not false; tabs are common and not YAML
    text = text.replace("- no\n", '- "no"\n').replace("\t", "  ")
    import yaml

    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        log.warning("%s: the front matter is not valid YAML and is left out (%s)", path, type(error).__name__)
        return {}
    return {str(key): value for key, value in found.items()} if isinstance(found, dict) else {}


def _texts(value: Any) -> list[str]:
    """A value of the front matter as texts: one, several, or none."""
    values = value if isinstance(value, list) else [value]
    return [str(v) for v in values if isinstance(v, (str, int, float)) and not isinstance(v, bool)]


def _first_text(card: Mapping[str, Any], names: Iterable[str]) -> str | None:
    return next((",".join(texts) for n in names if (texts := _texts(card.get(n)))), None)


def origins(key: str, value: Any, n_params: int) -> list[Pair]:
    """Keys of the models or data sets that a model was made from: ids, addresses, or descriptions."""
    entries = value if isinstance(value, list) else [] if value is None else [value]
    found = [_origin(entry, n_params) for entry in entries if isinstance(entry, (str, dict))]
    pairs: list[Pair] = [(f"{key}.count", len(found))] if found else []
    for i, entry in enumerate(found):
        pairs += [(f"{key}.{i}.{f}", text) for f in _ORIGIN_FIELDS if (text := _first_text(entry, (f,)))]
    return pairs


def _origin(entry: str | dict, n_params: int) -> Mapping[str, Any]:
    if isinstance(entry, dict):
        return entry
    is_url = entry.startswith(("http://", "https://", "ssh://"))
    if is_url:
        on_hub = re.match(r"https?://huggingface\.co/([^/]+/[^/]+)$", entry)
        parts = parse_name(on_hub[1], n_params) if on_hub else ModelName()
        url: str | None = entry
    else:
        parts = parse_name(entry, n_params)
        url = f"https://huggingface.co/{parts.organization}/{parts.name}" if parts.organization else None
    return {
        "name": title(parts.name) if parts.name else None,
        "organization": title(parts.organization) if parts.organization else None,
        "version": parts.version,
        "repo_url": url,
    }
