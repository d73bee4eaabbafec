"""Every model family over sequences that come in parts, states and keys carried over, gives what it gives at once."""

import numpy as np
import pytest

import gguftools
from tests.engine.models.in_parts import run_part
from tests.gguftools.test_families import checkpoint, converted, pytest_generate_tests, whole  # noqa: F401

CUTS = (0, 1, 2, 39, 40, 90)  # parts shorter and longer than a convolution, and than a window


def test_in_parts(checkpoint, converted):  # noqa: F811
    ids = np.load(checkpoint / "expected.npz")["ids1"]
    tokens = np.stack([ids, ids[::-1]])
    session = gguftools.load(converted(checkpoint), threads=2)
    if not session.arch.causal:
        pytest.skip("an encoder sees a text as a whole")
    at_once = session.hidden(tokens).reshape(2, len(ids), -1)
    past, found = {}, []
    for first, last in zip(CUTS, (*CUTS[1:], len(ids))):
        if first < last:
            hidden, past = run_part(session, tokens[:, first:last], first, past, len(ids))
            found.append(hidden)
    np.testing.assert_allclose(np.concatenate(found, 1), at_once, atol=5e-4, rtol=0)
