"""IEEE half, bfloat16 and float32 bits, as kernels (numba has no 16-bit floats on CPUs).

Both directions are exact: rounding is half to even, NaN stays NaN, subnormals are kept. Tests compare all 65,536
halves, and float32 samples around every rounding boundary, with numpy's `float16`.
"""

import numpy as np

from quant.jit import kernel


@kernel
def bits_of(x):
    """float32 -> its bits, uint32."""
    return np.float32(x).view(np.uint32)


@kernel
def float_of(bits):
    """uint32 -> the float32 with these bits."""
    return np.uint32(bits).view(np.float32)


@kernel
def half_to_float(h):
    """Bits of an IEEE half (uint16) -> float32."""
    bits = np.uint32(h)
    magnitude = (bits & np.uint32(0x7FFF)) << np.uint32(13)
    sign = (bits & np.uint32(0x8000)) << np.uint32(16)
    if (bits & np.uint32(0x7C00)) == np.uint32(0x7C00):
        return float_of(magnitude | np.uint32(0x7F800000) | sign)
    # the half's exponent, read as a float32's, is 112 too small; a multiplication also normalises subnormals
    return float_of(bits_of(float_of(magnitude) * np.float32(2.0**112)) | sign)


@kernel
def float_to_half(x):
    """float32 -> bits of the nearest IEEE half (uint16), ties to even; overflow gives infinity, NaN a quiet NaN."""
    bits = bits_of(x)
    sign = (bits >> np.uint32(16)) & np.uint32(0x8000)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    if magnitude > np.uint32(0x7F800000):
        return np.uint16(sign | np.uint32(0x7E00))
    if magnitude >= np.uint32(0x477FF000):  # 65520 and above round to infinity
        return np.uint16(sign | np.uint32(0x7C00))
    if magnitude < np.uint32(0x38800000):  # below 2^-14: adding 0.5 leaves the subnormal's bits in the low mantissa
        return np.uint16(sign | (bits_of(float_of(magnitude) + np.float32(0.5)) - np.uint32(0x3F000000)))
    odd = (magnitude >> np.uint32(13)) & np.uint32(1)
    rounded = magnitude - np.uint32(0x38000000) + np.uint32(0xFFF) + odd  # exponent from bias 127 to 15, half to even
    return np.uint16(sign | (rounded >> np.uint32(13)))


@kernel
def bfloat_to_float(h):
    """Bits of a bfloat16 (uint16) -> float32."""
    return float_of(np.uint32(h) << np.uint32(16))


@kernel
def float_to_bfloat(x):
    """float32 -> bits of the nearest bfloat16 (uint16), ties to even; NaN is made quiet."""
    bits = bits_of(x)
    if (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
        return np.uint16((bits >> np.uint32(16)) | np.uint32(64))
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))
