"""Checkpoints that hold more than a language model, or hold it under other names: the text part as a plain checkpoint
of its family would have it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.models import ARCHS
from gguftools.errors import GGUFError
from gguftools.safetensors import SafetensorView

log = logging.getLogger(__name__)

#: what stands in names around the text part of a model of several parts
_AROUND = ("language_model.", "text_model.")
#: beginnings of names, behind `model.`, of parts that see or hear
_OTHER_PARTS = (
    *("vision_tower.", "vision_model.", "vision_encoder.", "vision_embed", "visual.", "embed_vision.", "image_newline"),
    *("multi_modal_projector.", "multimodal_projector.", "mm_projector.", "pre_mm_projector_norm.", "patch_merger."),
    *("vision_language_adapter.", "vision_adapter.", "connector.", "audio_tower.", "audio_model.", "embed_audio."),
)
#: beginnings of names in checkpoints of the decoder alone, whose names lack `model.`
_BARE = ("embed_tokens.", "layers.", "norm.")


def text_class(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the class of its text part, if it is a model of several parts that has no family of its own.

    >>> parts = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": "llama"}}
    >>> text_class(parts)["architectures"]
    ['LlamaForCausalLM']
    """
    known = [name for arch in ARCHS.values() for name in arch.hf_names]
    names = config.get("architectures")
    text = config.get("text_config")
    if not isinstance(text, Mapping) or (isinstance(names, list) and any(name in known for name in names)):
        return dict(config)
    inner = text.get("architectures")
    found = [name for name in inner if name in known] if isinstance(inner, list) else []
    if not found:
        kind = str(text.get("model_type", "")).removesuffix("_text").replace("_", "").lower()
        found = [name for name in known if name.lower().removesuffix("forcausallm") == kind][:1]
    return {**config, "architectures": found or names}


def text_views(folder: Path, views: Iterable[SafetensorView]) -> list[SafetensorView]:
    """The tensors of the text part, in order, under the names of a plain checkpoint.

    Tensors of parts that see or hear are left out, with a warning. Raises GGUFError if two come to have one name.
    """
    kept: dict[str, SafetensorView] = {}
    others: list[str] = []
    views = list(views)
    bare = any(v.name == "embed_tokens.weight" for v in views) and not any(v.name.startswith("model.") for v in views)
    for view in views:
        if view.name.removeprefix("model.").startswith(_OTHER_PARTS):
            others.append(view.name)
            continue
        name = view.name
        for prefix in _AROUND:
            name = _without(name, prefix)
        if bare and name.startswith(_BARE):
            name = "model." + name
        if name in kept:
            raise GGUFError(f"{folder}: '{view.name}' and another tensor are both '{name}'; remove one of them")
        kept[name] = replace(view, name=name)
    if others and not kept:
        raise GGUFError(f"{folder}: holds no language model, only parts that see or hear ('{others[0]}')")
    if others:
        log.warning(
            "%s: the text part is converted; %d tensors of parts that see or hear are left out ('%s' and so on)",
            folder,
            len(others),
            others[0],
        )
    return list(kept.values())


def _without(name: str, part: str) -> str:
    """A name without one of its parts, where that is its first, or follows `model.`.

    >>> _without("language_model.model.layers.0.x", "language_model."), _without("model.text_model.norm", "text_model.")
    ('model.layers.0.x', 'model.norm')
    """
    if name.startswith(part):
        return name.removeprefix(part)
    return "model." + name.removeprefix("model." + part) if name.startswith("model." + part) else name
