"""What a model's name says: base name, size, finetune, version (`Mistral-7B-Instruct-v0.2`), and the names of files.

The rules are those of the GGUF naming convention as gguf-py reads names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

#: kind of a part between hyphens -> its form; the first that fits counts. The last two are never the first part.
_KINDS = (
    ("version", re.compile(r"(v|iter)?\d+(\.\d+)*", re.IGNORECASE)),
    ("type", re.compile(r"i?q\d(_\w)*|b?fp?(16|32)", re.IGNORECASE)),
    ("size", re.compile(r"(A|\d+x)?\d+([._]\d+)?[KMBT]\d?|small|mini|medium|large|x?xl", re.IGNORECASE)),
    ("finetune", re.compile(r"chat|instruct|vision|lora", re.IGNORECASE)),
)
_NEVER_FIRST = ("size", "finetune")
_UNITS = "KMBT"


@dataclass(frozen=True)
class ModelName:
    """The parts of a name; None where it does not say."""

    name: str | None = None
    organization: str | None = None
    basename: str | None = None
    finetune: str | None = None
    version: str | None = None
    size_label: str | None = None


def parse_name(model_id: str, n_params: int = 0) -> ModelName:
    """Parts of `organization/Some-Name-7B` or `Some-Name-7B`.

    n_params: weights in the model; a size that is far from it is no size (a context length, perhaps). 0: unknown.

    >>> parse_name("mistralai/Mixtral-8x7B-Instruct-v0.1")  # doctest: +NORMALIZE_WHITESPACE
    ModelName(name='Mixtral-8x7B-Instruct-v0.1', organization='mistralai', basename='Mixtral', finetune='Instruct',
              version='v0.1', size_label='8x7B')
    """
    if " " in model_id:  # a sentence, not a name of the convention
        return ModelName(name=model_id)
    organization, _, name = model_id.rpartition("/") if model_id.count("/") < 2 else model_id.partition("/")
    parts, kinds = _kinds([part for part in name.split("-") if part], n_params)
    n_base, n_plain = _extent_of_base(parts, kinds)

    def joined(kind: str) -> str | None:
        chosen = (p for i, (p, k) in enumerate(zip(parts, kinds)) if k == kind and not (k == "version" and i < n_plain))
        return "-".join(dict.fromkeys(chosen) if kind == "size" else chosen) or None

    kinds = [kind or ("base" if i < n_base else "finetune") for i, kind in enumerate(kinds)]
    size, finetune, version = joined("size"), joined("finetune"), joined("version")
    says_something = size or finetune or version
    basename = "-".join(parts[:n_plain]) or None if says_something else None
    return ModelName(name, None if organization[:1] in ("", ".") else organization, basename, finetune, version, size)


def _kinds(parts: list[str], n_params: int) -> tuple[list[str], list[str | None]]:
    """Parts as they are written in metadata, and the kind of each, None if it is plain."""
    written: list[str] = []
    kinds: list[str | None] = []
    for i, part in enumerate(parts):
        kind = next((k for k, form in _KINDS if form.fullmatch(part) and not (i == 0 and k in _NEVER_FIRST)), None)
        if kind == "type":
            part = part.upper()
        if kind == "size":
            part = _size(part)
            if not _is_near(part, n_params):
                part, kind = part[:-1] + part[-1].lower(), "finetune"
        written.append(part)
        kinds.append(kind)
    if any(kind == "size" and re.search(r"\d", part) for part, kind in zip(written, kinds)):
        kinds = [None if kind == "size" and part.isalpha() else kind for part, kind in zip(written, kinds)]
    return written, kinds


def _size(part: str) -> str:
    """A size in its usual spelling.

    >>> _size("7b1"), _size("1_5b"), _size("mini")
    ('7.1B', '1.5B', 'mini')
    """
    part = part.replace("_", ".")
    if part[-1].isdecimal():
        part = f"{part[:-2]}.{part[-1]}{part[-2]}"
    return part[:-1] + part[-1].upper() if part[-2:-1].isdecimal() else part


def _is_near(size: str, n_params: int) -> bool:
    """Whether a size can be that of a model of so many weights; sizes that are no plain number always can."""
    try:
        n = float(size[:-1]) * 1000 ** (1 + _UNITS.index(size[-1]))
    except ValueError:
        return True
    return not n_params or abs(n - n_params) <= 7 * n_params // 8


def _extent_of_base(parts: list[str], kinds: list[str | None]) -> tuple[int, int]:
    """Numbers of leading parts that are words or versions, and of these without versions that end the name."""
    n = 0
    while n < len(parts) and (kinds[n] == "version" or (kinds[n] is None and parts[n][0].isalpha())):
        n += 1
    n_plain = n
    while n == len(parts) and n_plain and kinds[n_plain - 1] == "version":
        n_plain -= 1
    return n, n_plain


def title(name: str) -> str:
    """A name as a title: hyphens become spaces, lower-case words get a capital, versions and acronyms stay.

    >>> title("tiny-llama-v1.5-GQA")
    'Tiny Llama v1.5 GQA'
    """
    words = name.strip().replace("-", " ").split()
    return " ".join(w.title() if w.islower() and not re.match(r"(v\d+(\.\d+)*|\d.*)$", w) else w for w in words)


def expert_count(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    """Number of experts of a model with these tensors, GGUF name -> NumPy shape, and of its weights if it had one.

    >>> expert_count({"blk.0.ffn_up_exps.weight": (4, 96, 64), "output.weight": (2048, 64)})
    (4, 137216)
    """
    counts, n_weights = [], 0
    for name, shape in shapes.items():
        n = shape[0] if "_exps." in name and len(shape) > 2 else 1
        counts += [n] if n > 1 else []
        n_weights += math.prod(shape) // max(1, n)
    return (sum(counts) // len(counts) if counts else 0), n_weights


def size_label(n_params: int, n_experts: int = 0) -> str:
    """A number of weights for people, at least two digits; with experts, that of a model with one of them.

    >>> size_label(4_066_560), size_label(224_448), size_label(8_030_261_312), size_label(355_968, 4)
    ('4.1M', '224K', '8.0B', '4x356K')
    """
    if n_experts:
        return f"{n_experts}x{size_label(n_params)}"
    unit, scaled = "K", n_params * 1e-3
    for name, factor in (("T", 1e-12), ("B", 1e-9), ("M", 1e-6)):
        if n_params * factor > 1:
            unit, scaled = name, n_params * factor
            break
    digits = max(2 - len(str(round(scaled)).lstrip("0")), 0)
    return f"{scaled:.{digits}f}{unit}"


def file_name(parts: ModelName, encoding: str, kind: str = "") -> str:
    """`{basename or name}[-size][-finetune][-version]-{encoding}[-kind].gguf`; a `vocab` has no size and encoding."""
    first = (parts.basename or parts.name or "ggml-model").strip().replace("/", "-")
    alone = kind == "vocab"
    size = None if alone else parts.size_label
    rest = [part.strip() for part in (size, parts.finetune, parts.version) if part]
    last = [kind] if alone else [encoding, kind] if kind else [encoding]
    return "-".join([first, *rest, *last]).replace(" ", "-").replace("/", "-") + ".gguf"
