"""The codebooks against the decoding grids of the gguf package, and the neighbour lists against their definition."""

from __future__ import annotations

import numpy as np
import pytest

from quant import lattice
from quant.codebooks import CODEBOOKS, IQ4_VALUES

gguf = pytest.importorskip("gguf")

LEVELS = {
    "IQ1_S": [-1, 0, 1],
    "IQ1_M": [-1, 0, 1],
    "IQ2_XXS": [8, 25, 43],
    "IQ2_XS": [8, 25, 43],
    "IQ2_S": [8, 25, 43],
    "IQ3_XXS": [4, 12, 20, 28, 36, 44, 52, 62],
    "IQ3_S": [1, 3, 5, 7, 9, 11, 13, 15],
}


def _levels(codes: np.ndarray, name: str) -> np.ndarray:
    """Packed codes -> levels [.., dims]."""
    book = CODEBOOKS[name]
    return (np.asarray(codes, np.int64)[..., None] >> (book.bits * np.arange(book.dims))) & ((1 << book.bits) - 1)


@pytest.mark.parametrize("name", CODEBOOKS)
def test_points_equal_the_gguf_package(name):
    reference = getattr(gguf.quants, name)
    if reference is gguf.quants.IQ1_M:
        reference = gguf.quants.IQ1_S
    reference.init_grid()
    points = np.array(LEVELS[name])[_levels(CODEBOOKS[name].codes, name)]
    np.testing.assert_array_equal(points, reference.grid.reshape(points.shape))


def test_iq4_values_equal_the_gguf_package():
    assert tuple(IQ4_VALUES) == tuple(gguf.quants.IQ4_NL.kvalues)


@pytest.mark.parametrize("name", CODEBOOKS)
def test_codes_are_distinct_and_within_the_levels_of_the_search(name):
    book = CODEBOOKS[name]
    assert (np.diff(book.codes.astype(int)) > 0).all()
    assert _levels(book.codes, name).max() == book.levels - 1


@pytest.mark.parametrize("name", CODEBOOKS)
def test_every_vector_of_levels_is_a_point_or_has_a_list(name):
    book = CODEBOOKS[name]
    index, near = lattice.tables(name)
    assert (index[book.codes] == np.arange(book.codes.size)).all()
    vectors = np.indices((book.levels,) * book.dims).reshape(book.dims, -1).T
    packed = (vectors << (book.bits * np.arange(book.dims))).sum(1)
    starts = np.sort(-1 - index[packed[index[packed] < 0]])
    assert starts.size == packed.size - book.codes.size
    lengths = near[starts]
    assert (starts == np.cumsum(lengths + 1) - (lengths + 1)).all()  # no gaps, no overlaps
    assert (lengths > 0).all()
    assert (lengths % 8 == 0).all()
    assert starts[-1] + 1 + lengths[-1] == near.size
    points = np.delete(near, starts)
    assert (index[points] >= 0).all()
    assert (book.codes[index[points]] == points).all()


@pytest.mark.parametrize("name", CODEBOOKS)
def test_lists_hold_the_nearest_shells_in_order(name):
    book = CODEBOOKS[name]
    index, near = lattice.tables(name)
    grid = _levels(book.codes, name)
    rng = np.random.default_rng(book.codes.size)
    for vector in rng.integers(0, book.levels, (200, book.dims)):
        code = int((vector << (book.bits * np.arange(book.dims))).sum())
        if index[code] >= 0:
            assert (grid[index[code]] == vector).all()
            continue
        distance = ((grid - vector) ** 2).sum(1)
        order = np.lexsort((np.arange(distance.size), distance))
        shells = np.unique(distance)[: book.shells]
        expected = book.codes[order[: np.isin(distance, shells).sum()]]
        start = -1 - index[code]
        found = near[start + 1 : start + 1 + near[start]]
        assert (found[: expected.size] == expected).all()
        assert (found[expected.size :] == expected[-1]).all()
