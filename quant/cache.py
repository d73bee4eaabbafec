"""Where what can be made again is kept: compiled kernels, the demonstration model."""

from __future__ import annotations

import atexit
import logging
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path

from platformdirs import user_cache_path

log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """The user's cache folder of this project, or what `writable` puts in its place."""
    return writable(user_cache_path("gguftools"))


@lru_cache
def writable(folder: Path) -> Path:
    """`folder`, made if need be; where it cannot be written, a new one that vanishes when the process ends.

    Raises OSError where temporary files cannot be written either.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        log.warning("%s cannot be written (%s): what would be kept there is made anew by every process", folder, error)
    instead = tempfile.mkdtemp(prefix="gguftools-cache-")
    atexit.register(shutil.rmtree, instead, ignore_errors=True)
    return Path(instead)
