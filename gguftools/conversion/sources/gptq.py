"""GPTQ: integers of 2, 3, 4 or 8 bits in 32-bit words, in groups of input columns that share scale and zero point.

x[o, i] = scales[g, o] * (q[i, o] - zero[g, o]), g = g_idx[i]. Words run along the inputs: `qweight` is
[in * bits / 32, out], `qzeros` [groups, out * bits / 32], `scales` [groups, out]. Zero points are stored less 1 unless
`checkpoint_format` is gptq_v2. Integers of 3 bits run on across words, 32 of them in three.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gguftools.conversion.sources.numbers import integers
from gguftools.conversion.sources.parts import Kind, Method, Parts, floats
from gguftools.conversion.transforms import Rows
from gguftools.errors import GGUFError

BITS = (2, 3, 4, 8)


def _make(parts: Parts) -> Rows:
    bits = parts.number("bits", *BITS)
    words = parts.matrix(".qweight", "I32", "U32")
    zeros = parts.matrix(".qzeros", "I32", "U32")
    scales = parts.matrix(".scales", "F16", "BF16", "F32")
    n, n_out = words.shape[0] * 32 // bits, words.shape[1]
    groups = len(scales)
    parts.expect(".scales", (groups, n_out))
    parts.expect(".qzeros", (groups, -(-n_out * bits // 32)))
    group_of = _groups(parts, n, groups)
    less = 0 if parts.settings.get("checkpoint_format", "gptq") == "gptq_v2" else 1
    kind = parts.views[".scales"].dtype

    def fetch(lo: int, hi: int) -> np.ndarray:
        q = integers(words[:, lo:hi].T, bits)
        first = lo // 32  # 32 integers fill whole words, whatever their size
        zero = integers(zeros[:, first * bits : -(-hi // 32) * bits], bits)
        zero = zero[:, lo - first * 32 : hi - first * 32].T + less
        scale = floats(scales[:, lo:hi], kind).T
        return scale[:, group_of] * (q - zero[:, group_of]).astype(np.float32)

    return Rows(parts.name, "F32", (n_out, n), fetch)


def _groups(parts: Parts, n: int, groups: int) -> np.ndarray:
    """The group of each input column."""
    if ".g_idx" in parts.views:
        parts.expect(".g_idx", (n,))
        found = parts.array(".g_idx", "I32", "I64").astype(np.int64)
        if found.min() < 0 or found.max() >= groups:
            raise parts.fail(f"'{parts.views['.g_idx'].name}' names group {found.max()}, there are {groups}")
        return found
    size = parts.number("group_size", default=-1)
    size = n if size <= 0 else size
    if -(-n // size) != groups:
        raise parts.fail(f"{n} columns in groups of {size} do not have {groups} scales")
    return np.arange(n) // size


def _kinds(settings: Mapping[str, Any]) -> tuple[Kind, ...]:
    layout = settings.get("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise GGUFError(
            f"config.json: quantization_config: 'checkpoint_format' is {layout!r}; gptq and gptq_v2 are read, convert "
            "the original model"
        )
    return (Kind(".qweight", (".qzeros", ".scales"), _make, optional=(".g_idx",)),)


METHOD = Method(
    names=("gptq",),
    kinds=_kinds,
    row="GPTQ of 2, 3, 4 and 8 bits: both conventions of zero points, columns in any order (g_idx)",
)
