"""The writer against the `gguf` package, which writes the same bytes and reads what we write."""

import os
import shutil
from pathlib import Path

import gguf as oracle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gguftools.errors import GGUFError
from gguftools.gguf import GGUF, ValueType, Writer
from gguftools.gguf.keys import type_of
from gguftools.gguf.values import encode
from quant import formats

SHARED = Path(os.environ.get("GGUFTOOLS_SHARED", Path(__file__).resolve().parents[3] / "shared"))
VALUES = {  # key -> type, value
    "a.uint8": (ValueType.UINT8, 255),
    "a.int8": (ValueType.INT8, -128),
    "a.uint16": (ValueType.UINT16, 65535),
    "a.int16": (ValueType.INT16, -5),
    "a.uint32": (ValueType.UINT32, 2**32 - 1),
    "a.int32": (ValueType.INT32, -(2**31)),
    "a.uint64": (ValueType.UINT64, 2**64 - 1),
    "a.int64": (ValueType.INT64, -(2**63)),
    "a.float32": (ValueType.FLOAT32, 0.5),
    "a.float64": (ValueType.FLOAT64, 0.1),
    "a.bool": (ValueType.BOOL, True),
    "a.string": (ValueType.STRING, "grüße\n"),
}
ARRAYS = {
    "b.int32": (ValueType.INT32, [1, -2, 3]),
    "b.float32": (ValueType.FLOAT32, [0.5, -1.5]),
    "b.string": (ValueType.STRING, ["", "a", "ü"]),
    "b.bool": (ValueType.BOOL, [True, False, True]),
    "b.bytes": (ValueType.UINT8, b"\0\1\xff"),
}
TENSORS = {
    "matrix": np.arange(12, dtype=np.float32).reshape(3, 4),
    "half": np.arange(5, dtype=np.float16),
    "cube": np.arange(24, dtype=np.int32).reshape(2, 3, 4),
    "column": np.ones((4, 1), np.float32),
}
FORMATS = {"float32": "F32", "float16": "F16", "int32": "I32"}


def write_ours(path: Path, alignment: int | None = None) -> None:
    with Writer(path) as w:
        w.add("general.architecture", "llama")
        if alignment:
            w.add("general.alignment", alignment)
        for key, (kind, value) in (VALUES | ARRAYS).items():
            w.add(key, value, kind)
        for name, value in TENSORS.items():
            w.declare(name, value.shape, FORMATS[value.dtype.name])
        w.declare("blocks", (2, 64), "Q8_0")
        for name, value in TENSORS.items():
            w.write(name, value)
        w.write("blocks", quantized())


def write_theirs(path: Path, alignment: int | None = None) -> None:
    w = oracle.GGUFWriter(path, "llama")
    if alignment:
        w.add_custom_alignment(alignment)
    for key, (kind, value) in VALUES.items():
        w.add_key_value(key, value, oracle.GGUFValueType(kind))
    for key, (_, value) in ARRAYS.items():
        w.add_array(key, value)
    for name, value in TENSORS.items():
        w.add_tensor(name, value)
    w.add_tensor("blocks", quantized(), raw_dtype=oracle.GGMLQuantizationType.Q8_0)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def quantized() -> np.ndarray:
    return oracle.quants.quantize(
        np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64), oracle.GGMLQuantizationType.Q8_0
    )


@pytest.mark.parametrize("alignment", [None, 1, 64, 4096])
def test_bytes_are_those_of_the_gguf_package(alignment, tmp_path):
    write_ours(tmp_path / "ours.gguf", alignment)
    write_theirs(tmp_path / "theirs.gguf", alignment)
    assert (tmp_path / "ours.gguf").read_bytes() == (tmp_path / "theirs.gguf").read_bytes()


def test_the_gguf_package_reads_ours(tmp_path):
    write_ours(tmp_path / "ours.gguf")
    theirs = oracle.GGUFReader(tmp_path / "ours.gguf")
    for key, (_, value) in (VALUES | ARRAYS).items():
        found = theirs.fields[key].contents()
        assert (bytes(found) if isinstance(value, bytes) else found) == value
    assert [t.name for t in theirs.tensors] == [*TENSORS, "blocks"]
    for t in theirs.tensors[:-1]:
        assert t.data.tobytes() == TENSORS[t.name].tobytes()
        assert t.shape.tolist() == list(TENSORS[t.name].shape[::-1])
    assert theirs.tensors[-1].data.tobytes() == quantized().tobytes()


@pytest.mark.parametrize("by_value", [False, True])
@pytest.mark.parametrize("name", ["tiny/tiny-bf16.gguf", "tiny/imatrix.gguf", "vocab/llama-spm.gguf"])
def test_a_copy_has_the_same_bytes(name, by_value, tmp_path):
    source = SHARED / "golden" / name
    if not source.exists():
        pytest.skip(f"{source} is absent")
    with GGUF(source) as f, Writer(tmp_path / "copy.gguf", [source]) as w:
        for field in f.fields.values():
            if by_value:
                w.add(field.key, field.value, field.element_type or field.type)
            else:
                w.add_field(field)
        for t in f.tensors.values():
            w.declare(t.name, t.shape, t.format)
        assert w.size == f.size
        for t in f.tensors.values():
            w.write(t.name, (t.data[i : i + 1000] for i in range(0, t.nbytes, 1000)))
    assert (tmp_path / "copy.gguf").read_bytes() == source.read_bytes()


