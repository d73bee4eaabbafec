"""What methods of quantization are made of: which tensors together are one weight, and how rows of numbers and rows of
scales become weights when they are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gguftools.conversion.sources.numbers import FLOAT8
from gguftools.conversion.transforms import Rows
from gguftools.errors import GGUFError
from gguftools.safetensors import SafetensorView


@dataclass(frozen=True)
class Parts:
    """The tensors of one weight.

    name: of the weight; views: ending -> tensor; settings: of config.json's `quantization_config`.
    """

    name: str
    views: Mapping[str, SafetensorView]
    settings: Mapping[str, Any]

    def fail(self, message: str) -> GGUFError:
        """The error for a weight whose tensors do not go together."""
        path = next(iter(self.views.values())).path
        return GGUFError(f"{path}: the weight '{self.name}' cannot be read: {message}")

    def array(self, ending: str, *kinds: str) -> np.ndarray:
        """A tensor's elements, mapped. Raises GGUFError unless its type is one of `kinds`."""
        view = self.views[ending]
        if view.dtype not in kinds:
            raise self.fail(f"'{view.name}' is of type {view.dtype}, expected {' or '.join(kinds)}")
        return view.array()

    def matrix(self, ending: str, *kinds: str) -> np.ndarray:
        """The same, of two axes."""
        found = self.array(ending, *kinds)
        if found.ndim != 2 or not found.size:
            raise self.fail(f"'{self.views[ending].name}' has shape {list(found.shape)}, expected a matrix")
        return found

    def expect(self, ending: str, shape: tuple[int, ...]) -> None:
        """Raises GGUFError unless a tensor has this shape."""
        view = self.views[ending]
        if view.shape != shape:
            raise self.fail(f"'{view.name}' has shape {list(view.shape)}, the others need {list(shape)}")

    def number(self, key: str, *allowed: int, default: int | None = None) -> int:
        """A whole number of the settings. Raises GGUFError if it is none, or not among `allowed`."""
        value = self.settings.get(key, default)
        if type(value) is not int or (allowed and value not in allowed):
            names = ", ".join(map(str, allowed)) or "a whole number"
            raise GGUFError(f"config.json: quantization_config: '{key}' is {value!r}, expected {names}")
        return value


@dataclass(frozen=True)
class Kind:
    """One way to store a weight as several tensors.

    main: ending of the tensor with the numbers; needed, optional: endings of those that belong to it; result: the
    ending of the weight in a plain checkpoint; make: the weight's rows; fits: whether a tensor with that ending is one.
    """

    main: str
    needed: tuple[str, ...]
    make: Callable[[Parts], Rows]
    optional: tuple[str, ...] = ()
    result: str = ".weight"
    fits: Callable[[SafetensorView], bool] = lambda view: True


@dataclass(frozen=True)
class Method:
    """A value of `quant_method`.

    names: its spellings; kinds: for these settings, of which the first that fits counts; apart: endings of tensors that
    are no weights: scales of activations and of the cache, which GGUF has no use for; row: for the table of sources,
    what is read.
    """

    names: tuple[str, ...]
    kinds: Callable[[Mapping[str, Any]], tuple[Kind, ...]]
    row: str
    apart: tuple[str, ...] = ()


#: scales of activations and of the cache
ACTIVATIONS = (
    *(".activation_scale", "_activation_scale", ".input_scale", ".input_zero_point", ".input_global_scale"),
    *(".k_scale", ".v_scale", ".q_scale", ".output_scale", ".qscale_act"),
)

#: types of scales
SCALES = ("F32", "F16", "BF16", *FLOAT8)


def floats(array: np.ndarray, dtype: str) -> np.ndarray:
    """Elements of one of SCALES as float32."""
    if dtype in FLOAT8:
        return FLOAT8[dtype][array]
    return (array.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else array.astype(np.float32)


def scaled(
    parts: Parts,
    shape: tuple[int, ...],
    values: Callable[[int, int], np.ndarray],
    scale: str,
    block: tuple[int, ...] | None = None,
    factor: float | None = None,
    zero: Callable[[int, int], np.ndarray] | None = None,
) -> Rows:
    """Weights as values times scales.

    values: function of lo and hi -> these rows, float32 [hi - lo, n]; scale: ending of the tensor with the scales: one
    for all, one for each index of the first axes, or one for each block of sizes `block` along the last axes;
    factor: of all scales; zero: what is subtracted before, as `values`.
    Raises GGUFError if scales and shape do not go together.
    """
    view = parts.views[scale]
    found = parts.array(scale, *SCALES)
    found = found.reshape(found.shape + (1,) * (len(shape) - found.ndim))
    steps = _steps(parts, shape, found.shape, block, view.name)

    def fetch(lo: int, hi: int) -> np.ndarray:
        at = np.unravel_index(np.arange(lo, hi), shape[:-1] or (1,)) if len(shape) > 1 else (np.arange(lo, hi),)
        index = tuple(axis // step for axis, step in zip(at, steps))
        scales = floats(found[index], view.dtype).reshape(hi - lo, -1)
        if scales.shape[1] > 1:
            scales = np.repeat(scales, steps[-1], axis=1)[:, : shape[-1]]
        rows = values(lo, hi)
        if zero is not None:
            rows = rows - zero(lo, hi)
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is reported where it is written
            rows = rows * scales
            return rows if factor is None else rows * np.float32(factor)

    return Rows(parts.name, "F32", shape, fetch)


def _steps(
    parts: Parts, shape: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, ...] | None, name: str
) -> tuple[int, ...]:
    """How many indices of each axis share a scale."""
    sizes = (None,) * (len(shape) - len(block or ())) + tuple(block or ())
    steps = []
    for n, count, size in zip(shape, scales, sizes) if len(scales) == len(shape) else ():
        if count in (1, n):
            steps.append(n if count == 1 else 1)
        elif size and -(-n // size) == count:
            steps.append(size)
    if len(steps) < len(shape):
        how = f" in blocks of {list(block)}" if block else ""
        raise parts.fail(f"'{name}' has shape {list(scales)}, which are no scales of {list(shape)}{how}")
    return tuple(max(1, step) for step in steps)


def single(parts: Parts, ending: str) -> float:
    """The value of a tensor of one element."""
    found = parts.array(ending, "F32", "F16", "BF16")
    if found.size != 1:
        raise parts.fail(f"'{parts.views[ending].name}' has {found.size} elements, expected one")
    return float(floats(found.reshape(1), parts.views[ending].dtype)[0])


def codes(parts: Parts, ending: str, per_byte: int) -> tuple[np.ndarray, tuple[int, ...]]:
    """Bytes of packed codes as rows, mapped, and the shape of the weight."""
    found = parts.array(ending, "U8", "I8", "F4") if ending in parts.views else np.empty(0)
    if found.ndim < 2:
        raise parts.fail(f"'{parts.views[ending].name}' has shape {list(found.shape)}, expected rows of bytes")
    n_rows = math.prod(found.shape[:-1])
    return found.view(np.uint8).reshape(n_rows, found.shape[-1]), (*found.shape[:-1], found.shape[-1] * per_byte)
