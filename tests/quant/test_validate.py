"""Validation of blocks against ggml's, block by block, on arbitrary bytes and on planted faults."""

from __future__ import annotations

import numpy as np
import pytest

import quant
from quant import FORMATS, QuantError
from tests.quant import oracle

COMPUTED = [name for name, fmt in FORMATS.items() if fmt.module]
ALWAYS_VALID = ("NVFP4", "I8", "I16", "I32", "I64")


def _blocks(name: str, count: int) -> np.ndarray:
    """Arbitrary bytes, the last two of each block's words drawn so that infinities are common."""
    fmt = FORMATS[name]
    r = np.random.default_rng(fmt.ggml_type)
    q = r.integers(0, 256, (count, fmt.type_size), np.uint8)
    q[r.random(q.shape) < 0.3] = 0xFF
    q[r.random(q.shape) < 0.2] = 0x7C
    return q


@pytest.mark.parametrize("name", [n for n in FORMATS if n != "Q8_1"])  # ggml has no rule for Q8_1
def test_agrees_with_ggml(name, capfd):
    q = _blocks(name, 400)
    if not FORMATS[name].module and name not in ALWAYS_VALID:
        pytest.skip("no module")
    valid = [oracle.is_valid(name, block) for block in q]
    assert [quant.validate(block, name) == -1 for block in q] == valid
    assert quant.validate(q, name) == (valid.index(False) if False in valid else -1)
    if name not in ALWAYS_VALID:
        assert {True, False} == set(valid), "the sample has both"


@pytest.mark.parametrize("name", COMPUTED)
def test_first_fault_is_found_through_rows(name):
    if name in ALWAYS_VALID:
        return
    fmt = FORMATS[name]
    good = np.zeros((4, 512 // fmt.block_size * fmt.type_size), np.uint8)
    assert quant.validate(good, name) == -1
    bad = _blocks(name, 400)
    bad = next(block for block in bad if quant.validate(block, name) == 0)
    per_row = 512 // fmt.block_size
    good.reshape(-1, fmt.type_size)[[2 * per_row + 1, 3 * per_row]] = bad
    assert quant.validate(good, name) == 2 * per_row + 1


@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00, 0x7C01])
@pytest.mark.parametrize("field", ["d", "dmin"])
def test_every_half_counts(bits, field):
    fmt = FORMATS["Q4_K"]
    if not fmt.module:
        pytest.skip("no module")
    blocks = np.zeros(3, fmt.block)
    blocks[2][field] = bits
    assert quant.validate(blocks.view(np.uint8), "Q4_K") == 2
    blocks[2][field] = 0x7BFF
    assert quant.validate(blocks.view(np.uint8), "Q4_K") == -1


def test_refuses_what_are_no_rows():
    with pytest.raises(QuantError, match="not a multiple of 18"):
        quant.validate(np.zeros(19, np.uint8), "Q4_0")
    with pytest.raises(QuantError, match="expected uint8 rows"):
        quant.validate(np.zeros(18, np.int8), "Q4_0")
    assert quant.validate(np.zeros((0, 18), np.uint8), "Q4_0") == -1
