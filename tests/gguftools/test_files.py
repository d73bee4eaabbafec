"""Outputs are whole or absent, and never an input."""

import errno
import os
import sys

import pytest

from gguftools.errors import GGUFError
from gguftools.files import atomic_output, check_output, map_file, read_whole, same_file

links = pytest.mark.skipif(sys.platform == "win32", reason="links need rights on Windows")


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_the_file_appears_when_complete(tmp_path):
    path = tmp_path / "out.bin"
    path.write_bytes(b"old")
    with atomic_output(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
        partial = [name for name in names(tmp_path) if name != "out.bin"]
        assert len(partial) == 1
        assert partial[0].startswith(".out.bin.")
        assert partial[0].endswith(".partial")
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["out.bin"]


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_failure_leaves_what_was_there(failure, tmp_path):
    path = tmp_path / "out.bin"
    path.write_bytes(b"old")

    def write():
        with atomic_output(path) as file:
            file.write(b"new")
            raise failure

    with pytest.raises(failure):
        write()
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["out.bin"]


def test_a_full_disk_is_one_line(tmp_path):
    with pytest.raises(GGUFError, match="No space left on device; make room"), atomic_output(tmp_path / "a"):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(FileNotFoundError), atomic_output(tmp_path / "a"):
        raise FileNotFoundError(errno.ENOENT, "another file's trouble")
    assert names(tmp_path) == []


@links
@pytest.mark.parametrize("kind", ["itself", "other spelling", "symlink", "symlink to the folder", "hard link", "chain"])
def test_an_input_is_refused_by_any_link(kind, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    source = folder / "in.bin"
    source.write_bytes(b"data")
    out = folder / "out.bin"
    if kind == "itself":
        out = source
    elif kind == "other spelling":
        out = folder / ".." / "folder" / "in.bin"
    elif kind == "symlink":
        out.symlink_to(source)
    elif kind == "symlink to the folder":
        (tmp_path / "door").symlink_to(folder)
        out = tmp_path / "door" / "in.bin"
    elif kind == "hard link":
        os.link(source, out)
    else:
        (folder / "middle").symlink_to(source)
        out.symlink_to(folder / "middle")
    before = names(folder)
    with pytest.raises(GGUFError, match="is the input file"), atomic_output(out, [tmp_path / "other", source]):
        pass
    assert source.read_bytes() == b"data"
    assert names(folder) == before


@links
def test_a_link_is_written_through(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out.bin").symlink_to(tmp_path / "disk" / "real.bin")
    with atomic_output(tmp_path / "out.bin") as file:
        file.write(b"new")
    assert (tmp_path / "out.bin").is_symlink()
    assert (tmp_path / "disk" / "real.bin").read_bytes() == b"new"


def test_impossible_outputs(tmp_path):
    with pytest.raises(GGUFError, match="is a folder"), atomic_output(tmp_path):
        pass
    with pytest.raises(GGUFError, match="does not exist; make it first"), atomic_output(tmp_path / "a" / "b"):
        pass
    if os.path.exists("/dev/null"):  # noqa: PTH110
        with pytest.raises(GGUFError, match="not a regular file"), atomic_output("/dev/null"):
            pass
    with pytest.raises(GGUFError, match="cannot be written"), atomic_output(tmp_path / ("n" * 300)):
        pass


def test_a_folder_that_may_not_be_written_is_seen_first(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # rights do not bind who runs tests as root
    with pytest.raises(GGUFError, match="may not be written; choose another"):
        check_output(tmp_path / "out.bin")


def test_read_whole(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert read_whole(tmp_path / "a", "a text file") == b"abc"
    with pytest.raises(GGUFError, match="is a folder, expected a text file"):
        read_whole(tmp_path, "a text file")
    with pytest.raises(GGUFError, match="cannot be read: No such file"):
        read_whole(tmp_path / "b", "a text file")


def test_same_file(tmp_path):
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / "b").write_bytes(b"")
    assert same_file(tmp_path / "a", tmp_path / "." / "a")
    assert not same_file(tmp_path / "a", tmp_path / "b")
    assert same_file(tmp_path / "absent", tmp_path / "x" / ".." / "absent")
    assert not same_file(tmp_path / "a", tmp_path / "absent")


def test_maps_are_read_only_and_outlive_the_name(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    data = map_file(tmp_path / "a")
    assert data.tobytes() == b"abc"
    with pytest.raises(ValueError, match="read-only"):
        data[0] = 1
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(GGUFError, match="is empty"):
        map_file(tmp_path / "empty")
