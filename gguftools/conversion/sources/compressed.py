"""compressed-tensors (llm-compressor, vLLM): floats and integers of 8 bits, packed integers, MXFP4 and NVFP4.

Settings lie in `config_groups`; what a tensor needs of them is settled by its shape, so several groups are no trouble.
Packed integers lie in 32-bit words along rows, 32 // bits in each, plus 2^(bits - 1); zero points, where they are,
along columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from gguftools.conversion.sources.fp8 import block_size, float8_scaled, is_float8
from gguftools.conversion.sources.mxfp4 import GROUP, mxfp4_rows
from gguftools.conversion.sources.numbers import integers
from gguftools.conversion.sources.nvfp4 import nvfp4_rows
from gguftools.conversion.sources.parts import ACTIVATIONS, Kind, Method, Parts, codes, floats, scaled, single
from gguftools.conversion.transforms import Rows
from gguftools.errors import GGUFError

Settings = Mapping[str, Any]
_WHERE = "config.json: quantization_config:"


def _weights(settings: Settings) -> list[tuple[str, Settings]]:
    """Format and settings of the weights of each group."""
    groups = settings.get("config_groups")
    found = []
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            found.append((str(group.get("format") or settings.get("format")), weights))
    if not found:
        raise GGUFError(f"{_WHERE} 'config_groups' names no weights; convert the original model")
    return found


def _float(parts: Parts, blocks: list[tuple[int, ...]]) -> Rows:
    return _first_fitting(parts, blocks, lambda block: float8_scaled(parts, ".weight", ".weight_scale", block))


def _int8(parts: Parts, blocks: list[tuple[int, ...]]) -> Rows:
    q = parts.matrix(".weight", "I8")
    zero = None
    if ".weight_zero_point" in parts.views:
        zeros = parts.array(".weight_zero_point", "I8", "I32", "I64").reshape(-1)
        if zeros.size not in (1, len(q)):
            raise parts.fail(f"it has {zeros.size} zero points for {len(q)} rows")
        columns = np.broadcast_to(zeros, (len(q),))

        def zero(lo: int, hi: int) -> np.ndarray:
            return columns[lo:hi, None].astype(np.float32)

    def values(lo: int, hi: int) -> np.ndarray:
        return q[lo:hi].astype(np.float32)

    return _first_fitting(
        parts, blocks, lambda block: scaled(parts, q.shape, values, ".weight_scale", block, zero=zero)
    )


def _first_fitting(parts: Parts, blocks: list[tuple[int, ...]], make) -> Rows:
    """The rows with the first block that the scales fit. Raises the last error if none does."""
    for block in blocks[:-1]:
        try:
            return make(block)
        except GGUFError:
            continue
    return make(blocks[-1] if blocks else None)


def _packed(parts: Parts, widths: list[int]) -> Rows:
    words = parts.matrix(".weight_packed", "I32")
    parts.expect(".weight_shape", (2,))
    n_out, n = (int(v) for v in parts.array(".weight_shape", "I64", "I32"))
    fitting = [b for b in widths if n_out == len(words) and n > 0 and -(-n // (32 // b)) == words.shape[1]]
    if len(fitting) != 1:
        names = " or ".join(map(str, widths))
        raise parts.fail(f"{list(words.shape)} words are no {[n_out, n]} of {names} bits")
    bits = fitting[0]
    scales = parts.matrix(".weight_scale", "F32", "F16", "BF16")
    groups = scales.shape[1]
    if len(scales) != n_out or n % groups:
        raise parts.fail(f"{list(scales.shape)} scales do not fit {[n_out, n]}")
    group_of = np.arange(n) // (n // groups)
    if ".weight_g_idx" in parts.views:
        parts.expect(".weight_g_idx", (n,))
        group_of = parts.array(".weight_g_idx", "I32", "I64").astype(np.int64)
        if group_of.min() < 0 or group_of.max() >= groups:
            raise parts.fail(f"column groups go up to {group_of.max()}, there are {groups}")
    zeros = None
    if ".weight_zero_point" in parts.views:
        zeros = parts.matrix(".weight_zero_point", "I32")
        parts.expect(".weight_zero_point", (-(-n_out // (32 // bits)), groups))
    per_word = 32 // bits

    def fetch(lo: int, hi: int) -> np.ndarray:
        q = integers(words[lo:hi], bits, across=False)[:, :n]
        scale = floats(scales[lo:hi], parts.views[".weight_scale"].dtype)[:, group_of]
        if zeros is None:
            return scale * (q - (1 << (bits - 1))).astype(np.float32)
        first = lo // per_word
        zero = integers(zeros[first : -(-hi // per_word)].T, bits, across=False).T
        zero = zero[lo - first * per_word : hi - first * per_word]
        return scale * (q - zero[:, group_of]).astype(np.float32)

    return Rows(parts.name, "F32", (n_out, n), fetch)


def _nvfp4(parts: Parts) -> Rows:
    whole = single(parts, ".weight_global_scale")
    if not whole or not np.isfinite(whole):
        raise parts.fail(f"its global scale is {whole}")
    return nvfp4_rows(parts, ".weight_packed", ".weight_scale", 1 / whole)


def _mxfp4(parts: Parts) -> Rows:
    packed, shape = codes(parts, ".weight_packed", 2)
    parts.expect(".weight_scale", (*shape[:-1], shape[-1] // GROUP))
    scales = parts.array(".weight_scale", "U8", "F8_E8M0")
    return mxfp4_rows(parts.name, shape, packed, scales.reshape(len(packed), -1))


def _kinds(settings: Settings) -> tuple[Kind, ...]:
    groups = _weights(settings)
    for name in ("sparsity_config", "transform_config"):
        if settings.get(name) and (settings[name] or {}).get("format", "") != "dense":
            raise GGUFError(f"{_WHERE} '{name}' is not supported; convert the original model")
    blocks = []
    for _, weights in groups:
        block = block_size(weights, "block_structure")
        size = weights.get("group_size")
        block = (size,) if block is None and type(size) is int and size > 0 else block
        blocks += [block] if block else []
    widths = sorted({bits for _, w in groups if type(bits := w.get("num_bits")) is int and 2 <= bits <= 8})
    made: dict[str, tuple[Kind, ...]] = {
        "float-quantized": (Kind(".weight", (".weight_scale",), partial(_float, blocks=blocks), fits=is_float8),),
        "int-quantized": (
            Kind(
                ".weight",
                (".weight_scale",),
                partial(_int8, blocks=blocks),
                (".weight_zero_point",),
                fits=lambda view: view.dtype == "I8",
            ),
        ),
        "pack-quantized": (
            Kind(
                ".weight_packed",
                (".weight_scale", ".weight_shape"),
                partial(_packed, widths=widths),
                (".weight_zero_point", ".weight_g_idx"),
            ),
        ),
        "nvfp4-pack-quantized": (Kind(".weight_packed", (".weight_scale", ".weight_global_scale"), _nvfp4),),
        "mxfp4-pack-quantized": (Kind(".weight_packed", (".weight_scale",), _mxfp4),),
    }
    made["naive-quantized"] = made["float-quantized"] + made["int-quantized"]
    formats = list(dict.fromkeys(format for format, _ in groups))
    unknown = [format for format in formats if format not in made]
    if unknown:
        known = ", ".join(made)
        raise GGUFError(f"{_WHERE} 'format' is {unknown[0]!r}; {known} are read, convert the original model")
    return tuple(kind for format in formats for kind in made[format])


METHOD = Method(
    names=("compressed-tensors",),
    kinds=_kinds,
    row="compressed-tensors: float, int, naive, packed integers, NVFP4, MXFP4",
    apart=ACTIVATIONS,
)
