"""The safetensors reader against the reference package, and against published ways to break readers."""

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy as oracle
from safetensors import SafetensorError

from gguftools.errors import GGUFError
from gguftools.safetensors import DTYPES, SafetensorsFile, open_checkpoint

SHARED = Path(os.environ.get("GGUFTOOLS_SHARED", Path(__file__).resolve().parents[3] / "shared"))
X = np.arange(6, dtype=np.float32).reshape(2, 3)


def build(header, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype="F32", shape=(2, 3), begin=0, end=24):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


GOOD = build({"a": entry()}, bytes(24))
TWICE = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'

#: class of fault -> file, what our message says; the reference package refuses all of them too, but one
BROKEN = {
    "empty": (b"", "is empty"),
    "seven bytes": (bytes(7), "truncated: the header length"),
    "header length 2^64-1": (build({}, length=2**64 - 1), "at most 33,554,432"),
    "header longer than the file": (build({}, length=1000), "truncated: the header ends at byte 1,008"),
    "not JSON": (build(b"{nonsense}"), "is not valid JSON"),
    "not UTF-8": (build(b'{"\xff": 1}'), "is not valid JSON"),
    "nested too deeply": (build(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "is not valid JSON"),
    "header is a list": (build(b"[]"), "is not a JSON object"),
    "NUL padding": (build(b"{}" + bytes(6)), "is not valid JSON"),
    "a name twice": (build(TWICE, bytes(1)), "names 'a' twice"),
    "entry is a number": (build({"a": 1}), "has no description"),
    "unknown type": (build({"a": entry("F7")}, bytes(24)), "unknown type 'F7'"),
    "type is a list": (build({"a": entry(["F32"])}, bytes(24)), "unknown type"),
    "no type": (build({"a": {"shape": [6], "data_offsets": [0, 24]}}, bytes(24)), "unknown type None"),
    "negative dimension": (build({"a": entry(shape=(-2, -3))}, bytes(24)), "no valid shape"),
    "fractional dimension": (build({"a": entry(shape=(2.0, 3))}, bytes(24)), "no valid shape"),
    "shape product wraps to zero": (build({"a": entry(shape=(2**32, 2**32), end=0)}), "no valid shape"),
    "negative begin": (build({"a": entry(begin=-24, end=0)}, bytes(24)), "no valid place"),
    "end before begin": (build({"a": entry(begin=24, end=0)}, bytes(24)), "no valid place"),
    "three offsets": (build({"a": {**entry(), "data_offsets": [0, 24, 24]}}, bytes(24)), "no valid place"),
    "size is not the shape's": (build({"a": entry(end=20)}, bytes(20)), "takes 24 bytes, it has 20"),
    "beyond the data": (build({"a": entry()}, bytes(20)), "truncated: tensor 'a' ends at byte 24 of the data"),
    "gap at the beginning": (build({"a": entry(begin=4, end=28)}, bytes(28)), "leaves a gap"),
    "gap between": (
        build({"a": entry(), "b": entry(begin=28, end=52)}, bytes(52)),
        "'b' at bytes 28 to 52 leaves a gap",
    ),
    "overlap": (build({"a": entry(), "b": entry(begin=20, end=44)}, bytes(44)), "overlaps"),
    "shared range": (build({"a": entry(), "b": entry()}, bytes(24)), "overlaps"),
    "bytes after the last tensor": (build({"a": entry()}, bytes(30)), "6 bytes after the last tensor"),
    "metadata is not of strings": (build({"__metadata__": {"a": 1}}), "not a map of strings"),
    "zip archive": (b"PK\x03\x04" + bytes(60), "truncated|not a safetensors file"),
    "git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_refused_in_one_line(case, tmp_path):
    data, message = BROKEN[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(GGUFError, match=message) as refused:
        SafetensorsFile(path)
    assert "\n" not in str(refused.value)
    if data:
        assert 0 <= refused.value.offset <= len(data)
    if case != "a name twice":  # there the reference lets the last one win
        with pytest.raises((SafetensorError, OSError)):
            oracle.load_file(path)


def test_every_truncation_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    for size in range(len(GOOD)):
        path.write_bytes(GOOD[:size])
        with pytest.raises(GGUFError):
            SafetensorsFile(path)


def test_agrees_with_the_reference(tmp_path):
    path = tmp_path / "model.safetensors"
    kinds = ["f4", "f2", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?"]
    tensors = {kind: (X % 2).astype(kind) for kind in kinds} | {"empty": X[:0], "scalar": np.array(3.0)}
    oracle.save_file(tensors, path, {"format": "np"})
    with SafetensorsFile(path) as f:
        assert f.metadata == {"format": "np"}
        assert set(f.tensors) == set(tensors)
        for name, expected in tensors.items():
            found = f.tensors[name].array()
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            np.testing.assert_array_equal(found, expected)
            assert not found.flags.writeable
            assert f.tensors[name].nbytes == expected.nbytes


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_has_its_size(dtype, tmp_path):
    size = 8 * DTYPES[dtype][0] // 8
    (tmp_path / "a.safetensors").write_bytes(build({"a": entry(dtype, (2, 4), 0, size)}, bytes(size)))
    view = SafetensorsFile(tmp_path / "a.safetensors").tensors["a"]
    assert view.nbytes == size
    if DTYPES[dtype][1] is None:
        with pytest.raises(GGUFError, match="use its bytes"):
            view.array()
    else:
        assert view.array().shape == (2, 4)


def test_bfloat16_and_padded_header(tmp_path):
    header = json.dumps({"a": entry("BF16", (3,), 0, 6)}).encode() + b"   "
    (tmp_path / "a.safetensors").write_bytes(build(header, struct.pack("<3H", 0x3F80, 0, 0xBF80)))
    view = SafetensorsFile(tmp_path / "a.safetensors").tensors["a"]
    assert view.dtype == "BF16"
    assert view.array().tolist() == [0x3F80, 0, 0xBF80]


def test_many_entries_are_read(tmp_path):
    n = 20_000
    header = {f"t{i}": entry("U8", (1,), i, i + 1) for i in reversed(range(n))}
    (tmp_path / "a.safetensors").write_bytes(build(header, bytes(n)))
    assert list(SafetensorsFile(tmp_path / "a.safetensors").tensors) == [f"t{i}" for i in range(n)]


def save(folder: Path, parts: dict[str, list[str]], index: dict[str, str] | None = None) -> None:
    """Write parts (file name -> tensor names) and, if given, an index (tensor name -> file name)."""
    for file, names in parts.items():
        oracle.save_file({name: X + i for i, name in enumerate(names)}, folder / file)
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
PARTS = {ONE: ["a", "b"], TWO: ["c"]}
INDEX = {"a": ONE, "b": ONE, "c": TWO}


def test_single_file_folder_and_path(tmp_path):
    save(tmp_path, {"model.safetensors": ["a", "b"]})
    for path in (tmp_path, tmp_path / "model.safetensors"):
        with open_checkpoint(path) as checkpoint:
            assert list(checkpoint) == ["a", "b"]
            np.testing.assert_array_equal(checkpoint["b"].array(), X + 1)
            assert checkpoint.files == [tmp_path / "model.safetensors"]


def test_shards_with_index(tmp_path):
    save(tmp_path, PARTS, INDEX)
    save(tmp_path, {"consolidated.safetensors": ["a", "b", "c"]})  # not in the index: left aside
    checkpoint = open_checkpoint(tmp_path)
    assert {name: checkpoint[name].path.name for name in checkpoint} == INDEX
    assert checkpoint.files == [tmp_path / ONE, tmp_path / TWO]


def test_loose_files_without_index(tmp_path):
    save(tmp_path, PARTS)
    assert list(open_checkpoint(tmp_path)) == ["a", "b", "c"]


FOLDERS = {
    "empty folder": ({}, None, "holds no"),
    "duplicates without index": (
        {"extra.safetensors": ["a"], "model.safetensors": ["a"]},
        None,
        "'a' is both in extra.safetensors and in model.safetensors",
    ),
    "shards and the whole": ({**PARTS, "model.safetensors": ["a"]}, None, f"both in {ONE} and in model.safetensors"),
    "missing part": ({ONE: ["a", "b"]}, INDEX, f"files that are missing: {TWO}"),
    "dangling entry": (PARTS, {**INDEX, "d": TWO}, rf"lack: 'd' \(in {TWO}\)"),
    "entry in the wrong part": (PARTS, {**INDEX, "c": ONE, "b": TWO}, r"lack: 'b' \(in .*, 'c' \(in "),
    "tensor not in the index": (PARTS, {"a": ONE, "c": TWO}, rf"lacks: 'b' \(in {ONE}\)"),
    "duplicates with index": ({ONE: ["a", "b"], TWO: ["b", "c"]}, INDEX, "'b' is both in"),
    "path out of the folder": (PARTS, {**INDEX, "c": "../x.safetensors"}, "in the same folder"),
    "absolute path": (PARTS, {**INDEX, "c": "/etc/x.safetensors"}, "in the same folder"),
    "Windows path": (PARTS, {**INDEX, "c": "..\\x.safetensors"}, "in the same folder"),
    "Windows drive": (PARTS, {**INDEX, "c": "C:x.safetensors"}, "in the same folder"),
    "another kind of file": (PARTS, {**INDEX, "c": "pytorch_model.bin"}, "in the same folder"),
    "no weight map": (PARTS, {}, "has no weight_map"),
    "weight map of numbers": (PARTS, {"a": 1}, "has no weight_map"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_folders_that_do_not_fit_together(case, tmp_path):
    parts, index, message = FOLDERS[case]
    save(tmp_path, parts, index)
    with pytest.raises(GGUFError, match=message) as refused:
        open_checkpoint(tmp_path)
    assert "\n" not in str(refused.value)


def test_long_lists_of_faults_are_cut(tmp_path):
    save(tmp_path, {ONE: ["a"]}, {"a": ONE} | {f"x{i}": ONE for i in range(9)})
    with pytest.raises(GGUFError, match=r"'x2' \(in .*\) and 6 more;"):
        open_checkpoint(tmp_path)


def test_index_with_a_name_twice_or_two_indexes(tmp_path):
    save(tmp_path, PARTS, INDEX)
    index = tmp_path / "model.safetensors.index.json"
    (tmp_path / "consolidated.safetensors.index.json").write_text(index.read_text(encoding="utf-8"))
    with pytest.raises(GGUFError, match="several checkpoints"):
        open_checkpoint(tmp_path)
    (tmp_path / "consolidated.safetensors.index.json").unlink()
    index.write_text(f'{{"weight_map": {{"a": "{ONE}", "a": "{TWO}"}}}}')
    with pytest.raises(GGUFError, match="names 'a' twice"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "model.ckpt"])
def test_pickles_are_never_loaded(name, tmp_path):
    (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(GGUFError, match=rf"pickled weights \({name}\).*never loaded.*save_pretrained"):
        open_checkpoint(tmp_path)


def test_no_folder(tmp_path):
    with pytest.raises(GGUFError, match="no such folder"):
        open_checkpoint(tmp_path / "absent")


def test_real_checkpoint():
    folder = SHARED / "models" / "tiny"
    if not folder.exists():
        pytest.skip(f"{folder} is absent")
    from safetensors import safe_open

    checkpoint = open_checkpoint(folder)
    with safe_open(folder / "model.safetensors", "np") as theirs:
        assert set(checkpoint) == set(theirs.keys())
        for name in checkpoint:
            assert list(checkpoint[name].shape) == theirs.get_slice(name).get_shape()
            assert checkpoint[name].dtype == theirs.get_slice(name).get_dtype()
