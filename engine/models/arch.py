"""What a model family is: rows of facts that conversion, loading, presets and inspection read, and its graph.

A family is one file in this folder: metadata rows, tensor rows, graph builders, and one `Arch` value, listed in
`engine/models/__init__.py`. Relatives compose (`dataclasses.replace`), they do not inherit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from engine.errors import EngineError

Hparams = SimpleNamespace  # one attribute per Hparam row: n_layer, n_embd, ...
REQUIRED = object()  # default of a row that must be there


@dataclass(frozen=True)
class Hparam:
    """One hyper-parameter.

    field: our name; key: GGUF key, `{arch}` stands for the family's name; config: keys of a Hugging Face config.json,
    first one found counts, dots lead into nested objects; default: REQUIRED, a value, or a function of the parameters
    read so far (rows are read in order); kind: GGUF value type (`uint32`, `float32`, `bool`).
    Conversion writes a row only where the config has it, unless `always`: then also its default.
    """

    field: str
    key: str
    config: tuple[str, ...] = ()
    default: Any = REQUIRED
    kind: str = "uint32"
    always: bool = False

    def fill(self, found: Any, so_far: Hparams, where: str) -> Any:
        """The row's value: what was found, or its default. Raises EngineError for a missing required one."""
        if found is not None:
            return found
        if self.default is REQUIRED:
            raise EngineError(f"{where}: required parameter is missing: the file is incomplete or of another kind")
        if not callable(self.default):
            return self.default
        try:
            return self.default(so_far)
        except ZeroDivisionError:
            raise EngineError(f"{where}: cannot be derived from the other parameters: the file is damaged") from None


@dataclass(frozen=True)
class TensorRow:
    """One tensor, or one per layer where names hold `{i}`.

    name: GGUF name; source: name in the Hugging Face checkpoint; shape: function of the parameters -> NumPy shape;
    transform: how conversion changes it (a name in `gguftools/conversion/transforms.py`); optional: may be absent.
    """

    name: str
    source: str
    shape: Callable[[Hparams], tuple[int, ...]]
    transform: str | None = None
    optional: bool = False


MAX_LAYERS = 512

#: (field, condition, what the field must be), in the order of the check: what graphs take for granted
_SANE: tuple[tuple[str, Callable[[Hparams], bool], str], ...] = (
    ("n_layer", lambda h: 1 <= h.n_layer <= MAX_LAYERS, f"1 to {MAX_LAYERS}"),
    ("n_embd", lambda h: h.n_embd > 0, "1 or more"),
    ("n_ff", lambda h: h.n_ff > 0, "1 or more"),
    ("n_head", lambda h: h.n_head > 0, "1 or more"),
    ("n_head_kv", lambda h: h.n_head_kv > 0 and h.n_head % h.n_head_kv == 0, "a divisor of the number of heads"),
    ("n_embd_head_k", lambda h: h.n_embd_head_k > 0, "1 or more"),
    ("n_embd_head_v", lambda h: h.n_embd_head_v > 0, "1 or more"),
    ("n_rot", lambda h: h.n_rot % 2 == 0 and h.n_rot <= h.n_embd_head_k, "even and at most the key's length"),
)


@dataclass(frozen=True)
class Arch:
    """A model family.

    name: `general.architecture`; hf_names: class names in config.json's `architectures`; hparams: rows that every
    family has, extra_hparams: rows of its own (conversion writes them after `general.file_type`); tensors: rows;
    body: graph from token ids to normalised hidden states; head: graph from those to logits;
    refused: (config key, accepted values, what it would be) for settings that change the mathematics and that the
    graph does not have; runs: (field, values that the graph can run) for settings that a file may have.
    """

    name: str
    hf_names: tuple[str, ...]
    hparams: tuple[Hparam, ...]
    extra_hparams: tuple[Hparam, ...]
    tensors: tuple[TensorRow, ...]
    body: Callable
    head: Callable
    refused: tuple[tuple[str, tuple, str], ...] = ()
    runs: tuple[tuple[str, tuple], ...] = ()

    def key(self, row: Hparam) -> str:
        """The row's GGUF key."""
        return row.key.format(arch=self.name)

    def read_hparams(self, metadata: Mapping[str, Any]) -> Hparams:
        """Parameters from GGUF metadata. Raises EngineError, naming the key, for what is missing or of a wrong kind."""
        h = Hparams()
        for row in (*self.hparams, *self.extra_hparams):
            key = self.key(row)
            value = row.fill(metadata.get(key), h, f"key '{key}'")
            setattr(h, row.field, _checked(value, row, key))
            allowed = dict(self.runs).get(row.field)
            if allowed is not None and value not in allowed:
                known = ", ".join(str(v) for v in allowed if v is not None)
                raise EngineError(f"key '{key}' is {value!r}: this version runs {known}")
        for field, holds, what in _SANE:
            if not holds(h):
                row = next(row for row in (*self.hparams, *self.extra_hparams) if row.field == field)
                raise EngineError(f"key '{self.key(row)}' is {getattr(h, field)}, expected {what}: the file is damaged")
        return h

    def expected_tensors(self, h: Hparams) -> dict[str, tuple[TensorRow, tuple[int, ...]]]:
        """GGUF name -> (row, NumPy shape) of every tensor that a model of these parameters has or may have."""
        found = {}
        for row in self.tensors:
            shape = row.shape(h)
            for i in range(h.n_layer if "{i}" in row.name else 1):
                found[row.name.format(i=i)] = (row, shape)
        return found


def _checked(value: Any, row: Hparam, key: str) -> Any:
    if value is None:
        return None
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if row.kind == "uint32" and not (number and 0 <= value < 2**32 and int(value) == value):
        raise EngineError(f"key '{key}' is {value!r}, expected a whole number: the file is damaged")
    if row.kind == "float32" and not number:
        raise EngineError(f"key '{key}' is {value!r}, expected a number: the file is damaged")
    if row.kind == "float32" and not math.isfinite(value):
        raise EngineError(f"key '{key}' is {value!r}, expected a finite number: the file is damaged")
    return int(value) if row.kind == "uint32" else value
