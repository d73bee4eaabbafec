"""A context: what one model remembers of its sequences, and the decoding of batches on top of that.

A model (`Session`) may have many. `decode` completes and checks a batch, cuts it into ubatches, finds cells for all of
them, and runs one graph each. Graphs are built for a number of tokens and of cells, kept, and used again.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from engine import ops
from engine.backends.base import AbortCallback, Status
from engine.batch import MAX_SEQUENCES, Batch, FullBatch, Ubatch, complete, split_seq
from engine.cache.kv import padded
from engine.cache.layout import Layout, Recorder, record
from engine.cache.memory import CacheMemory, Step
from engine.cache.reads import CacheReads
from engine.cache.shift import shift_graph
from engine.context import Context
from engine.errors import EngineError
from engine.graph import Graph
from engine.memory import Prepared
from engine.models.arch import Hparams
from engine.models.build import Build, SequenceMemory, Windows
from engine.ops.op import F32, I32
from engine.pooling import POOLING, pool
from engine.tensor import Flag, Tensor

if TYPE_CHECKING:
    from engine.adapters import Adapters, ControlVector, Lora
    from engine.alloc import Allocator
    from engine.session import Session

log = logging.getLogger(__name__)

LAYER_NODES = 256  # of one layer with its cache, at most
ADAPTER_NODES = 64  # of one layer for one adapter, at most
NODE_BYTES = 512  # of a node's header and its places in the graph
KEPT_GRAPHS = 16  # drafts are of all lengths


class Code(IntEnum):
    """How `decode` ended. NO_SLOT: no room in the cache, nothing was done: use a smaller batch or a larger context;
    ABORTED: by the abort callback, ubatches before it stay; below 0: an error, of the batch (INVALID), or of the run.
    """

    OK = 0
    NO_SLOT = 1
    ABORTED = 2
    INVALID = -1
    NO_MEMORY = -2
    FAILED = -3


@dataclass(frozen=True)
class ContextParams:
    """n_ctx: tokens that are remembered, 0 for as many as the model was trained for, rounded up to 256s; shared evenly
    by n_seq_max sequences unless kv_unified; n_batch: tokens of one `decode` at most; n_ubatch: tokens that run at
    once; type_k, type_v: what keys and values are kept as; threads, threads_batch: for one token and for many, None:
    the model's; embeddings: results are hidden states instead of logits; pooling: of a sequence's, see
    `engine/pooling.py`; causal: whether tokens see only what is before them, None: as the model was made.

    rope_freq_base, rope_freq_scale, yarn_*: instead of the model's, None or 0 for those; full_windows: keep all
    positions of windowed layers, so that any can be removed; reuse: run graphs again.
    """

    n_ctx: int = 512
    n_batch: int = 2048
    n_ubatch: int = 512
    n_seq_max: int = 1
    kv_unified: bool = False
    type_k: str = "F16"
    type_v: str = "F16"
    threads: int | None = None
    threads_batch: int | None = None
    embeddings: bool = False
    pooling: str = "none"
    causal: bool | None = None
    rope_freq_base: float = 0.0
    rope_freq_scale: float = 0.0
    yarn_ext_factor: float | None = None
    yarn_attn_factor: float | None = None
    yarn_beta_fast: float | None = None
    yarn_beta_slow: float | None = None
    yarn_orig_ctx: int = 0
    full_windows: bool = False
    reuse: bool = True


@dataclass
class Counts:
    """Seconds and tokens so far. prompt: of batches of several tokens; eval: of single ones; reused, built: graphs."""

    load: float = 0.0
    started: float = field(default_factory=time.perf_counter)
    prompt: float = 0.0
    n_prompt: int = 0
    eval: float = 0.0
    n_eval: int = 0
    reused: int = 0
    built: int = 0


@dataclass(frozen=True)
class _Key:
    """All that a graph's shape depends on: equal keys, equal graphs."""

    n_tokens: int
    n_seqs: int
    n_outputs: int
    n_kv: tuple[int, ...]
    first: int
    is_embd: bool
    adapters: tuple[tuple[Lora, float], ...]
    control: ControlVector | None


@dataclass(frozen=True)
class _Built:
    prepared: Prepared
    reads: CacheReads | None


