"""The table of formats against ggml's, and dequantization of arbitrary bytes, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

import quant
from quant import FORMATS, QuantError, get_format
from quant.format import format_of
from quant.formats import BY_TYPE, IK_LLAMA, REMOVED, describe_type
from tests.quant import oracle

COMPUTED = [name for name, fmt in FORMATS.items() if fmt.module]
N = 1024


def _random_bytes(name: str, rows: int = 12, finite: bool = True) -> np.ndarray:
    """Arbitrary blocks; those with a scale that is not finite are replaced if `finite`."""
    fmt = FORMATS[name]
    rng = np.random.default_rng(fmt.ggml_type)
    q = rng.integers(0, 256, (rows * N // fmt.block_size, fmt.type_size), np.uint8)
    while finite and (bad := quant.validate(q, name)) >= 0:
        q[bad] = rng.integers(0, 256, fmt.type_size, np.uint8)
    return q.reshape(rows, -1)


def _equal_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal to the bit, where NaN equals any NaN."""
    return bool(((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))).all())


# --- the table ---


@pytest.mark.parametrize("name", FORMATS)
def test_row_agrees_with_ggml(name):
    fmt, row = FORMATS[name], oracle.traits(name)
    assert (fmt.block_size, fmt.type_size) == (row.blck_size, row.type_size)
    assert fmt.ggml_name == row.type_name.decode()
    assert fmt.is_quantized == row.is_quantized


@pytest.mark.parametrize("name", COMPUTED)
def test_block_agrees_with_its_row(name):
    fmt = FORMATS[name]
    assert fmt.block.itemsize == fmt.type_size
    assert format_of(fmt.block) == name
    assert fmt.block.isalignedstruct is False
    assert all(fmt.block[field].base.byteorder in "<|=" for field in fmt.block.names)


def test_blocks_are_distinct():
    """numba chooses kernels by dtype: equal ones would be confused."""
    blocks = [FORMATS[name].block for name in COMPUTED]
    assert len({str(b.fields) for b in blocks}) == len(blocks)
    assert all(a != b for i, a in enumerate(blocks) for b in blocks[:i])


def test_names_and_numbers_are_unique():
    assert len(BY_TYPE) == len(FORMATS)
    assert not set(BY_TYPE) & (set(REMOVED) | set(IK_LLAMA))
    assert {f.ggml_type for f in FORMATS.values()} | set(REMOVED) == set(range(43))


@pytest.mark.parametrize("text", ["q4_K", "Q4_K", "q4_k"])
def test_names_in_any_case(text):
    assert get_format(text) is FORMATS["Q4_K"]


def test_unknown_names():
    with pytest.raises(QuantError, match=r"unknown type 'q4k'; did you mean Q4_K\?"):
        get_format("q4k")
    with pytest.raises(QuantError, match=r"unknown type 'zzzzzzz'$"):
        get_format("zzzzzzz")


@pytest.mark.parametrize(("number", "text"), [
    (14, "Q6_K"), (4, "removed from llama.cpp: Q4_2"), (33, "Q4_0_8_8"), (36, "I2_S"), (139, "IQ4_K of ik_llama.cpp"),
    (144, "type 144 (IQ4_KS of ik_llama.cpp)"), (-1, "type -1 (unknown)"), (4096, "unknown"),
])  # fmt: skip
def test_type_numbers_in_messages(number, text):
    assert text in describe_type(number)


def test_types_without_kernels_are_refused():
    for name in set(FORMATS) - set(COMPUTED):
        with pytest.raises(QuantError, match=f"{name}: this type can be listed and copied"):
            quant.quantize(np.zeros((1, 1024), np.float32), name)
        with pytest.raises(QuantError, match=f"{name}: this type can be listed and copied"):
            quant.dequantize(np.zeros((1, FORMATS[name].type_size), np.uint8), name)


@pytest.mark.parametrize("name", ["F64"])
def test_types_that_are_only_read(name):
    with pytest.raises(QuantError, match="not a type that files are written in"):
        quant.quantize(np.zeros((1, 256), np.float32), name)


# --- dequantization ---


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("name", COMPUTED)
def test_dequantize_equals_ggml(name, finite):
    if name in ("F32", "F64"):
        pytest.skip("ggml has no conversion: the value itself")
    q = _random_bytes(name, finite=finite)
    assert _equal_bits(quant.dequantize(q, name), oracle.dequantize(name, q))


@pytest.mark.parametrize("name", COMPUTED)
def test_dequantize_equals_the_gguf_package(name):
    q = _random_bytes(name)
    assert _equal_bits(quant.dequantize(q, name), oracle.package_dequantize(name, q))


def test_doubles_are_read_as_floats():
    x = np.array([[1 / 3, -1e30, 5e-324, 0.1]])
    assert (quant.dequantize(x.view(np.uint8), "F64") == x.astype(np.float32)).all()


@pytest.mark.parametrize("name", COMPUTED)
def test_dequantize_does_not_depend_on_layout_or_threads(name, monkeypatch):
    import importlib

    monkeypatch.setattr(importlib.import_module("quant.quantize"), "ROWS_PER_TASK", N)
    q = _random_bytes(name)
    expected = quant.dequantize(q, name, threads=1)
    assert _equal_bits(quant.dequantize(q, name, threads=3), expected)
    assert _equal_bits(quant.dequantize(np.asfortranarray(q), name), expected)
    assert _equal_bits(quant.dequantize(q[3], name), expected[3])
    read_only = q.copy()
    read_only.flags.writeable = False
    assert _equal_bits(quant.dequantize(read_only, name), expected)


@pytest.mark.parametrize("name", COMPUTED)
def test_dequantize_refuses_what_is_no_row(name):
    fmt = FORMATS[name]
    assert quant.dequantize(np.empty((0, fmt.type_size), np.uint8), name).shape == (0, fmt.block_size)
    if fmt.type_size > 1:
        with pytest.raises(QuantError, match="not a multiple"):
            quant.dequantize(np.zeros((1, fmt.type_size + 1), np.uint8), name)
    with pytest.raises(QuantError, match="expected uint8"):
        quant.dequantize(np.zeros((1, fmt.type_size), np.int16), name)
    with pytest.raises(QuantError, match="1 or 2 dimensions"):
        quant.dequantize(np.zeros((1, 1, fmt.type_size), np.uint8), name)
