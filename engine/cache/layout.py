"""What a model's layers ask of their memory, found out by building its graph once: no table of families is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.models.build import Build, Windows
from engine.tensor import Tensor

_SAME_VALUES = ("VIEW", "RESHAPE", "PERMUTE", "CONT", "DUP")


@dataclass(frozen=True)
class AttentionLayer:
    """Keys and values that a layer adds for each token. window: positions that its tokens see, 0 for all; rotation: the
    node that rotated the keys, None if nothing did; rotated_at: the first element of a key that the node's result is;
    shifts: whether keys can be rotated further."""

    d_k: int
    d_v: int
    n_head_kv: int
    window: int
    rotation: Tensor | None
    rotated_at: int
    shifts: bool

    @property
    def row_k(self) -> int:
        return self.d_k * self.n_head_kv

    @property
    def row_v(self) -> int:
        return self.d_v * self.n_head_kv


@dataclass
class Layout:
    """attention: by layer; states: (layer, name) -> their shape for one sequence."""

    attention: dict[int, AttentionLayer] = field(default_factory=dict)
    states: dict[tuple[int, str], tuple[int, ...]] = field(default_factory=dict)

    @property
    def windows(self) -> tuple[int, ...]:
        """The different windows, full attention (0) first."""
        return tuple(sorted({a.window for a in self.attention.values()}))


class Recorder(Windows):
    """A memory without a past that notes what it is asked for."""

    def __init__(self) -> None:
        super().__init__(1)
        self.layout = Layout()

    def attend(
        self, b: Build, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, scale: float, **options: Any
    ) -> Tensor:
        if k is not None and v is not None:
            rotation, at, shifts = _rotation(k)
            self.layout.attention[layer] = AttentionLayer(
                k.ne[0], v.ne[0], k.ne[1], int(options.get("window", 0)), rotation, at, shifts
            )
        return super().attend(b, layer, q, k, v, scale, **options)

    def state(self, b: Build, layer: int, name: str, *ne: int) -> Tensor:
        self.layout.states[layer, name] = ne
        return super().state(b, layer, name, *ne)


def record(build: Callable[[Recorder], object]) -> Layout:
    """The layout of the graph that `build` makes over the memory that it is given."""
    recorder = Recorder()
    build(recorder)
    return recorder.layout


def _rotation(k: Tensor) -> tuple[Tensor | None, int, bool]:
    """(node that rotated the keys, where its result begins in a key, whether rotating further is exact): a rotation may
    lie behind views, and be joined to a part that has none (DeepSeek)."""
    node = k
    while node.op in _SAME_VALUES and node.src[0].op is not None and node.ne[0] == node.src[0].ne[0]:
        node = node.src[0]
    if node.op == "ROPE":
        return node, 0, True
    if node.op == "CONCAT" and node.params[0] == 0:
        for part, at in ((node.src[0], 0), (node.src[1], node.src[0].ne[0])):
            found, inner, shifts = _rotation(part)
            if found is not None:
                return found, at + inner, shifts
        return None, 0, True
    if node.op == "REPEAT":
        return _rotation(node.src[0])
    return None, 0, not _rotates(node)


def _rotates(node: Tensor) -> bool:
    """Whether a rotation lies somewhere behind other ops of this layer, before its weights' products."""
    stack = [node]
    while stack:
        tensor = stack.pop()
        if tensor.op == "ROPE":
            return True
        if tensor.op not in ("MUL_MAT", "ADD", None):
            stack += [s for s in tensor.src if s is not None]
    return False
