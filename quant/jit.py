"""The one place with numba options: how kernels of this project are compiled and cached.

numba's cache notices changes only in a kernel's own file. So the cache folder's name carries a digest of all sources of
`quant` and `engine` and of the versions that code generation depends on: an edit anywhere means a new folder.
The folder is set for our kernels only; other numba code in the process keeps its own.

No fastmath in `kernel`: quantizers must give the reference's bytes, and those come from strict float32 in a fixed order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

import numba
from numba.core import config
from platformdirs import user_cache_path

_ROOT = Path(__file__).resolve().parent.parent


@lru_cache(maxsize=1)
def cache_folder() -> Path:
    """Folder of the compiled kernels: the user's cache, or NUMBA_CACHE_DIR, below a digest of sources and versions."""
    digest = hashlib.sha256()
    for package in ("quant", "engine"):
        for path in sorted((_ROOT / package).rglob("*.py")):
            digest.update(path.read_bytes())
    for name in ("numba", "llvmlite", "numpy"):
        digest.update(f"{name} {version(name)}".encode())
    base = Path(config.CACHE_DIR) if config.CACHE_DIR else user_cache_path("gguftools") / "kernels"
    return base / digest.hexdigest()[:16]


@contextmanager
def _our_cache():
    before = config.CACHE_DIR
    config.CACHE_DIR = str(cache_folder())
    try:
        yield
    finally:
        config.CACHE_DIR = before


#: What the engine's kernels may do with sums; infinities and NaN keep their meaning.
_FAST = {"reassoc", "contract", "nsz", "arcp"}


def kernel(function: Callable) -> Callable:
    """Compile `function` for each argument types on first call; cached on disk; runs without the GIL."""
    with _our_cache():
        return numba.njit(cache=True, nogil=True, error_model="numpy")(function)


def fast_kernel(function: Callable) -> Callable:
    """As `kernel`, but sums may be reordered and multiply-adds contracted: for the engine, never for quantizers."""
    with _our_cache():
        return numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=_FAST)(function)


def native(signature, function: Callable):
    """Compile `function` to machine code at once, for calls through its `.address`; cached on disk."""
    with _our_cache():
        return numba.cfunc(signature, cache=True, error_model="numpy", fastmath=_FAST)(function)
