"""The chat templates of a model folder as metadata keys."""

from __future__ import annotations

import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguftools.conversion.card import Pair
from gguftools.conversion.hf import load_json
from gguftools.errors import GGUFError


def template_keys(folder: Path, settings: Mapping[str, Any]) -> list[Pair]:
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
