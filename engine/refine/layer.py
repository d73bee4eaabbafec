"""One layer of a model on its own: hidden states in, hidden states out, and what its products are multiplied with.

Nothing here knows families: the layer's graph is built, its products with weights are found in it, and those that read
the same input make a group. A graph that ends at a group's input computes nothing behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from engine.backends.base import Status
from engine.context import Context
from engine.errors import EngineError
from engine.graph import Graph
from engine.models.build import Build, Windows
from engine.ops.op import F32, I32
from engine.session import GRAPH_NODES, NODE_BYTES, Session
from engine.tensor import Flag, Tensor
from quant.format import Format

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Group:
    """Products of one layer that read the same input.

    names: their weights; experts: whether rows go to chosen experts; n: length of the input; residual: factor with
    which the result is added to the stream of hidden states directly, 0 where it is not.
    """

    names: tuple[str, ...]
    experts: bool
    n: int
    residual: float


@dataclass(frozen=True)
class Inputs:
    """What a group was given for some windows: x float32 [rows, n], or [tokens, 1 or used, n] with the experts ids int
    [tokens, used]; stream: the hidden states before the group's result is added, [tokens, n_embd], or None."""

    x: np.ndarray
    ids: np.ndarray | None
    stream: np.ndarray | None


class Layer:
    """Layer `i` of a session's model, with other weights in place of some. n_seq windows of n_tokens at a time."""

    def __init__(self, session: Session, i: int, weights: Weights, n_seq: int, n_tokens: int):
        self._session, self._i, self._weights = session, i, weights
        self._n_seq, self._n_tokens = n_seq, n_tokens
        self._whole: _Graph | None = None

    def groups(self) -> list[Group]:
        """The layer's groups of products, in the order in which they are computed."""
        return [group for group, _ in _groups(self._built())]

    def run(self, x: np.ndarray) -> np.ndarray:
        """Hidden states [n_seq * n_tokens, n_embd] behind the layer, for those before it."""
        if self._whole is None:
            self._whole = self._built()
            self._whole.finish(self._session, {"y": self._whole.y})
        return self._whole.run(x)["y"].array()[0, 0].copy()

    def inputs(self, number: int) -> _Inputs:
        """What runs the layer up to the inputs of a group."""
        built = self._built()
        _, product = _groups(built)[number]
        wanted = {"x": product.src[1]}
        if product.op == "MUL_MAT_ID":
            wanted["ids"] = product.src[2]
        stream, _ = _added_to(built.nodes, product)
        if stream is not None:
            wanted["stream"] = stream
        built.finish(self._session, wanted)
        return _Inputs(built)

    def _built(self) -> _Graph:
        return _Graph(self._session, self._i, self._weights, self._n_seq, self._n_tokens)


class _Inputs:
    """Runs a layer's graph as far as a group's inputs."""

    def __init__(self, graph: _Graph):
        self._graph = graph

    def __call__(self, x: np.ndarray) -> Inputs:
        """Valid until the next call."""
        io = self._graph.run(x)
        array, ids = io["x"].array(), io.get("ids")
        if ids is None:
            array = array.reshape(-1, array.shape[-1])
        else:
            array = array[0]
        stream = io.get("stream")
        return Inputs(
            array,
            None if ids is None else ids.array()[0, 0],
            None if stream is None else stream.array().reshape(-1, stream.ne[0]),
        )


class _Graph:
    """The graph of a layer: built at once, planned when it is known what is wanted of it."""

    def __init__(self, session: Session, i: int, weights: Weights, n_seq: int, n_tokens: int):
        n, h = n_seq * n_tokens, session.hparams
        self.ctx = Context(max(1 << 20, 4 * GRAPH_NODES * NODE_BYTES))
        self.x = self._input(F32, h.n_embd, n, name="x")
        positions = self._input(I32, n, name="positions")
        tokens = self._input(I32, n, name="tokens")
        build = Build(self.ctx, session.arch, h, weights, Windows(n_seq), tokens, positions)
        self.y = session.arch.layer(build, i, self.x)
        self.nodes = Graph(4 * GRAPH_NODES).expand(self.y).nodes
        self._positions, self._places = positions, np.tile(np.arange(n_tokens), n_seq)
        self._io: dict[str, Tensor] = {}

    def _input(self, format: Format, *ne: int, name: str) -> Tensor:
        tensor = self.ctx.tensor(format, *ne, name=name)
        tensor.flags |= Flag.INPUT
        return tensor

    def finish(self, session: Session, wanted: dict[str, Tensor]) -> None:
        """Plan it for these results."""
        graph = Graph(4 * GRAPH_NODES, self.ctx)
        for tensor in wanted.values():
            tensor.flags |= Flag.OUTPUT
            graph.expand(tensor)
        self._reads_positions = self._positions in graph.leafs
        self._io = wanted
        self._executable = session.backend.prepare(graph) if graph.nodes else None

    def run(self, x: np.ndarray) -> dict[str, Tensor]:
        if self._executable is None:
            raise EngineError("a product reads the layer's input as it is: this family cannot be refined")
        self.x.array()[...] = x
        if self._reads_positions:
            self._positions.array()[...] = self._places
        if self._executable.run() is not Status.SUCCESS:
            raise EngineError("the run was ended")
        return self._io


def _groups(graph: _Graph) -> list[tuple[Group, Tensor]]:
    """Groups, each with one of its products."""
    found: dict[tuple, list[Tensor]] = {}
    for node in graph.nodes:
        if node.op not in ("MUL_MAT", "MUL_MAT_ID") or node.src[0].op is not None:
            continue
        x = node.src[1]
        found.setdefault((node.op, x.view_src or x), []).append(node)
    groups = []
    for (op, _), products in found.items():
        factors = [_added_to(graph.nodes, product)[1] for product in products]
        names = tuple(product.src[0].name for product in products)
        residual = factors[0] if len(factors) == 1 else 0.0
        groups.append((Group(names, op == "MUL_MAT_ID", products[0].src[1].ne[0], residual), products[0]))
    return groups


def _added_to(nodes: list[Tensor], product: Tensor) -> tuple[Tensor | None, float]:
    """The hidden states that a product's result is added to, behind its bias and a factor at most, and that factor."""
    readers = list(_readers(nodes, product))
    factor = 1.0
    while len(readers) == 1:
        node = readers[0]
        if node.op == "SCALE" and len(node.params) == 2 and node.params[1] == 0:
            factor *= node.params[0]
        elif node.op == "ADD":
            other = node.src[1] if node.src[0] is product else node.src[0]
            if other.ne == product.ne:
                return other, factor
            if other.op is not None:
                break
        else:
            break
        product, readers = node, list(_readers(nodes, node))
    return None, 0.0


def _readers(nodes: list[Tensor], tensor: Tensor) -> Iterator[Tensor]:
    return (node for node in nodes if any(source is tensor for source in node.src))
