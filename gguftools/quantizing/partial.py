"""An output in the making that outlives its process: pieces are written to their places in any order, a journal notes
each, and the same command goes on where another was stopped.

Beside `NAME` lie `.NAME.partial`, the file as far as it is, and `.NAME.journal`, lines of JSON: the first holds the
digest of everything that decides the output, every other [offset, length, CRC-32, note] of a piece. A piece counts only
if the bytes that are there have its CRC, so it does not matter what of both files reached the disk before a crash.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np

from gguftools.errors import GGUFError
from gguftools.files import check_output, map_file

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

_VERSION = 1
_SHOWN = 200  # bytes of an output's name in the names of the files beside it, which may not be longer than 255
_NO_ROOM = {errno.ENOSPC, errno.EFBIG} | ({errno.EDQUOT} if hasattr(errno, "EDQUOT") else set())


class Partial:
    """The output `path` of `size` bytes. digest: of everything that decides its bytes; a partial output with another
    one is started anew. inputs: files that must not be overwritten.

    A context manager. If the block is interrupted, or fails for want of room, what is done is kept; if it fails because
    of its input (our errors, which the same command would meet again), it is removed. `finish` gives the file its name.
    resumed: bytes of an earlier run that were taken over (whoever asks `holds` counts).

    Raises GGUFError as `files.check_output` does, and if another process is writing the same output.
    """

    def __init__(self, path: Path, inputs: Iterable[Path], size: int, digest: str) -> None:
        self.path = path
        self.size = size
        self.target = check_output(path, inputs)
        shown = os.fsencode(self.target.name)[:_SHOWN].decode(errors="ignore")
        self.partial = self.target.with_name(f".{shown}.partial")
        self.journal = self.target.with_name(f".{shown}.journal")
        self.resumed = 0
        self._first = json.dumps({"gguftools": _VERSION, "digest": digest, "size": size})
        self._done: dict[int, tuple[int, int, Any]] = {}  # offset -> length, CRC-32, note
        self._earlier: dict[int, tuple[int, int, Any]] = {}  # the same, of an earlier run, not yet believed
        self._finished = False
        self._file: IO[bytes] | None = None
        self._notes: IO[bytes] | None = None

    @property
    def missing(self) -> int:
        """Bytes of disk that the output still takes: all, or what an earlier run has left."""
        try:
            there = self.partial.stat()
        except OSError:
            return self.size
        blocks = getattr(there, "st_blocks", None)
        return max(0, self.size - (there.st_size if blocks is None else blocks * 512))

    def __enter__(self) -> Partial:
        try:
            self._notes = _open(self.journal)
            _lock(self._notes, self.path)
        except BaseException as error:  # the files may be another process's: they stay
            self._close()
            raise self._refusal(error) from None
        try:
            self._file = _open(self.partial)
            self._earlier = self._read_journal()
            if not self._earlier:
                for file in (self._file, self._notes):
                    file.truncate(0)
                self._notes.seek(0)
                self._notes.write(self._first.encode() + b"\n")
                self._file.truncate(self.size)
        except BaseException as error:
            self._close()
            if not self._earlier:
                self._remove()
            raise self._refusal(error) from None
        return self

    def _refusal(self, error: BaseException) -> BaseException:
        """What the system says, in a line; other exceptions as they are."""
        if isinstance(error, OSError):
            return GGUFError(f"{self.path}: cannot be written: {_reason(error)}")
        return error

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        worth = not self._finished and bool(self._done or self._earlier)
        keep = worth and kind is not None and not issubclass(kind, ValueError)
        self._close()
        if keep:
            log.warning("%s: what is done is kept in %s; the same command goes on with it", self.path, self.partial)
        else:
            self._remove()
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            raise self._refusal(error) from None

    # --- pieces ---

    def holds(self, offset: int, length: int) -> bool:
        """Whether an earlier run has written this piece, and it is sound."""
        found = self._earlier.get(offset)
        if found is None or found[0] != length or self._file is None:
            return False
        if zlib.crc32(self._read(offset, length).data) != found[1]:
            return False
        self._done[offset] = found
        return True

    def note(self, offset: int) -> Any:
        """What was noted with a piece that is done."""
        return self._done[offset][2]

    def write(self, offset: int, data: memoryview, crc: int, note: Any = None) -> None:
        """Put a piece into its place. Raises OSError."""
        assert self._file is not None
        assert self._notes is not None
        self._put(offset, data)
        self._done[offset] = len(data), crc, note
        self._notes.seek(0, os.SEEK_END)
        self._notes.write(json.dumps([offset, len(data), crc, note]).encode() + b"\n")

    def _put(self, offset: int, data: memoryview) -> None:
        assert self._file is not None
        self._file.seek(offset)
        while data:  # the disk may take less than it was given
            data = data[self._file.write(data) :]

    def pieces(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """(offset, length, CRC-32) of what was written between two places, in order."""
        return sorted((at, n, crc) for at, (n, crc, _) in self._done.items() if start <= at < end)

    def _read(self, offset: int, length: int) -> np.ndarray:
        return map_file(self.partial)[offset : offset + length]

    # --- the end ---

    def settle(self) -> np.ndarray:
        """Bring everything to the disk; returns the bytes as a memory map that is read from there."""
        assert self._file is not None
        os.fsync(self._file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return map_file(self.partial)

    def finish(self, header: bytes) -> None:
        """Write the beginning of the file and give it its name. Raises GGUFError if that is refused."""
        assert self._file is not None
        self._put(0, memoryview(header))
        os.fsync(self._file.fileno())
        if self.target.exists():
            shutil.copymode(self.target, self.partial)
        self._file.close()
        try:
            self.partial.replace(self.target)
        except OSError as error:
            raise GGUFError(
                f"{self.path}: cannot be replaced ({error.strerror}); is it open in another program?"
            ) from None
        self._finished = True
        _sync_folder(self.target.parent)

    def _close(self) -> None:
        for file in (self._file, self._notes):
            if file is not None:
                file.close()

    def _remove(self) -> None:
        for path in (self.partial, self.journal):
            with contextlib.suppress(OSError):
                path.unlink()

    def _read_journal(self) -> dict[int, tuple[int, int, Any]]:
        """What an earlier run noted, if it was making the same file; a line that was cut short ends it."""
        assert self._notes is not None
        assert self._file is not None
        self._notes.seek(0)
        lines = self._notes.read().split(b"\n")
        if lines[0] != self._first.encode() or self._file.seek(0, os.SEEK_END) != self.size:
            return {}
        if lines[-1]:
            self._notes.write(b"\n")
        found = {}
        for line in lines[1:-1]:
            with contextlib.suppress(ValueError, TypeError):
                offset, length, crc, note = json.loads(line)
                found[int(offset)] = int(length), int(crc), note
        return found


def _open(path: Path) -> IO[bytes]:
    """For reading and writing, made if absent, unbuffered; never through a link that another user has laid."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    return os.fdopen(os.open(path, flags, 0o666), "r+b", buffering=0)


def _lock(file: IO[bytes], path: Path) -> None:
    """Raises GGUFError if another process has the file; does nothing where files cannot be locked."""
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise GGUFError(f"{path}: another process is writing it; wait for it, or choose another name") from None
    except OSError:
        return


def _reason(error: OSError) -> str:
    room = "; make room or choose another disk" if error.errno in _NO_ROOM else ""
    return f"{error.strerror or error}{room}"


def _sync_folder(path: Path) -> None:
    with contextlib.suppress(OSError):  # folders cannot be opened on Windows
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
