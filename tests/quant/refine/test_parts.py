"""Blocks taken apart and put together again are the same bytes, and mean what the format's decoder says."""

import numpy as np
import pytest

from quant import FORMATS
from quant.quantize import dequantize_blocks
from quant.refine.parts import FORMATS_OF, apart, layout_of, together


@pytest.fixture(scope="module")
def golden(data):
    return np.load(data / "quant.npz")


@pytest.mark.parametrize("name", FORMATS_OF)
def test_there_and_back(name, golden):
    fmt, layout = FORMATS[name], layout_of(name)
    for key in (name, f"{name}.imatrix"):
        if key not in golden:
            continue
        blocks = np.ascontiguousarray(golden[key]).reshape(16, -1).view(fmt.block)
        parts = apart(blocks, layout)
        np.testing.assert_array_equal(layout.values(parts), dequantize_blocks(blocks, fmt))
        if name == "MXFP4":  # codes of minus zero become zero
            again = dequantize_blocks(together(parts, layout, fmt.block), fmt)
            np.testing.assert_array_equal(again, dequantize_blocks(blocks, fmt))
        else:
            assert together(parts, layout, fmt.block).tobytes() == blocks.tobytes()


@pytest.mark.parametrize("name", FORMATS_OF)
def test_any_bytes(name):
    """Not only what quantizers write: every code and scale survives."""
    fmt, layout = FORMATS[name], layout_of(name)
    raw = np.random.default_rng(1).integers(0, 256, (3, 4 * fmt.type_size), dtype=np.uint8)
    blocks = raw.view(fmt.block)
    parts = apart(blocks, layout)
    parts.d[:] = np.float32(0.5)
    parts.dmin[:] = np.float32(0.25) if layout.mins or layout.offset else np.float32(0)
    if layout.sets > 1 or name == "MXFP4":
        blocks = together(parts, layout, fmt.block)
        parts = apart(blocks, layout)
    again = apart(together(parts, layout, fmt.block), layout)
    for field in ("d", "dmin", "scales", "mins", "codes", "negative"):
        np.testing.assert_array_equal(getattr(again, field), getattr(parts, field), err_msg=field)
    found = dequantize_blocks(together(parts, layout, fmt.block), fmt)
    np.testing.assert_allclose(layout.values(parts), found, rtol=1e-6, atol=1e-6)
