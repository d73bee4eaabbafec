"""MXFP4: FP4 codes in groups of 32 with a power of two as scale, as gpt-oss stores experts (`_blocks`, `_scales`).

Bits are only moved: byte i of a group holds codes 2 i (low half) and 2 i + 1 in a checkpoint, codes i and i + 16 in
GGUF's block. So the rows are of type MXFP4, and stay exact whatever is made of them.
"""

from __future__ import annotations

import math

import numpy as np

from gguftools.conversion.sources.numbers import nibbles
from gguftools.conversion.sources.parts import Kind, Method, Parts
from gguftools.conversion.transforms import Rows
from quant.formats import FORMATS

GROUP = 32


def mxfp4_rows(name: str, shape: tuple[int, ...], packed: np.ndarray, scales: np.ndarray) -> Rows:
    """packed: uint8 [rows, n / 2]; scales: uint8 [rows, n / 32], biased exponents -> rows of MXFP4 blocks."""
    block = FORMATS["MXFP4"].block

    def moved(some: np.ndarray, exponents: np.ndarray) -> np.ndarray:
        unpacked = nibbles(some).reshape(*exponents.shape, GROUP)
        blocks = np.empty(exponents.shape, block)
        blocks["e"] = exponents
        blocks["qs"] = unpacked[..., : GROUP // 2] | (unpacked[..., GROUP // 2 :] << 4)
        return blocks

    return Rows(
        name,
        "MXFP4",
        shape,
        lambda lo, hi: moved(packed[lo:hi], scales[lo:hi]),
        lambda order: moved(packed[order], scales[order]),
    )


def _make(parts: Parts) -> Rows:
    blocks, scales = parts.array("_blocks", "U8"), parts.array("_scales", "U8", "F8_E8M0")
    if blocks.ndim < 3 or blocks.shape[-1] != GROUP // 2 or not blocks.size:
        raise parts.fail(f"'{parts.name}_blocks' has shape {list(blocks.shape)}, expected [..., groups, {GROUP // 2}]")
    parts.expect("_scales", blocks.shape[:-1])
    n_rows, groups = math.prod(blocks.shape[:-2]), blocks.shape[-2]
    shape = (*blocks.shape[:-2], groups * GROUP)
    return mxfp4_rows(parts.name, shape, blocks.reshape(n_rows, -1), scales.reshape(n_rows, groups))


METHOD = Method(
    names=("mxfp4",),
    kinds=lambda settings: (Kind("_blocks", ("_scales",), _make, result=""),),
    row="MXFP4 (gpt-oss): kept as it is",
)
