"""The reader against hand-made files: ggml's own list of broken ones, published attacks, and the `gguf` package."""

import os
import struct
import subprocess
import sys
from pathlib import Path

import gguf as oracle
import numpy as np
import pytest

from gguftools.errors import GGUFError
from gguftools.gguf import GGUF, ValueType
from gguftools.gguf.values import string_starts
from quant.errors import QuantError

SHARED = Path(os.environ.get("GGUFTOOLS_SHARED", Path(__file__).resolve().parents[3] / "shared"))
F32, Q4_0, I8, I64 = 0, 2, 24, 27
U32, I32, BOOL, STRING, ARRAY, INT64 = 4, 5, 7, 8, 9, 11


def text(s: str | bytes, length: int | None = None) -> bytes:
    data = s.encode() if isinstance(s, str) else s
    return struct.pack("<Q", len(data) if length is None else length) + data


def kv(key: str | bytes, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def array(key: str, kind: int, count: int, payload: bytes = b"") -> bytes:
    return kv(key, ARRAY, struct.pack("<IQ", kind, count) + payload)


def tensor(name: str | bytes, ne: list[int], kind: int = F32, offset: int = 0, rank: int | None = None) -> bytes:
    dims = b"".join(struct.pack("<Q", n % 2**64) for n in ne)
    rank = len(ne) if rank is None else rank
    return text(name) + struct.pack("<I", rank) + dims + struct.pack("<IQ", kind, offset % 2**64)


def alignment(value: int, kind: int = U32) -> bytes:
    return kv("general.alignment", kind, struct.pack("<I", value))


def build(keys=(), tensors=(), data=0, align=32, version=3, magic=b"GGUF", n_tensors=None, n_keys=None) -> bytes:
    """A file as given, right or wrong; data: number of bytes in the data section."""
    n_tensors = len(tensors) if n_tensors is None else n_tensors
    n_keys = len(keys) if n_keys is None else n_keys
    head = magic + struct.pack("<Iqq", version, n_tensors, n_keys) + b"".join(keys) + b"".join(tensors)
    body = bytes(i % 256 for i in range(data))
    return head + bytes(-len(head) % align) + body


KEYS = (
    kv("my_key_0", U32, struct.pack("<I", 7)),
    kv("my_key_1", STRING, text("seven")),
    array("my_key_2", STRING, 2, text("a") + text("")),
    array("my_key_3", 6, 2, struct.pack("<ff", 1, 2)),
)
ONE = (tensor("my_tensor_0", [4, 3]), tensor("my_tensor_1", [32, 2], Q4_0, 64))  # 48 bytes -> 64, 36 -> 64
DENSE = (tensor("my_tensor_0", [3]), tensor("my_tensor_1", [4], I8, 12))  # laid out with alignment 1
HUGE = int(1.01 * ((2**64 - 1) // 8) ** 0.5) + 1
INT64_MAX = 2**63 - 1

# ggml's tests/test-gguf.cpp: name -> file, and what our message must say (None: must be read)
HANDCRAFTED = {
    "HEADER_BAD_MAGIC": (build(magic=b"FUGG"), "not a GGUF file"),
    "HEADER_BAD_VERSION_0": (build(version=0), "version 0"),
    "HEADER_BAD_VERSION_1": (build(version=1), "version 1"),
    "HEADER_BAD_VERSION_FUTURE": (build(version=4), "version 4"),
    "HEADER_BAD_N_TENSORS": (build(n_tensors=-1), "-1 tensors"),
    "HEADER_BAD_N_KV": (build(n_keys=-1), "-1 keys"),
    "HEADER_EMPTY": (build(), None),
    "KV_BAD_KEY_SIZE": (build([text("my_key", 2**64 - 1)], n_keys=1, data=64), "key 0 has"),
    "KV_EMPTY_KEY": (build([kv("", U32, bytes(4))]), "key 0 is empty"),
    "KV_BAD_TYPE": (build([kv("my_key", 13, bytes(4))]), "value type 13"),
    "KV_DUPLICATE_KEY": (build([KEYS[0], KEYS[0]]), "comes twice"),
    "KV_BAD_ALIGN": (build([alignment(13)]), "power of two"),
    "KV_WRONG_TYPE_ALIGN": (build([alignment(32, I32)]), "must be uint32"),
    "KV_SUCCESS": (build(KEYS), None),
    "TENSORS_BAD_NAME_SIZE": (build(KEYS, [tensor("n" * 64, [4])], 32), "has 64 bytes"),
    "TENSORS_BAD_N_DIMS": (build(KEYS, [tensor("t", [1] * 5)], 32), "5 dimensions"),
    "TENSORS_BAD_SHAPE": (build(KEYS, [tensor("t", [-1])], 32), "negative dimension"),
    "TENSORS_ZERO_DIM": (build(KEYS, [tensor("t", [32, 0], Q4_0)]), None),
    "TENSORS_NE_TOO_BIG": (build(KEYS, [tensor("t", [4 * (2**31 - 1)] * 2)], 32), "too large"),
    "TENSORS_NBYTES_TOO_BIG": (build(KEYS, [tensor("t", [HUGE] * 2, I64)], 32), "too large"),
    "TENSORS_NBYTES_PAD_WRAP": (build(KEYS, [tensor("t", [4, 2**30 - 1, 2**30 + 1])], 32), "too large"),
    "TENSORS_BAD_TYPE": (build(KEYS, [tensor("t", [4], 43)], 32), "unknown type 43"),
    "TENSORS_BAD_OFFSET": (build(KEYS, [tensor("t", [4], offset=-1)], 32), "expected 0"),
    "TENSORS_DUPLICATE_NAME": (build(KEYS, [tensor("t", [8]), tensor("t", [8], offset=32)], 64), "'t' comes twice"),
    "TENSORS_BAD_ALIGN": (build([*KEYS, alignment(13)], ONE, 128), "power of two"),
    "TENSORS_INCONSISTENT_ALIGN": (build(KEYS, DENSE, 64, align=1), "expected 32"),
    "TENSORS_SUCCESS": (build(KEYS, ONE, 128), None),
    "TENSORS_CUSTOM_ALIGN": (build([*KEYS, alignment(1)], DENSE, 16, align=1), None),
    "DATA_NOT_ENOUGH_DATA": (build(KEYS, ONE, 127), "truncated: the padding of tensor 'my_tensor_1'"),
    "DATA_MEM_SIZE_OVERFLOW": (
        build(KEYS, [tensor("a", [0x7FFFFFFFFFFFFFC0], I8), tensor("b", [0x7FFFFFFFFFFFFFC0], I8, -64)], 32),
        "too large",
    ),
}

# published attacks on other readers, and rules of ours
HOSTILE = {
    "array count wraps": (build([array("k", U32, 2**62)]), "array of 4,611,686,018,427,387,904"),
    "array count of 2^30 in a small file": (build([array("k", INT64, 2**30)]), "truncated: key 'k'"),
    "array count one too many": (build([array("k", U32, 3, bytes(8))], align=1), "truncated: key 'k'"),
    "string of 2^63 bytes": (build([kv("k", STRING, text("x", 2**63))]), "9,223,372,036,854,775,808 bytes"),
    "string beyond the file": (build([kv("k", STRING, text("x", 500))]), "truncated: key 'k' ends at byte"),
    "string in an array, beyond the file": (
        build([array("k", STRING, 2, text("x") + text("y", 500))], align=1),
        "string 1 of key 'k'",
    ),
    "string in an array, length wraps": (
        build([array("k", STRING, 3, text("x") + text("y", 2**64 - 9))], data=64),
        "string 1 of key 'k'",
    ),
    "array of arrays": (build([array("k", ARRAY, 1, bytes(12))]), "array of arrays"),
    "array of an unknown type": (build([array("k", 256, 1, bytes(12))]), "value type 256"),
    "more keys than bytes": (build(n_keys=2**62, data=64), "keys, more than"),
    "more tensors than bytes": (build(n_tensors=2**62, data=64), "tensors, more than"),
    "bool of 2": (build([kv("k", BOOL, b"\2")]), "bool of value 2"),
    "bool of 255 in an array": (build([array("k", BOOL, 3, b"\0\1\xff")]), "bool of value 255"),
    "key is not UTF-8": (build([kv(b"\xff\xfe", U32, bytes(4))]), "not UTF-8"),
    "key with NUL": (build([kv("a\0b", U32, bytes(4))]), "NUL"),
    "key of 70,000 bytes": (build([kv("k" * 70_000, U32, bytes(4))]), "at most 65,535"),
    "name is not UTF-8": (build((), [tensor(b"\xff", [8])], 32), "not UTF-8"),
    "name with NUL": (build((), [tensor("a\0", [8])], 32), "NUL"),
    "alignment 2^31": (build([alignment(2**31)], [tensor("t", [8])], 32), "power of two up to"),
    "alignment 0": (build([alignment(0)]), "power of two"),
    "4 billion dimensions": (build((), [tensor("t", [8], rank=2**32 - 1)], 32), "4,294,967,295 dimensions"),
    "Q4_0 row that overflows": (build((), [tensor("t", [5124095576030431008], Q4_0)], 64), "too large"),
    "negative product": (build((), [tensor("t", [INT64_MAX, 2])], 64), "too large"),
    "zero beside overflowing dimensions": (build((), [tensor("t", [0, INT64_MAX, INT64_MAX])], 64), "too large"),
    "data beyond the file": (build((), [tensor("t", [1024])], 64), "truncated: tensor 't' ends at byte"),
    "offset into another tensor": (build((), [tensor("t", [8]), tensor("u", [8])], 64), "expected 32"),
    "region smaller than its type needs": (
        build((), [tensor("t", [32, 2], Q4_0), tensor("u", [8], offset=32)], 96),
        "begin at 32 of the data section, expected 64",
    ),
    "offset beyond the file": (build((), [tensor("t", [8], offset=1 << 40)], 64), "expected 0"),
    "row that is no multiple of the block": (build((), [tensor("t", [33], Q4_0)], 64), "no multiple of 32"),
    "scalar of a block type": (build((), [tensor("t", [], Q4_0)], 64), "no multiple of 32"),
    "removed type": (build((), [tensor("t", [32], 31)], 64), r"Q4_0_4_4 \(31\), which ggml has removed"),
    "fork's type": (build((), [tensor("t", [256], 139)], 64), r"IQ4_K \(139\) of the ik_llama.cpp fork"),
    "unknown type": (build((), [tensor("t", [32], 2**31)], 64), "unknown type 2147483648"),
    "big-endian, version 1": (b"GGUF" + struct.pack(">Iqq", 1, 0, 0), "version 1 is no longer read"),
    "big-endian, version 4": (b"GGUF" + struct.pack(">Iqq", 4, 0, 0), "version 4 is not known"),
    "big-endian, truncated": (b"GGUF" + struct.pack(">Iqq", 3, 0, 1), "1 keys, more than the file can hold"),
    "nothing": (b"", "is empty"),
    "three bytes": (b"GGU", "not a GGUF file"),
    "magic only": (b"GGUF", "truncated: the header ends at byte 8, the file has 4"),
    "safetensors": (struct.pack("<Q", 2) + b"{}", "looks like safetensors"),
    "git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "old format": (b"tjgg" + bytes(60), "older than GGUF"),
    "web page": (b"<!DOCTYPE html>", "web page"),
}


@pytest.fixture
def save(tmp_path):
    def write(data: bytes) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(data)
        return path

    return write


@pytest.mark.parametrize("case", [*HANDCRAFTED, *HOSTILE])
def test_broken_files_are_refused_in_one_line(case, save):
    data, message = (HANDCRAFTED | HOSTILE)[case]
    path = save(data)
    if message is None:
        GGUF(path)
        return
    with pytest.raises(GGUFError, match=message) as refused:
        GGUF(path)
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith(f"{path}: ")
    if data:
        assert 0 <= refused.value.offset <= len(data)


def test_handcrafted_content(save):
    f = GGUF(save(HANDCRAFTED["TENSORS_SUCCESS"][0]))
    assert dict(f.metadata) == {"my_key_0": 7, "my_key_1": "seven", "my_key_2": ["a", ""], "my_key_3": [1.0, 2.0]}
    assert (f.version, f.alignment, f.data_offset % 32, f.size - f.data_offset) == (3, 32, 0, 128)
    first, second = f.tensors.values()
    assert (first.name, first.ne, first.shape, first.format.name, first.nbytes) == (
        "my_tensor_0",
        (4, 3),
        (3, 4),
        "F32",
        48,
    )
    assert (second.ne, second.offset, second.nbytes) == ((32, 2), 64, 36)
    assert second.data.tolist() == list(range(64, 100))
    dense = GGUF(save(HANDCRAFTED["TENSORS_CUSTOM_ALIGN"][0]))
    assert dense.alignment == 1
    assert dense.tensors["my_tensor_1"].data.tolist() == [12, 13, 14, 15]


def test_version_2_trailing_bytes_and_nameless_scalar(save):
    f = GGUF(save(build(KEYS, [tensor("", [])], 32, version=2) + b"more"))
    assert f.version == 2
    assert f.tensors[""].shape == f.tensors[""].blocks.shape == f.tensors[""].dequantize().shape == ()


def test_every_truncation_and_every_flipped_byte_is_refused_or_read(save):
    whole = build([*KEYS, array("flags", BOOL, 2, b"\0\1"), alignment(32)], ONE, 128)
    for size in range(len(whole)):
        with pytest.raises(GGUFError):
            GGUF(save(whole[:size]))
    rng = np.random.default_rng(0)
    read = 0
    for _ in range(2000):
        data = bytearray(whole)
        for _ in range(rng.integers(1, 4)):
            data[rng.integers(0, len(data) - 128)] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, int(rng.integers(256))])
        try:
            f = GGUF(save(bytes(data)))
        except GGUFError:
            continue
        read += 1
        for value in f.metadata.values():
            assert repr(value)
        for t in f.tensors.values():
            assert t.data.size == t.nbytes <= len(data)
    assert read  # some flips only change values


def test_no_file_folder_and_device(tmp_path):
    with pytest.raises(GGUFError, match="no such file"):
        GGUF(tmp_path / "absent.gguf")
    with pytest.raises(GGUFError, match="is a folder"):
        GGUF(tmp_path)
    if Path("/dev/zero").exists():
        with pytest.raises(GGUFError, match="not a regular file"):
            GGUF("/dev/zero")


def test_arrays_decode_on_demand(save):
    words = ["", "one", "zwölf", "\udcff\udcfe", "👋"]
    raw = b"".join(text(w.encode("utf-8", "surrogateescape")) for w in words)
    f = GGUF(save(build([array("w", STRING, 5, raw), array("n", I32, 3, struct.pack("<3i", 1, -2, 3))])))
    found = f.metadata["w"]
    assert (len(found), found[2], found[-1], found[1:3], list(found)) == (5, "zwölf", "👋", words[1:3], words)
    assert found == words
    assert found != words[:4]
    with pytest.raises(IndexError):
        found[5]
    numbers = f.metadata["n"]
    assert (numbers, numbers[1], numbers[::2]) == ([1, -2, 3], -2, [1, 3])
    assert type(numbers[0]) is int
    assert np.asarray(numbers).dtype == np.int32
    view = numbers.numpy()
    assert not view.flags.writeable
    assert view.base is not None
    assert (f.fields["n"].type, f.fields["n"].element_type) == (ValueType.ARRAY, ValueType.INT32)
    assert bytes(f.fields["n"].raw) == struct.pack("<IQ3i", I32, 3, 1, -2, 3)


def test_a_large_vocabulary_is_located_without_decoding():
    words = [b"x" * (i % 300) for i in range(5000)]
    buffer = memoryview(b"".join(map(text, words)))
    starts, fits = string_starts(buffer, 0, len(words))
    assert fits
    assert starts[-1] == len(buffer)
    assert np.diff(starts).tolist() == [8 + len(w) for w in words]


def test_closing_keeps_views_and_refuses_the_rest(save):
    with GGUF(save(build(KEYS, ONE, 128))) as f:
        data, words = f.tensors["my_tensor_0"].data, f.metadata["my_key_2"]
        metadata = f.metadata
    assert data[1] == 1
    assert words == ["a", ""]
    assert metadata["my_key_0"] == 7
    for name in ("fields", "metadata", "tensors"):
        with pytest.raises(GGUFError, match="has been closed"):
            getattr(f, name)


def test_tensors_are_read_only_views(save):
    t = GGUF(save(build(KEYS, ONE, 128))).tensors["my_tensor_1"]
    assert t.blocks.shape == (2, 1)
    assert t.blocks.dtype.itemsize == 18
    assert np.shares_memory(t.blocks, t.data)
    with pytest.raises(ValueError, match="read-only"):
        t.data[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        t.blocks["d"] = 1


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q8_0"])
def test_dequantize_agrees_with_the_gguf_package(kind, tmp_path):
    ours = oracle.GGMLQuantizationType[kind]
    x = np.random.default_rng(1).standard_normal((3, 5, 64), np.float32)
    blocks = oracle.quants.quantize(x, ours)
    writer = oracle.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("t", blocks, raw_dtype=ours)
    _finish(writer)
    t = GGUF(tmp_path / "a.gguf").tensors["t"]
    assert t.shape == (3, 5, 64)
    assert t.blocks.shape == (3, 5, 64 // t.format.block_size)
    np.testing.assert_array_equal(t.dequantize(threads=1), oracle.quants.dequantize(blocks, ours))


def test_types_without_kernels_are_listed(save):
    t = GGUF(save(build((), [tensor("t", [4], I64)], 32))).tensors["t"]
    assert (t.format.name, t.nbytes) == ("I64", 32)
    with pytest.raises(QuantError, match="listed and copied"):
        t.dequantize()


def test_empty_tensor(save):
    t = GGUF(save(build((), [tensor("t", [32, 0], Q4_0)], 0))).tensors["t"]
    assert t.blocks.shape == (0, 1)
    assert t.dequantize().shape == (0, 32)


def test_files_of_the_gguf_package(tmp_path):
    writer = oracle.GGUFWriter(tmp_path / "a.gguf", "llama")
    values = {"u8": 255, "i8": -128, "u16": 65535, "i16": -5, "u32": 2**32 - 1, "i32": -(2**31), "f32": 0.5}
    values |= {"u64": 2**64 - 1, "i64": -(2**63), "f64": 0.1, "yes": True, "no": False, "text": "grüße"}
    kinds = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "float32", "uint64", "int64", "float64"]
    for (key, value), kind in zip(values.items(), [*kinds, "bool", "bool", "string"]):
        getattr(writer, f"add_{kind}")(key, value)
    arrays = {"ints": [1, -2, 3], "floats": [0.5, 1.5], "strings": ["", "a", "ü"], "bools": [True, False]}
    for key, value in arrays.items():
        writer.add_array(key, value)
    data = {"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.arange(5, dtype=np.int8)}
    for name, value in data.items():
        writer.add_tensor(name, value)
    _finish(writer)
    f = GGUF(tmp_path / "a.gguf")
    assert dict(f.metadata) == {"general.architecture": "llama"} | values | arrays
    assert [str(f.fields[key].type) for key in values] == [*kinds, "bool", "bool", "string"]
    for name, value in data.items():
        assert f.tensors[name].shape == value.shape
        assert f.tensors[name].data.tobytes() == value.tobytes()


@pytest.mark.parametrize("name", ["tiny/tiny-bf16.gguf", "tiny/imatrix.gguf", "vocab/llama-spm.gguf"])
def test_real_files_agree_with_the_gguf_package(name):
    path = SHARED / "golden" / name
    if not path.exists():
        pytest.skip(f"{path} is absent")
    f, theirs = GGUF(path), oracle.GGUFReader(path)
    keys = [key for key in theirs.fields if not key.startswith("GGUF.")]
    assert list(f.metadata) == keys
    for key in keys:
        assert f.metadata[key] == theirs.fields[key].contents(), key
        assert [int(f.fields[key].type)] == [int(t) for t in theirs.fields[key].types[:1]]
    assert list(f.tensors) == [t.name for t in theirs.tensors]
    for t in theirs.tensors:
        ours = f.tensors[t.name]
        assert (list(ours.ne), ours.format.ggml_type, ours.nbytes) == (t.shape.tolist(), t.tensor_type, t.n_bytes)
        assert f.data_offset + ours.offset == t.data_offset
        assert ours.data.tobytes() == t.data.tobytes()


def test_opening_needs_no_compiler(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(build(KEYS, ONE, 128))
    code = (
        "import sys; from gguftools.gguf import GGUF; f = GGUF(sys.argv[1]); dict(f.metadata), list(f.tensors);"
        "print([m for m in ('numba', 'scipy', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def _finish(writer: oracle.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
