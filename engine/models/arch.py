"""What a model family is: rows of facts that conversion, loading, presets and inspection read, and its graph.

A family is one file in this folder: metadata rows, tensor rows, graph functions, and one `Arch` value, listed in
`engine/models/__init__.py`. Relatives compose (`dataclasses.replace`), they do not inherit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from engine.errors import EngineError
from engine.models.steps import Step

Hparams = SimpleNamespace  # one attribute per Hparam row: n_layer, n_embd, ...
REQUIRED = object()  # default of a row that must be there


@dataclass(frozen=True)
class Hparam:
    """One hyper-parameter.

    field: our name; key: GGUF key, `{arch}` stands for the family's name; config: keys of a Hugging Face config.json,
    first one found counts, dots lead into nested objects; or a function of the config and of the parameters read so
    far, which returns None for "not there"; default: REQUIRED, a value, or a function of the parameters read so far
    (rows are read in order); kind: GGUF value type (`uint32`, `float32`, `bool`, `string`). per_layer: a single value,
    or a list with one for each layer (`at` reads both); is_list: always a list, of any length.
    source: a checkpoint's tensors of one number, one a layer, that are the row's values, if not the config has these.
    inverse: for a `config` that is a function, the way back: value and parameters -> keys of a config.json.
    Conversion writes a row only where the config has it, unless `always`: then also its default; and not at all unless
    `written`.
    """

    field: str
    key: str
    config: tuple[str, ...] | Callable[[Mapping[str, Any], Hparams], Any] = ()
    default: Any = REQUIRED
    kind: str = "uint32"
    always: bool = False
    written: bool = True
    per_layer: bool = False
    is_list: bool = False
    source: str = ""
    inverse: Callable[[Any, Hparams], Mapping[str, Any]] | None = None

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
        except EngineError as error:
            raise EngineError(f"{where}: {error}") from None
        except (ZeroDivisionError, TypeError, AttributeError):
            raise EngineError(f"{where}: cannot be derived from the other parameters: the file is damaged") from None


def at(value: Any, i: int) -> Any:
    """The value of layer i of a parameter that has one for all layers, or a list of them."""
    return value[i] if isinstance(value, (list, tuple, np.ndarray)) else value


@dataclass(frozen=True)
class TensorRow:
    """One tensor, or one per layer where names hold `{i}`.

    name: GGUF name; source: name in the Hugging Face checkpoint, or several spellings of it of which one is there, or
    "" for a tensor that no checkpoint holds. `{e}` in it is a number of an expert: those found become one tensor with
    an axis more, in front. The same source may serve several rows that each take a part.
    shape: function of the parameters, or of them and the layer -> NumPy shape;
    steps: how conversion changes it, in order; optional: may be absent; layers: which layers have it, a function of the
    parameters and the layer; make: for tensors without a source, function of config and parameters -> float32 array, or
    None if this model has none.
    """

    name: str
    source: str | tuple[str, ...]
    shape: Callable[..., tuple[int, ...]]
    steps: tuple[Step, ...] = ()
    optional: bool = False
    layers: Callable[[Hparams, int], bool] | None = None
    make: Callable[[Mapping[str, Any], Hparams], np.ndarray | None] | None = None

    @property
    def sources(self) -> tuple[str, ...]:
        """The spellings of the source."""
        return (self.source,) if isinstance(self.source, str) else self.source

    def shape_of(self, h: Hparams, i: int = 0) -> tuple[int, ...]:
        """The tensor's NumPy shape in layer i."""
        return self.shape(h, i) if self.shape.__code__.co_argcount == 2 else self.shape(h)

    def places(self, h: Hparams) -> Iterator[int]:
        """The layers that have the tensor; 0 for one that belongs to no layer."""
        for i in range(h.n_layer if "{i}" in self.name else 1):
            if self.layers is None or self.layers(h, i):
                yield i


MAX_LAYERS = 512
MAX_EXPERTS = 4096


def _has_ramp(h: Hparams) -> bool:
    """Whether the rotary scaling is YaRN's, which goes by the original context."""
    return getattr(h, "rope_scaling_type", None) == "yarn" or bool(getattr(h, "yarn_ext", None))


