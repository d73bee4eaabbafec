"""How formats lay small codes out in bytes. Codes are uint8 arrays; every kernel fills its whole result."""

import numpy as np

from quant.jit import kernel


@kernel
def pack_nibbles(codes, start, half, qs):
    """Four bits: in each stretch of 2 * half codes, byte j has code j (low nibble) and code j + half (high)."""
    for base in range(0, qs.size, half):
        at = start + 2 * base
        for j in range(half):
            qs[base + j] = np.uint8(codes[at + j] & np.uint8(15)) | np.uint8(codes[at + half + j] << np.uint8(4))


@kernel
def pack_crumbs(codes, start, shift, qs):
    """Two bits, code >> shift & 3: in each stretch of 128 codes, byte j has codes j, j + 32, j + 64, j + 96, from the
    low bits up."""
    for base in range(0, qs.size, 32):
        at = start + 4 * base
        for j in range(32):
            byte = np.uint8(0)
            for k in range(4):
                byte |= np.uint8(((codes[at + 32 * k + j] >> np.uint8(shift)) & np.uint8(3)) << np.uint8(2 * k))
            qs[base + j] = byte


@kernel
def pack_plane(codes, start, shift, bits):
    """One bit, code >> shift & 1, of 256 codes: byte j of 32 has codes j, j + 32, ..., j + 224, low bit first."""
    for j in range(32):
        byte = np.uint8(0)
        for k in range(8):
            byte |= np.uint8(((codes[start + 32 * k + j] >> np.uint8(shift)) & np.uint8(1)) << np.uint8(k))
        bits[j] = byte


@kernel
def pack_fifth_bits(codes, start, qh):
    """Bit 4 of 32 codes: bit j of the little-endian 32-bit word in qh (4 bytes) belongs to code j."""
    for i in range(4):
        byte = np.uint8(0)
        for k in range(8):
            byte |= np.uint8(((codes[start + 8 * i + k] >> np.uint8(4)) & np.uint8(1)) << np.uint8(k))
        qh[i] = byte


@kernel
def pack_scales_mins(scales, mins, packed):
    """Eight 6-bit scales and eight 6-bit mins in 12 bytes (Q4_K, Q5_K): the first four of each in the low six bits of
    bytes 0-3 and 4-7, the low nibbles of the others in bytes 8-11, their high bits on top of bytes 0-3 and 4-7."""
    for j in range(4):
        packed[j] = np.uint8(scales[j] | ((scales[j + 4] >> 4) << 6))
        packed[j + 4] = np.uint8(mins[j] | ((mins[j + 4] >> 4) << 6))
        packed[j + 8] = np.uint8((scales[j + 4] & 15) | ((mins[j + 4] & 15) << 4))


@kernel
def scale_min(packed, j):
    """Scale and min of sub-block j from the 12 bytes of `pack_scales_mins`."""
    if j < 4:
        return np.int32(packed[j]) & 63, np.int32(packed[j + 4]) & 63
    low, scale, least = np.int32(packed[j + 4]), np.int32(packed[j - 4]), np.int32(packed[j])
    return (low & 15) | ((scale >> 6) << 4), (low >> 4) | ((least >> 6) << 4)


@kernel
def pack_scales(scales, packed):
    """Sixteen 6-bit scales in 12 bytes (Q3_K): low nibbles of the first and the last eight in bytes 0-7, then the two
    high bits of scales j, j + 4, j + 8, j + 12 in byte 8 + j, from the low bits up."""
    for j in range(8):
        packed[j] = np.uint8((scales[j] & 15) | ((scales[j + 8] & 15) << 4))
    for j in range(4):
        byte = np.uint8(0)
        for k in range(4):
            byte |= np.uint8((scales[j + 4 * k] >> 4) << (2 * k))
        packed[8 + j] = byte


@kernel
def packed_scale(packed, j):
    """Scale j, 0..63, from the 12 bytes of `pack_scales`."""
    low = np.int32(packed[j]) & 15 if j < 8 else np.int32(packed[j - 8]) >> 4
    high = (np.int32(packed[8 + j % 4]) >> (2 * (j // 4))) & 3
    return low | (high << 4)
