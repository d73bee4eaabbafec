"""Is a quantized tensor sane? Scales that are not finite poison whole rows; the reference refuses such files."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quant.errors import QuantError
from quant.format import Format
from quant.formats import get_format

BLOCKS_PER_STEP = 1 << 18  # bounds the temporaries


def _half(bits: np.ndarray) -> np.ndarray:
    return (bits & np.uint16(0x7C00)) == 0x7C00


def _bfloat(bits: np.ndarray) -> np.ndarray:
    return (bits & np.uint16(0x7F80)) == 0x7F80


def _not_finite(values: np.ndarray) -> np.ndarray:
    return ~np.isfinite(values)


def _not_finite_as_float(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return ~np.isfinite(values.astype(np.float32))


def _spread_half(scales: np.ndarray) -> np.ndarray:
    """IQ1_M keeps the four hex digits of its half on top of four 16-bit words, lowest first."""
    words = np.ascontiguousarray(scales).view("<u2").reshape(len(scales), 4)
    digits = (words >> 12).astype(np.uint16)
    return _half(digits[:, 0] | digits[:, 1] << 4 | digits[:, 2] << 8 | digits[:, 3] << 12)


#: format -> ((field, which of its values are bad), ...); formats that are not listed have halves named d, dmin, m and s
_RULES: dict[str, tuple[tuple[str, Callable[[np.ndarray], np.ndarray]], ...]] = {
    "F32": (("x", _not_finite),),
    "F64": (("x", _not_finite_as_float),),
    "F16": (("h", _half),),
    "BF16": (("h", _bfloat),),
    "Q8_K": (("d", _not_finite),),
    "IQ1_M": (("scales", _spread_half),),
    "MXFP4": (("e", lambda e: e == 255),),
    "NVFP4": (),
    "I8": (),
    "I16": (),
    "I32": (),
    "I64": (),
}


def validate(q: np.ndarray, format: str | Format) -> int:
    """Index of the first block whose scale (or value) is not finite, counted through all rows; -1 if there is none.

    q: uint8 [rows, row_size] (or [row_size]). The rules are those of ggml's `ggml_validate_row_data`.

    >>> import numpy as np
    >>> validate(np.float32([1, 2, np.nan]).view(np.uint8), "F32")
    2

    Raises QuantError for an unknown type, a row size that is no multiple of the block's bytes, and a type that cannot
    be computed with.
    """
    fmt = get_format(format)
    if q.dtype != np.uint8 or q.ndim not in (1, 2):
        raise QuantError(f"expected uint8 rows, an array of 1 or 2 dimensions, not {q.dtype} of {q.ndim}")
    if q.shape[-1] % fmt.type_size:
        raise QuantError(f"rows of {q.shape[-1]} bytes are not a multiple of {fmt.type_size} ({fmt}'s block)")
    if _RULES.get(fmt.name) == ():
        return -1
    return first_bad_block(np.ascontiguousarray(q).view(fmt.block), fmt)


def first_bad_block(blocks: np.ndarray, fmt: Format) -> int:
    """As `validate`, for an array of blocks."""
    flat = blocks.reshape(-1)
    for start in range(0, flat.size, BLOCKS_PER_STEP):
        bad = bad_blocks(flat[start : start + BLOCKS_PER_STEP], fmt)
        if bad.any():
            return start + int(np.argmax(bad))
    return -1


def bad_blocks(blocks: np.ndarray, fmt: Format) -> np.ndarray:
    """Which blocks of an array have a scale (or value) that is not finite: bool, of the same shape."""
    rules = _RULES.get(fmt.name)
    if rules is None:
        rules = tuple((field, _half) for field in ("d", "dmin", "m", "s") if field in (fmt.block.names or ()))
    flat = blocks.reshape(-1)
    bad = np.zeros(flat.size, bool)
    for field, is_bad in rules:
        bad |= is_bad(flat[field])
    return bad.reshape(blocks.shape)
