"""Big-endian files: read like the others, written and back to the byte, for every type."""

import struct

import gguf as oracle
import numpy as np
import pytest

import gguftools
from gguftools import cli
from gguftools.errors import GGUFError
from gguftools.gguf import GGUF, Writer
from gguftools.gguf.endian import WORDS, swapped
from quant.formats import FORMATS


def test_every_format_has_its_words():
    assert WORDS.keys() == FORMATS.keys()
    for name, words in WORDS.items():
        assert all(start + size * count <= FORMATS[name].type_size for start, size, count in words)


@pytest.mark.parametrize("name", [f for f in FORMATS if FORMATS[f].module])
def test_words_are_the_numbers_of_the_block(name):
    """Every field of the block's dtype that has several bytes is listed, at its place."""
    fmt = FORMATS[name]
    listed = {start + i * size: size for start, size, count in WORDS[name] for i in range(count)}
    for field, (dtype, start, *_) in (fmt.block.fields or {}).items():
        base, shape = dtype.subdtype or (dtype, ())
        for i in range(int(np.prod(shape, dtype=int))):
            if base.itemsize > 1:
                at = start + i * base.itemsize
                within = max((p for p in listed if p <= at), default=-1)
                assert within >= 0, (field, i)
                assert at + base.itemsize <= within + listed[within], (field, i)


@pytest.mark.parametrize("name", FORMATS)
def test_swapping_twice_changes_nothing(name):
    fmt = FORMATS[name]
    data = np.random.default_rng(0).integers(0, 256, 5 * fmt.type_size).astype(np.uint8)
    once = swapped(data, fmt)
    assert (once != data).any() == bool(WORDS[name])
    assert (swapped(once, fmt) == data).all()
    assert sorted(once.tolist()) == sorted(data.tolist())


def make(path, order, version=3):
    rng = np.random.default_rng(1)
    with Writer(path, byte_order=order, version=version) as w:
        for kind in ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float32", "float64"]:
            w.add("one." + kind, 3, kind)
            w.add("many." + kind, [1, 2, 3], kind)
        w.add("flag", True)
        w.add("flags", [True, False])
        w.add("text", "grüße")
        w.add("texts", ["", "a", "ü" * 300])
        w.add("no texts", [], "string")
        for name, fmt in FORMATS.items():
            w.declare(name, (3, 2 * fmt.block_size), fmt)
        for fmt in FORMATS.values():
            w.write(fmt.name, rng.integers(0, 256, 6 * fmt.type_size).astype(np.uint8))


@pytest.mark.parametrize("version", [2, 3])
def test_round_trip(version, tmp_path):
    little, big, back = (tmp_path / name for name in ("little.gguf", "big.gguf", "back.gguf"))
    make(little, "<", version)
    assert gguftools.convert_endian(little, big, "big") == ("little", "big")
    assert struct.unpack_from(">I", big.read_bytes(), 4)[0] == version
    with GGUF(little) as a, GGUF(big) as b:
        assert (a.byte_order, b.byte_order, b.version) == ("<", ">", version)
        assert dict(a.metadata) == dict(b.metadata)
        assert [f.type for f in a.fields.values()] == [f.type for f in b.fields.values()]
        for name, t in a.tensors.items():
            assert t.data.tobytes() == b.tensors[name].data.tobytes()
            assert not b.tensors[name].data.flags.writeable
            assert (t.raw.tobytes() == b.tensors[name].raw.tobytes()) == (not WORDS[name])
    gguftools.convert_endian(big, back, "little")
    assert back.read_bytes() == little.read_bytes()
    make(tmp_path / "written.gguf", ">", version)
    assert (tmp_path / "written.gguf").read_bytes() == big.read_bytes()


def test_the_gguf_package_reads_them(tmp_path):
    with Writer(tmp_path / "a.gguf", byte_order=">") as w:
        w.add("general.architecture", "llama")
        w.add("numbers", [1, -2, 3], "int32")
        w.add("words", ["a", "bc"])
        w.declare("x", (2, 3), "F32")
        w.write("x", np.arange(6, dtype=np.float32))
    theirs = oracle.GGUFReader(tmp_path / "a.gguf")
    assert theirs.endianess == oracle.GGUFEndian.BIG
    assert theirs.fields["numbers"].contents() == [1, -2, 3]
    assert theirs.fields["words"].contents() == ["a", "bc"]
    assert np.asarray(theirs.tensors[0].data, np.float32).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_files_of_the_gguf_package(tmp_path):
    w = oracle.GGUFWriter(tmp_path / "a.gguf", "llama", endianess=oracle.GGUFEndian.BIG)
    w.add_array("numbers", [1, 2, 3])
    w.add_float32("f", 0.5)
    w.add_tensor("x", np.arange(6, dtype=np.float32).reshape(2, 3))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    with GGUF(tmp_path / "a.gguf") as f:
        assert (f.byte_order, f.metadata["numbers"], f.metadata["f"]) == (">", [1, 2, 3], 0.5)
        assert f.tensors["x"].dequantize().tolist() == [[0, 1, 2], [3, 4, 5]]


def test_quantizing_a_big_endian_file(tiny, q4, tmp_path):
    gguftools.convert_endian(tiny["bf16"], tmp_path / "be.gguf", "big")
    gguftools.quantize(tmp_path / "be.gguf", tmp_path / "q.gguf", "Q4_K_M")
    assert gguftools.diff(tmp_path / "q.gguf", q4).is_same
    gguftools.edit(tmp_path / "be.gguf", gguftools.Edits(set={"general.name": "other"}))
    with GGUF(tmp_path / "be.gguf") as f:
        assert (f.byte_order, f.metadata["general.name"]) == (">", "other")


def test_refusals(tiny, tmp_path, capsys):
    with pytest.raises(GGUFError, match="is little-endian already"):
        gguftools.convert_endian(tiny["bf16"], tmp_path / "x.gguf", "little")
    with pytest.raises(GGUFError, match="there are little, big and native"):
        gguftools.convert_endian(tiny["bf16"], tmp_path / "x.gguf", "middle")
    assert cli.main(["convert-endian", str(tiny["bf16"]), str(tmp_path / "x.gguf"), "big"]) == 0
    assert "little-endian -> big-endian" in capsys.readouterr().out
