"""From a file to a model that can be run: how its bytes come into memory, what is changed on the way, and who may watch
or stop it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gguftools.errors import GGUFError, naming
from gguftools.gguf.reader import GGUF, TensorView
from gguftools.toolbox.shards import open_set

if TYPE_CHECKING:
    from engine.backends import Backend
    from engine.scheduler import Scheduler
    from engine.session import Session
    from quant import Format

#: How weights come into memory. `mmap`: pages of the file, as they are needed, shared between processes; `none`: read
#: into memory of our own; `mlock`: the same, and never swapped out; `mmap+mlock`: pages that stay; `dio`: read past
#: the system's cache of files; `auto`: `mmap`, or `none` where a file cannot be mapped.
LOAD_MODES = ("auto", "none", "mmap", "mlock", "mmap+mlock", "dio")

STAGING = 64 << 20  # bytes that unbuffered reads take at a time

#: Told the share that is loaded, 0 to 1; returns whether to go on.
Progress = Callable[[float], bool]


class LoadCancelled(GGUFError):
    """The progress callback said no."""

    status = -2


@dataclass(frozen=True)
class _Loaded:
    """A tensor whose bytes are in memory of our own."""

    shape: tuple[int, ...]
    format: Format
    data: np.ndarray


def load(
    path: str | os.PathLike,
    backend: str | Backend | Scheduler = "cpu",
    threads: int | None = None,
    vocab_only: bool = False,
    *,
    threads_batch: int | None = None,
    mode: str = "auto",
    progress: Progress | None = None,
    overrides: Mapping[str, Any] | None = None,
    check_tensors: bool = False,
    activations: str = "f32",
) -> Session:
    """Open a GGUF model for running: a file, or any shard of a set; its weights stay in the file's memory map.

    backend: `cpu` or `reference`; threads: for one token at a time, threads_batch: for many; None means all cores;
    vocab_only: the tokenizer alone; mode: see LOAD_MODES; progress: called before each tensor and at the end;
    overrides: metadata values that count instead of the file's; check_tensors: refuse values that are not finite;
    activations: `f32`, or `q8`: rounded to 8 bits before they meet quantized weights, as llama.cpp does.

    >>> import gguftools
    >>> m = gguftools.load(gguftools.demo_model())
    >>> ids = m.tokenize("The first program")
    >>> m.logits(ids).shape == (len(ids), m.n_vocab)
    True

    Raises GGUFError for a damaged file, EngineError for a model that cannot be run; both name the file. Raises
    LoadCancelled if `progress` returns False.
    """
    from engine.session import Session

    if mode not in LOAD_MODES:
        raise GGUFError(f"there is no load mode '{mode}'; use one of {', '.join(LOAD_MODES)}")
    started = time.perf_counter()
    model = open_set(path)
    metadata = {**model.metadata, **(overrides or {})} if overrides else model.metadata
    if metadata.get("general.architecture") == "clip":
        raise GGUFError(f"{path}: is a projector for pictures, which no text can be run with; name the language model")
    with naming(path):
        if vocab_only:
            return Session(metadata, None, backend, threads)
        tensors: dict[str, Any] = {}
        for file, view in _watched(model.files, progress):
            tensors[view.name] = _placed(file, view, mode)
            if check_tensors:
                _check_values(file, view)
        session = Session(metadata, tensors, backend, threads, threads_batch, activations)
    session.load_seconds = time.perf_counter() - started
    return session


def _watched(files: Sequence[GGUF], progress: Progress | None) -> Iterator[tuple[GGUF, TensorView]]:
    """The tensors one after another, with word to `progress` before each and behind the last."""
    total = sum(view.nbytes for file in files for view in file.tensors.values())
    done = 0

    def say(share: float) -> None:
        if progress is not None and not progress(share):
            raise LoadCancelled(f"{files[0].path}: loading was cancelled")

    for file in files:
        for view in file.tensors.values():
            say(done / max(1, total))
            yield file, view
            done += view.nbytes
    say(1.0)


def _placed(file: GGUF, view: TensorView, mode: str) -> TensorView | _Loaded:
    """The tensor, its bytes where the mode wants them."""
    if mode in ("auto", "mmap"):
        return view
    if mode == "mmap+mlock":
        _lock(view.data, file.path)
        return view
    data = _read_directly(file, view) if mode == "dio" else view.data.copy()
    if mode == "mlock":
        _lock(data, file.path)
    return _Loaded(view.shape, view.format, data)


def _lock(data: np.ndarray, path: Path) -> None:
    """Keep the bytes from being swapped out, or say why that is not possible."""
    from gguftools import report

    lock = getattr(ctypes.CDLL(None, use_errno=True), "mlock", None) if sys.platform != "win32" else None
    if lock is None:
        raise GGUFError(f"{path}: this system cannot lock memory; use --load-mode mmap")
    start = data.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    if lock(ctypes.c_void_p(start), ctypes.c_size_t(data.ctypes.data + data.nbytes - start)):
        why = os.strerror(ctypes.get_errno())
        report.warn(f"{path}: memory cannot be locked ({why}); raise the limit (ulimit -l), or use --load-mode mmap")


def _read_directly(file: GGUF, view: TensorView) -> np.ndarray:
    """The tensor's bytes past the system's cache, through aligned memory; where the file system does not offer that, in
    the usual way."""
    if view.order != "<" or not hasattr(os, "O_DIRECT"):
        return view.data.copy()
    offset = file.data_offset + view.offset
    out = np.empty(view.nbytes, np.uint8)
    pages = min(STAGING, view.nbytes + 2 * mmap.PAGESIZE) // mmap.PAGESIZE
    staging = mmap.mmap(-1, pages * mmap.PAGESIZE)
    with contextlib.ExitStack() as stack:
        stack.callback(staging.close)
        try:
            handle = os.open(file.path, os.O_RDONLY | os.O_DIRECT)
            stack.callback(os.close, handle)
            at = 0
            while at < view.nbytes:
                block = (offset + at) // mmap.PAGESIZE * mmap.PAGESIZE
                got = os.preadv(handle, [staging], block)
                skip = offset + at - block
                part = min(got - skip, view.nbytes - at)
                if part <= 0:
                    raise GGUFError(f"{file.path}: the file was cut while it was read")
                out[at : at + part] = np.frombuffer(staging[skip : skip + part], np.uint8)
                at += part
        except OSError:
            return view.data.copy()
    return out


def _check_values(file: GGUF, view: TensorView) -> None:
    from quant.validate import validate

    bad = validate(view.data.reshape(-1), view.format)
    if bad >= 0:
        raise GGUFError(f"{file.path}: tensor '{view.name}' is not finite in block {bad}: the file is damaged")


def read_overrides(texts: Sequence[str]) -> dict[str, Any]:
    """`KEY=TYPE:VALUE` as a mapping for `load`. Raises GGUFError for anything else."""
    from gguftools.quantizing.prepare import read_override

    return {field.key: field.value for field in map(read_override, texts)}
