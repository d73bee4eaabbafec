"""Byte order of tensor data: which bytes of a block are numbers of several bytes.

A big-endian machine keeps every number of a block in its own order, single bytes stay where they are. A row of the
table lists the words of one block; it follows how ggml stores and loads them: an integer that is moved as a whole is a
word even where the struct declares bytes (the fifth bits of Q5_0, the signs of IQ3_XXS).
"""

from __future__ import annotations

import numpy as np

from gguftools.errors import GGUFError
from quant.format import Format

LITTLE, BIG = "<", ">"
NAMES = {LITTLE: "little", BIG: "big"}

Words = tuple[tuple[int, int, int], ...]  # (byte within the block, bytes of a word, number of words), ...

#: format -> its words; formats without any are listed too, so that a new format cannot be forgotten
WORDS: dict[str, Words] = {
    "F32": ((0, 4, 1),),
    "F16": ((0, 2, 1),),
    "BF16": ((0, 2, 1),),
    "F64": ((0, 8, 1),),
    "I8": (),
    "I16": ((0, 2, 1),),
    "I32": ((0, 4, 1),),
    "I64": ((0, 8, 1),),
    "Q1_0": ((0, 2, 1),),
    "Q2_0": ((0, 2, 1),),
    "Q4_0": ((0, 2, 1),),
    "Q4_1": ((0, 2, 2),),
    "Q5_0": ((0, 2, 1), (2, 4, 1)),
    "Q5_1": ((0, 2, 2), (4, 4, 1)),
    "Q8_0": ((0, 2, 1),),
    "Q8_1": ((0, 2, 2),),
    "Q2_K": ((80, 2, 2),),
    "Q3_K": ((108, 2, 1),),
    "Q4_K": ((0, 2, 2),),
    "Q5_K": ((0, 2, 2),),
    "Q6_K": ((208, 2, 1),),
    "Q8_K": ((0, 4, 1), (260, 2, 16)),
    "IQ1_S": ((0, 2, 1), (34, 2, 8)),
    "IQ1_M": ((48, 2, 4),),
    "IQ2_XXS": ((0, 2, 1), (2, 4, 16)),
    "IQ2_XS": ((0, 2, 1), (2, 2, 32)),
    "IQ2_S": ((0, 2, 1),),
    "IQ3_XXS": ((0, 2, 1), (66, 4, 8)),
    "IQ3_S": ((0, 2, 1),),
    "IQ4_NL": ((0, 2, 1),),
    "IQ4_XS": ((0, 2, 2),),
    "TQ1_0": ((52, 2, 1),),
    "TQ2_0": ((64, 2, 1),),
    "MXFP4": (),
    "NVFP4": (),
}


def swapped(data: np.ndarray, fmt: Format) -> np.ndarray:
    """Blocks in the other byte order: uint8 [bytes of whole blocks] -> a new array of the same size.

    >>> from quant.formats import FORMATS
    >>> swapped(np.array([1, 2, 3, 4, 5, 6], np.uint8), FORMATS["F16"]).tolist()
    [2, 1, 4, 3, 6, 5]
    """
    blocks = data.reshape(-1, fmt.type_size).copy()
    for start, size, count in WORDS[fmt.name]:
        words = blocks[:, start : start + size * count].reshape(-1, count, size)
        blocks[:, start : start + size * count] = words[:, :, ::-1].reshape(-1, size * count)
    return blocks.reshape(-1)


def byte_order(name: str) -> str:
    """`little`, `big` or `native` -> LITTLE or BIG. Raises GGUFError for another name."""
    if name == "native":
        return LITTLE if np.little_endian else BIG
    for order, known in NAMES.items():
        if name == known:
            return order
    raise GGUFError(f"unknown byte order '{name}'; there are little, big and native")
