"""Embeddings of texts from the states of their tokens."""

import numpy as np
import pytest

from engine.errors import EngineError
from engine.pooling import BY_NUMBER, POOLINGS, name_of, normalize, pool

STATES = np.array([[1, 2, 2], [3, 0, 4], [5, 1, 0]], np.float32)


@pytest.mark.parametrize(("name", "expected"), [("mean", [3, 1, 2]), ("cls", [1, 2, 2]), ("last", [5, 1, 0])])
def test_pool(name, expected):
    found = pool(STATES, name)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)


def test_one_token_is_its_own_embedding():
    for name in POOLINGS:
        np.testing.assert_array_equal(pool(STATES[:1], name), STATES[0])


def test_unit():
    np.testing.assert_allclose(normalize(STATES[0]), STATES[0] / 3, rtol=1e-6)
    np.testing.assert_array_equal(normalize(np.zeros((2, 3), np.float32)), np.zeros((2, 3)))


def test_numbers_in_files():
    assert [name_of(value) for value in (None, *BY_NUMBER)] == [None, None, "mean", "cls", "last"]
    with pytest.raises(EngineError, match="pooling type 4 is unknown"):
        name_of(4)


def test_errors():
    with pytest.raises(EngineError, match="unknown pooling 'max'; there are mean, cls, last"):
        pool(STATES, "max")
    with pytest.raises(EngineError, match="no tokens"):
        pool(STATES[:0], "mean")
