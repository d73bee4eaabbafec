"""bitsandbytes: 4-bit codes of a table (nf4, fp4) in blocks with a largest magnitude, or 8-bit integers by rows.

4 bits: x = quant_map[q] * absmax[block]; codes run through the flattened weight, the upper half of a byte first. The
magnitudes may be quantized, too: absmax[b] = nested_quant_map[a] * nested_absmax[b // nested_blocksize] +
nested_offset. Shape, block sizes and offset are JSON in a tensor of bytes. 8 bits: x = q * SCB[row] / 127.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from gguftools.conversion.sources.numbers import nibbles
from gguftools.conversion.sources.parts import Kind, Method, Parts
from gguftools.conversion.transforms import Rows
from gguftools.safetensors import read_json

_STATE = ".weight.quant_state.bitsandbytes__"
_NESTED = (".weight.nested_absmax", ".weight.nested_quant_map")


def _make4(kind: str):
    def make(parts: Parts) -> Rows:
        state = read_json(bytes(parts.views[_STATE + kind].data), f"{parts.name}: its quantization state")
        shape = state.get("shape")
        if not isinstance(shape, list) or len(shape) != 2 or not all(type(n) is int and n > 0 for n in shape):
            raise parts.fail(f"the quantization state names the shape {shape!r}")
        size = _size(parts, state, "blocksize")
        n = math.prod(shape)
        packed = parts.array(".weight", "U8").reshape(-1)
        table = parts.array(".weight.quant_map", "F32").reshape(-1)
        n_blocks = -(-n // size)
        if packed.size != -(-n // 2) or table.size != 16:
            raise parts.fail(f"{packed.size} bytes and a table of {table.size} are no {shape} of 4 bits")
        magnitude = _magnitudes(parts, state, n_blocks)

        def fetch(lo: int, hi: int) -> np.ndarray:
            first, last = lo * shape[1], hi * shape[1]
            codes = nibbles(packed[None, first // 2 : -(-last // 2)], high_first=True)[0]
            values = table[codes[first % 2 : first % 2 + last - first]]
            blocks = np.arange(first // size, -(-last // size))
            scales = np.repeat(magnitude(blocks), size)[first - blocks[0] * size if len(blocks) else 0 :]
            return (values * scales[: last - first]).reshape(hi - lo, shape[1])

        return Rows(parts.name, "F32", tuple(shape), fetch)

    return make


def _size(parts: Parts, state: Mapping[str, Any], key: str) -> int:
    found = state.get(key)
    if type(found) is not int or found < 1:
        raise parts.fail(f"the quantization state has '{key}': {found!r}")
    return found


def _magnitudes(parts: Parts, state: Mapping[str, Any], n_blocks: int):
    """Function of numbers of blocks -> their largest magnitudes."""
    absmax = parts.array(".weight.absmax", "F32", "U8").reshape(-1)
    if absmax.size != n_blocks:
        raise parts.fail(f"'{parts.name}.absmax' has {absmax.size} values for {n_blocks} blocks")
    if absmax.dtype != np.uint8:
        return lambda blocks: absmax[blocks]
    lost = [ending for ending in _NESTED if ending not in parts.views]
    if lost:
        raise parts.fail(f"the tensor ending in '{lost[0]}' is missing; download the model again")
    size = _size(parts, state, "nested_blocksize")
    offset = state.get("nested_offset", 0.0)
    scales = parts.array(_NESTED[0], "F32").reshape(-1)
    table = parts.array(_NESTED[1], "F32").reshape(-1)
    if not isinstance(offset, (int, float)) or scales.size != -(-n_blocks // size) or table.size != 256:
        raise parts.fail("the magnitudes of its blocks are damaged")
    return lambda blocks: table[absmax[blocks]] * scales[blocks // size] + np.float32(offset)


def _make8(parts: Parts) -> Rows:
    q = parts.matrix(".weight", "I8")
    parts.expect(".SCB", (len(q),))
    scales = parts.array(".SCB", "F32")

    def fetch(lo: int, hi: int) -> np.ndarray:
        return q[lo:hi].astype(np.float32) * (scales[lo:hi, None] / np.float32(127))

    return Rows(parts.name, "F32", q.shape, fetch)


METHOD = Method(
    names=("bitsandbytes",),
    kinds=lambda settings: (
        *(
            Kind(".weight", (".weight.absmax", ".weight.quant_map", _STATE + kind), _make4(kind), optional=_NESTED)
            for kind in ("nf4", "fp4")
        ),
        Kind(".weight", (".SCB",), _make8),
    ),
    row="bitsandbytes nf4, fp4 (also with quantized magnitudes) and int8",
    apart=(".weight_format",),
)
