"""A model that can be run: weights, backend, tokenizer, and the graphs that were built for it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from engine.activations import check as check_activations
from engine.backends import Backend, Status, get_backend
from engine.backends.base import AbortCallback, Timing
from engine.context import Context
from engine.errors import EngineError
from engine.graph import Graph
from engine.memory import Memory, Prepared, report
from engine.models import get_arch
from engine.models.build import Build, Windows
from engine.ops.op import F32, I32
from engine.scheduler import Scheduler
from engine.tensor import Flag, Tensor
from engine.tokenizer import Tokenizer, from_metadata
from quant import Format

GRAPH_NODES = 160  # of one layer, at most
NODE_BYTES = 512  # of a node's header and its places in the graph
HEAD_ROWS = 256  # rows of logits that are computed at a time: bounds memory for large vocabularies

#: Called with the weight's name and the float32 [rows, n] that it is multiplied with; for a weight of several matrices
#: also with None and their number, and x is [..., rows, n]; for experts with the int [tokens, slots] that were chosen
#: and the number of experts, and x is [tokens, slots or 1, n].
Observer = Callable[..., None]


class WeightView(Protocol):
    """What the engine needs of a tensor in a file: NumPy shape, format, and its bytes (uint8, one axis)."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def format(self) -> Format: ...
    @property
    def data(self) -> np.ndarray: ...


