"""Files are put together: room is made, the pass over the weights runs, what is on the disk is read again and checked,
and only then do the files get their names."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gguftools._version import __version__
from gguftools.errors import GGUFError
from gguftools.files import check_space
from gguftools.quantizing.partial import Partial
from gguftools.quantizing.pipeline import Job, Sums, in_parallel, run
from gguftools.quantizing.prepare import File
from quant.mixes import Choice

#: A function that is told what begins and how many bytes there are, and gives one to call with bytes that are done.
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


@contextlib.contextmanager
def silent(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Progress that nobody watches."""
    yield lambda n: None


@dataclass(frozen=True)
class Written:
    """errors: (number of the file, tensor) -> sums, where they were measured; resumed: bytes per file that an earlier
    run had done."""

    errors: Mapping[tuple[int, str], Sums]
    resumed: tuple[int, ...]


def assemble(
    files: Sequence[File],
    jobs: Sequence[Job],
    inputs: Sequence[Path],
    about: Any,
    header: Callable[[File, Mapping[str, str]], bytes] = lambda file, digests: file.header,
    threads: int | None = None,
    buffer: int | None = None,
    progress: Progress = silent,
    hashed: bool = False,
    verb: str = "quantizing",
) -> Written:
    """Write `files` by carrying out `jobs`, whose places name them by number.

    inputs: what the files are made from; about: whatever else decides their bytes, as JSON can hold it; header: gives
    the beginning of a finished file, of the length that was planned, from the SHA-256 of its tensors' data ("" unless
    `hashed`).

    Raises GGUFError if there is no room, or the disk gives back something else than was written, and what reading and
    quantizing raise.
    """
    stamp = _stamp(inputs, about)
    partials = [Partial(file.path, inputs, file.size, _digest(file, stamp)) for file in files]
    for path, size in _room(partials).items():
        check_space(path, size)
    with ExitStack() as stack:
        for partial in partials:
            stack.enter_context(partial)
        with progress(verb, sum(job.source.n_bytes for job in jobs)) as advance:
            done = run(jobs, partials, threads, buffer, advance)
        with progress("verifying", sum(c.n_bytes for file in files for c in file.choices)) as advance:
            digests = [_verify(file, partial, hashed, threads, advance) for file, partial in zip(files, partials)]
        for file, partial, found in zip(files, partials, digests):
            partial.finish(header(file, found))
    return Written(done.errors, tuple(partial.resumed for partial in partials))


def _stamp(inputs: Sequence[Path], about: Any) -> list[Any]:
    """What decides the outputs' bytes beyond their headers."""
    stats = [(os.path.realpath(path), path.stat()) for path in inputs]
    return [__version__, [(name, s.st_size, s.st_mtime_ns) for name, s in stats], about]


def _digest(file: File, stamp: list[Any]) -> str:
    header = hashlib.sha256(file.header).hexdigest()
    return hashlib.sha256(json.dumps([header, file.size, stamp]).encode()).hexdigest()


def _room(partials: Sequence[Partial]) -> dict[Path, int]:
    """Bytes that are needed, by folder, for which its first output stands."""
    needed: dict[Path, tuple[Path, int]] = {}
    for partial in partials:
        first, size = needed.get(partial.target.parent, (partial.path, 0))
        needed[partial.target.parent] = first, size + partial.missing
    return dict(needed.values())


def _verify(
    file: File, partial: Partial, hashed: bool, threads: int | None, advance: Callable[[int], None]
) -> dict[str, str]:
    """Read a file again from the disk: every byte as it was written, every block sound. Returns the SHA-256 of each
    tensor's data ("" unless `hashed`)."""
    data = partial.settle()

    def work(choice: Choice) -> tuple[Choice, str]:
        return choice, _verify_tensor(file, choice, partial, data, hashed)

    digests = {}
    for choice, found in in_parallel(iter(file.choices), work, threads or os.cpu_count() or 1):
        digests[choice.name] = found
        advance(choice.n_bytes)
    return digests


def _verify_tensor(file: File, choice: Choice, partial: Partial, data: np.ndarray, hashed: bool) -> str:
    """SHA-256 of a tensor's data on the disk, "" if it was not asked for."""
    from quant.validate import first_bad_block

    start = file.offsets[choice.name]
    state, at = hashlib.sha256(), start
    for offset, length, crc in partial.pieces(start, start + choice.n_bytes):
        piece = data[offset : offset + length]
        if offset != at or zlib.crc32(piece.data) != crc:
            raise GGUFError(
                f"{file.path}: tensor '{choice.name}' reads differently from what was written; check the disk"
            )
        at += length
        if choice.target.module is not None and first_bad_block(piece.view(choice.target.block), choice.target) >= 0:
            raise GGUFError(
                f"{file.path}: tensor '{choice.name}' holds a block that is not finite; this is a bug of ours"
            )
        if hashed:
            state.update(piece.data)
    if at != start + choice.n_bytes:
        raise GGUFError(f"{file.path}: tensor '{choice.name}' is not whole; check the disk")
    return state.hexdigest() if hashed else ""