#: (field, condition on one layer's value, what the field must be), for fields that a family has
_SANE: tuple[tuple[str, Callable[[Hparams, Any], bool], str], ...] = (
    ("n_layer", lambda h, n: 1 <= n <= MAX_LAYERS, f"1 to {MAX_LAYERS}"),
    ("n_embd", lambda h, n: n > 0, "1 or more"),
    ("n_embd_head_k", lambda h, n: n > 0, "1 or more"),
    ("n_embd_head_v", lambda h, n: n > 0, "1 or more"),
    ("n_rot", lambda h, n: n % 2 == 0 and n <= h.n_embd_head_k, "even and at most the key's length"),
    ("rope_base", lambda h, base: base > 1, "more than 1"),
    ("rope_base_swa", lambda h, base: base > 1, "more than 1"),
    ("rope_scaling_factor", lambda h, factor: factor > 0, "more than 0"),
    ("n_ctx_orig", lambda h, n: n > 0 or not _has_ramp(h), "1 or more"),
    ("yarn_beta_fast", lambda h, rotations: rotations > 0, "more than 0"),
    ("yarn_beta_slow", lambda h, rotations: rotations > 0, "more than 0"),
    ("n_expert", lambda h, n: 0 <= n <= MAX_EXPERTS, f"0 to {MAX_EXPERTS}"),
    ("n_expert_used", lambda h, n: 0 <= n <= h.n_expert, "at most the number of experts"),
)


@dataclass(frozen=True)
class Arch:
    """A model family.

    name: `general.architecture`; hf_names: class names in config.json's `architectures`; hparams: rows in the order in
    which conversion writes them, extra_hparams: those that it writes after `general.file_type`; tensors: rows;
    embed: graph from token ids to the first layer's input; layer: graph of one layer; finish: graph behind the last
    layer, to normalised hidden states; head: graph from those to logits (see `engine/models/build.py`);
    refused: (config key, accepted values, what it would be) for settings that change the mathematics and that the
    graph does not have; runs: (field, values that the graph can run) for settings that a file may have;
    ignored: beginnings or ends of names in a checkpoint that hold no weights of this model, or parts that are left out
    on purpose; beyond: beginning of the names of layers in a checkpoint, where those behind the last are left out on
    purpose: they predict further tokens; causal: whether tokens see only what is before them; attends: whether it has
    attention; bounded: whether there is nothing for positions beyond the context length, because they have learned
    embeddings; check: further conditions on the parameters, which it raises EngineError for;
    fits: whether a config with one of the class names is of this family, where several have the same class;
    hf_class: of which of `hf_names` a model with these parameters is, for export (the first, if there is no function,
    or it names none of them).
    """

    name: str
    hf_names: tuple[str, ...]
    hparams: tuple[Hparam, ...]
    extra_hparams: tuple[Hparam, ...]
    tensors: tuple[TensorRow, ...]
    embed: Callable
    layer: Callable
    finish: Callable
    head: Callable
    refused: tuple[tuple[str, tuple, str], ...] = ()
    runs: tuple[tuple[str, tuple], ...] = ()
    ignored: tuple[str, ...] = ()
    beyond: str = ""
    causal: bool = True
    attends: bool = True
    bounded: bool = False
    check: Callable[[Hparams], None] | None = None
    fits: Callable[[Mapping[str, Any]], bool] = lambda config: True
    hf_class: Callable[[Hparams], str] | None = None

    @property
    def rows(self) -> tuple[Hparam, ...]:
        """All parameter rows, in the order in which they are read."""
        return (*self.hparams, *self.extra_hparams)

    def key(self, row: Hparam) -> str:
        """The row's GGUF key."""
        return row.key.format(arch=self.name)

    def is_unused(self, name: str, h: Hparams) -> bool:
        """Whether a file's tensor is of a layer that predicts further tokens, and does not run here."""
        number = name.removeprefix("blk.").split(".", 1)[0] if self.beyond and name.startswith("blk.") else ""
        return number.isdecimal() and int(number) >= h.n_layer and getattr(h, "n_layer_nextn", 0) > 0

    def read_hparams(self, metadata: Mapping[str, Any]) -> Hparams:
        """Parameters from GGUF metadata. Raises EngineError, naming the key, for what is missing or of a wrong kind."""
        h = Hparams()
        for row in self.rows:
            key = self.key(row)
            value = row.fill(_plain(metadata.get(key)), h, f"key '{key}'")
            setattr(h, row.field, _checked(value, row, key, getattr(h, "n_layer", None)))
            allowed = dict(self.runs).get(row.field)
            if allowed is not None and value not in allowed:
                known = ", ".join(str(v) for v in allowed if v is not None)
                raise EngineError(f"key '{key}' is {value!r}: this version runs {known}")
        self.check_hparams(h, lambda row: f"key '{self.key(row)}'")
        return h

    def check_hparams(self, h: Hparams, place: Callable[[Hparam], str]) -> None:
        """What graphs take for granted. place: what to call a row where it was read. Raises EngineError."""
        rows = {row.field: row for row in self.rows}
        for field, holds, what in _SANE:
            value = getattr(h, field, None)
            if value is None:
                continue
            for one in value if isinstance(value, (list, tuple)) else (value,):
                if not holds(h, one):
                    raise EngineError(f"{place(rows[field])} is {one}, expected {what}: the file is damaged")
        if self.attends and h.n_head == 0:
            raise EngineError(f"{place(rows['n_head'])} is 0, expected 1 or more: the file is damaged")
        if getattr(h, "n_head", 0) and getattr(h, "n_head_kv", None) is not None:
            for i in range(h.n_layer):
                n, n_kv = at(h.n_head, i), at(h.n_head_kv, i)
                if n_kv < 0 or (n_kv > 0 and n % n_kv):
                    what = f"expected a divisor of the {n} heads: the file is damaged"
                    raise EngineError(f"{place(rows['n_head_kv'])} is {n_kv}, {what}")
        if self.check is not None:
            self.check(h)

    def expected_tensors(self, h: Hparams) -> dict[str, tuple[TensorRow, tuple[int, ...]]]:
        """GGUF name -> (row, NumPy shape) of every tensor that a model of these parameters has or may have."""
        return {row.name.format(i=i): (row, row.shape_of(h, i)) for row in self.tensors for i in row.places(h)}