def test_setting_a_key_again_moves_it_to_the_end(tmp_path):
    with Writer(tmp_path / "a.gguf") as w:
        for key, value in (("x", 1), ("y", 2), ("z", 3), ("x", "new")):
            w.add(key, value)
        w.remove("z")
        w.remove("absent")
    assert list(GGUF(tmp_path / "a.gguf").metadata.items()) == [("y", 2), ("x", "new")]


@pytest.mark.parametrize(
    ("key", "value", "kind", "element"),
    [
        ("k", 5, "uint32", None),
        ("k", -5, "int32", None),
        ("k", 2**40, "uint64", None),
        ("k", True, "bool", None),
        ("k", 1.5, "float32", None),
        ("k", "s", "string", None),
        ("k", np.int16(3), "int16", None),
        ("k", np.float64(3), "float64", None),
        ("k", [1, 2], "array", "int32"),
        ("k", [1, 2**40], "array", "int64"),
        ("k", [1, 2.5], "array", "float32"),
        ("k", ("a", b"\xff"), "array", "string"),
        ("k", b"\1\2", "array", "uint8"),
        ("k", np.array([1, 2], np.uint16), "array", "uint16"),
        ("llama.rope.freq_base", 10_000, "float32", None),
        ("qwen2.attention.layer_norm_rms_epsilon", 1e-6, "float32", None),
        ("llama.context_length", 8192, "uint32", None),
        ("split.count", 3, "uint16", None),
        ("split.tensors.count", 3, "int32", None),
        ("general.tags", [], "array", "string"),
        ("tokenizer.ggml.scores", [0, -1], "array", "float32"),
    ],
)
def test_types_without_being_told(key, value, kind, element, tmp_path):
    with Writer(tmp_path / "a.gguf") as w:
        w.add(key, value)
    field = GGUF(tmp_path / "a.gguf").fields[key]
    assert str(field.type) == kind
    assert (str(field.element_type) if element else field.element_type) == element


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        (True, "uint32", "bool cannot be written as uint32"),
        (1, "bool", "int cannot be written as bool"),
        (1.0, "int32", "float cannot be written as int32"),
        ("1", "int32", "str cannot be written as int32"),
        ([1, 2], "string", "int cannot be written as string"),
        ([True, 1], None, "not bool, int"),
        ([1, "a"], None, "not int, str"),
        (256, "uint8", "out of the range of uint8"),
        (-1, "uint64", "out of the range of uint64"),
        (2**64, None, "does not fit in 64 bits"),
        (1e39, "float32", "out of the range of float32"),
        ([], None, "needs an element type"),
        ([[1]], None, "not list"),
        ([[1]], "array", "arrays of arrays"),
        (np.ones((2, 2)), None, "one dimension"),
        (np.array([1j]), None, "complex128"),
        ("\ud800", None, "surrogate"),
        (None, None, "NoneType"),
        (1, "uint128", "unknown value type 'uint128'; there are uint8, "),
    ],
)
def test_values_that_cannot_be_written(value, kind, message, tmp_path):
    with pytest.raises(GGUFError, match=message), Writer(tmp_path / "a.gguf") as w:
        w.add("k", value, kind)
    assert list(tmp_path.iterdir()) == []


def test_infinity_and_nan_survive(tmp_path):
    with Writer(tmp_path / "a.gguf") as w:
        w.add("k", [float("inf"), float("-inf"), float("nan")], "float32")
    found = GGUF(tmp_path / "a.gguf").metadata["k"].tolist()
    assert found[:2] == [float("inf"), float("-inf")]
    assert found[2] != found[2]


def _declared(w):
    w.declare("t", (2, 32), "F32")


