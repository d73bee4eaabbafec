"""AWQ: integers of 4 bits in 32-bit words along the outputs, in groups of input columns.

x[o, i] = scales[g, o] * (q[i, o] - zero[g, o]), g = i // group_size. `qweight` is [in, out / 8], `qzeros`
[groups, out / 8], `scales` [groups, out]. The eight integers of a word are, from its lowest bits on, those of outputs
0, 2, 4, 6, 1, 3, 5, 7 (AutoAWQ's layout GEMM).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gguftools.conversion.sources.numbers import integers
from gguftools.conversion.sources.parts import Kind, Method, Parts, floats
from gguftools.conversion.transforms import Rows
from gguftools.errors import GGUFError

PER_WORD = 8
#: output -> place in its word
_PLACES = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])


def _unpacked(words: np.ndarray) -> np.ndarray:
    """Words [rows, k] -> integers [rows, 8 * k] in the order of outputs."""
    found = integers(words, 4).reshape(len(words), -1, PER_WORD)
    return found[:, :, _PLACES].reshape(len(words), -1)


def _make(parts: Parts) -> Rows:
    parts.number("bits" if "bits" in parts.settings else "w_bit", 4)
    words = parts.matrix(".qweight", "I32", "U32")
    zeros = parts.matrix(".qzeros", "I32", "U32")
    scales = parts.matrix(".scales", "F16", "BF16", "F32")
    n, n_out, groups = words.shape[0], words.shape[1] * PER_WORD, len(scales)
    parts.expect(".scales", (groups, n_out))
    parts.expect(".qzeros", (groups, n_out // PER_WORD))
    size = parts.number("group_size" if "group_size" in parts.settings else "q_group_size")
    size = n if size <= 0 else size
    if -(-n // size) != groups:
        raise parts.fail(f"{n} columns in groups of {size} do not have {groups} scales")
    kind = parts.views[".scales"].dtype
    group_of = np.arange(n) // size

    def fetch(lo: int, hi: int) -> np.ndarray:
        first, last = lo // PER_WORD, -(-hi // PER_WORD)
        cut = slice(lo - first * PER_WORD, hi - first * PER_WORD)
        q = _unpacked(words[:, first:last])[:, cut].T
        zero = _unpacked(zeros[:, first:last])[:, cut].T
        scale = floats(scales[:, lo:hi], kind).T
        return scale[:, group_of] * (q - zero[:, group_of]).astype(np.float32)

    return Rows(parts.name, "F32", (n_out, n), fetch)


def _kinds(settings: Mapping[str, Any]) -> tuple[Kind, ...]:
    layout = str(settings.get("version", "gemm")).lower()
    if layout != "gemm" or settings.get("zero_point") is False:
        what = f"'version' is {layout!r}" if layout != "gemm" else "'zero_point' is false"
        raise GGUFError(f"config.json: quantization_config: {what}; the layout gemm is read, convert another one")
    return (Kind(".qweight", (".qzeros", ".scales"), _make),)


METHOD = Method(names=("awq",), kinds=_kinds, row="AWQ of 4 bits (layout GEMM)")