class Session:
    """A model over plain mappings: `metadata` with GGUF keys, `tensors` name -> WeightView.

    Weights are used where they lie, never expanded as a whole. Graphs are kept: a second call with the same number of
    tokens builds and plans nothing (`graphs_built`, `graphs_reused` count).

    backend: a name, or a backend (a `Scheduler` too); threads: of it, for one token at a time; threads_batch: for many
    at once, the same by default; None means all cores; activations: see `engine/activations.py`.

    Raises EngineError for an architecture we do not have, for missing or unknown tensors and for wrong shapes.
    """

    def __init__(
        self,
        metadata: Mapping[str, Any],
        tensors: Mapping[str, WeightView] | None,
        backend: str | Backend | Scheduler = "cpu",
        threads: int | None = None,
        threads_batch: int | None = None,
        activations: str = "f32",
    ):
        self.metadata = metadata
        self.graphs_built = self.graphs_reused = 0
        self.activations = check_activations(activations)
        self._vocab_only = tensors is None
        if tensors is None:
            return
        self.arch = get_arch(metadata.get("general.architecture"))
        self.hparams = self.arch.read_hparams(metadata)
        embedding = tensors.get("token_embd.weight")
        if self.hparams.n_vocab is None and embedding is not None:
            self.hparams.n_vocab = embedding.shape[0]
        self._headers = Context()
        self.weights = self._bind(tensors)
        self.backend = (
            get_backend(backend, threads, threads_batch=threads_batch) if isinstance(backend, str) else backend
        )
        self._threads = threads
        self.abort: AbortCallback | None = None  # asked after every node; a run that it ends raises EngineError
        self.on_run: Callable[[Prepared, list[Timing]], None] | None = None  # told after every run what its steps took
        self.load_seconds = 0.0  # whoever opens the file knows
        self._prepared: dict[tuple, Prepared] = {}

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return from_metadata(self.metadata)

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Text -> token ids. `add_special` adds BOS and EOS where the model wants them; `parse_special` recognises
        the text of control tokens."""
        return self.tokenizer.tokenize(text, add_special, parse_special)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Token ids -> text."""
        return self.tokenizer.detokenize(ids)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the weights' names, shapes, formats and first bytes: tells models apart."""
        self._need_weights()
        digest = hashlib.sha256(self.arch.name.encode())
        for name, tensor in sorted(self.weights.items()):
            digest.update(f"{name} {tensor.ne} {tensor.format}".encode())
            digest.update(tensor.raw()[:256].tobytes())
        return digest.hexdigest()

    @property
    def n_ctx_train(self) -> int:
        """The context length that the model was trained for."""
        self._need_weights()
        return self.hparams.n_ctx_train

    @property
    def n_vocab(self) -> int:
        """Number of logits."""
        self._need_weights()
        return self.hparams.n_vocab

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Logits of the next token behind every token of one sequence: float32 [n_tokens, n_vocab].

        Raises EngineError for an empty list or an id outside of the vocabulary.
        """
        hidden = self.hidden(np.asarray(ids, np.int64)[None])
        out = np.empty((hidden.shape[0], self.n_vocab), np.float32)
        for lo in range(0, len(out), HEAD_ROWS):
            out[lo : lo + HEAD_ROWS] = self.head(hidden[lo : lo + HEAD_ROWS])
        return out

    def hidden(
        self,
        windows: np.ndarray,
        first: int = 0,
        last: int | None = None,
        observe: Observer | None = None,
        causal: bool | None = None,
        all_experts: bool = False,
    ) -> np.ndarray:
        """Normalised hidden states of positions first..last-1 of each window: float32 [n_windows * positions, n_embd].

        windows: int [n_windows, n_tokens], independent sequences of equal length. observe: see Observer; it is called
        for every product with a weight, of all positions whose hidden state is computed. causal: whether tokens see
        only what is before them, None: as the model was made. all_experts: it sees every token go through every expert,
        the chosen ones first; the hidden states are those of the chosen ones.
        """
        windows = np.asarray(windows)
        n_seq, n_tokens = self._check(windows)
        last = n_tokens if last is None else last
        rows = None
        if (first, last) != (0, n_tokens):
            rows = (np.arange(n_seq)[:, None] * n_tokens + np.arange(first, last)).astype(np.int32).reshape(-1)
        prepared = self.prepared_body(n_seq, n_tokens, None if rows is None else rows.size, causal, all_experts)
        io = prepared.io
        io["tokens"].array()[...] = windows.reshape(-1)
        if io["positions"].buffer is not None:  # models without positions do not read them
            io["positions"].array()[...] = np.tile(np.arange(n_tokens), n_seq)
        if rows is not None:
            io["rows"].array()[...] = rows
        self._run(prepared, observe)
        return io["result"].array()[0, 0].copy()

    def head(self, hidden: np.ndarray, observe: Observer | None = None) -> np.ndarray:
        """Logits of hidden states [n, n_embd]: float32 [n, n_vocab], valid until the next call."""
        prepared = self.prepared_head(hidden.shape[0])
        prepared.io["hidden"].array()[...] = hidden
        self._run(prepared, observe)
        return prepared.io["result"].array()[0, 0]

    def prepared_body(
        self,
        n_seq: int,
        n_tokens: int,
        n_rows: int | None = None,
        causal: bool | None = None,
        all_experts: bool = False,
    ) -> Prepared:
        """The graph from tokens to hidden states, built and planned now if it is not there yet."""
        self._need_weights()
        return self._graph(("body", n_seq, n_tokens, n_rows, causal, all_experts), n_seq * n_tokens)

    def prepared_head(self, n: int) -> Prepared:
        """The graph from `n` hidden states to logits."""
        self._need_weights()
        return self._graph(("head", n), n)

    def memory(self) -> list[Memory]:
        """What the model and its graphs take now: the five memories of `engine/memory.py`."""
        self._need_weights()
        return report(self._headers, self.weights.values(), list(self._prepared.values()))

    def _run(self, prepared: Prepared, observe: Observer | None) -> None:
        callback = None if observe is None else _observing(observe)
        timings: list[Timing] | None = None if self.on_run is None else []
        if prepared.executable.run(callback, self.abort, timings) is Status.ABORTED:
            raise EngineError("the run was ended by its abort callback")
        if self.on_run is not None:
            self.on_run(prepared, timings or [])

    def check_context(self, n_ctx: int) -> None:
        """Raises EngineError for windows longer than the model was trained for."""
        if n_ctx > self.n_ctx_train:
            raise EngineError(
                f"a context of {n_ctx} is beyond the {self.n_ctx_train} tokens that the model was trained for; "
                "use a smaller -c"
            )

    def check_experts(self) -> None:
        """Raises EngineError for a model without experts."""
        self._need_weights()
        if not any("_exps." in name for name in self.weights):
            raise EngineError(
                "the model has no experts, so there are none to send all tokens to; leave --all-experts out"
            )

    def check_runnable(self) -> None:
        """Raises EngineError for a model that was loaded with its vocabulary only."""
        self._need_weights()

    def threads_for(self, n_tokens: int) -> int | None:
        """Threads for a graph of so many tokens; None: those of the backend for many."""
        return self._threads if n_tokens == 1 else None

    def _need_weights(self) -> None:
        if self._vocab_only:
            raise EngineError("the model was loaded with vocab_only: load it again without")

    def _check(self, windows: np.ndarray) -> tuple[int, int]:
        self._need_weights()
        if windows.ndim != 2 or windows.size == 0:
            raise EngineError("no tokens to run: the text is empty")
        low, high = windows.min(), windows.max()
        if low < 0 or high >= self.n_vocab:
            bad = low if low < 0 else high
            raise EngineError(f"token id {bad} is outside of the vocabulary of {self.n_vocab}")
        if self.arch.bounded and windows.shape[1] > self.n_ctx_train:
            raise EngineError(f"{windows.shape[1]} tokens are more than the {self.n_ctx_train} positions of the model")
        return windows.shape

    def _bind(self, tensors: Mapping[str, WeightView]) -> dict[str, Tensor]:
        """Headers over the file's bytes, checked against what the family expects."""
        expected = self.arch.expected_tensors(self.hparams)
        unknown = next(
            (name for name in tensors if name not in expected and not self.arch.is_unused(name, self.hparams)), None
        )
        if unknown is not None:
            raise EngineError(f"tensor '{unknown}' is not part of a {self.arch.name} model: this version cannot run it")
        ctx, weights = self._headers, {}
        for name, (row, shape) in expected.items():
            view = tensors.get(name)
            if view is None:
                if row.optional:
                    continue
                raise EngineError(f"tensor '{name}' is missing: the file is incomplete")
            if tuple(view.shape) != shape:
                raise EngineError(f"tensor '{name}' has shape {list(view.shape)}, expected {list(shape)}")
            if view.format.module is None:
                raise EngineError(f"tensor '{name}' is of type {view.format}, which this version cannot compute with")
            weights[name] = ctx.tensor(view.format, *shape[::-1], name=name)
            weights[name].bind(np.asarray(view.data).reshape(-1))
        return weights

    def _graph(self, key: tuple, n_tokens: int) -> Prepared:
        if key in self._prepared:
            self.graphs_reused += 1
            return self._prepared[key]
        n_nodes = max(2048, GRAPH_NODES * self.hparams.n_layer)
        ctx = Context(max(16 << 20, n_nodes * NODE_BYTES))
        build = self._build_body if key[0] == "body" else self._build_head
        io = build(ctx, *key[1:])
        io["result"].flags |= Flag.OUTPUT
        io["result"].name = "result"
        graph = Graph(n_nodes, ctx).expand(io["result"])
        executable = self.backend.prepare(graph, self._threads if n_tokens == 1 else None)
        self.graphs_built += 1
        while len(self._prepared) >= 4:  # a run uses two or three shapes
            self._prepared.pop(next(iter(self._prepared)))
        self._prepared[key] = Prepared(executable, io, ctx)
        return self._prepared[key]

    def _build_body(
        self,
        ctx: Context,
        n_seq: int,
        n_tokens: int,
        n_rows: int | None,
        causal: bool | None,
        all_experts: bool,
    ) -> dict[str, Tensor]:
        io = {
            "tokens": _input(ctx, I32, n_seq * n_tokens, name="tokens"),
            "positions": _input(ctx, I32, n_seq * n_tokens, name="positions"),
        }
        if n_rows is not None:
            io["rows"] = _input(ctx, I32, n_rows, name="rows")
        build = self._build(ctx, n_seq, causal)
        build.tokens, build.positions, build.out_rows = io["tokens"], io["positions"], io.get("rows")
        build.all_experts = all_experts
        io["result"] = build.body()
        return io

    def _build_head(self, ctx: Context, n: int) -> dict[str, Tensor]:
        hidden = _input(ctx, F32, self.hparams.n_embd, n, name="hidden")
        return {"hidden": hidden, "result": self.arch.head(self._build(ctx, n), hidden)}

    def _build(self, ctx: Context, n_seq: int, causal: bool | None = None) -> Build:
        windows = Windows(n_seq, causal)
        return Build(ctx, self.arch, self.hparams, self.weights, windows, activations=self.activations)


def _input(ctx: Context, format: Format, *ne: int, name: str) -> Tensor:
    tensor = ctx.tensor(format, *ne, name=name)
    tensor.flags |= Flag.INPUT
    return tensor


def _observing(observe: Observer):
    """An evaluation callback that hands every matrix product's input to `observe`."""

    def callback(node: Tensor, ask: bool) -> bool:
        wanted = node.op in ("MUL_MAT", "MUL_MAT_ID") and node.src[0].op is None
        if not wanted or ask:
            return wanted
        weight, x = node.src[:2]
        n_mat = weight.ne[2] * weight.ne[3]
        if node.op == "MUL_MAT_ID":
            ids = node.src[2].array()[0, 0]
            observe(weight.name, x.array()[0], ids, n_mat)
        elif n_mat > 1:
            observe(weight.name, x.array(), None, n_mat)
        else:
            observe(weight.name, x.array().reshape(-1, x.ne[0]))
        return True

    return callback
