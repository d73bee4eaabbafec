"""What can be added to a model while graphs are built: low-rank changes of its weights, and directions of its states.

LoRA (Hu et al. 2021, arXiv 2106.09685): W x becomes W x + s B (A x), so the weights stay as they are, in any format. A
control vector is added to the hidden states between layers (Zou et al. 2023, arXiv 2310.01405).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from engine.context import Context
from engine.errors import EngineError
from engine.ops.op import F32
from engine.tensor import Tensor
from quant import Format

if TYPE_CHECKING:
    from engine.session import Session

_A, _B, _EMBEDDING, _NORM = ".lora_a", ".lora_b", "token_embd.weight", "_norm.weight"


class _View(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def format(self) -> Format: ...
    @property
    def data(self) -> np.ndarray: ...


@dataclass(frozen=True, eq=False)
class Pair:
    """Change of one weight [k, n]: a [k, rank], b [rank, n]; of the embeddings [n_embd, n_vocab]: a [rank, n_vocab], b
    [rank, n_embd]. Experts have an axis more. scale: alpha / rank, or 1."""

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True, eq=False)
class Lora:
    """An adapter of one model: weight -> its change."""

    pairs: Mapping[str, Pair]

    @classmethod
    def of(cls, session: Session, metadata: Mapping[str, Any], tensors: Mapping[str, _View]) -> Lora:
        """From an adapter file's keys and tensors, `NAME.lora_a` and `NAME.lora_b`. Changes of norms are left out, as
        the reference does. Raises EngineError for another kind of file, or one for another model."""
        session.check_runnable()
        for key, expected in (("general.type", "adapter"), ("adapter.type", "lora")):
            if metadata.get(key) != expected:
                raise EngineError(f"key '{key}' is {metadata.get(key)!r}, expected '{expected}': no LoRA adapter")
        if metadata.get("general.architecture") != session.arch.name:
            raise EngineError(
                f"the adapter is for {metadata.get('general.architecture')!r}, the model is of {session.arch.name!r}"
            )
        alpha = metadata.get("adapter.lora.alpha", 0.0)
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not np.isfinite(alpha):
            raise EngineError(f"key 'adapter.lora.alpha' is {alpha!r}, expected a number")
        ctx = Context(max(1 << 20, 1024 * len(tensors)))
        names = {name.removesuffix(_A).removesuffix(_B) for name in tensors if name.endswith((_A, _B))}
        for name in tensors:
            if not name.endswith((_A, _B, _NORM)):
                raise EngineError(f"tensor '{name}' of the adapter ends with neither {_A} nor {_B}")
        pairs = {}
        for name in sorted(names):
            a, b = tensors.get(name + _A), tensors.get(name + _B)
            if a is None or b is None:
                raise EngineError(f"tensor '{name}{_B if b is None else _A}' is missing: the adapter is incomplete")
            weight = session.weights.get(name)
            if weight is None:
                raise EngineError(f"the adapter changes '{name}', which the model has not: it is for another model")
            rank = _rank(name, weight, a, b)
            pairs[name] = Pair(_bound(ctx, a), _bound(ctx, b), alpha / rank if alpha else 1.0)
        return cls(pairs)


def _rank(name: str, weight: Tensor, a: _View, b: _View) -> int:
    """The rank of a pair that fits the weight."""
    axes = 2 + (weight.ne[2] > 1)
    if len(a.shape) != axes or len(b.shape) != axes:
        raise EngineError(f"the adapter's matrices for '{name}' have another number of axes than the weight")
    k, n = weight.ne[:2]
    if name == _EMBEDDING:
        fits = a.shape[0] == n and b.shape[0] == k and a.shape[1] == b.shape[1]
        rank = a.shape[1]
    else:
        fits = a.shape[-1] == k and b.shape[-2] == n and a.shape[-2] == b.shape[-1]
        rank = b.shape[-1]
    if not fits or (axes == 3 and not a.shape[0] == b.shape[0] == weight.ne[2]):
        raise EngineError(
            f"the adapter's matrices for '{name}' are {list(a.shape)} and {list(b.shape)}, the weight is "
            f"{list(weight.shape[-axes:])}: it is for another model"
        )
    return max(1, rank)


def _bound(ctx: Context, view: _View) -> Tensor:
    if view.format.module is None:
        raise EngineError(f"the adapter has matrices of type {view.format}, which this version cannot compute with")
    tensor = ctx.tensor(view.format, *view.shape[::-1])
    tensor.bind(np.asarray(view.data).reshape(-1))
    return tensor


@dataclass(frozen=True, eq=False)
class ControlVector:
    """layer -> float32 [n_embd], added behind that layer (from 0)."""

    directions: Mapping[int, Tensor]

    @classmethod
    def of(
        cls,
        session: Session,
        files: Iterable[tuple[Mapping[str, _View], float]],
        first: int | None = None,
        last: int | None = None,
    ) -> ControlVector:
        """The sum of files' tensors `direction.LAYER`, each with its strength, for layers first..last (all by default).
        Layer 0 has none. Raises EngineError for tensors that are no directions of this model."""
        session.check_runnable()
        n_layer, n_embd = session.hparams.n_layer, session.hparams.n_embd
        first, last = max(1, first or 1), n_layer - 1 if last is None or last <= 0 else last
        sums: dict[int, np.ndarray] = {}
        for tensors, strength in files:
            if not tensors:
                raise EngineError("the control vector has no directions")
            for name, view in tensors.items():
                layer = _layer_of(name)
                if view.format is not F32 or tuple(view.shape) != (n_embd,):
                    raise EngineError(
                        f"tensor '{name}' of the control vector is {view.format} {list(view.shape)}, expected F32 "
                        f"[{n_embd}]: it is for another model"
                    )
                if first <= layer <= min(last, n_layer - 1):
                    values = np.asarray(view.data).view(np.float32)
                    sums[layer] = sums.get(layer, np.zeros(n_embd, np.float32)) + values * np.float32(strength)
        ctx = Context()
        directions = {}
        for layer, values in sums.items():
            directions[layer] = ctx.tensor(F32, n_embd, name=f"direction.{layer}")
            directions[layer].bind(np.ascontiguousarray(values, np.float32).view(np.uint8))
        return cls(directions)


def _layer_of(name: str) -> int:
    kind, _, number = name.partition(".")
    if kind != "direction" or not number.isascii() or not number.isdigit() or int(number) == 0:
        raise EngineError(f"tensor '{name}' of the control vector is no direction of a layer from 1 on")
    return int(number)


#: Adapters in use, each with its strength.
Adapters = Sequence[tuple[Lora, float]]
