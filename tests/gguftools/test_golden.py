"""The whole job against the reference's own results: files by their SHA-256, importance, perplexity.

`tests/data/tiny` holds what llama.cpp (b11434) and an independent float32 implementation make of the package's model.
"""

import hashlib
import json

import numpy as np
import pytest

import gguftools
from gguftools.imatrix_file import read_imatrix, write_imatrix
from tests.conftest import DATA

PRESETS = json.loads((DATA / "tiny" / "presets.json").read_text(encoding="utf-8"))
CASES = [(preset, how) for preset, entry in PRESETS.items() for how in entry]


def sha256(path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(("preset", "how"), CASES)
def test_quantized_files(tiny, tmp_path, preset, how):
    """The whole file, header and data, for every preset, with and without importance."""
    imatrix = DATA / "tiny" / "imatrix.gguf" if how == "with_imatrix" else None
    result = gguftools.quantize(tiny["bf16"], tmp_path / "q.gguf", preset, imatrix)
    expected = PRESETS[preset][how]
    assert (tmp_path / "q.gguf").stat().st_size == expected["bytes"]
    assert sha256(tmp_path / "q.gguf") == expected["sha256"]
    assert result.output == tmp_path / "q.gguf"


def test_all_presets_are_there():
    assert {how for _, how in CASES} == {"without", "with_imatrix"}
    assert len(CASES) > 60


@pytest.mark.slow
def test_importance(tiny, tmp_path):
    """Sums of squares and counts over 65,536 tokens, and the running perplexity at the end."""
    values = []
    collected = gguftools.imatrix(
        tiny["f32"],
        gguftools.demo_text("calibration"),
        tmp_path / "imatrix.gguf",
        n_ctx=256,
        chunks=256,
        on_chunk=lambda done, total, value: values.append(value),
    )
    expected = read_imatrix(DATA / "tiny" / "imatrix.gguf")
    assert collected.entries.keys() == expected.entries.keys()
    for name, entry in expected.entries.items():
        found = collected.entries[name]
        np.testing.assert_array_equal(found.counts, entry.counts)
        # the reference keeps keys and values in half precision: single columns differ by more than a tensor as a whole
        difference = np.linalg.norm(found.squares - entry.squares) / np.linalg.norm(entry.squares)
        assert difference < 1e-4, name
        np.testing.assert_allclose(found.squares, entry.squares, rtol=5e-4)
        # plain sums cancel: their error is measured against the size of what is summed
        size = np.sqrt(entry.squares * entry.counts[:, None]).max()
        np.testing.assert_allclose(found.sums, entry.sums, rtol=0, atol=1e-4 * size)
    assert values[-1] == pytest.approx(23.7567, abs=2e-3)
    assert (collected.chunk_count, collected.chunk_size) == (256, 256)
    again = read_imatrix(tmp_path / "imatrix.gguf")
    assert again.chunk_count == 256
    np.testing.assert_allclose(again.importance(name), collected.importance(name), rtol=1e-6)


def test_importance_file_is_the_references(tmp_path):
    """What we read of the reference's file and write again is, tensor by tensor, the same."""
    source = DATA / "tiny" / "imatrix.gguf"
    write_imatrix(tmp_path / "again.gguf", read_imatrix(source))
    with gguftools.open(source) as a, gguftools.open(tmp_path / "again.gguf") as b:
        assert list(a.tensors) == list(b.tensors)
        for name, view in a.tensors.items():
            if name.endswith(".stats"):  # derived, in floating point
                np.testing.assert_allclose(b.tensors[name].data.view("<f4"), view.data.view("<f4"), rtol=1e-6)
            else:
                np.testing.assert_array_equal(b.tensors[name].data, view.data)
        for key in ("general.type", "imatrix.chunk_count", "imatrix.chunk_size", "imatrix.stats_schema"):
            assert b.fields[key].raw == a.fields[key].raw
        assert list(b.metadata["imatrix.datasets"]) == list(a.metadata["imatrix.datasets"])


def test_perplexity_per_chunk(tiny):
    """Running perplexity of 64 chunks, as an independent implementation finds it."""
    expected = json.loads((DATA / "tiny" / "evaluation.json").read_text(encoding="utf-8"))["float32_independent"]
    running = expected["running"] if isinstance(expected, dict) else expected
    result = gguftools.perplexity(tiny["f32"], gguftools.demo_text("valid"), n_ctx=256, chunks=64)
    np.testing.assert_allclose(result.running, running, rtol=2e-4)
    assert result.ppl.value == pytest.approx(25.4374, rel=2e-5)
    assert result.ppl.error == pytest.approx(0.70461, rel=1e-3)


def test_divergence_from_itself_is_zero(tiny):
    result = gguftools.perplexity(
        tiny["bf16"], gguftools.demo_text("valid"), n_ctx=128, chunks=3, base=tiny["bf16"], n_batch=256
    )
    d = result.divergence
    assert (d.max_kld, d.min_kld, d.mean_kld.value, d.rms_dp.value, d.same_top.value) == (0, 0, 0, 0, 1)
    assert d.ln_ppl_ratio.value == 0


@pytest.mark.slow
def test_smollm2(smollm2, shared):
    """A real model: the number of tokens, which depends on the splitter, and PPL after each of 8 chunks."""
    session = gguftools.load(smollm2)
    text = (shared / "data" / "wiki.test.raw").read_bytes().decode()
    assert len(session.tokenize(text)) == 304_830
    result = gguftools.perplexity(smollm2, shared / "data" / "wiki.test.raw", n_ctx=512, chunks=8)
    expected = [12.5616, 21.2799, 22.2078, 22.1073, 21.7683, 21.9998, 22.6495, 23.6173]
    np.testing.assert_allclose(result.running, expected, rtol=2e-4)


@pytest.mark.slow
def test_our_files_load_elsewhere(tiny, tmp_path):
    """The `gguf` package reads what we write, every tensor equal."""
    import gguf

    gguftools.quantize(tiny["bf16"], tmp_path / "q.gguf", "Q4_K_M", DATA / "tiny" / "imatrix.gguf")
    for path in (tiny["bf16"], tmp_path / "q.gguf"):
        theirs = {t.name: t for t in gguf.GGUFReader(path).tensors}
        with gguftools.open(path) as ours:
            assert set(ours.tensors) == set(theirs)
            for name, view in ours.tensors.items():
                values = gguf.quants.dequantize(theirs[name].data, theirs[name].tensor_type)
                np.testing.assert_array_equal(view.dequantize().ravel(), values.ravel())
