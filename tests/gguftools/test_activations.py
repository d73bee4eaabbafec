"""Activations rounded to 8 bits, as llama.cpp's products see them."""

import json

import numpy as np
import pytest

import gguftools
from engine import EngineError, ModelContext
from engine.activations import partner
from quant import FORMATS

#: formats whose partner is not the one of super-blocks
PARTNERS = {"Q4_0": "Q8_0", "Q8_0": "Q8_0", "IQ4_NL": "Q8_0", "Q5_1": "Q8_1", "F16": "F16", "Q4_K": "Q8_K"}


@pytest.mark.parametrize(("name", "expected"), PARTNERS.items())
def test_partners(name, expected):
    assert partner(FORMATS[name]) is FORMATS[expected]
    assert partner(FORMATS["F32"]) is None


@pytest.mark.parametrize("preset", ["Q8_0", "Q4_0", "Q4_K_M", "Q6_K", "IQ4_XS"])
def test_perplexity_is_the_references(shared, tmp_path, preset):
    golden = shared / "golden" / "tiny"
    expected = json.loads((golden / "evaluation.json").read_text())[f"qi-{preset}"]["ppl"]
    path = tmp_path / "m.gguf"
    gguftools.quantize(golden / "tiny-bf16.gguf", path, preset, imatrix=golden / "imatrix.gguf")
    text = gguftools.demo_text("valid")
    found = gguftools.perplexity(path, text, n_ctx=256, chunks=64, threads=2, activations="q8")
    assert found.ppl.value == pytest.approx(expected, rel=1e-3)


def test_what_is_rounded(tiny, tmp_path):
    """One product by hand; float32 weights see activations as they are; contexts round as sessions do."""
    gguftools.quantize(tiny["f32"], tmp_path / "m.gguf", "Q8_0")
    plain, rounded = (gguftools.load(tmp_path / "m.gguf", threads=2, activations=a) for a in ("f32", "q8"))
    ids = [1, 5, 9, 30]
    exact, rough = plain.logits(ids), rounded.logits(ids)
    assert 1e-4 < np.abs(exact - rough).max() < 1
    c = ModelContext(rounded, n_ctx=256, type_k="F32", type_v="F32")
    c.process(ids)
    np.testing.assert_allclose(c.logits(), rough[-1], atol=1e-3)
    same = gguftools.load(tiny["f32"], threads=2, activations="q8").logits(ids)
    np.testing.assert_array_equal(same, gguftools.load(tiny["f32"], threads=2).logits(ids))


def test_activations_that_are_none(tiny):
    with pytest.raises(EngineError, match="no activations 'q4'; use one of f32, q8"):
        gguftools.load(tiny["f32"], activations="q4")
