"""Through all layers of a model: refine each with the inputs that the already quantized layers give it, aim at what the
original computes, and keep what text that was held back says is better.

Two streams of hidden states go along, the original's and the quantized model's, over the same calibration windows; they
lie in files, so memory holds one batch and one layer's matrices. For every group of products that read the same input,
second moments of the quantized model's inputs are summed up; the target of a weight is moved so that it makes good for
what earlier layers got wrong (GPTAQ: Li et al. 2025, arXiv 2504.02692), products whose result is added to the hidden
states also for the error of these.

After every few layers the divergence on the held-back windows, with the rest of the model as it was, decides between
the refined layers and plainly quantized ones, on the first layers between several dampings too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from engine.context import Context
from engine.errors import EngineError
from engine.evaluate.scoring import divergence
from engine.graph import Graph
from engine.models.build import Build, Windows
from engine.ops.op import F32, I32
from engine.refine.layer import Group, Inputs, Layer
from engine.session import HEAD_ROWS, Session
from engine.tensor import Flag, Tensor
from quant.errors import QuantError
from quant.format import Format
from quant.quantize import dequantize_blocks, quantize_into
from quant.refine.matrix import Factored, factored, refine
from quant.refine.matrix import Settings as MatrixSettings
from quant.refine.parts import FORMATS_OF

#: tokens that a column must have seen on average for the whole of the earlier error to be made good; below, half of it
WHOLE_REPAIR = 48
#: what the moments grow by before they are divided by, for the repair of earlier errors
REPAIR_DAMPING = 0.03
#: an expert's moments count as if so many tokens with the mean of all experts had reached it besides its own
EXPERT_FLOOR = 256
PLAIN = "plain-"  # in front of the names of tensors that the plain quantizer made
EXPERT_BYTES = 1 << 30  # of experts' moments that are held at a time


@dataclass(frozen=True)
class Settings:
    """dampings: those that are tried on the first layers, the best is kept; window, passes: of `quant.refine`;
    gates: how often, at most, held-back text decides; batch: windows that run together; repair: None to choose by the
    number of tokens, else the share of earlier errors that is made good."""

    dampings: tuple[float, ...] = (0.1, 0.3, 1.0)
    window: int = 1
    passes: int = 2
    gates: int = 8
    batch: int = 8
    repair: float | None = None


@dataclass(frozen=True)
class Decision:
    """What held-back text said about some layers: divergence of each choice from the original (nats a token), with the
    layers behind as they were. choice: the damping that was kept, or 0 for plain."""

    layers: tuple[int, ...]
    plain: float
    refined: dict[str, float]
    choice: float


@dataclass
class Outcome:
    """formats: what each tensor got; decisions; plain, refined: divergence of every held-back token, for the whole
    model, when all layers are plain and as decided."""

    decisions: list[Decision] = field(default_factory=list)
    plain: np.ndarray = field(default_factory=lambda: np.zeros(0))
    refined: np.ndarray = field(default_factory=lambda: np.zeros(0))


#: Told how many of how many layers are done.
Progress = Callable[[int, int], None]


class Store:
    """A folder that holds a run's state: streams as files, finished tensors, and `state.json`, which is replaced last,
    so that a run that was ended goes on from the last decision."""

    def __init__(self, folder: Path, key: str):
        self.folder, self._key = folder, key
        folder.mkdir(parents=True, exist_ok=True)
        self.state: dict[str, Any] = {"key": key, "next": 0, "decisions": [], "damping": None}
        try:
            found = json.loads((folder / "state.json").read_text())
            if found.get("key") == key:
                self.state = found
        except (OSError, ValueError):
            pass

    def new(self, name: str, layer: int, shape: tuple[int, ...]) -> np.memmap:
        """A stream to be written, of the states before `layer`."""
        return np.lib.format.open_memmap(self._path(name, layer), "w+", np.float32, shape)

    def stream(self, name: str, layer: int) -> np.memmap:
        """A stream that was written."""
        return np.lib.format.open_memmap(self._path(name, layer), "r")

    def keep(self, name: str, blocks: np.ndarray) -> None:
        """A finished tensor."""
        path = self.tensor(name)
        with path.with_suffix(".part").open("wb") as f:
            f.write(np.ascontiguousarray(blocks).view(np.uint8).tobytes())
            f.flush()
            os.fsync(f.fileno())
        path.with_suffix(".part").replace(path)

    def tensor(self, name: str) -> Path:
        """Where a finished tensor's bytes lie."""
        return self.folder / f"{name}.bin"

    def commit(self, layer: int) -> None:
        """Everything before `layer` is done."""
        self.state["next"] = layer
        part = self.folder / "state.part"
        with part.open("w") as f:
            json.dump(self.state, f)
            f.flush()
            os.fsync(f.fileno())
        part.replace(self.folder / "state.json")
        for path in self.folder.glob("*.npy"):
            if not path.stem.endswith(f".{layer}") and not path.stem.startswith("base"):
                path.unlink()

    def _path(self, name: str, layer: int) -> Path:
        return self.folder / f"{name}.{layer}.npy"


