"""One pass over the weights: a thread reads ahead, as many as wanted quantize, and the caller's writes.

The unit is a piece of rows of one tensor. It is read once, quantized for every output that wants it, and goes to its
place in each, so the order in which pieces are done does not matter. What is in memory is bounded by the number of
threads, not by the model.
"""

from __future__ import annotations

import os
import queue
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gguftools.quantizing.partial import Partial
from gguftools.quantizing.source import PIECE, SourceTensor
from quant.format import Format

BYTES_PER_WEIGHT = 12  # of a piece in work: float32, the source's bytes, the output's, and temporaries
BUFFER = 384 << 20  # bytes of pieces in work at a time, if nothing else is asked for


@dataclass(frozen=True)
class Place:
    """Where a tensor goes. output: number; format; offset: bytes from the file's beginning; reused: the same tensor as
    an older output has it, whose bytes are taken instead; measured: whether the error is wanted."""

    output: int
    format: Format
    offset: int
    reused: SourceTensor | None = None
    measured: bool = False


@dataclass(frozen=True)
class Job:
    """One tensor and its places. importance: function that gives float32 [matrices, n], or None."""

    source: SourceTensor
    places: tuple[Place, ...]
    importance: Callable[[], np.ndarray] | None = None
    by_matrix: bool = False

    def bytes_at(self, place: Place, lo: int, hi: int) -> tuple[int, int]:
        """Offset and length of rows lo to hi in an output."""
        size = place.format.row_size(self.source.n)
        return place.offset + lo * size, (hi - lo) * size


@dataclass
class Sums:
    """Of a tensor's values and of what quantizing adds to them, for the relative error."""

    error: float = 0.0
    values: float = 0.0

    @property
    def relative(self) -> float:
        return (self.error / self.values) ** 0.5 if self.values else 0.0


@dataclass
class Done:
    """What a pass found. errors: (output, name) -> sums, of the places that were measured."""

    errors: dict[tuple[int, str], Sums] = field(default_factory=dict)

    def add(self, output: int, name: str, note: Any) -> None:
        if note:
            sums = self.errors.setdefault((output, name), Sums())
            sums.error += note[0]
            sums.values += note[1]


@dataclass(frozen=True)
class _Piece:
    job: Job
    lo: int
    hi: int


@dataclass(frozen=True)
class _Written:
    """A piece for one output; data None: an earlier run had it."""

    place: Place
    job: Job
    offset: int
    data: np.ndarray | None
    crc: int
    note: Any


