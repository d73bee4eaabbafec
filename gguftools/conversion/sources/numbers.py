"""Small numbers and how they are packed: tables of the 8-bit floats and of FP4, integers in words and nibbles."""

from __future__ import annotations

import numpy as np

#: E2M1 (FP4): sign, two bits of exponent, one of mantissa
FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _float8(n_mantissa: int, bias: int, unsigned_zero: bool = False) -> np.ndarray:
    """The 256 values of sign, exponent and mantissa by the rules of IEEE 754, without its infinities and NaNs;
    unsigned_zero: the code of -0 is the only NaN (`FNUZ`)."""
    code = np.arange(128)
    exponent, mantissa = code >> n_mantissa, code & ((1 << n_mantissa) - 1)
    significand = np.where(exponent > 0, mantissa + (1 << n_mantissa), mantissa).astype(np.float64)
    positive = np.ldexp(significand, np.maximum(exponent, 1) - bias - n_mantissa)
    values = np.concatenate([positive, -positive])
    if unsigned_zero:
        values[128] = np.nan
    return values.astype(np.float32)


def _e4m3() -> np.ndarray:
    values = _float8(3, 7)
    values[[127, 255]] = np.nan
    return values


def _e5m2() -> np.ndarray:
    values = _float8(2, 15)
    values[124:128] = [np.inf, np.nan, np.nan, np.nan]
    values[252:256] = [-np.inf, np.nan, np.nan, np.nan]
    return values


def _e8m0() -> np.ndarray:
    values = np.ldexp(1.0, np.minimum(np.arange(256) - 127, 127)).astype(np.float32)
    values[255] = np.nan
    return values


#: safetensors type -> float32 value of each code: OCP's floats (E4M3 has no infinity), AMD's FNUZ, powers of two
FLOAT8: dict[str, np.ndarray] = {
    "F8_E4M3": _e4m3(),
    "F8_E5M2": _e5m2(),
    "F8_E4M3FNUZ": _float8(3, 8, unsigned_zero=True),
    "F8_E5M2FNUZ": _float8(2, 16, unsigned_zero=True),
    "F8_E8M0": _e8m0(),
}


def nibbles(packed: np.ndarray, high_first: bool = False) -> np.ndarray:
    """Bytes [rows, n] -> codes uint8 [rows, 2 * n], the low half of each byte first unless `high_first`."""
    halves = (packed >> 4, packed & 15) if high_first else (packed & 15, packed >> 4)
    return np.stack(halves, axis=-1).reshape(len(packed), -1)


def integers(words: np.ndarray, bits: int, across: bool = True) -> np.ndarray:
    """32-bit words [rows, k] -> unsigned integers int32 [rows, n], lowest bits first.

    across: integers go on in the next word where `bits` does not divide 32, so that n = 32 * k // bits; else the upper
    bits of words stay empty.
    """
    words = np.ascontiguousarray(words).view(np.uint32)
    mask = np.uint32((1 << bits) - 1)
    if 32 % bits == 0 or not across:
        shifts = np.arange(0, 32 - bits + 1, bits, dtype=np.uint32)
        return ((words[:, :, None] >> shifts) & mask).astype(np.int32).reshape(len(words), -1)
    start = np.arange(0, 32 * words.shape[1] - bits + 1, bits)
    word, shift = start // 32, (start % 32).astype(np.uint64)
    padded = np.concatenate([words, np.zeros((len(words), 1), np.uint32)], axis=1).astype(np.uint64)
    both = padded[:, word] | (padded[:, word + 1] << np.uint64(32))
    return ((both >> shift) & np.uint64(mask)).astype(np.int32)
