"""Files at the edges: read-only memory maps, and outputs that are whole or absent.

An output never overwrites an input by any link, is written under a temporary name in the same folder, and takes its
name only when it is complete and on the disk.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import numpy as np

from gguftools.errors import GGUFError

_NO_ROOM = {errno.ENOSPC, errno.EFBIG} | ({errno.EDQUOT} if hasattr(errno, "EDQUOT") else set())

_SHOWN = 200  # bytes of an output's name in the temporary name, which may not be longer than 255


def read_whole(path: Path, what: str) -> bytes:
    """The bytes of a small file, or of a pipe; `what` is expected of it, as in "a text file".

    Raises GGUFError if there is no such file, or it is a folder or a device (which may have no end), or may not be
    read.
    """
    try:
        kind = path.stat().st_mode
        if stat.S_ISDIR(kind):
            raise GGUFError(f"{path}: is a folder, expected {what}")
        if stat.S_ISBLK(kind) or (stat.S_ISCHR(kind) and not path.samefile(os.devnull)):
            raise GGUFError(f"{path}: is a device, expected {what}")
        return path.read_bytes()
    except OSError as error:
        raise GGUFError(f"{path}: cannot be read: {error.strerror or error}") from None


def map_file(path: Path) -> np.ndarray:
    """The bytes of a file, uint8 [size], read-only, as a memory map that lives as long as views of it.

    Raises GGUFError if there is no such file, or it is empty, a folder or a device, or may not be read.
    """
    try:
        kind = path.stat().st_mode
        if stat.S_ISDIR(kind):
            raise GGUFError(f"{path}: is a folder, expected a file")
        if not stat.S_ISREG(kind):
            raise GGUFError(f"{path}: is not a regular file")
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise GGUFError(f"{path}: the file is empty; download or make it again")
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except FileNotFoundError:
        raise GGUFError(f"{path}: no such file") from None
    except OSError as error:
        raise GGUFError(f"{path}: cannot be read: {error.strerror or error}") from None


def same_file(a: Path, b: Path) -> bool:
    """Whether both names lead to one file, by whatever links; for absent files, whether the names are the same."""
    try:
        return a.samefile(b)
    except OSError:
        return os.path.normcase(os.path.realpath(a)) == os.path.normcase(os.path.realpath(b))


def check_output(path: Path, inputs: Iterable[Path] = ()) -> Path:
    """The file that writing to `path` would replace (links followed).

    Raises GGUFError if it is one of the inputs, a folder, a device, or in a folder that does not exist or may not be
    written.
    """
    for source in inputs:
        if same_file(path, Path(source)):
            raise GGUFError(f"{path}: is the input file {source}; choose another name for the output")
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise GGUFError(f"{path}: the folder {target.parent} does not exist; make it first")
    if not os.access(target.parent, os.W_OK):
        raise GGUFError(f"{path}: the folder {target.parent} may not be written; choose another")
    try:
        kind = target.stat().st_mode
    except FileNotFoundError:
        return target
    except OSError as error:
        raise GGUFError(f"{path}: cannot be written: {error.strerror or error}") from None
    if stat.S_ISDIR(kind):
        raise GGUFError(f"{path}: is a folder; name a file in it")
    if not stat.S_ISREG(kind):
        raise GGUFError(f"{path}: is not a regular file; choose another name for the output")
    return target


def check_space(path: Path, size: int) -> None:
    """Raises GGUFError unless `size` more bytes fit beside `path`."""
    free = shutil.disk_usage(Path(os.path.realpath(path)).parent).free
    if free < size:
        raise GGUFError(f"{path}: needs {size:,} bytes, the disk has {free:,} free; make room or choose another disk")


@contextlib.contextmanager
def atomic_output(path: str | os.PathLike, inputs: Iterable[str | os.PathLike] = ()) -> Iterator[IO[bytes]]:
    """A binary file that becomes `path` when the block ends, and vanishes if the block fails in any way.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with atomic_output(Path(folder, "result.bin")) as file:
    ...         written = file.write(b"all or nothing")
    ...     os.listdir(folder)
    ['result.bin']

    inputs: files that must not be overwritten. Raises GGUFError as `check_output` does, and when the disk is full or
    the file cannot be made or renamed.
    """
    path = Path(path)
    target = check_output(path, [Path(source) for source in inputs])
    shown = os.fsencode(target.name)[:_SHOWN].decode(errors="ignore")
    partial = target.with_name(f".{shown}.{secrets.token_hex(4)}.partial")
    try:  # from the first moment: a signal may come between any two lines
        with _create(partial, path) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _replace(partial, target, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            raise GGUFError(f"{path}: cannot be written: {error.strerror}; make room or choose another disk") from None
        raise


def _create(partial: Path, shown: Path) -> IO[bytes]:
    try:
        return partial.open("xb")
    except OSError as error:
        raise GGUFError(f"{shown}: cannot be written: {error.strerror or error}") from None


def _replace(partial: Path, target: Path, shown: Path) -> None:
    try:
        partial.replace(target)
    except OSError as error:
        raise GGUFError(f"{shown}: cannot be replaced ({error.strerror}); is it open in another program?") from None
    with contextlib.suppress(OSError):  # folders cannot be opened on Windows
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