def run(
    jobs: Sequence[Job],
    outputs: Sequence[Partial],
    threads: int | None = None,
    buffer: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Done:
    """Carry out all jobs. buffer: bytes of pieces in work at a time; progress: called with bytes of the source.

    Raises what reading, quantizing and writing raise; all threads have ended then.
    """
    done = Done()
    widest = max((max(PIECE, job.source.n) for job in jobs), default=PIECE)
    copies = max((len(job.places) for job in jobs), default=1)
    wanted = threads or os.cpu_count() or 1
    workers = max(1, min(wanted, (buffer or BUFFER) // (widest * (BYTES_PER_WEIGHT + copies - 1))))
    pieces = (_Piece(job, lo, hi) for job in jobs for lo, hi in job.source.spans(job.by_matrix))
    memory = _Importance()

    def work(piece: _Piece) -> tuple[_Piece, list[_Written]]:
        return piece, _quantize(piece, outputs, memory)

    for piece, written in in_parallel(pieces, work, workers, ahead=_touch):
        for one in written:
            if one.data is not None:
                outputs[one.place.output].write(one.offset, one.data.data, one.crc, one.note)
            else:
                outputs[one.place.output].resumed += one.job.bytes_at(one.place, piece.lo, piece.hi)[1]
            done.add(one.place.output, one.job.source.name, one.note)
        if progress is not None:
            progress((piece.hi - piece.lo) * piece.job.source.format.row_size(piece.job.source.n))
    return done


_TENSORS_IN_WORK = 4


class _Importance:
    """Importance of the tensors in work: read once for a tensor's many pieces, dropped when others follow."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, np.ndarray] = {}

    def of(self, job: Job) -> np.ndarray | None:
        if job.importance is None:
            return None
        name = job.source.name
        with self._lock:
            if name not in self._found:
                while len(self._found) > _TENSORS_IN_WORK:
                    self._found.pop(next(iter(self._found)))
                self._found[name] = job.importance()
            return self._found[name]


def _touch(piece: _Piece) -> None:
    """Bring a piece's pages into memory, while others are quantized."""
    if not piece.job.source.as_float:
        piece.job.source.fetch(piece.lo, piece.hi)[:, ::4096].sum()


def _quantize(piece: _Piece, outputs: Sequence[Partial], memory: _Importance) -> list[_Written]:
    job, source = piece.job, piece.job.source
    rows: np.ndarray | None = None
    written = []
    for place in job.places:
        offset, length = job.bytes_at(place, piece.lo, piece.hi)
        output = outputs[place.output]
        if output.holds(offset, length):
            written.append(_Written(place, job, offset, None, 0, output.note(offset)))
            continue
        note = None
        if place.reused is not None:
            data = place.reused.raw(piece.lo, piece.hi)
        elif place.format is source.format:
            data = source.raw(piece.lo, piece.hi)
        else:
            rows = source.read(piece.lo, piece.hi) if rows is None else rows
            data = _blocks(piece, place, rows, memory)
            note = _error(rows, data, place.format) if place.measured else None
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        written.append(_Written(place, job, offset, flat, zlib.crc32(flat.data), note))
    return written


def _blocks(piece: _Piece, place: Place, rows: np.ndarray, memory: _Importance) -> np.ndarray:
    from quant.quantize import quantize_into

    source, fmt = piece.job.source, place.format
    importance = memory.of(piece.job)
    weights = None
    if importance is not None:
        weights = importance[piece.lo * len(importance) // max(1, source.n_rows)]
    blocks = np.empty((len(rows), source.n // fmt.block_size), fmt.block)
    quantize_into(rows, fmt, blocks, weights, 1, source.where, piece.lo)
    return blocks


def _error(rows: np.ndarray, blocks: np.ndarray, fmt: Format) -> tuple[float, float]:
    from quant.quantize import dequantize_blocks

    difference = dequantize_blocks(blocks, fmt, 1)
    difference -= rows
    return (
        float(np.einsum("ij,ij->", difference, difference, dtype=np.float64)),
        float(np.einsum("ij,ij->", rows, rows, dtype=np.float64)),
    )


# --- threads ----------------------------------------------------------------------------------------------------------


def in_parallel(
    items: Iterator[Any],
    work: Callable[[Any], Any],
    threads: int,
    ahead: Callable[[Any], None] | None = None,
) -> Iterator[Any]:
    """Results of work(item), in the order in which they are done; ahead(item) is called before, on a thread of its own.

    At most a few results per thread wait for their taker. The first error ends everything and is raised.
    """
    todo: queue.Queue = queue.Queue(2 * threads)
    done: queue.Queue = queue.Queue(threads + 1)
    stop = threading.Event()

    def put(place: queue.Queue, item: Any) -> None:
        while not stop.is_set():
            try:
                place.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def feed() -> None:
        try:
            for item in items:
                if stop.is_set():
                    break
                if ahead is not None:
                    ahead(item)
                put(todo, (item,))
        except BaseException as error:
            put(done, error)
        for _ in range(threads):
            put(todo, None)

    def loop() -> None:
        try:
            while not stop.is_set():
                try:
                    taken = todo.get(timeout=0.1)
                except queue.Empty:
                    continue
                if taken is None:
                    break
                put(done, (work(taken[0]),))
        except BaseException as error:
            put(done, error)
        put(done, None)

    started = [threading.Thread(target=target, daemon=True) for target in (feed, *[loop] * threads)]
    for thread in started:
        thread.start()
    left = threads
    try:
        while left:
            result = done.get()
            if result is None:
                left -= 1
            elif isinstance(result, BaseException):
                raise result
            else:
                yield result[0]
    finally:
        stop.set()
        for thread in started:
            thread.join()
