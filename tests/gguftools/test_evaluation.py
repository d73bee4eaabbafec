"""Measuring, against llama.cpp's own figures for the package's model (`tests/data/tiny/evaluation.json`).

It rounds activations to 8 bits where ours stay float32: its divergences are somewhat larger.
"""

import json

import numpy as np
import pytest

import gguftools
from tests.conftest import DATA

EVALUATION = json.loads((DATA / "tiny" / "evaluation.json").read_text())
VALID = gguftools.demo_text("valid")

#: below this KLD the reference measures its own rounding of activations more than the weights
_ROUNDING = 1.5e-3


#: of the list, one of every kind and size: q- without importance matrix, qi- with it
PRESETS = (
    "qi-F16 qi-BF16 qi-Q8_0 qi-Q6_K qi-Q5_K_M qi-Q5_1 qi-Q4_K_M q-Q4_K_M q-Q4_0 qi-IQ4_XS qi-Q3_K_M qi-IQ3_XXS q-Q2_K "
    "qi-IQ2_XS qi-IQ1_S"
).split()


@pytest.fixture(scope="module")
def results(tiny, tmp_path_factory):
    """Every preset of the reference's list, measured in one run beside the float32 model."""
    folder = tmp_path_factory.mktemp("presets")
    files = []
    for name in PRESETS:
        how, _, preset = name.partition("-")
        imatrix = DATA / "tiny" / "imatrix.gguf" if how == "qi" else None
        gguftools.quantize(tiny["bf16"], folder / f"{name}.gguf", preset, imatrix)
        files.append(folder / f"{name}.gguf")
    found = gguftools.compare(files, VALID, 256, 64, base=tiny["f32"])
    return dict(zip(PRESETS, found))


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_presets(results, name):
    expected, found = EVALUATION[name], results[name]
    exact = name in ("qi-F16", "qi-BF16")
    assert found.ppl.value == pytest.approx(expected["ppl"], rel=2e-4 if exact else 5e-3)
    d = found.divergence
    assert d.base_ppl.value == pytest.approx(expected["ppl_base"], rel=2e-4)
    share = d.mean_kld.value / expected["mean_kld"] if expected["mean_kld"] > 1e-4 else None
    if expected["mean_kld"] > _ROUNDING:
        assert 0.70 < share < 1.02
        assert d.kld_percentiles[50.0] == pytest.approx(expected["median_kld"], rel=0.3)
        assert d.kld_percentiles[99.0] == pytest.approx(expected["kld_99"], rel=0.3)
        if "same_top" in expected:  # the list has gaps
            assert 100 * d.same_top.value == pytest.approx(expected["same_top"], abs=1.2)
            assert 100 * d.rms_dp.value == pytest.approx(expected["rms_dp"], rel=0.2)
    elif share is not None:
        assert share < 1.02
    assert sum(d.kld_histogram) == found.n_tokens == 64 * 127
