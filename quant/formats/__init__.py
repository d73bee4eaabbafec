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
    Format("Q4_1", 3, 32, 20, "q4_1"),
    Format("Q5_0", 6, 32, 22, "q5_0"),
    Format("Q5_1", 7, 32, 24, "q5_1"),
    Format("Q8_0", 8, 32, 34, "q8_0"),
    Format("Q8_1", 9, 32, 36, "q8_1"),
    Format("Q2_K", 10, 256, 84, "q2_k"),
    Format("Q3_K", 11, 256, 110, "q3_k"),
    Format("Q4_K", 12, 256, 144, "q4_k"),
    Format("Q5_K", 13, 256, 176, "q5_k"),
    Format("Q6_K", 14, 256, 210, "q6_k"),
    Format("Q8_K", 15, 256, 292, "q8_k"),
    Format("IQ2_XXS", 16, 256, 66, "iq2_xxs"),
    Format("IQ2_XS", 17, 256, 74, "iq2_xs"),
    Format("IQ3_XXS", 18, 256, 98, "iq3_xxs"),
    Format("IQ1_S", 19, 256, 50, "iq1_s"),
    Format("IQ4_NL", 20, 32, 18, "iq4_nl"),
    Format("IQ3_S", 21, 256, 110, "iq3_s"),
    Format("IQ2_S", 22, 256, 82, "iq2_s"),
    Format("IQ4_XS", 23, 256, 136, "iq4_xs"),
    Format("I8", 24, 1, 1),
    Format("I16", 25, 1, 2),
    Format("I32", 26, 1, 4),
    Format("I64", 27, 1, 8),
    Format("F64", 28, 1, 8, "f64"),
    Format("IQ1_M", 29, 256, 56, "iq1_m"),
    Format("TQ1_0", 34, 256, 54, "tq1_0"),
    Format("TQ2_0", 35, 256, 66, "tq2_0"),
    Format("MXFP4", 39, 32, 17, "mxfp4"),
    Format("NVFP4", 40, 64, 36, "nvfp4"),
    Format("Q1_0", 41, 128, 18, "q1_0"),
    Format("Q2_0", 42, 64, 18, "q2_0"),
)

#: name -> Format, in the table's order
FORMATS: dict[str, Format] = {f.name: f for f in _TABLE}
#: ggml type number -> Format
BY_TYPE: dict[int, Format] = {f.ggml_type: f for f in _TABLE}

#: Numbers that llama.cpp no longer reads.
REMOVED = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4; also I2_S of BitNet",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}

#: Numbers of ik_llama.cpp, from the enumeration in its gguf-py.
IK_LLAMA = {
    133: "Q6_0", 134: "IQ1_BN", 135: "IQ2_BN", 136: "Q8_K64", 137: "IQ2_K", 138: "IQ3_K", 139: "IQ4_K", 140: "IQ5_K",
    141: "IQ6_K", 142: "IQ2_TN", 143: "IQ1_TN", 144: "IQ4_KS", 145: "IQ2_KS", 146: "IQ4_KSS", 147: "Q8_K16",
    148: "Q8_K32", 149: "Q8_KR8", 150: "Q8_K128", 151: "Q8_KV", 152: "IQ5_KS", 153: "IQ2_KT", 154: "IQ3_KT",
    155: "IQ4_KT", 156: "IQ3_KS", 157: "IQ2_KL", 158: "IQ1_KT", 202: "Q4_0_R8", 206: "Q5_0_R4", 208: "Q8_0_R8",
    210: "Q2_K_R4", 211: "Q3_K_R4", 212: "Q4_K_R4", 213: "Q5_K_R4", 214: "Q6_K_R4", 216: "IQ2_XXS_R4",
    217: "IQ2_XS_R4", 218: "IQ3_XXS_R4", 219: "IQ1_S_R4", 220: "IQ4_NL_R4", 221: "IQ3_S_R4", 222: "IQ2_S_R4",
    223: "IQ4_XS_R8", 229: "IQ1_M_R4", 230: "BF16_R16", 233: "Q6_0_R4", 335: "IQ2_BN_R4", 337: "IQ2_K_R4",
    338: "IQ3_K_R4", 339: "IQ4_K_R4", 340: "IQ5_K_R4", 344: "IQ4_KS_R4", 352: "IQ5_KS_R4", 398: "Q8_KV_R8",
    399: "Q8_K_R8",
}  # fmt: skip


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


def describe_type(number: int) -> str:
    """What a type number in a file stands for, for messages about those that are not in the table.

    >>> describe_type(12), describe_type(144), describe_type(4), describe_type(99)
    ('Q4_K', 'type 144 (IQ4_KS of ik_llama.cpp)', 'type 4 (removed from llama.cpp: Q4_2)', 'type 99 (unknown)')
    """
    if number in BY_TYPE:
        return BY_TYPE[number].name
    if number in REMOVED:
        return f"type {number} (removed from llama.cpp: {REMOVED[number]})"
    if number in IK_LLAMA:
        return f"type {number} ({IK_LLAMA[number]} of ik_llama.cpp)"
    return f"type {number} (unknown)"
