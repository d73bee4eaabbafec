"""What a model family is: rows of facts that conversion, loading, presets and inspection read, and its graph.

A family is one file in this folder: metadata rows, tensor rows, graph builders, and one `Arch` value, listed in
`engine/models/__init__.py`. Relatives compose (`dataclasses.replace`), they do not inherit.
"""

from __future__ import annotations

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
        return self.default(so_far) if callable(self.default) else self.default


@dataclass(frozen=True)
class TensorRow:
    """One tensor, or one per layer where names hold `{i}`.

    name: GGUF name; source: name in the Hugging Face checkpoint; shape: function of the parameters -> NumPy shape;
    transform: how conversion changes it (a name in `gguftools/convert/transforms.py`); optional: may be absent.
    """

    name: str
    source: str
    shape: Callable[[Hparams], tuple[int, ...]]
    transform: str | None = None
    optional: bool = False


@dataclass(frozen=True)
class Arch:
    """A model family.

    name: `general.architecture`; hf_names: class names in config.json's `architectures`; hparams: rows that every
    family has, extra_hparams: rows of its own (conversion writes them after `general.file_type`); tensors: rows;
    body: graph from token ids to normalised hidden states; head: graph from those to logits;
    refused: (config key, accepted values, what it would be) for settings that change the mathematics and that the
    graph does not have.
    """

    name: str
    hf_names: tuple[str, ...]
    hparams: tuple[Hparam, ...]
    extra_hparams: tuple[Hparam, ...]
    tensors: tuple[TensorRow, ...]
    body: Callable
    head: Callable
    refused: tuple[tuple[str, tuple, str], ...] = ()

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
    if row.kind == "uint32" and not (number and int(value) == value and 0 <= value < 2**32):
        raise EngineError(f"key '{key}' is {value!r}, expected a whole number: the file is damaged")
    if row.kind == "float32" and not number:
        raise EngineError(f"key '{key}' is {value!r}, expected a number: the file is damaged")
    return int(value) if row.kind == "uint32" else value
