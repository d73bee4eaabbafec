"""Every model family with quantized weights: the file can be made and run, and says nearly what the original says."""

import numpy as np
import pytest

import gguftools
from tests.gguftools.test_families import converted, log_softmax, pytest_generate_tests  # noqa: F401

#: of the middle token: where a router's choice is close, a few tokens go to other experts
MOST_KLD = {"Q8_0": 0.01, "Q4_K_M": 0.5}


@pytest.mark.parametrize("preset", MOST_KLD)
def test_quantized(checkpoint, converted, preset, tmp_path):  # noqa: F811
    ids = np.load(checkpoint / "expected.npz")["ids1"]
    gguftools.quantize(converted(checkpoint), tmp_path / "small.gguf", preset)
    base, ours = (
        log_softmax(gguftools.load(path, threads=2).logits(ids).astype(np.float64))
        for path in (converted(checkpoint), tmp_path / "small.gguf")
    )
    kld = np.median((np.exp(base) * (base - ours)).sum(-1))
    assert np.isfinite(ours).all()
    assert 0 < kld < MOST_KLD[preset]
