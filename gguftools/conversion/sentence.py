"""What a folder of sentence-transformers says beside the model's config: how token states become one embedding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.pooling import BY_NUMBER, POOLINGS
from gguftools.conversion.hf import load_json
from gguftools.errors import GGUFError
from gguftools.files import read_whole

_NUMBERS = {name: number for number, name in BY_NUMBER.items()}

#: flags of older files -> our names; the first that is set counts
_FLAGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
#: names that newer files have instead
_MODES = {"mean": "mean", "cls": "cls", "lasttoken": "last"}


def sentence_settings(folder: Path) -> dict[str, Any]:
    """`pooling_type` as GGUF counts it, from the module that modules.json names; {} without one.

    Raises GGUFError for damaged files and for kinds of pooling that GGUF has no number for.
    """
    path = folder / "modules.json"
    if not path.is_file():
        return {}
    module = next((m for m in _modules(path) if str(m.get("type", "")).endswith("Pooling")), None)
    if module is None:
        return {}
    if not isinstance(module.get("path"), str):
        raise GGUFError(f"{path}: the pooling module names no folder ('path'); the file is damaged")
    file = folder / module["path"] / "config.json"
    settings = load_json(file)
    found = next((name for flag, name in _FLAGS.items() if settings.get(flag) is True), None)
    found = found or _MODES.get(str(settings.get("pooling_mode")))
    if found is None:
        other = [key for key, value in settings.items() if key.startswith("pooling_mode") and value is not False]
        what = f"'{other[0]}' is {settings[other[0]]!r}" if other else "no kind of pooling is set"
        raise GGUFError(f"{file}: {what}; GGUF has {', '.join(POOLINGS)}")
    return {"pooling_type": _NUMBERS[found]}


def _modules(path: Path) -> list[dict[str, Any]]:
    try:
        modules = json.loads(read_whole(path, "a JSON file"))
    except ValueError:
        modules = None
    if not isinstance(modules, list) or not all(isinstance(m, dict) for m in modules):
        raise GGUFError(f"{path}: is no list of modules; the file is damaged")
    return modules
