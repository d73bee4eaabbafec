"""Backends: what runs a graph. `reference` (NumPy) is the definition of every op, `cpu` (numba) is the fast one.

The registry maps names to factories, so that further backends can join without a change here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from importlib import import_module

from engine.backends.base import Backend, EvalCallback, Executable, Program, Status, Timing
from engine.errors import EngineError


class Device(Enum):
    """What a backend runs on."""

    CPU = "cpu"
    GPU = "gpu"
    ACCEL = "accel"


@dataclass(frozen=True)
class Entry:
    """A registered backend. make: (threads or None, further options) -> Backend."""

    name: str
    make: Callable[..., Backend]
    device: Device = Device.CPU


def _lazily(module: str, name: str, *takes: str) -> Callable[..., Backend]:
    """A factory that imports its module when it is first called."""

    def make(**options) -> Backend:
        return getattr(import_module(module), name)(**{k: v for k, v in options.items() if k in takes})

    return make


_REGISTRY: dict[str, Entry] = {}


def register(name: str, make: Callable[..., Backend], device: Device = Device.CPU) -> None:
    """Add a backend, or replace the one of that name."""
    _REGISTRY[name] = Entry(name, make, device)


def registered() -> dict[str, Entry]:
    """Name -> entry of every backend, in the order of registration."""
    return dict(_REGISTRY)


def get_backend(name: str, threads: int | None = None, **options) -> Backend:
    """The backend called `name`. threads: None means all cores. Raises EngineError that lists what there is."""
    if not _REGISTRY:
        raise EngineError("no backends are registered; register one, or import engine.backends afresh")
    if name not in _REGISTRY:
        raise EngineError(f"unknown backend '{name}'; there are: {', '.join(_REGISTRY)}")
    return _REGISTRY[name].make(threads=threads, **options)


register("cpu", _lazily("engine.backends.cpu", "CpuBackend", "threads", "threads_batch", "fuse", "poll"))
register("reference", _lazily("engine.backends.reference", "ReferenceBackend"))

__all__ = [
    "Backend", "Device", "Entry", "EvalCallback", "Executable", "Program", "Status", "Timing", "get_backend",
    "register",
    "registered",
]  # fmt: skip
