"""For ollama: one file, and a Modelfile beside it that names it, its sampling and its stop texts."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.tokenizer import KINDS
from engine.tokenizer.vocab import read_vocab
from gguftools.conversion.options import Options
from gguftools.errors import GGUFError
from gguftools.files import atomic_output

if TYPE_CHECKING:
    from gguftools.conversion.run import Conversion

log = logging.getLogger(__name__)

#: key -> parameter of a Modelfile
_PARAMETERS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repeat_penalty",
    "general.sampling.penalty_last_n": "repeat_last_n",
}
_MAX_STOPS = 16


def check(options: Options) -> None:
    """Raises GGUFError for what ollama cannot read."""
    for asked, what in (
        (options.split is not None, "several files"),
        (options.bigendian, "a big-endian file"),
        (options.vocab_only, "a vocabulary alone"),
    ):
        if asked:
            raise GGUFError(f"ollama does not read {what}; leave out --for, or that option")


def write_modelfile(done: Conversion) -> Path:
    """Write `Modelfile` beside a converted model; returns its path.

    ollama takes the chat template of the file where it knows it; without one, it only completes text, which is warned
    of. Raises GGUFError if another Modelfile is there.
    """
    keys: dict[str, Any] = dict(done.keys)
    if "tokenizer.chat_template" not in keys:
        log.warning("%s: has no chat template: ollama completes text with it, and does not chat", done.output)
    lines = [f"FROM ./{done.output.name}"]
    for key, name in _PARAMETERS.items():
        if key in keys:
            lines.append(f"PARAMETER {name} {keys[key]}")
    vocab = read_vocab(keys, KINDS[keys["tokenizer.ggml.model"]].special)
    stops = [vocab.tokens[i] for i in sorted(vocab.eog)][:_MAX_STOPS]
    lines += [f"PARAMETER stop {json.dumps(text, ensure_ascii=False)}" for text in stops]
    path = done.output.with_name("Modelfile")
    with atomic_output(path, [done.output], overwrite=False) as file:
        file.write(("\n".join(lines) + "\n").encode())
    return path
