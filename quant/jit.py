"""The one place with numba options: how kernels of this project are compiled and cached.

numba's cache notices changes only in a kernel's own file. So the cache folder's name carries a digest of all sources of
the kernel's package, and of those below it, and of the versions that code generation depends on: an edit anywhere in
them means a new folder.
The folder is set for our kernels only; other numba code in the process keeps its own.

No fastmath in `kernel`: quantizers must give the reference's bytes, which come from strict float32 in a fixed order.
It is switched off by name, since a function otherwise takes over the setting of whoever calls it first.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numba
from numba.core import config as numba_config
from numba.core.caching import IndexDataCacheFile
from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature
from platformdirs import user_cache_path

from quant.cache import writable

_ROOT = Path(__file__).resolve().parent.parent


#: package -> packages whose sources its kernels are made of
_SOURCES = {"quant": ("quant",), "engine": ("quant", "engine")}
#: folders without kernels, and without anything that kernels are made of: an edit there recompiles nothing
WITHOUT_KERNELS = (
    "engine/models",
    "engine/tokenizer",
    "engine/sampling",
    "engine/cache",
    "engine/batch.py",
    "engine/contexts.py",
    "engine/pooling.py",
    "engine/adapters.py",
    "engine/activations.py",
    "engine/generation",
)


config: Any = numba_config  # its settings are made at run time, unknown to type checkers


@lru_cache
def cache_folder(package: str = "quant") -> Path:
    """Folder of a package's compiled kernels: the user's cache, or NUMBA_CACHE_DIR, below a digest of sources and
    versions; a temporary one where that cannot be written."""
    digest = hashlib.sha256()
    for name in _SOURCES.get(package, _SOURCES["engine"]):
        for path in sorted((_ROOT / name).rglob("*.py")):
            if not path.relative_to(_ROOT).as_posix().startswith(WITHOUT_KERNELS):
                digest.update(path.read_bytes())
    for name in ("numba", "llvmlite", "numpy"):
        digest.update(f"{name} {version(name)}".encode())
    base = writable(Path(config.CACHE_DIR)) if config.CACHE_DIR else writable(user_cache_path("gguftools") / "kernels")
    return base / f"{package}-{digest.hexdigest()[:16]}"


class _CacheFile(IndexDataCacheFile):
    """numba's cache of one function, safe for processes that fill it at the same time.

    numba numbers the files of machine code by what it finds in the index: two processes can give one number to
    different code, and a third then runs what it did not ask for. Here a file is named after what is in it, and written
    before the index names it; what a lost entry costs is one compilation.
    """

    def save(self, key, data):
        name = f"{self._index_name.removesuffix('.nbi')}.{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.nbc"
        self._save_data(name, data)
        self._save_index(self._load_index() | {key: name})


_setting = threading.Lock()  # modules with kernels may be imported on several threads at once


@contextmanager
def _cache_of(function: Callable):
    """numba's cache folder is the one of the function's package."""
    with _setting:
        before = config.CACHE_DIR
        config.CACHE_DIR = str(cache_folder(function.__module__.split(".")[0]))
        try:
            yield
        finally:
            config.CACHE_DIR = before


def _cached(compiled: Any, function: Callable):
    """Turn the cache of a dispatcher or a native function on."""
    with _cache_of(function):
        compiled.enable_caching()
    cache = compiled._cache
    locator = cache._impl.locator
    cache._cache_file = _CacheFile(cache._cache_path, cache._impl.filename_base, locator.get_source_stamp())
    return compiled


#: What the engine's kernels may do with sums; infinities and NaN keep their meaning.
_FAST = {"reassoc", "contract", "nsz", "arcp"}


def kernel(function: Callable) -> Callable:
    """Compile `function` for each argument types on first call; cached on disk; runs without the GIL."""
    return _cached(numba.njit(nogil=True, error_model="numpy", fastmath=False)(function), function)


def fast_kernel(function: Callable) -> Callable:
    """As `kernel`, but sums may be reordered and multiply-adds contracted: for the engine, never for quantizers."""
    return _cached(numba.njit(nogil=True, error_model="numpy", fastmath=_FAST)(function), function)


def fast_inline(function: Callable) -> Callable:
    """As `fast_kernel`, but copied into its callers. For sums: a function of its own may be compiled once more in each
    caller, with another order of the sum, and then results depend on which copy the linker meets first."""
    return numba.njit(inline="always", nogil=True, error_model="numpy", fastmath=_FAST)(function)


def native(signature, function: Callable):
    """Compile `function` to machine code at once, for calls through its `.address`; cached on disk."""
    options = {"error_model": "numpy", "fastmath": _FAST}
    compiled = _cached(CFunc(function, normalize_signature(signature), locals={}, options=options), function)
    compiled.compile()
    return compiled