class ModelContext:
    """Sequences of one model. Raises EngineError for parameters that are not possible.

    memory: what is remembered (`engine/cache/memory.py`), None for encoders, which remember nothing; error: why the
    last `decode` did not return 0; abort: asked after every node, ends the run.
    """

    def __init__(self, session: Session, params: ContextParams | None = None, **changes: Any):
        given = params or ContextParams()
        self.session = session
        self.params = given = replace(given, **changes)
        session.check_runnable()
        self.arch = session.arch
        self.hparams = _overridden(session.hparams, given)
        self._check(given)
        self.pooling = given.pooling
        self._size(given)
        self.abort: AbortCallback | None = None
        self.error = ""
        self.counts = Counts(load=session.load_seconds)
        self._allocator: Allocator | None = None
        self._graphs: dict[_Key, _Built] = {}
        self._adapters: tuple[tuple[Lora, float], ...] = ()
        self._control: ControlVector | None = None
        self._rows: dict[int, int] = {}  # place in the batch -> row of the results
        self._results = np.empty((0, 0), np.float32)
        self._pooled: dict[int, np.ndarray] = {}
        self.memory: CacheMemory | None = None
        if self.arch.causal:
            self.memory = CacheMemory(
                self._layout(), self.n_ctx_seq, self.n_ubatch, given.n_seq_max, given.kv_unified, given.type_k,
                given.type_v, given.full_windows,
            )  # fmt: skip
            self.memory.can_shift = self.memory.can_shift and not self.arch.bounded
        self._reserve()

    # --- sizes ---

    def _check(self, p: ContextParams) -> None:
        if not 1 <= p.n_seq_max <= MAX_SEQUENCES:
            raise EngineError(f"n_seq_max is 1 to {MAX_SEQUENCES}, not {p.n_seq_max}")
        if p.n_ctx < 0 or p.n_batch < 0 or p.n_ubatch < 0:
            raise EngineError("n_ctx, n_batch and n_ubatch are 0 or more")
        if p.n_batch == 0 and p.n_ubatch == 0:
            raise EngineError("n_batch and n_ubatch are both 0: give one of them")
        if p.n_ctx == 0 and self.hparams.n_ctx_train == 0:
            raise EngineError("n_ctx is 0, and the model does not say what it was trained for: give -c")
        if p.pooling not in POOLING:
            raise EngineError(f"there is no pooling '{p.pooling}'; use one of {', '.join(POOLING)}")

    def _size(self, p: ContextParams) -> None:
        n_ctx = padded(p.n_ctx or self.hparams.n_ctx_train)
        self.n_ctx_seq = n_ctx
        if not p.kv_unified and p.n_seq_max > 1:
            self.n_ctx_seq = padded(n_ctx // p.n_seq_max)
            if self.n_ctx_seq * p.n_seq_max != n_ctx:
                n_ctx = self.n_ctx_seq * p.n_seq_max
                log.warning("n_ctx is made %d: %d sequences of %d", n_ctx, p.n_seq_max, self.n_ctx_seq)
        self.n_ctx = n_ctx
        n_batch = p.n_batch or p.n_ubatch
        self.n_batch = min(n_ctx, n_batch) if self.causal else n_batch
        self.n_ubatch = min(self.n_batch, p.n_ubatch or p.n_batch)
        n_train = self.hparams.n_ctx_train
        if self.n_ctx_seq > n_train:
            log.warning("n_ctx of a sequence is %d, the model was trained for %d", self.n_ctx_seq, n_train)
        log.info("n_ctx %d, n_ctx_seq %d, n_batch %d, n_ubatch %d", n_ctx, self.n_ctx_seq, self.n_batch, self.n_ubatch)

    @property
    def causal(self) -> bool:
        """Whether tokens see only what is before them."""
        return self.arch.causal if self.params.causal is None else self.params.causal

    @property
    def n_vocab(self) -> int:
        return self.session.n_vocab

    # --- decoding ---

    def decode(self, batch: Batch | Sequence[int]) -> Code:
        """Run a batch, or the next tokens of sequence 0; see Code. Raises nothing: `error` says what was wrong."""
        batch = batch if isinstance(batch, Batch) else Batch.of(batch)
        started = time.perf_counter()
        self.error = ""
        try:
            full = self._completed(batch)
            steps = self._steps(full)
        except EngineError as error:
            return self._failed(Code.INVALID, str(error))
        if steps is None:
            return self._failed(
                Code.NO_SLOT,
                f"no room for {full.n_tokens} tokens in a cache of {self.n_ctx_seq}: use a larger context (-c)",
            )
        self._make_room(full)
        for step in steps:
            code = self._run_step(step)
            if code is not Code.OK:
                return code
        self._pool(full)
        self._count(full.n_tokens, time.perf_counter() - started)
        return Code.OK

    def process(self, batch: Batch | Sequence[int]) -> None:
        """`decode` that raises EngineError for every code but 0."""
        if self.decode(batch) is not Code.OK:
            raise EngineError(self.error)

    def _completed(self, batch: Batch) -> FullBatch:
        pooled = self.params.embeddings and self.pooling != "none"
        pos_max = self.memory.pos_max if self.memory is not None else None
        if pooled and batch.outputs is not None and not all(batch.outputs):
            log.warning("pooling needs all tokens of the batch: its output flags are overridden")
        full = complete(
            batch, self.n_vocab, self.params.n_seq_max, pos_max, pooled or not self.causal, self.hparams.n_embd
        )
        if self.arch.bounded and full.pos.max() >= self.hparams.n_ctx_train:
            raise EngineError(
                f"position {full.pos.max()} in the batch: the model has learned {self.hparams.n_ctx_train}; start anew"
            )
        if full.n_tokens > self.n_batch:
            raise EngineError(f"the batch has {full.n_tokens} tokens, more than n_batch {self.n_batch}: cut it")
        if not self.causal and full.n_tokens > self.n_ubatch:
            raise EngineError(
                f"the batch has {full.n_tokens} tokens, more than n_ubatch {self.n_ubatch}, which tokens that see each "
                "other must fit in"
            )
        return full

    def _steps(self, full: FullBatch) -> list[Step] | None:
        if self.memory is None:
            return [Step(u, ()) for u in split_seq(full, self.n_ubatch)]
        self.update()
        return self.memory.prepare(self.memory.split(full, self.n_ubatch))

    def _run_step(self, step: Step) -> Code:
        u = step.ubatch
        if self.memory is not None:
            self.memory.apply(step)
        try:
            built = self._graph(self._key(u))
            self._fill(built, step)
            status = built.prepared.executable.run(None, self.abort)
        except MemoryError:
            return self._undone(u, Code.NO_MEMORY, "out of memory: use a smaller n_ubatch or n_ctx")
        except EngineError as error:
            return self._undone(u, Code.FAILED, str(error))
        except BaseException:  # the caller's interrupt: memory and books must still agree
            self._undone(u, Code.FAILED, "the run was interrupted")
            raise
        if status is Status.ABORTED:
            return self._undone(u, Code.ABORTED, "the run was ended by its abort callback")
        if u.n_outputs:
            rows = [self._rows[int(i)] for i in u.index[u.outputs]]
            self._results[rows] = built.prepared.io["result"].array()[0, 0]
        if self.memory is not None and self.memory.states is not None:
            self.memory.states.share(u)
        return Code.OK

    def _failed(self, code: Code, message: str) -> Code:
        self.error = message
        return code

    def _undone(self, u: Ubatch, code: Code, message: str) -> Code:
        if self.memory is not None:
            self.memory.roll_back(u)
        return self._failed(code, message)

    def _fill(self, built: _Built, step: Step) -> None:
        u = step.ubatch
        values = {
            "tokens": u.tokens,
            "embd": u.embd,
            "positions": u.pos,
            "rows": np.flatnonzero(u.outputs) if u.n_outputs else u.n_tokens - 1,
        }
        for name, value in values.items():
            tensor = built.prepared.io.get(name)
            if tensor is not None and tensor.buffer is not None:  # a model without attention asks for no positions
                tensor.array()[...] = value
        if built.reads is not None:
            built.reads.fill(step)

    def _make_room(self, full: FullBatch) -> None:
        wanted = np.flatnonzero(full.outputs)
        self._rows = {int(i): row for row, i in enumerate(wanted)}
        width = self.hparams.n_embd if self.params.embeddings else self.n_vocab
        if self._results.shape[0] < len(wanted) or self._results.shape[1] != width:
            self._results = np.empty((len(wanted), width), np.float32)

    def _count(self, n: int, seconds: float) -> None:
        if n == 1:
            self.counts.eval += seconds
            self.counts.n_eval += 1
        else:
            self.counts.prompt += seconds
            self.counts.n_prompt += n

    def update(self) -> None:
        """Rotate the keys of positions that were moved; `decode` does it before anything else."""
        if self.memory is None:
            return
        for cache in self.memory.caches:
            if not cache.is_shifted:
                continue
            moved = np.flatnonzero(cache.shifts()).astype(np.int32)
            ctx = Context()
            graph = Graph(max(64, 32 * len(cache.layers)), ctx)
            inputs = shift_graph(ctx, graph, cache, len(moved))
            executable = self.session.backend.prepare(graph, self.params.threads_batch, None)
            for tensor, values in inputs.items():
                tensor.array()[...] = values(moved, cache.shifts()[moved])
            executable.run()
            cache.shifted()

    # --- results ---

    def logits(self, i: int = -1) -> np.ndarray:
        """Logits of a token of the last batch by its place; negative: of the outputs, counted from the end. float32
        [n_vocab], valid until the next call of `decode`. Raises EngineError for a token whose result was not wanted."""
        if self.params.embeddings:
            raise EngineError("no logits: this context gives embeddings")
        return self._results[self._row(i)]

    def all_logits(self) -> np.ndarray:
        """Logits of all outputs of the last batch, in its order: float32 [n_outputs, n_vocab]."""
        return self._results[: len(self._rows)]

    def embedding(self, i: int = -1) -> np.ndarray:
        """Hidden state of a token of the last batch; as `logits`."""
        if not self.params.embeddings:
            raise EngineError("no embeddings: make the context with embeddings=True")
        return self._results[self._row(i)]

    def sequence_embedding(self, seq: int = 0) -> np.ndarray:
        """The pooled embedding of a sequence of the last batch: float32 [n_embd]. Raises EngineError if there is
        none."""
        if seq not in self._pooled:
            raise EngineError(f"no pooled embedding of sequence {seq}: not in the last batch, or pooling is none")
        return self._pooled[seq]

    def _row(self, i: int) -> int:
        n = len(self._rows)
        if i < 0:
            if n + i < 0:
                raise EngineError(f"negative index {i} is out of range: the last batch had {n} outputs")
            return n + i
        if i not in self._rows:
            raise EngineError(f"token {i} of the last batch has no result: its output flag was not set")
        return self._rows[i]

    def _pool(self, full: FullBatch) -> None:
        self._pooled = {}
        if not self.params.embeddings or self.pooling == "none":
            return
        for seq in sorted({s for of in full.seqs for s in of}):
            rows = [i for i, of in enumerate(full.seqs) if seq in of]
            self._pooled[seq] = pool(self._results[rows], self.pooling)

    # --- graphs ---

    def _key(self, u: Ubatch) -> _Key:
        n_kv: tuple[int, ...] = ()
        first, n_seqs = 0, 1
        if self.memory is not None:
            streams = [s for s, _ in self.memory.caches[0].parts(u)] if self.memory.caches else [0]
            n_kv = tuple(cache.n_kv(streams) for cache in self.memory.caches)
            first, n_seqs = streams[0], u.n_seqs
            if self.memory.states is None and self.memory.unified:
                n_seqs = 1
        return _Key(u.n_tokens, n_seqs, u.n_outputs, n_kv, first, u.tokens is None, self._adapters, self._control)

    def _graph(self, key: _Key) -> _Built:
        if self.params.reuse and key in self._graphs:
            self.counts.reused += 1
            built = self._graphs.pop(key)
        else:
            self.counts.built += 1
            built = self._build(key)
        while len(self._graphs) >= KEPT_GRAPHS:
            self._graphs.pop(next(iter(self._graphs)))
        self._graphs[key] = built
        return built

    def set_adapters(self, adapters: Adapters = (), control: ControlVector | None = None) -> None:
        """Add LoRA adapters with their strengths, and a control vector, to all graphs from now on, instead of those
        before. What is in memory stays as it was computed."""
        used = tuple((lora, float(strength)) for lora, strength in adapters if strength)
        if (used, control) != (self._adapters, self._control):
            self._adapters, self._control = used, control
            self._reserve()

    @property
    def _n_nodes(self) -> int:
        """Nodes of a graph, at most."""
        return max(2048, (LAYER_NODES + ADAPTER_NODES * len(self._adapters)) * self.hparams.n_layer)

    def _build(self, key: _Key) -> _Built:
        reads = None
        memory: SequenceMemory = Windows(1, self.params.causal)
        if self.memory is not None:
            forced = None if self.causal == self.arch.causal else self.causal
            memory = reads = CacheReads(self.memory, key.n_seqs, key.n_kv, key.first, causal=forced)
        ctx = Context(max(16 << 20, self._n_nodes * NODE_BYTES))
        io = self._io(ctx, key, memory)
        graph = Graph(self._n_nodes, ctx)
        for node in reads.stores if reads is not None else ():
            graph.expand(node)
        graph.expand(io["result"])
        threads = self.params.threads if key.n_tokens == 1 else self.params.threads_batch
        threads = threads or self.session.threads_for(key.n_tokens)
        executable = self.session.backend.prepare(graph, threads, self._allocator)
        self._allocator = executable.allocator
        return _Built(Prepared(executable, io, ctx), reads)

    def _io(self, ctx: Context, key: _Key, memory: SequenceMemory) -> dict[str, Tensor]:
        """Inputs and result of one graph."""

        def add(name: str, format: Any, *ne: int) -> Tensor:
            io[name] = ctx.tensor(format, *ne, name=name)
            io[name].flags |= Flag.INPUT
            return io[name]

        io: dict[str, Tensor] = {}
        b = Build(ctx, self.arch, self.hparams, self.session.weights, memory, n_ctx=self.n_ctx_seq)
        b.activations = self.session.activations
        b.adapters, b.control = key.adapters, key.control.directions if key.control is not None else {}
        if key.is_embd:
            b.embd = add("embd", F32, self.hparams.n_embd, key.n_tokens)
        else:
            b.tokens = add("tokens", I32, key.n_tokens)
        b.positions = add("positions", I32, key.n_tokens)
        if key.n_outputs != key.n_tokens:
            b.out_rows = add("rows", I32, max(1, key.n_outputs))
        hidden = b.body()
        wants_logits = key.n_outputs > 0 and not self.params.embeddings
        result = self.arch.head(b, hidden) if wants_logits else hidden
        if result.op is None or result.view_src is not None:
            result = ops.cont(ctx, result)
        result.flags |= Flag.OUTPUT
        result.name = "result"
        io["result"] = result
        return io

    def _layout(self) -> Layout:
        """What the layers ask of memory: the graph of one token is built for it, and thrown away."""

        def build(recorder: Recorder) -> None:
            self._io(
                Context(max(16 << 20, self._n_nodes * NODE_BYTES)), _Key(1, 1, 1, (), 0, False, (), None), recorder
            )

        return record(build)

    def _reserve(self) -> None:
        """Memory for the largest graphs, kernels compiled: the first tokens need nothing more. Prompt first, then one
        token, then the prompt again, whose places stay."""
        n = min(self.n_ctx, self.n_ubatch)
        n_kv: tuple[int, ...] = ()
        n_seqs = 1
        if self.memory is not None:
            n_kv = tuple(cache.n_cells for cache in self.memory.caches)
            if not self.memory.unified or self.memory.states is not None:
                n_seqs = min(n, self.params.n_seq_max)
        key = _Key(n - n % n_seqs, n_seqs, n - n % n_seqs, n_kv, 0, False, self._adapters, self._control)
        small = _Key(n_seqs, n_seqs, n_seqs, n_kv, 0, False, self._adapters, self._control)
        for one in (key, small, key):
            self._build(one)

    @property
    def compute_bytes(self) -> int:
        """Of the memory that all graphs of the context share."""
        return self._allocator.size if self._allocator is not None else 0


#: parameter of a context -> field of the model's parameters that it takes the place of
_OVERRIDES = {
    "rope_freq_base": "rope_base",
    "yarn_ext_factor": "yarn_ext",
    "yarn_attn_factor": "yarn_attn",
    "yarn_beta_fast": "yarn_beta_fast",
    "yarn_beta_slow": "yarn_beta_slow",
    "yarn_orig_ctx": "n_ctx_orig",
}


def _overridden(h: Hparams, p: ContextParams) -> Hparams:
    """The model's parameters with what the context sets instead."""
    found = copy.copy(h)
    for name, field_name in _OVERRIDES.items():
        value = getattr(p, name)
        if value is not None and (value != 0 or name in ("yarn_ext_factor", "yarn_attn_factor")):
            setattr(found, field_name, value)
    if p.rope_freq_scale:
        if p.rope_freq_scale < 0:
            raise EngineError(f"rope_freq_scale is above 0, not {p.rope_freq_scale:g}")
        found.rope_scaling_factor = 1.0 / p.rope_freq_scale
        if found.rope_scaling_type not in ("linear", "yarn"):
            found.rope_scaling_type = "yarn" if p.yarn_ext_factor else "linear"
    return found