@dataclass
class _Sums:
    """Of a dense group: second moments of the quantized model's inputs [n, n]; of (original - quantized) inputs times
    those [n, n]; of (original - quantized) hidden states times those [n_embd, n]; squares of the original's [n]."""

    moments: np.ndarray
    inputs: np.ndarray
    stream: np.ndarray | None
    squares: np.ndarray
    n: int = 0

    def add(self, q: Inputs, f: Inputs) -> None:
        self.moments += (q.x.T @ q.x).astype(np.float64)
        self.inputs += ((f.x - q.x).T @ q.x).astype(np.float64)
        if self.stream is not None and q.stream is not None and f.stream is not None:
            self.stream += ((f.stream - q.stream).T @ q.x).astype(np.float64)
        self.squares += np.einsum("ij,ij->j", f.x, f.x, dtype=np.float64)
        self.n += len(q.x)


class Walk:
    """A run over a model. plan: format of every weight; windows, held: token ids int [n, n_tokens], for calibration and
    for decisions; store: where it keeps what it has."""

    def __init__(
        self,
        session: Session,
        plan: Mapping[str, Format],
        windows: np.ndarray,
        held: np.ndarray,
        store: Store,
        settings: Settings | None = None,
        threads: int | None = None,
    ):
        self._session, self._plan, self._store = session, plan, store
        self._tokens = {"cal": windows, "held": held}
        self._settings, self._threads = settings or Settings(), threads
        self._weights = dict(session.weights)  # of the quantized model, as far as it is there
        self._headers = Context()

    def run(self, progress: Progress | None = None) -> Outcome:
        """Refine all layers. Raises EngineError and QuantError for models, texts and formats that cannot be."""
        h, store = self._session.hparams, self._store
        step = max(1, -(-h.n_layer // self._settings.gates))
        first = store.state["next"]
        if first == 0:
            self._begin()
        self._replace(name for name in self._plan if store.tensor(name).exists())
        for lo in range(first, h.n_layer, step):
            layers = range(lo, min(lo + step, h.n_layer))
            if progress is not None:
                progress(lo, h.n_layer)
            self._decide(layers)
        if progress is not None:
            progress(h.n_layer, h.n_layer)
        return self._conclude()

    # --- streams ------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """The streams before the first layer: embeddings of the original and of the quantized model."""
        for name, fmt in self._plan.items():
            if not name.startswith("blk."):
                for prefix in ("", PLAIN):
                    self._store.keep(prefix + name, self._plain(name, fmt, None))
        self._replace(name for name in self._plan if not name.startswith("blk."))
        for which, windows in self._tokens.items():
            for stream, weights in (("f", self._session.weights), ("q", self._weights)):
                out = self._store.new(f"{which}-{stream}", 0, (*windows.shape, self._session.hparams.n_embd))
                embed = _Edge(self._session, weights, windows.shape[1], "embed")
                for at in range(len(windows)):
                    out[at] = embed(windows[at])
                out.flush()
        out = self._store.new("held-p", 0, (*self._tokens["held"].shape, self._session.hparams.n_embd))
        out[:] = self._store.stream("held-q", 0)
        out.flush()
        base = self._store.new("base", 0, out.shape)
        base[:] = self._through(self._store.stream("held-f", 0), 0, self._session.weights)
        base.flush()
        self._store.commit(0)

    def _batches(self, windows: int) -> list[slice]:
        return [slice(lo, min(lo + self._settings.batch, windows)) for lo in range(0, windows, self._settings.batch)]

    def _advance(self, source: np.ndarray, out: np.ndarray, i: int, weights: Mapping[str, Tensor]) -> None:
        """A stream through layer i."""
        runs: dict[int, Layer] = {}
        for part in self._batches(len(source)):
            x = source[part]
            n = len(x)
            runs.setdefault(n, Layer(self._session, i, weights, n, x.shape[1]))
            out[part] = runs[n].run(np.asarray(x).reshape(-1, x.shape[-1])).reshape(x.shape)

    def _through(self, x: np.ndarray, first: int, weights: Mapping[str, Tensor]) -> np.ndarray:
        """A stream through all layers from `first` on, to normalised hidden states."""
        now = np.array(x)
        for i in range(first, self._session.hparams.n_layer):
            self._advance(now, now, i, weights)
        finish = _Edge(self._session, weights, x.shape[1], "finish")
        for at in range(len(now)):
            now[at] = finish(now[at])
        return now

    # --- decisions ----------------------------------------------------------------------------------------------------

    def _decide(self, layers: range) -> None:
        store, settings = self._store, self._settings
        before = {name: store.stream(name, layers.start) for name in ("cal-f", "cal-q", "held-f", "held-q", "held-p")}
        known = store.state["damping"]
        dampings = settings.dampings if known is None else (known,)
        after_f = store.new("cal-f", layers.stop, before["cal-f"].shape)
        tried: dict[float, dict[str, np.ndarray]] = {}
        plain: dict[str, np.ndarray] = {}
        for damping in dampings:
            out = store.new(f"try{dampings.index(damping)}", layers.stop, before["cal-q"].shape)
            tried[damping] = self._refine_layers(layers, damping, before, out, after_f, plain)
        found = {damping: self._judge(blocks, before["held-q"], layers) for damping, blocks in tried.items()}
        beside = self._judge(plain, before["held-q"], layers)
        best = min(found, key=lambda damping: float(found[damping].mean()))
        choice = best if found[best].mean() < beside.mean() else 0.0
        if known is None:
            store.state["damping"] = best
        chosen = tried[best] if choice else plain
        for name, blocks in chosen.items():
            store.keep(name, blocks)
        for name, blocks in plain.items():
            store.keep(f"{PLAIN}{name}", blocks)
        after_q = store.new("cal-q", layers.stop, before["cal-q"].shape)
        if choice:
            after_q[:] = store.stream(f"try{dampings.index(best)}", layers.stop)
        else:
            self._advance_all(before["cal-q"], after_q, layers, self._with(plain))
        self._replace(chosen)
        for name, weights in (
            ("held-f", self._session.weights),
            ("held-q", self._weights),
            ("held-p", self._with(plain)),
        ):
            self._advance_all(before[name], store.new(name, layers.stop, before[name].shape), layers, weights)
        decision = Decision(
            tuple(layers), float(beside.mean()), {f"{d:g}": float(k.mean()) for d, k in found.items()}, choice
        )
        store.state["decisions"].append(asdict(decision))
        store.commit(layers.stop)

    def _advance_all(self, source, out, layers: range, weights: Mapping[str, Tensor]) -> None:
        now = source
        for i in layers:
            self._advance(now, out, i, weights)
            now = out
        out.flush()

    def _judge(self, blocks: Mapping[str, np.ndarray], stream: np.ndarray, layers: range) -> np.ndarray:
        """Divergence of every held-back token with these blocks in `layers`, and the original behind them."""
        now = np.array(stream)
        weights = self._with(blocks)
        for i in layers:
            self._advance(now, now, i, weights)
        return self._divergence(self._through(now, layers.stop, self._session.weights), self._session.weights)

    def _divergence(self, hidden: np.ndarray, weights: Mapping[str, Tensor]) -> np.ndarray:
        """KL divergence of the next token's distribution from the original's, float64 [windows, n_tokens]; `weights`:
        whose head it is."""
        base = self._store.stream("base", 0)
        n_embd = base.shape[-1]
        ours, theirs = hidden.reshape(-1, n_embd), base.reshape(-1, n_embd)
        out = np.empty(len(ours))
        rows = min(HEAD_ROWS, len(ours))
        heads = [_Edge(self._session, w, rows, "head") for w in (self._session.weights, weights)]
        for lo in range(0, len(ours), rows):
            hi = min(lo + rows, len(ours))
            logits = []
            for head, x in zip(heads, (theirs, ours)):
                padded = np.zeros((rows, n_embd), np.float32)
                padded[: hi - lo] = x[lo:hi]
                logits.append(head(padded)[: hi - lo])
            out[lo:hi] = divergence(logits[0], logits[1])[0]
        return out.reshape(hidden.shape[:2])

    def _conclude(self) -> Outcome:
        h, held = self._session.hparams, {}
        for name in ("held-q", "held-p"):
            x = self._store.stream(name, h.n_layer)
            held[name] = self._divergence(self._through(x, h.n_layer, self._weights), self._weights)
        decisions = [
            Decision(tuple(d["layers"]), d["plain"], d["refined"], d["choice"]) for d in self._store.state["decisions"]
        ]
        return Outcome(decisions, held["held-p"], held["held-q"])

    # --- weights ------------------------------------------------------------------------------------------------------

    def _refine_layers(
        self, layers: range, damping: float, before: Mapping[str, np.ndarray], out, after_f, plain
    ) -> dict[str, np.ndarray]:
        """Refined blocks of all weights of some layers. `out`, `after_f`: the streams behind them; `plain` gets the
        blocks of the plain quantizer."""
        done: dict[str, np.ndarray] = {}
        weights = dict(self._weights)
        xq, xf = before["cal-q"], before["cal-f"]
        for i in layers:
            for number, group in enumerate(Layer(self._session, i, weights, 1, xq.shape[1]).groups()):
                wanted = {name: self._plan[name] for name in group.names if name in self._plan}
                refinable = {name: fmt for name, fmt in wanted.items() if fmt.name in FORMATS_OF}
                runs = _Pairs(self, i, number, weights, xq, xf)
                if group.experts:
                    found = self._refine_experts(group, refinable, runs, damping, plain)
                else:
                    found = self._refine_dense(group, wanted, refinable, runs, damping, plain)
                for name, fmt in wanted.items():
                    if name not in found:
                        plain.setdefault(name, self._plain(name, fmt, None))
                        found[name] = plain[name]
                    weights[name] = self._tensor(name, fmt, found[name])
                done |= found
            for name, fmt in self._plan.items():  # what no product reads
                if name.startswith(f"blk.{i}.") and name not in done:
                    done[name] = plain.setdefault(name, self._plain(name, fmt, None))
                    weights[name] = self._tensor(name, fmt, done[name])
            self._advance(xf, after_f, i, self._session.weights)
            self._advance(xq, out, i, weights)
            xq, xf = out, after_f
        out.flush()
        after_f.flush()
        return done

    def _refine_dense(
        self, group: Group, wanted, refinable, runs: _Pairs, damping: float, plain
    ) -> dict[str, np.ndarray]:
        n, n_embd = group.n, self._session.hparams.n_embd
        repairs = group.residual != 0 and self._session.weights[group.names[0]].ne[1] == n_embd
        stream = np.zeros((n_embd, n)) if repairs else None
        sums = _Sums(np.zeros((n, n)), np.zeros((n, n)), stream, np.zeros(n))
        for q, f in runs:
            with np.errstate(invalid="ignore", over="ignore"):  # the check that follows is ours
                sums.add(q, f)
        if not (np.isfinite(sums.moments).all() and np.isfinite(sums.squares).all()):
            raise EngineError(f"{group.names[0]}: its inputs are not finite: the model or the text cannot be used")
        importance = (sums.squares / sums.n).astype(np.float32)
        for name, fmt in wanted.items():
            if name not in plain:
                plain[name] = self._plain(name, fmt, importance)
        if not refinable:
            return {}
        strength = self._settings.repair
        if strength is None:
            strength = 1.0 if sums.n >= WHOLE_REPAIR * n else 0.5
        try:
            ready = factored(sums.moments / sums.n, damping)
            corrections = _Corrections(sums, strength, group.residual)
            return {
                name: self._blocks(name, fmt, corrections.of(self._original(name)), ready)
                for name, fmt in refinable.items()
            }
        except QuantError as error:
            raise QuantError(f"{group.names[0]}: {error}") from None

    def _refine_experts(self, group: Group, refinable, runs: _Pairs, damping: float, plain) -> dict[str, np.ndarray]:
        """Experts each have moments of their own, mixed with a little of all experts' mean."""
        if not refinable:
            return {}
        n = group.n
        n_expert = self._session.weights[next(iter(refinable))].ne[2]
        at_once = max(1, min(n_expert, EXPERT_BYTES // (8 * n * n)))
        mean, counts, squares = np.zeros((n, n)), np.zeros(n_expert), np.zeros((n_expert, n))
        for q, f in runs:
            for e, x in _by_expert(q, n_expert):
                mean += (x.T @ x).astype(np.float64)
                counts[e] += len(x)
            for e, x in _by_expert(f, n_expert):
                squares[e] += np.einsum("ij,ij->j", x, x, dtype=np.float64)
        if not counts.sum():
            raise EngineError(f"{group.names[0]}: no token reached an expert; use more text")
        mean /= counts.sum()
        importance = (squares + EXPERT_FLOOR * np.diag(mean)) / (counts[:, None] + EXPERT_FLOOR)
        for name, fmt in refinable.items():
            if name not in plain:
                plain[name] = self._plain(name, fmt, importance.astype(np.float32))
        found = {name: np.empty_like(plain[name]) for name in refinable}
        originals = {name: self._original(name) for name in refinable}
        for lo in range(0, n_expert, at_once):
            some = range(lo, min(lo + at_once, n_expert))
            moments = np.zeros((len(some), n, n))
            for q, _ in runs.quantized():
                for e, x in _by_expert(q, n_expert):
                    if e in some:
                        moments[e - lo] += (x.T @ x).astype(np.float64)
            for e in some:
                ready = factored((moments[e - lo] + EXPERT_FLOOR * mean) / (counts[e] + EXPERT_FLOOR), damping)
                for name, fmt in refinable.items():
                    found[name][e] = self._blocks(name, fmt, originals[name][e], ready)
        return found

    def _blocks(self, name: str, fmt: Format, weights: np.ndarray, ready: Factored) -> np.ndarray:
        settings = MatrixSettings(window=self._settings.window, passes=self._settings.passes)
        return refine(weights, ready, fmt, settings, self._threads)

    def _original(self, name: str) -> np.ndarray:
        """A weight of the original, float32 [(experts,) rows, n]."""
        tensor = self._session.weights[name]
        array = tensor.array()[0]
        rows = array.reshape(-1, array.shape[-1])
        if tensor.format.name == "F32":
            values = np.array(rows, np.float32)
        else:
            blocks = np.ascontiguousarray(rows).view(np.uint8).view(tensor.format.block)
            values = dequantize_blocks(blocks, tensor.format, self._threads)
        return values.reshape(tensor.ne[2], -1, tensor.ne[0]) if tensor.ne[2] > 1 else values

    def _plain(self, name: str, fmt: Format, importance: np.ndarray | None) -> np.ndarray:
        """A weight as the plain quantizer makes it: blocks [(experts,) rows, blocks]."""
        values = self._original(name)
        weighted = fmt.kernels.quantize_weighted is not None
        if importance is None and fmt.kernels.quantize is None:
            importance = np.ones((len(values), values.shape[-1]) if values.ndim == 3 else values.shape[-1:], np.float32)
        blocks = np.empty((*values.shape[:-1], values.shape[-1] // fmt.block_size), fmt.block)
        each = zip(values, blocks) if values.ndim == 3 else [(values, blocks)]
        for e, (x, out) in enumerate(each):
            own = None if importance is None or not weighted else importance[e] if values.ndim == 3 else importance
            quantize_into(x, fmt, out, own, self._threads, name)
        return blocks

    def _tensor(self, name: str, fmt: Format, blocks: np.ndarray) -> Tensor:
        tensor = Context().tensor(fmt, *self._session.weights[name].ne, name=name)
        tensor.bind(np.ascontiguousarray(blocks).view(np.uint8).reshape(-1))
        return tensor

    def _with(self, blocks: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        """The quantized model's weights so far, with others in place of some."""
        return self._weights | {name: self._tensor(name, self._plan[name], b) for name, b in blocks.items()}

    def _replace(self, names: Iterable[str]) -> None:
        """From now on the quantized model has the kept tensors."""
        for name in names:
            data = np.memmap(self._store.tensor(name), np.uint8, "r")
            tensor = Context().tensor(self._plan[name], *self._session.weights[name].ne, name=name)
            tensor.bind(data)
            self._weights[name] = tensor


class _Pairs:
    """The inputs of one group, batch by batch: the quantized model's and the original's."""

    def __init__(self, walk: Walk, i: int, number: int, weights, xq: np.ndarray, xf: np.ndarray):
        self._walk, self._i, self._number, self._weights, self._xq, self._xf = walk, i, number, weights, xq, xf

    def __iter__(self):
        return self._each(True)

    def quantized(self):
        """The quantized model's alone; None in place of the original's."""
        return self._each(False)

    def _each(self, both: bool):
        session, runs = self._walk._session, {}
        for part in self._walk._batches(len(self._xq)):
            n, n_tokens, n_embd = self._xq[part].shape
            if n not in runs:
                runs[n] = tuple(
                    Layer(session, self._i, weights, n, n_tokens).inputs(self._number)
                    for weights in (self._weights, session.weights)
                )
            q = runs[n][0](np.asarray(self._xq[part]).reshape(-1, n_embd))
            f = runs[n][1](np.asarray(self._xf[part]).reshape(-1, n_embd)) if both else None
            yield q, f


class _Corrections:
    """Moves weights so that they make good for errors of earlier layers."""

    def __init__(self, sums: _Sums, strength: float, factor: float):
        from scipy.linalg import cho_factor

        self._sums, self._strength, self._factor = sums, strength, factor
        moments = sums.moments / sums.n
        diagonal = np.diag(moments)
        small = REPAIR_DAMPING * diagonal + 1e-4 * np.median(diagonal[diagonal > 0])
        self._solver = cho_factor(moments + np.diag(small)) if strength else None

    def of(self, weights: np.ndarray) -> np.ndarray:
        """The target of a weight float32 [rows, n]."""
        from scipy.linalg import cho_solve

        if not self._strength:
            return weights
        wanted = weights.astype(np.float64) @ (self._sums.inputs / self._sums.n)
        if self._sums.stream is not None:
            wanted += self._sums.stream / (self._sums.n * self._factor)
        moved = cho_solve(self._solver, wanted.T).T
        return (weights + self._strength * moved).astype(np.float32)


class _Edge:
    """The graphs at the ends of a model: `embed` token ids, `finish` hidden states, `head` to logits; n rows."""

    def __init__(self, session: Session, weights: Mapping[str, Tensor], n: int, which: str):
        ctx, h = Context(), session.hparams
        fmt, ne = (I32, (n,)) if which == "embed" else (F32, (h.n_embd, n))
        self._in = ctx.tensor(fmt, *ne, name="in")
        positions = ctx.tensor(I32, n, name="positions")
        for tensor in (self._in, positions):
            tensor.flags |= Flag.INPUT
        build = Build(ctx, session.arch, h, weights, Windows(1), self._in, positions)
        function: Any = getattr(session.arch, which)
        self._out = function(build) if which == "embed" else function(build, self._in)
        if build.extra:
            raise EngineError(f"'{session.arch.name}' hands more than hidden states from layer to layer: not refinable")
        self._out.flags |= Flag.OUTPUT
        graph = Graph(ctx=ctx).expand(self._out)
        self._positions = positions if positions in graph.leafs else None
        self._executable = session.backend.prepare(graph)
        self._n = n

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        self._in.array()[...] = rows
        if self._positions is not None:
            self._positions.array()[...] = np.arange(self._n)
        self._executable.run()
        return self._out.array()[0, 0].copy()


def _by_expert(inputs: Inputs, n_expert: int):
    """(expert, the rows that went to it) for every expert that got some."""
    assert inputs.ids is not None
    slots = inputs.x.shape[1]
    for e in range(n_expert):
        token, used = np.nonzero(inputs.ids == e)
        if token.size:
            yield e, inputs.x[token, used % slots]


def divergence_of(
    session: Session, plan: Mapping[str, Format], folder: Path, prefix: str, windows: np.ndarray
) -> np.ndarray:
    """KL divergence from the original of the model with the tensors that a walk left in `folder`, those whose files
    begin with `prefix`: float64 [windows, n_tokens]."""
    quantized = Session(session.metadata, _views(session, plan, folder, prefix), session.backend)
    out = np.empty(windows.shape)
    for i, window in enumerate(windows):
        hidden = [s.hidden(window[None]) for s in (session, quantized)]
        for lo in range(0, windows.shape[1], HEAD_ROWS):
            rows = slice(lo, lo + HEAD_ROWS)
            base = session.head(hidden[0][rows]).copy()
            out[i, rows] = divergence(base, quantized.head(hidden[1][rows]))[0]
    return out


@dataclass(frozen=True)
class _View:
    shape: tuple[int, ...]
    format: Format
    data: np.ndarray


def _views(session: Session, plan: Mapping[str, Format], folder: Path, prefix: str) -> dict[str, _View]:
    expected = session.arch.expected_tensors(session.hparams)
    found = {}
    for name, tensor in session.weights.items():
        shape = expected[name][1]
        if name in plan:
            found[name] = _View(shape, plan[name], np.memmap(folder / f"{prefix}{name}.bin", np.uint8, "r"))
        else:
            found[name] = _View(shape, tensor.format, tensor.raw())
    return found