WRONG = {
    "empty key": (lambda w: w.add("", 1), "may not be empty"),
    "key with NUL": (lambda w: w.add("a\0", 1), "without NUL"),
    "key too long": (lambda w: w.add("k" * 70_000, 1), "at most 65535"),
    "alignment of another type": (lambda w: w.add("general.alignment", 32, "int32"), "must be uint32"),
    "alignment 13": (lambda w: w.add("general.alignment", 13), "power of two"),
    "name of 64 bytes": (lambda w: w.declare("n" * 64, (1,), "F32"), "64 bytes; at most 63"),
    "name of 63 characters, 64 bytes": (lambda w: w.declare("n" * 62 + "ü", (1,), "F32"), "64 bytes"),
    "name twice": (lambda w: (_declared(w), _declared(w)), "declared twice"),
    "five dimensions": (lambda w: w.declare("t", (1,) * 5, "F32"), "up to 4 dimensions"),
    "negative dimension": (lambda w: w.declare("t", (-1,), "F32"), "up to 4 dimensions"),
    "row no multiple of the block": (lambda w: w.declare("t", (32, 33), "Q4_0"), "choose another type"),
    "too large": (lambda w: w.declare("t", (2**31, 2**31), "F32"), "too large"),
    "too few bytes": (lambda w: (_declared(w), w.write("t", bytes(255))), "256 bytes as declared, got 255"),
    "too many bytes": (lambda w: (_declared(w), w.write("t", [bytes(200), bytes(57)])), "got more than 256"),
    "wrong turn": (lambda w: (_declared(w), w.write("u", bytes(256))), "it is the turn of 't'"),
    "written twice": (lambda w: (_declared(w), w.write("t", bytes(256)), w.write("t", bytes(256))), "all tensors"),
    "not written": (_declared, "1 declared tensors were not written, the first is 't'"),
    "key after data": (lambda w: (_declared(w), w.write("t", bytes(256)), w.add("k", 1)), "header is written"),
    "disk too small": (lambda w: (w.declare("t", (2**40, 2**15), "F32"), w.write("t", b"")), "bytes, the disk has"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_uses_leave_no_file(case, tmp_path):
    action, message = WRONG[case]
    with pytest.raises(GGUFError, match=message), Writer(tmp_path / "a.gguf") as w:
        action(w)
    assert list(tmp_path.iterdir()) == []


def test_a_name_of_63_bytes_is_kept(tmp_path):
    with Writer(tmp_path / "a.gguf") as w:
        w.declare("n" * 63, (2,), "F32")
        w.write("n" * 63, np.ones(2, np.float32))
    assert list(GGUF(tmp_path / "a.gguf").tensors) == ["n" * 63]


def test_input_is_never_overwritten(tmp_path):
    write_ours(tmp_path / "a.gguf")
    before = (tmp_path / "a.gguf").read_bytes()
    with pytest.raises(GGUFError, match="is the input file"), Writer(tmp_path / "a.gguf", [tmp_path / "a.gguf"]):
        pass
    assert (tmp_path / "a.gguf").read_bytes() == before


def test_failure_keeps_the_old_file(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"old")

    def interrupted():
        yield bytes(8)
        raise KeyboardInterrupt

    def write():
        with Writer(tmp_path / "a.gguf") as w:
            w.declare("t", (4,), "F32")
            w.write("t", interrupted())

    with pytest.raises(KeyboardInterrupt):
        write()
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"a.gguf": b"old"}


def test_arrays_are_written_in_c_order_and_little_endian(tmp_path):
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    with Writer(tmp_path / "a.gguf") as w:
        for name in ("transposed", "big", "scalar", "empty"):
            shape = {"transposed": (3, 2), "big": (2, 3), "scalar": (), "empty": (0, 3)}[name]
            w.declare(name, shape, "F32")
        w.write("transposed", x.T)
        w.write("big", x.astype(">f4"))
        w.write("scalar", np.float32([7]))
        w.write("empty", [])
    f = GGUF(tmp_path / "a.gguf")
    assert f.tensors["transposed"].data.view("<f4").tolist() == x.T.ravel().tolist()
    assert f.tensors["big"].data.view("<f4").tolist() == x.ravel().tolist()
    assert (f.tensors["scalar"].shape, f.tensors["empty"].shape) == ((), (0, 3))


@pytest.mark.parametrize("name", formats.FORMATS)
def test_every_format_can_be_copied(name, tmp_path):
    fmt = formats.FORMATS[name]
    data = np.random.default_rng(2).integers(0, 256, (3, 2 * fmt.type_size), np.uint8)
    with Writer(tmp_path / "a.gguf") as w:
        w.declare("t", (3, 2 * fmt.block_size), name.lower())
        w.write("t", data)
    t = GGUF(tmp_path / "a.gguf").tensors["t"]
    assert (t.format, t.nbytes, t.shape) == (fmt, data.nbytes, (3, 2 * fmt.block_size))
    assert t.data.tobytes() == data.tobytes()


scalars = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1).filter(lambda n: n < 2**63 or n >= 0),
    st.floats(width=32, allow_nan=False),
    st.text(),
)
arrays = st.one_of(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1),
    st.lists(st.floats(width=32, allow_nan=False), min_size=1),
    st.lists(st.booleans(), min_size=1),
    st.lists(st.text(), min_size=1),
)


@given(st.one_of(scalars, arrays))
def test_values_survive_encoding(value):
    field = encode("k", value)
    assert field.value == value
    assert encode("k", field.value, field.element_type or field.type) == field


def test_key_types_name_existing_types():
    assert type_of("general.name") is None
    assert type_of("mistral.rope.scaling.factor") is ValueType.FLOAT32


def test_space_is_checked_before_data(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100))

    def write():
        with Writer(tmp_path / "a.gguf") as w:
            w.declare("t", (64,), "F32")
            w.write("t", bytes(256))

    with pytest.raises(GGUFError, match="the disk has 100 free"):
        write()
