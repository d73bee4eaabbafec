"""Files that are made to exhaust a reader: large ones too (sparse, so they take no disk). Each must be refused, or
read, in little memory."""

import json
import struct
import sys
from pathlib import Path

import pytest

from gguftools.errors import GGUFError
from gguftools.gguf import GGUF
from gguftools.imatrix_file import read_imatrix
from gguftools.safetensors import MAX_HEADER, SafetensorsFile
from gguftools.toolbox.check import check

resource = pytest.importorskip("resource")

MEMORY = 200_000_000  # bytes
ARRAY, STRING, BOOL, U8 = 9, 8, 7, 0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sparse files")


def text(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def header(n_tensors: int, n_keys: int) -> bytes:
    return b"GGUF" + struct.pack("<Iqq", 3, n_tensors, n_keys)


def array(key: bytes, kind: int, count: int) -> bytes:
    return text(key) + struct.pack("<IIQ", ARRAY, kind, count)


def safetensors(head: bytes) -> bytes:
    return struct.pack("<Q", len(head)) + head


def many_arrays(n: int) -> bytes:
    """As many empty strings as are allowed, and one array more."""
    part = 1 << 20
    return b"".join(array(b"k%d" % i, STRING, part) + bytes(8 * part) for i in range(n))


def small_key(i: int) -> bytes:
    return text(b"%d" % i) + struct.pack("<IB", 0, 1)


def small_tensor(i: int) -> bytes:
    return text(b"%d" % i) + struct.pack("<IIQ", 0, 24, 32 * i)


def entries(n: int) -> bytes:
    """The header of a safetensors file with as many empty tensors."""
    found = {str(i): {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(n)}
    return json.dumps(found, separators=(",", ":")).encode()


def long_shape(number: bytes, n: int) -> bytes:
    return b'{"a":{"dtype":"U8","shape":[' + b",".join([number] * n) + b'],"data_offsets":[0,0]}}'


#: name -> (start of the file, its size or None, what the GGUF reader says or None: it is read)
GGUF_FILES = {
    "2^30 empty strings": (header(0, 1) + array(b"k", STRING, 1 << 30), 9 << 30, "strings, at most"),
    "two million empty strings": (header(0, 1) + array(b"k", STRING, 1 << 21), 1 << 25, None),
    "three arrays of a million strings": (header(0, 3) + many_arrays(3), None, "strings, at most"),
    "2^30 bools": (header(0, 1) + array(b"k", BOOL, 1 << 30), 2 << 30, "elements, at most 67,108,864"),
    "2^26 bools": (header(0, 1) + array(b"k", BOOL, 1 << 26), 2 << 30, None),
    "2^30 bytes": (header(0, 1) + array(b"k", U8, 1 << 30), 2 << 30, None),
    "a string of 2^30 bytes": (header(0, 1) + text(b"k") + struct.pack("<IQ", STRING, 1 << 30), 2 << 30, None),
    "2^33 keys in a file of zeros": (header(0, 1 << 33), 200 << 30, "keys, at most"),
    "65,536 keys of zeros": (header(0, 1 << 16), 1 << 30, "key 0 is empty"),
    "65,536 keys": (header(0, 1 << 16) + b"".join(map(small_key, range(1 << 16))), None, None),
    "65,536 tensors": (header(1 << 16, 0) + b"".join(map(small_tensor, range(1 << 16))), 8 << 20, None),
    "2^33 tensors": (header(1 << 33, 0), 1 << 40, "tensors, at most"),
    "a tensor of a terabyte": (header(1, 0) + text(b"t") + struct.pack("<IqIQ", 1, 1 << 40, 24, 0), 1025 << 30, None),
    "zeros": (b"", 1 << 33, "not a GGUF file"),
}  # fmt: skip

#: name -> (the file, what the safetensors reader says, or None)
SAFETENSORS = {
    "100,000 entries": (entries(100_000), None),
    "header over the limit": (b'{"' + b"a" * MAX_HEADER + b'":0}', "at most"),
    "millions of values": (b"{" + b",".join([b'"":0'] * 3_000_000) + b"}", "values"),
    "nested": (b'{"a":' + b"[" * 500_000 + b"]" * 500_000 + b"}", "not valid JSON"),
    "one long name": (b'{"' + b"a" * (MAX_HEADER - 100) + b'":0}', "no description"),
    "one long name of wide characters": (b'{"' + "😊".encode() * (MAX_HEADER // 5) + b'":0}', "no description"),
    "a long number": (b'{"a":' + b"9" * 1_000_000 + b"}", "not valid JSON"),
    "a long shape": (long_shape(b"0", 1_000_000), "no valid shape"),
    "a long shape of large numbers": (long_shape(b"9" * 20, 100_000), "no valid shape"),
}


@pytest.fixture
def limited():
    """Anonymous memory (maps of files do not count): what goes beyond is a MemoryError."""
    status = Path("/proc/self/status").read_text()
    now = 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData"))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (now + MEMORY, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)


def make(path: Path, start: bytes, size: int | None) -> Path:
    path.write_bytes(start)
    if size is not None:
        with path.open("r+b") as file:
            try:
                file.truncate(size)
            except OSError:
                pytest.skip("the file system has no files of this size")
    return path


@pytest.mark.parametrize("name", GGUF_FILES)
def test_gguf(name, tmp_path, limited):
    start, size, says = GGUF_FILES[name]
    path = make(tmp_path / "x.gguf", start, size)
    for read in (GGUF, read_imatrix) if says else (GGUF,):
        if says is None:
            read(path)
        else:
            # what does not begin as GGUF may be an importance matrix of the older form: other words, same refusal
            older = read is read_imatrix and not start.startswith(b"GGUF")
            with pytest.raises(GGUFError, match=f"{says}|not an importance matrix" if older else says) as refused:
                read(path)
            assert older or refused.value.offset is not None


@pytest.mark.parametrize("name", SAFETENSORS)
def test_safetensors(name, tmp_path, limited):
    head, says = SAFETENSORS[name]
    path = make(tmp_path / "x.safetensors", safetensors(head), None)
    if says is None:
        SafetensorsFile(path)
        return
    with pytest.raises(GGUFError, match=says) as refused:
        SafetensorsFile(path)
    assert refused.value.offset is not None
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("name", ["two million empty strings", "65,536 keys", "65,536 tensors", "2^30 empty strings"])
def test_check(name, tmp_path, limited):
    start, size, _ = GGUF_FILES[name]
    assert check(make(tmp_path / "x.gguf", start, size), data=False).faults
