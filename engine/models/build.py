"""What a family's graph functions are given: context, parameters, weights, inputs, and the memory of earlier tokens.

A family writes `embed(b)`, `layer(b, i, x)`, `finish(b, x)` and `head(b, hidden)` once, over tokens in a row: tensors
are [size, n] or [size, n_head, n] in ggml's order, `n` the tokens of all sequences together. Whether these are windows
that stand alone (perplexity) or the next tokens of sequences in a cache (generation) is the memory's business:
`b.attend` and `b.state` ask it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from engine import ops
from engine.activations import partner, rounded
from engine.context import Context
from engine.models.arch import Arch, Hparams
from engine.ops.op import F32
from engine.tensor import Tensor
from quant import Format

if TYPE_CHECKING:
    from engine.adapters import Adapters

Weights = Mapping[str, Tensor]


class SequenceMemory(Protocol):
    """Where earlier tokens' keys, values and states come from. n_seq: sequences that the tokens are of, each with as
    many tokens, one after another, if the model has states."""

    @property
    def n_seq(self) -> int: ...

    def attend(
        self, b: Build, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, scale: float, **options: Any
    ) -> Tensor:
        """See `Build.attend`."""
        ...

    def state(self, b: Build, layer: int, name: str, *ne: int) -> Tensor:
        """See `Build.state`."""
        ...

    def keep(self, b: Build, layer: int, name: str, new: Tensor) -> None:
        """See `Build.keep`."""
        ...


@dataclass
class Build:
    """One graph under construction.

    tokens: I32 [n]; positions: I32 [n], both None in the graph of `head`; embd: float32 [n_embd, n], where given,
    instead of tokens;
    out_rows: I32 [m], the tokens whose hidden states are wanted, None for all;
    activations: what products see of x, see `engine/activations.py`;
    n_ctx: tokens that a sequence may grow to, 0 for those that it has here;
    adapters, control: what is added to weights and between layers (`engine/adapters.py`);
    all_experts: tokens also go through the experts that were not chosen for them, with no effect on the result;
    extra: for what one layer leaves for others, or `embed` for all.
    """

    ctx: Context
    arch: Arch
    h: Hparams
    w: Weights
    memory: SequenceMemory
    tokens: Tensor = None  # type: ignore[assignment]
    positions: Tensor = None  # type: ignore[assignment]
    out_rows: Tensor | None = None
    embd: Tensor | None = None
    n_ctx: int = 0
    activations: str = "f32"
    adapters: Adapters = ()
    control: Mapping[int, Tensor] = field(default_factory=dict)
    all_experts: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    _seen: dict[tuple[Tensor, Format | None], Tensor] = field(default_factory=dict)

    @property
    def n_seq(self) -> int:
        """Sequences of the tokens."""
        return self.memory.n_seq

    def body(self) -> Tensor:
        """Tokens -> normalised hidden states [n_embd, n], or of the wanted rows only."""
        x = self.arch.embed(self) if self.embd is None else self.embd
        for i in range(self.h.n_layer):
            x = self.arch.layer(self, i, x)
            if i in self.control:
                x = ops.add(self.ctx, x, self.control[i])
        return self.arch.finish(self, x)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        scale: float,
        *,
        causal: bool = True,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of q [d, n_head, n] over the keys and values of its own sequence so far: [dv * n_head, n].

        k: [d, n_head_kv, n]; v: [dv, n_head_kv, n], the new ones, which join those of `layer`; both None: those that
        `layer` has already (layers that share keys and values). window > 0: a token sees that many positions, its own
        included. softcap, sinks: as `ops.attention` takes them.
        """
        return self.memory.attend(
            self, layer, q, k, v, scale, causal=causal, window=window, softcap=softcap, sinks=sinks
        )

    def state(self, layer: int, name: str, *ne: int) -> Tensor:
        """What `layer` keeps under `name` from each sequence's tokens before: float32 [*ne, n_seq], zeros at first."""
        return self.memory.state(self, layer, name, *ne)

    def keep(self, layer: int, name: str, new: Tensor) -> None:
        """Make `new`, of the same shape as `state` gave, what the tokens to come will find."""
        self.memory.keep(self, layer, name, new)

    def seen(self, weight: Tensor, x: Tensor) -> Tensor:
        """What the product of `weight` with x sees of x."""
        if self.activations == "f32":
            return x
        key = x, partner(weight.format)
        if key not in self._seen:
            self._seen[key] = rounded(self.ctx, weight, x)
        return self._seen[key]

    def last(self, layer: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """In the last layer, behind its attention, the wanted rows of tensors [size, n]: nobody reads the others."""
        if self.out_rows is None or layer != self.h.n_layer - 1:
            return tensors
        return tuple(ops.get_rows(self.ctx, t, self.out_rows) for t in tensors)


@dataclass
class Windows:
    """Sequences of equal length that begin with these tokens: nothing comes before, nothing is kept. causal: instead of
    what layers ask for, None leaves it to them."""

    n_seq: int
    causal: bool | None = None
    _shared: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def attend(
        self, b: Build, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, scale: float, **options: Any
    ) -> Tensor:
        if k is None or v is None:
            k, v = self._shared[layer]
        self._shared[layer] = (k, v)
        if self.causal is not None:
            options["causal"] = self.causal
        q, k, v = (ops.permute(b.ctx, self._apart(b.ctx, t), 0, 2, 1, 3) for t in (q, k, v))
        y = ops.attention(b.ctx, q, k, v, scale, **options)
        return ops.reshape(b.ctx, y, y.ne[0] * y.ne[1], y.ne[2] * y.ne[3])

    def _apart(self, ctx: Context, t: Tensor) -> Tensor:
        """[d, n_head, n] -> [d, n_head, n / n_seq, n_seq]."""
        n = t.ne[2] // self.n_seq
        return ops.view(ctx, t, (t.ne[0], t.ne[1], n, self.n_seq), (t.nb[1], t.nb[2], t.nb[2] * n))

    def state(self, b: Build, layer: int, name: str, *ne: int) -> Tensor:
        return ops.fill(b.ctx, b.ctx.tensor(F32, *ne, self.n_seq), 0.0)

    def keep(self, b: Build, layer: int, name: str, new: Tensor) -> None:
        pass
