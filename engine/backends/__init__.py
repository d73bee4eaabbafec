"""Backends: what runs a graph. `reference` (NumPy) is the definition of every op, `cpu` (numba) is the fast one."""

from __future__ import annotations

from engine.backends.base import Backend, Executable
from engine.errors import EngineError

NAMES = ("cpu", "reference")


def get_backend(name: str, threads: int | None = None) -> Backend:
    """The backend called `name`. Raises EngineError that lists what there is."""
    if name == "reference":
        from engine.backends.reference import ReferenceBackend

        return ReferenceBackend()
    if name == "cpu":
        from engine.backends.cpu import CpuBackend

        return CpuBackend(threads)
    raise EngineError(f"unknown backend '{name}'; there are: {', '.join(NAMES)}")


__all__ = ["NAMES", "Backend", "Executable", "get_backend"]
