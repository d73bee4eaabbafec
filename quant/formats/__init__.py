"""The table of tensor formats: everything else asks it.

A new format is one new file in this folder and one row here. Numbers, block sizes and byte sizes are those of ggml's
type table; a module's BLOCK must agree with its row (a test walks the table).
"""

from __future__ import annotations

import difflib

from quant.errors import QuantError
from quant.format import Format

_TABLE = (
    # name, ggml type, weights per block, bytes per block, module
    Format("F32", 0, 1, 4, "f32"),
    Format("F16", 1, 1, 2, "f16"),
    Format("BF16", 30, 1, 2, "bf16"),
    Format("Q4_0", 2, 32, 18, "q4_0"),
    Format("Q4_1", 3, 32, 20),
    Format("Q5_0", 6, 32, 22),
    Format("Q5_1", 7, 32, 24),
    Format("Q8_0", 8, 32, 34, "q8_0"),
    Format("Q8_1", 9, 32, 36),
    Format("Q2_K", 10, 256, 84),
    Format("Q3_K", 11, 256, 110),
    Format("Q4_K", 12, 256, 144),
    Format("Q5_K", 13, 256, 176),
    Format("Q6_K", 14, 256, 210),
    Format("Q8_K", 15, 256, 292),
    Format("IQ2_XXS", 16, 256, 66),
    Format("IQ2_XS", 17, 256, 74),
    Format("IQ3_XXS", 18, 256, 98),
    Format("IQ1_S", 19, 256, 50),
    Format("IQ4_NL", 20, 32, 18),
    Format("IQ3_S", 21, 256, 110),
    Format("IQ2_S", 22, 256, 82),
    Format("IQ4_XS", 23, 256, 136),
    Format("I8", 24, 1, 1),
    Format("I16", 25, 1, 2),
    Format("I32", 26, 1, 4),
    Format("I64", 27, 1, 8),
    Format("F64", 28, 1, 8),
    Format("IQ1_M", 29, 256, 56),
    Format("TQ1_0", 34, 256, 54),
    Format("TQ2_0", 35, 256, 66),
    Format("MXFP4", 39, 32, 17),
    Format("NVFP4", 40, 64, 36),
    Format("Q1_0", 41, 128, 18),
    Format("Q2_0", 42, 64, 18),
)

#: name -> Format, in the table's order
FORMATS: dict[str, Format] = {f.name: f for f in _TABLE}
#: ggml type number -> Format
BY_TYPE: dict[int, Format] = {f.ggml_type: f for f in _TABLE}


def get_format(name: str | Format) -> Format:
    """The format called `name`, in any case (`Q4_K`, `q4_K`, `q4_k`).

    >>> get_format("q4_K").bpw
    4.5

    Raises QuantError, with the nearest name, if there is none.
    """
    if isinstance(name, Format):
        return name
    found = FORMATS.get(name.upper())
    if found is None:
        near = difflib.get_close_matches(name.upper(), FORMATS, 1, 0.5)
        raise QuantError(f"unknown type '{name}'" + (f"; did you mean {near[0]}?" if near else ""))
    return found
