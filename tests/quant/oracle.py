"""Compiled ggml, called by ctypes: what quantized bytes and dequantized values must be.

`libggml-python` brings ggml's own library; `libgguf` is another build of the same quantizers. Both are test
dependencies only.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from quant.formats import FORMATS


class _Traits(ctypes.Structure):
    """ggml's `ggml_type_traits`."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.c_void_p),
        ("from_float_ref", ctypes.c_void_p),
    )


_ROW = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)

#: formats without traits for conversion: the library's functions
_QUANTIZE_BY_NAME = {"Q8_1": "quantize_row_q8_1_ref", "Q8_K": "quantize_row_q8_K_ref"}
_DEQUANTIZE_BY_NAME = {"Q8_K": "dequantize_row_q8_K"}
#: formats that the library refuses (by aborting the process) to write without importance
NEEDS_IMPORTANCE = ("IQ2_XXS", "IQ2_XS", "IQ1_S")


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """ggml's base library; skips the test where it is not installed."""
    package = pytest.importorskip("libggml")
    folder = Path(package.__file__).parent
    found = sorted(p for p in folder.rglob("*ggml-base*") if p.suffix in (".so", ".dylib", ".dll"))
    if not found:
        pytest.skip("libggml-python has no library for this platform")
    lib = ctypes.CDLL(str(found[0]))
    lib.ggml_quantize_chunk.restype = ctypes.c_size_t
    lib.ggml_quantize_chunk.argtypes = (
        [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p] + [ctypes.c_int64] * 3 + [ctypes.c_void_p]
    )
    lib.ggml_validate_row_data.restype = ctypes.c_bool
    lib.ggml_validate_row_data.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
    lib.ggml_get_type_traits.restype = ctypes.POINTER(_Traits)
    lib.ggml_get_type_traits.argtypes = [ctypes.c_int]
    return lib


def traits(name: str) -> _Traits:
    """ggml's row for a format."""
    return library().ggml_get_type_traits(FORMATS[name].ggml_type).contents


def quantize(name: str, x: np.ndarray, importance: np.ndarray | None = None) -> np.ndarray:
    """float32 [rows, n] -> uint8 [rows, row_size], as ggml writes it."""
    lib, fmt = library(), FORMATS[name]
    x = np.ascontiguousarray(x, np.float32)
    out = np.zeros((x.shape[0], fmt.row_size(x.shape[1])), np.uint8)
    if name in _QUANTIZE_BY_NAME:
        _ROW((_QUANTIZE_BY_NAME[name], lib))(x.ctypes.data, out.ctypes.data, x.size)
        return out
    assert importance is not None or name not in NEEDS_IMPORTANCE
    w = None if importance is None else np.ascontiguousarray(importance, np.float32)
    size = lib.ggml_quantize_chunk(
        fmt.ggml_type, x.ctypes.data, out.ctypes.data, 0, *x.shape, None if w is None else w.ctypes.data
    )
    assert size == out.size
    return out


def dequantize(name: str, q: np.ndarray) -> np.ndarray:
    """uint8 [rows, row_size] -> float32 [rows, n]."""
    fmt = FORMATS[name]
    q = np.ascontiguousarray(q)
    y = np.empty((q.shape[0], q.shape[1] // fmt.type_size * fmt.block_size), np.float32)
    if name in _DEQUANTIZE_BY_NAME:
        convert = _ROW((_DEQUANTIZE_BY_NAME[name], library()))
    elif address := traits(name).to_float:
        convert = _ROW(address)
    else:
        pytest.skip(f"ggml has no conversion from {name}")
    convert(q.ctypes.data, y.ctypes.data, y.size)
    return y


def is_valid(name: str, q: np.ndarray) -> bool:
    """ggml's judgement of quantized bytes."""
    q = np.ascontiguousarray(q)
    return library().ggml_validate_row_data(FORMATS[name].ggml_type, q.ctypes.data, q.size)


def second_quantize(name: str, x: np.ndarray, importance: np.ndarray | None = None) -> np.ndarray:
    """As `quantize`, from the other build; skips formats that it does not have."""
    lib = pytest.importorskip("libgguf")
    number = FORMATS[name].ggml_type
    if number not in lib._SUPPORTED_QUANTIZED_QTYPES:
        pytest.skip(f"libgguf does not write {name}")
    return lib.quantize_rows(np.ascontiguousarray(x, np.float32), number, importance)


def package_dequantize(name: str, q: np.ndarray) -> np.ndarray:
    """Dequantization in numpy by the `gguf` package; skips formats that it does not have."""
    gguf = pytest.importorskip("gguf")
    try:
        with np.errstate(over="ignore"):
            return gguf.quants.dequantize(q, gguf.GGMLQuantizationType[name])
    except (KeyError, NotImplementedError):
        pytest.skip(f"the gguf package does not read {name}")
