"""One graph over several backends: who computes what, what has to be copied between them, and running it.

Backends are listed by priority; the last takes what no other does, and holds the inputs that callers write. Assignment
goes in passes over the nodes:

1. fixed points: what the caller set, memory that a backend owns, inputs, and nodes that use a weight that a backend
owns; 2. each assignment spreads to its neighbours, down and up, first those of the backends before the last;
3. what is left goes where most of its sources lie; what could run on a backend of higher priority with the same memory
   moves there;
4. sources that nobody placed follow their readers, views their roots.

Then consecutive nodes of one backend form splits, and a source that lies elsewhere becomes a copy. All of it is planned
as one graph, so that the memory of every backend is reused across splits. The splits run clones of the headers, whose
sources are the copies; caller and callbacks read the originals' memory through either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from engine.alloc import Allocator, Plan
from engine.backends.base import AbortCallback, Backend, EvalCallback, Program, Status, Timing
from engine.errors import EngineError
from engine.graph import Graph
from engine.tensor import Flag, Tensor

MAX_BACKENDS = 16
RING = 4  # copies of the inputs, so that a caller can write the next ones while a run is under way
_STAY = ("ROPE", "ATTENTION")  # ops that do not follow the weights that they read


@dataclass
class Split:
    """Nodes first..last-1 of the graph, on one backend; inputs: tensors that lie elsewhere, and are copied first."""

    backend: int
    first: int
    last: int
    inputs: list[Tensor] = field(default_factory=list)


class Scheduler:
    """Backends by priority. parallel: a ring of input copies, for `Schedule.run_async`. Has the methods that a session
    asks of a backend, so it can stand in for one."""

    def __init__(self, backends: Sequence[Backend], parallel: bool = False):
        names = [b.name for b in backends]
        if not 1 <= len(backends) <= MAX_BACKENDS:
            raise EngineError(f"a scheduler needs 1 to {MAX_BACKENDS} backends, not {len(backends)}")
        if len(set(names)) < len(names):
            raise EngineError(f"two backends have one name: {', '.join(names)}")
        self.backends = tuple(backends)
        self.name = "+".join(names)
        self.n_copies = RING if parallel else 1
        self._allocator = self._new_allocator()
        self._fixed: dict[Tensor, int] = {}

    def _new_allocator(self) -> Allocator:
        return Allocator([b.memory for b in self.backends])

    def set_backend(self, tensor: Tensor, name: str) -> None:
        """Have `tensor` computed, or its data held, by the backend called `name`."""
        self._fixed[tensor] = self._index(name)

    def reset(self) -> None:
        """Forget what `set_backend` said."""
        self._fixed.clear()

    def reserve(self, graph: Graph) -> Plan:
        """Plan for the largest graph that will come and get its memory, so that `allocate` need not."""
        schedule = Schedule(self, graph)
        return self._allocator.reserve(schedule.flat, schedule.buffer_of)

    def allocate(self, graph: Graph) -> Schedule:
        """Split, place and lower a graph, in the memory that all graphs of this scheduler share one after another."""
        return Schedule(self, graph).place(self._allocator)

    def prepare(self, graph: Graph, threads: int | None = None, allocator: Allocator | None = None) -> Schedule:
        """The same in memory of its own, or of the allocator of an earlier one."""
        return Schedule(self, graph, threads).place(allocator or self._new_allocator())

    def assign(self, graph: Graph) -> dict[Tensor, int]:
        """Tensor -> index of its backend, for all leafs and nodes of the graph."""
        return _Assignment(self, graph, self._fixed).result()

    def split(self, graph: Graph, where: Mapping[Tensor, int]) -> list[Split]:
        """The graph's nodes as runs on one backend each, with the sources that have to be copied; what a backend has
        got once it keeps."""
        splits: list[Split] = []
        got: set[tuple[Tensor, int]] = set()
        for i, node in enumerate(graph.nodes):
            if not splits or (where[node] != splits[-1].backend and not node.is_empty_op):
                splits.append(Split(where[node], i, i))
            split = splits[-1]
            split.last = i + 1
            if node.is_empty_op:
                continue
            for source in node.src:
                if source is None or (source, split.backend) in got or not self._is_cut(source, split.backend, where):
                    continue
                got.add((source, split.backend))
                split.inputs.append(source)
        return splits

    def _is_cut(self, source: Tensor, backend: int, where: Mapping[Tensor, int]) -> bool:
        root = source.view_src or source
        if self.n_copies > 1 and source.flags & Flag.INPUT:
            return True
        if root.buffer is not None and root.backend is None:  # a file's map: everybody reads it
            return False
        return self.backends[where[source]].memory.name != self.backends[backend].memory.name

    def _index(self, name: str) -> int:
        for i, backend in enumerate(self.backends):
            if backend.name == name:
                return i
        raise EngineError(f"no backend '{name}' in this scheduler; it has: {', '.join(b.name for b in self.backends)}")


class _Assignment:
    """The passes. `where` fills as they go."""

    def __init__(self, scheduler: Scheduler, graph: Graph, fixed: Mapping[Tensor, int]):
        self.backends, self.graph = scheduler.backends, graph
        self.index = {b.name: i for i, b in enumerate(self.backends)}
        self.last = len(self.backends) - 1
        self.fixed = fixed
        self.where: dict[Tensor, int] = {}

    def result(self) -> dict[Tensor, int]:
        self._fixed_points()
        for cpu_too in (False, True):
            for nodes in (self.graph.nodes, self.graph.nodes[::-1]):
                self._spread(nodes, cpu_too)
        self._rest_and_upgrades()
        self._sources()
        self._fallbacks()
        return self.where

    def _owner(self, tensor: Tensor) -> int | None:
        root = tensor.view_src or tensor
        if root in self.fixed:
            return self.fixed[root]
        return self.index.get(root.backend or "") if root.buffer is not None and root.op is None else None

    def _fixed_points(self) -> None:
        for tensor in (*self.graph.leafs, *self.graph.nodes):
            owner = self.fixed.get(tensor, self._owner(tensor))
            if owner is None and tensor.flags & Flag.INPUT:
                owner = self.last
            if owner is None and tensor.op not in _STAY:
                weights = (s for s in tensor.src if s is not None and s.op is None and not s.flags & Flag.INPUT)
                owner = next((o for s in weights if (o := self._owner(s)) is not None), None)
            if owner is not None:
                self.where[tensor] = owner

    def _spread(self, nodes: Sequence[Tensor], cpu_too: bool) -> None:
        current = None
        for node in nodes:
            if node.is_empty_op:
                continue
            if node in self.where:
                current = self.where[node] if cpu_too or self.where[node] != self.last else None
            elif current is not None and self.backends[current].supports(node):
                self.where[node] = current

    def _rest_and_upgrades(self) -> None:
        for node in self.graph.nodes:
            if node.is_empty_op:
                continue
            able = [i for i, b in enumerate(self.backends) if b.supports(node)]
            if node not in self.where:
                near = [self._near(node, i) for i in range(len(self.backends))]
                self.where[node] = max(able, key=lambda i: (near[i], -i), default=self.last)
            elif node not in self.fixed:
                memory = self.backends[self.where[node]].memory.name
                same = [i for i in able if self.backends[i].memory.name == memory]
                self.where[node] = min([*same, self.where[node]])

    def _near(self, node: Tensor, backend: int) -> int:
        """Sources that lie there; inputs do not count, they are small."""
        return sum(self.where.get(s) == backend for s in node.src if s is not None and not s.flags & Flag.INPUT)

    def _sources(self) -> None:
        for node in self.graph.nodes[::-1]:
            for source in node.src:
                if source is not None and node in self.where:
                    self.where.setdefault(source, self.where.get(source.view_src or source, self.where[node]))
        for tensor in (*self.graph.leafs, *self.graph.nodes):
            self.where.setdefault(tensor, self.last)
            if tensor.view_src is not None and tensor.is_empty_op:
                self.where[tensor] = self.where.get(tensor.view_src, self.where[tensor])

    def _fallbacks(self) -> None:
        for node in self.graph.nodes:
            if not node.is_empty_op and not self.backends[self.where[node]].supports(node):
                able = next((i for i, b in enumerate(self.backends) if b.supports(node)), None)
                if able is None:
                    raise EngineError(f"no backend of {', '.join(self.index)} can compute {node!r}")
                self.where[node] = able


class Schedule:
    """A graph that is split, and when it is placed, ready to run."""

    def __init__(self, scheduler: Scheduler, graph: Graph, threads: int | None = None):
        self.scheduler, self.graph, self._threads = scheduler, graph, threads
        self.where = scheduler.assign(graph)
        self.splits = scheduler.split(graph, self.where)
        self._slots = [self._clones(c) for c in range(scheduler.n_copies)]
        self.flat = self._flat_graph()
        self.plan = Plan()
        self.copied = 0  # bytes that runs moved between backends
        self._programs: list[list[Program]] = []
        self._runs = 0
        self._worker: ThreadPoolExecutor | None = None
        self._pending: list[Future | None] = [None] * scheduler.n_copies

    def buffer_of(self, tensor: Tensor) -> int:
        """Index of the backend that holds a tensor of the flat graph."""
        return self._home.get(tensor, self.where.get(tensor, len(self.scheduler.backends) - 1))

    def _clones(self, slot: int) -> _Slot:
        """Headers of one place in the ring: clones of all nodes, and for each split the copies of its inputs."""
        clone: dict[Tensor, Tensor] = {}
        copies: list[dict[Tensor, Tensor]] = []
        held: list[dict[Tensor, Tensor]] = [{} for _ in self.scheduler.backends]
        for split in self.splits:
            mine: dict[Tensor, Tensor] = {}
            for source in split.inputs:
                copy = Tensor(source.format, source.ne, source.nb)
                copy.name = f"{self.scheduler.backends[split.backend].name}#{source.name}#{slot}"
                copy.flags = Flag.COMPUTE
                if self.scheduler.n_copies > 1 and source.flags & Flag.INPUT:
                    copy.flags |= Flag.INPUT | Flag.OUTPUT  # a place in the ring is never given to others
                else:
                    copy.op, copy.src = "CPY", (clone.get(source, source), None)
                mine[source] = copy
            copies.append(mine)
            held[split.backend] |= mine
            for node in self.graph.nodes[split.first : split.last]:
                clone[node] = _clone(node, held[split.backend], clone)
        return _Slot(clone, copies)

    def _flat_graph(self) -> Graph:
        """One graph for the allocator: every split's copies, then its nodes; the ring's places as leafs."""
        flat = Graph(1 << 30)
        first = self._slots[0]
        self._home: dict[Tensor, int] = {}
        flat.leafs = list(self.graph.leafs)
        seen: set[Tensor] = set()
        for s, split in enumerate(self.splits):
            for slot in self._slots:
                for copy in slot.copies[s].values():
                    if copy in seen or (copy.op is not None and slot is not first):
                        continue
                    seen.add(copy)
                    self._home[copy] = split.backend
                    (flat.nodes if copy.op is not None else flat.leafs).append(copy)
            for node in self.graph.nodes[split.first : split.last]:
                flat.nodes.append(first.clone[node])
                self._home[first.clone[node]] = self.where[node]
        for node in flat.nodes:
            for source in node.src:
                if source is not None:
                    flat.use_counts[source] = flat.use_counts.get(source, 0) + 1
        return flat

    def place(self, allocator: Allocator) -> Schedule:
        """Give everything its memory, and lower every split."""
        self.allocator = allocator
        self.plan = allocator.allocate(self.flat, self.buffer_of)
        first = self._slots[0]
        for node in self.graph.nodes:
            _share_memory(node, first.clone[node])
        for slot in self._slots:
            if slot is not first:
                for node, clone in slot.clone.items():
                    _share_memory(clone, first.clone[node])
                for mine, others in zip(first.copies, slot.copies):
                    for source, copy in others.items():
                        if copy.op is not None:
                            _share_memory(copy, mine[source])
            self._programs.append(
                [
                    self.scheduler.backends[split.backend].compile(
                        [slot.clone[n] for n in self.graph.nodes[split.first : split.last]], self.flat, self._threads
                    )
                    for split in self.splits
                ]
            )
        return self

    @property
    def originals(self) -> dict[Tensor, Tensor]:
        """Clone that runs -> node of the graph."""
        return {clone: node for slot in self._slots for node, clone in slot.clone.items()}

    @property
    def program(self) -> Schedule:
        """Itself: `Executable` has its program under this name."""
        return self

    @property
    def scratch_size(self) -> int:
        """Bytes of scratch of all splits."""
        return sum(p.scratch_size for programs in self._programs for p in programs)

    def run(
        self,
        callback: EvalCallback | None = None,
        abort: AbortCallback | None = None,
        timings: list[Timing] | None = None,
    ) -> Status:
        """Compute the graph and wait for it; see `Executable.run`."""
        self.synchronize()
        slot = self._next_slot()
        self._copy_inputs(slot)
        return self._run(slot, callback, abort, timings)

    def run_async(self, callback: EvalCallback | None = None, abort: AbortCallback | None = None) -> None:
        """Begin to compute. Until `synchronize`, outputs are not ready; inputs may be written again at once with a
        parallel scheduler, which has copied them, and not before with another. Runs do not overtake each other."""
        if self.scheduler.n_copies == 1:
            self.synchronize()
        slot = self._next_slot()
        waiting = self._pending[slot]
        if waiting is not None:
            waiting.result()
        self._copy_inputs(slot)
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "gguftools-schedule")
        self._pending[slot] = self._worker.submit(self._run, slot, callback, abort, None)

    def synchronize(self) -> Status:
        """Wait for what was begun. Returns how it ended, ABORTED if any of it was; raises what it raised."""
        ended = [f.result() for f in self._pending if f is not None]
        self._pending = [None] * self.scheduler.n_copies
        return Status.ABORTED if Status.ABORTED in ended else Status.SUCCESS

    def _next_slot(self) -> int:
        self._runs += 1
        return self._runs % self.scheduler.n_copies

    def _copy_inputs(self, slot: int) -> None:
        for copies in self._slots[slot].copies:
            for source, copy in copies.items():
                if copy.op is None:
                    self._copy(source, copy)

    def _copy(self, source: Tensor, copy: Tensor) -> None:
        copy.raw()[:] = source.raw()
        self.copied += source.nbytes

    def _run(
        self, slot: int, callback: EvalCallback | None, abort: AbortCallback | None, timings: list[Timing] | None
    ) -> Status:
        for split, copies, program in zip(self.splits, self._slots[slot].copies, self._programs[slot]):
            for source in split.inputs:
                if copies[source].op is not None:
                    self._copy(source, copies[source])
            status = program.run(callback, abort, timings)
            if status is Status.SUCCESS and abort is not None and split is not self.splits[-1] and abort():
                status = Status.ABORTED
            if status is not Status.SUCCESS:
                return status
        return Status.SUCCESS


@dataclass
class _Slot:
    """Headers of one place in the ring: node -> clone, and for each split source -> copy."""

    clone: dict[Tensor, Tensor]
    copies: list[dict[Tensor, Tensor]]


def _clone(node: Tensor, copies: Mapping[Tensor, Tensor], clones: Mapping[Tensor, Tensor]) -> Tensor:
    def there(source: Tensor | None) -> Tensor | None:
        if source is None:
            return None
        return copies.get(source) if source in copies and not node.is_empty_op else clones.get(source, source)

    clone = Tensor(node.format, node.ne, node.nb, node.name)
    clone.op, clone.params, clone.flags = node.op, node.params, node.flags
    clone.src = tuple(there(s) for s in node.src)
    if node.view_src is not None:
        clone.view_src, clone.view_offs = clones.get(node.view_src, node.view_src), node.view_offs
    return clone


def _share_memory(tensor: Tensor, other: Tensor) -> None:
    tensor.buffer, tensor.offset, tensor.backend = other.buffer, other.offset, other.backend


def by_layer(names: Sequence[str]) -> Callable[[str, int], str]:
    """A rule that spreads the layers of a model evenly: (tensor name, number of layers) -> backend. Tensors outside of
    the layers go to the last one."""

    def rule(tensor: str, n_layer: int) -> str:
        if not tensor.startswith("blk."):
            return names[-1]
        return names[int(tensor.split(".")[1]) * len(names) // n_layer]

    return rule