def _plain(value: Any) -> Any:
    """A file's array as a list, anything else as it is."""
    if value is None or isinstance(value, (str, bytes)) or not hasattr(value, "__len__"):
        return value
    return [v.item() if isinstance(v, np.generic) else v for v in value]


def _checked(value: Any, row: Hparam, key: str, n_layer: int | None) -> Any:
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        if not (row.per_layer or row.is_list):
            raise EngineError(f"key '{key}' is a list, expected a single value: the file is damaged")
        if row.per_layer and not row.is_list and n_layer is not None and len(value) < n_layer:
            raise EngineError(f"key '{key}' has {len(value)} values for {n_layer} layers: the file is damaged")
        return tuple(_checked_one(v, row, key) for v in value)
    if row.is_list and not row.per_layer:
        raise EngineError(f"key '{key}' is {value!r}, expected a list: the file is damaged")
    return _checked_one(value, row, key)


def _checked_one(value: Any, row: Hparam, key: str) -> Any:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if row.kind == "uint32" and not (number and 0 <= value < 2**32 and int(value) == value):
        raise EngineError(f"key '{key}' is {value!r}, expected a whole number: the file is damaged")
    if row.kind == "float32" and not number:
        raise EngineError(f"key '{key}' is {value!r}, expected a number: the file is damaged")
    if row.kind == "float32" and not math.isfinite(value):
        raise EngineError(f"key '{key}' is {value!r}, expected a finite number: the file is damaged")
    period = row.per_layer and number and 0 <= value < 2**32 and int(value) == value  # instead of a list of them
    if row.kind == "bool" and not isinstance(value, bool) and not period:
        raise EngineError(f"key '{key}' is {value!r}, expected true or false: the file is damaged")
    return int(value) if row.kind == "uint32" else value
