"""Measuring, against llama.cpp's own figures for the package's model (`tests/data/tiny/evaluation.json`).

It rounds activations to 8 bits where ours stay float32: its divergences are somewhat larger.
"""

import json
import struct

import numpy as np
import pytest

import gguftools
from engine import EngineError
from engine.evaluate import evaluate
from gguftools import GGUFError, comparison, measure
from gguftools.cli import main
from gguftools.logits_file import LogitsFile
from tests.conftest import DATA

EVALUATION = json.loads((DATA / "tiny" / "evaluation.json").read_text())
VALID = gguftools.demo_text("valid")

#: below this KLD the reference measures its own rounding of activations more than the weights
_ROUNDING = 1.5e-3


#: of the list, one of every kind and size: q- without importance matrix, qi- with it
# fmt: off
PRESETS = (
    "qi-F16", "qi-BF16", "qi-Q8_0", "qi-Q6_K", "qi-Q5_K_M", "qi-Q5_1", "qi-Q4_K_M", "q-Q4_K_M", "q-Q4_0", "qi-IQ4_XS",
    "qi-Q3_K_M", "qi-IQ3_XXS", "q-Q2_K", "qi-IQ2_XS", "qi-IQ1_S",
)
# fmt: on
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


@pytest.fixture(scope="module")
def q2(tiny, tmp_path_factory):
    path = tmp_path_factory.mktemp("q2") / "q2.gguf"
    gguftools.quantize(tiny["bf16"], path, "Q2_K", DATA / "tiny" / "imatrix.gguf")
    return path


def test_every_token_of_an_independent_list(tiny, data):
    """Log-probabilities of single tokens, through the scoring kernel."""
    from engine.evaluate.scoring import negative_log_likelihood

    expected = np.load(data / "tiny" / "expected.npz")
    session = gguftools.load(tiny["f32"], threads=2)
    for which in (0, 1):
        ids = expected[f"ids{which}"]
        found = negative_log_likelihood(session.logits(ids)[:-1], ids[1:])
        np.testing.assert_allclose(found, expected[f"nll{which}"], atol=1e-4)


def test_strided(tiny, data):
    """Each of the last S positions of every window, against logits of that window alone."""
    session = gguftools.load(tiny["f32"], threads=2)
    tokens = np.load(data / "tiny" / "expected.npz")["ids1"]
    found = evaluate([session], tokens, n_ctx=64, stride=32, chunks=3)[0]
    nll = []
    for start in (0, 32, 64):
        window = tokens[start : start + 80].copy()
        logits = session.logits([session.tokenizer.bos, *window[1:]]).astype(np.float64)
        for j in range(80 - 32 - 1, 79):
            nll.append(np.log(np.exp(logits[j]).sum()) - logits[j, window[j + 1]])
    assert (found.n_ctx, found.stride, found.n_chunks, found.n_tokens) == (80, 32, 3, 96)
    assert found.ppl.value == pytest.approx(np.exp(np.mean(nll)), rel=1e-4)


def test_bits_per_byte(tiny):
    session = gguftools.load(tiny["f32"], threads=2)
    tokens = session.tokenize(VALID.read_text())
    found = evaluate([session], tokens, n_ctx=128, chunks=2)[0]
    scored = b"".join(session.tokenizer.token_to_piece(t) for c in (0, 1) for t in tokens[c * 128 + 65 : c * 128 + 128])
    bits = np.log2(found.ppl.value) * found.n_tokens / len(scored)
    assert found.bits_per_byte == pytest.approx(bits)


def test_batches_do_not_matter(tiny, q2):
    one = gguftools.perplexity(q2, VALID, 128, 5, base=tiny["f32"], n_batch=128)
    four = gguftools.perplexity(q2, VALID, 128, 5, base=tiny["f32"], n_batch=512)
    assert one.tokens_sha256 == four.tokens_sha256
    assert four.divergence.mean_kld.value == pytest.approx(one.divergence.mean_kld.value, rel=1e-4)


def test_stored_logits(tiny, q2, tmp_path):
    """The file is laid out as the reference's, and gives the divergence of both models side by side."""
    saved = measure.save_logits(tiny["f32"], VALID, tmp_path / "base.bin", 128, 4)
    data = (tmp_path / "base.bin").read_bytes()
    assert data[:20] == b"_logits_" + struct.pack("<3i", 128, 2048, 4)
    assert len(data) == 20 + 4 * 4 * 128 + 4 * 63 * 2 * (2048 + 4)
    stored = LogitsFile(tmp_path / "base.bin")
    session = gguftools.load(tiny["f32"], threads=2)
    tokens = session.tokenize(VALID.read_text().removesuffix("\n"))
    assert stored.tokens.tolist() == tokens[: 4 * 128]
    logits = session.logits([session.tokenizer.bos, *tokens[129:256]])[64:127].astype(np.float64)
    want = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    largest = want.max(1, keepdims=True)
    np.testing.assert_allclose(stored.rows(63, 126), np.maximum(want, largest - 16), atol=3e-4)
    direct = gguftools.perplexity(q2, VALID, 128, 4, base=tiny["f32"])
    found = measure.against_logits(q2, tmp_path / "base.bin", text=VALID)
    assert saved.ppl.value == pytest.approx(found.divergence.base_ppl.value, rel=1e-5)
    assert found.ppl.value == pytest.approx(direct.ppl.value, rel=1e-6)
    assert found.divergence.mean_kld.value == pytest.approx(direct.divergence.mean_kld.value, rel=1e-3)
    assert found.divergence.same_top.value == direct.divergence.same_top.value


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: b"_lugits_" + d[8:], "not a file of logits"),
        (lambda d: d[:-2], "its header asks for"),
        (lambda d: d[:8] + struct.pack("<3i", 1 << 30, 2048, 4) + d[20:], "the file is damaged"),
        (lambda d: d[:8] + struct.pack("<3i", 128, -1, 4) + d[20:], "the file is damaged"),
        (lambda d: d[:20] + struct.pack("<i", 5000) + d[24:], "tokens outside of its vocabulary"),
        (lambda d: d[: 20 + 4 * 128] + b"\xff\xff\xff\x7f" + d[24 + 4 * 128 :], "not finite"),
    ],
)
def test_damaged_logits(tiny, tmp_path, damage, message):
    measure.save_logits(tiny["bf16"], VALID, tmp_path / "base.bin", 128, 1)
    (tmp_path / "bad.bin").write_bytes(damage((tmp_path / "base.bin").read_bytes()))
    with pytest.raises(GGUFError, match=message):
        measure.against_logits(tiny["bf16"], tmp_path / "bad.bin")


def test_logits_of_something_else(tiny, tmp_path):
    measure.save_logits(tiny["bf16"], VALID, tmp_path / "base.bin", 128, 1)
    with pytest.raises(GGUFError, match="was made of another text"):
        measure.against_logits(tiny["bf16"], tmp_path / "base.bin", text=gguftools.demo_text("calibration"))
    data = bytearray((tmp_path / "base.bin").read_bytes())
    data[12:16] = struct.pack("<i", 1024)
    rest = np.frombuffer(bytes(data[20 + 512 :]), np.uint16).reshape(63, -1)[:, : 4 + 1024]
    tokens = np.frombuffer(bytes(data[20 : 20 + 512]), "<i4") % 1024
    (tmp_path / "small.bin").write_bytes(bytes(data[:20]) + tokens.tobytes() + rest.tobytes())
    with pytest.raises(EngineError, match="over 1,024 tokens, the model has 2,048"):
        measure.against_logits(tiny["bf16"], tmp_path / "small.bin")


def test_base_from_safetensors(tiny, tiny_folder, q2):
    found = gguftools.perplexity(q2, VALID, 128, 2, base=tiny_folder)
    assert found.divergence == gguftools.perplexity(q2, VALID, 128, 2, base=tiny["bf16"]).divergence


def test_interruption_keeps_what_is_measured(tiny):
    session = gguftools.load(tiny["bf16"], threads=2)
    tokens = session.tokenize(VALID.read_text())

    def stop(done, total, scores):
        if done == 3:
            raise KeyboardInterrupt

    found = evaluate([session], tokens, session, n_ctx=64, chunks=9, n_batch=64, on_chunk=stop, partial=True)[0]
    assert (found.complete, found.n_chunks, len(found.running)) == (False, 3, 3)
    whole = evaluate([session], tokens, session, n_ctx=64, chunks=3)[0]
    assert whole.complete
    assert whole.tokens_sha256 == found.tokens_sha256
    assert found.ppl.value == pytest.approx(whole.ppl.value, rel=1e-6)
    with pytest.raises(KeyboardInterrupt):
        evaluate([session], tokens, n_ctx=64, chunks=9, n_batch=64, on_chunk=stop)


# --- compare ----------------------------------------------------------------------------------------------------------


def test_compare(tiny, q2, tmp_path, capsys):
    arguments = ["compare", tiny["f32"], q2, "-f", VALID, "-c", 128, "--plot", tmp_path / "c.svg"]
    assert main([*map(str, arguments), "--chunks", "3", "--json"]) == 0
    (tmp_path / "a.json").write_text(capsys.readouterr().out)
    record = comparison.read_record(tmp_path / "a.json")
    assert record["schema"] == "gguftools.compare/1"
    base, model = record["results"]
    assert (base["divergence"]["mean_kld"]["value"], base["divergence"]["same_top"]["value"]) == (0, 1)
    direct = gguftools.perplexity(q2, VALID, 128, 3, base=tiny["f32"])
    assert model["divergence"]["mean_kld"]["value"] == direct.divergence.mean_kld.value
    assert model["bpw"] == pytest.approx(3.4317, abs=1e-4)
    assert "q2" in (tmp_path / "c.svg").read_text()

    more = ["compare", tiny["f32"], tiny["bf16"], "-f", VALID, "-c", 128, "--records", tmp_path / "a.json"]
    assert main([*map(str, more), "--chunks", "3"]) == 0
    out = capsys.readouterr().out
    for part in ("tiny-f32.gguf", "tiny-bf16.gguf", "q2.gguf", f"{direct.divergence.mean_kld.value:.6f}", "100.00 %"):
        assert part in out
    assert main([*map(str, more), "--chunks", "2"]) == 1
    error = capsys.readouterr().err
    assert "was measured with another tokens_sha256" in error
    assert "[2]" not in error  # before the run, not behind it
    other_base = ["compare", tiny["bf16"], "-f", VALID, "-c", 128, "--chunks", 3, "--records", tmp_path / "a.json"]
    assert main(list(map(str, other_base))) == 1
    assert "was measured with another base" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nonsense", "is not JSON"),
        ("[1]", "has the schema None"),
        ('{"schema": "gguftools.compare/0"}', "expected 'gguftools.compare/1'"),
        ('{"schema": "gguftools.compare/1", "protocol": {}, "results": [{"name": "x"}]}', "the file is damaged"),
    ],
)
def test_bad_records(tmp_path, capsys, content, message):
    (tmp_path / "a.json").write_text(content)
    assert main(["compare", "--records", str(tmp_path / "a.json")]) == 1
    assert message in capsys.readouterr().err


# --- what cannot be measured
# --------------------------------------------------------------------------------------------


def test_vocabularies_must_be_equal(tiny):
    a, b = (gguftools.load(tiny["bf16"], threads=1) for _ in range(2))
    tokens = list(b.metadata["tokenizer.ggml.tokens"])
    tokens[7], tokens[8] = tokens[8], tokens[7]
    b.metadata = {**{k: b.metadata[k] for k in b.metadata}, "tokenizer.ggml.tokens": tokens}
    with pytest.raises(EngineError, match="different vocabularies: token 7"):
        evaluate([a], list(range(300)), b, n_ctx=16, chunks=1)
    b.hparams.n_vocab = 2000
    with pytest.raises(EngineError, match="of 2,000 and 2,048 tokens"):
        evaluate([a], list(range(300)), b, n_ctx=16, chunks=1)


def test_logits_that_are_not_finite(tiny, tmp_path, capsys):
    from gguftools.gguf import GGUF, Writer

    with GGUF(tiny["f32"]) as f, Writer(tmp_path / "nan.gguf") as w:
        for field in f.fields.values():
            w.add_field(field)
        for t in f.tensors.values():
            w.declare(t.name, t.shape, t.format)
        for t in f.tensors.values():
            w.write(t.name, np.full(t.shape, np.nan, np.float32) if t.name == "output_norm.weight" else t.data)
    assert main(["perplexity", str(tmp_path / "nan.gguf"), "-f", str(VALID), "-c", "64", "--chunks", "1"]) == 1
    assert "logits are not finite" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "which text?"),
        (("-f", VALID, "-c", 2048), "beyond the 1024 tokens"),
        (("-f", VALID, "--kl-divergence", "x", "--hellaswag"), "exclude each other"),
        (("-f", VALID, "--save-all-logits", "x", "--ppl-stride", 4), "no place for a stride"),
        (("-f", VALID, "-c", 64, "--ppl-stride", 64), "a stride of 64 does not fit"),
        (("-f", "short.txt"), "two contexts of 512"),
        (("-f", "empty.txt"), "the text is empty"),
        (("-f", VALID, "--kl-divergence-base", VALID), "not a file of logits"),
    ],
)
def test_bad_requests(tiny, tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("Too short.")
    (tmp_path / "empty.txt").touch()
    assert main(["perplexity", str(tiny["bf16"]), *map(str, options)]) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_calibration_text_is_found_out(tiny, tmp_path, capsys):
    text = gguftools.demo_text("calibration")
    half = tmp_path / "half.txt"
    half.write_text(text.read_text()[:30_000] + VALID.read_text()[:30_000])
    gguftools.imatrix(tiny["bf16"], text, tmp_path / "im.gguf", n_ctx=128, chunks=2)
    gguftools.quantize(tiny["bf16"], tmp_path / "q.gguf", "Q4_0", tmp_path / "im.gguf")
    for path, share in ((text, 1.0), (half, 0.5)):
        warnings = measure.overlaps([tmp_path / "q.gguf"], path)
        found = [float(w.split("%")[0]) / 100 for w in warnings if "is in the text that" in w]
        assert found == [pytest.approx(share, abs=0.12)]
    assert measure.overlaps([tmp_path / "q.gguf"], VALID) == []
    assert main(["perplexity", str(tmp_path / "q.gguf"), "-f", str(text), "-c", "64", "--chunks", "1"]) == 0
    err = capsys.readouterr().err
    assert err.count("warning: ") == 2  # by name, and by content
    assert (
        main(
            [
                "compare",
                str(tiny["bf16"]),
                "-f",
                str(half),
                "-c",
                "64",
                "--chunks",
                "1",
                "--imatrix",
                str(tmp_path / "im.gguf"),
            ]
        )
        == 0
    )
    assert "results may flatter" in capsys.readouterr().err


# --- sensitivity
# --------------------------------------------------------------------------------------------------------


def test_sensitivity(tiny, tmp_path, capsys):
    """One tensor swapped in memory is one tensor swapped in a file."""
    from gguftools import sensitivity
    from quant.mixes import PlanOptions

    costs = sensitivity.run(tiny["bf16"], ["Q4_K", "Q2_K"], VALID, n_ctx=128, chunks=2, pattern=r"blk\.[01]\.ffn_down")
    assert [(c.group, c.type) for c in costs] == [
        (f"blk.{i}.ffn_down.weight", t) for t in ("Q4_K", "Q2_K") for i in (0, 1)
    ]
    by_type = {t: sum(c.mean_kld for c in costs if c.type == t) for t in ("Q4_K", "Q2_K")}
    assert 0 < by_type["Q4_K"] < by_type["Q2_K"]
    first = costs[0]
    assert first.saved_bits == 256 * 512 * (16 - 4.5)
    assert first.kld_per_bpw == pytest.approx(first.mean_kld / (first.saved_bits / 4_066_560))
    options = PlanOptions(tensor_types=(("blk.0.ffn_down", "Q4_K"),))
    gguftools.quantize(tiny["bf16"], tmp_path / "q.gguf", "BF16", options=options)
    whole = gguftools.perplexity(tmp_path / "q.gguf", VALID, 128, 2, base=tiny["bf16"])
    assert whole.divergence.mean_kld.value == pytest.approx(first.mean_kld, rel=1e-6)
    arguments = ["sensitivity", tiny["bf16"], "-f", VALID, "-c", 64, "--chunks", 1, "--types", "Q4_0", "--by", "class"]
    assert main([*map(str, arguments), "--json", "--plot", str(tmp_path / "s.svg")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "gguftools.sensitivity/1"
    assert {len(c["names"]) for c in found["costs"]} == {1, 6}
    assert "token_embd" in (tmp_path / "s.svg").read_text()


def test_what_is_never_quantized_has_no_variant():
    from gguftools.sensitivity import View, plan
    from quant import get_format

    names = ("blk.0.ffn_gate_inp.weight", "blk.0.ffn_up_exps.weight", "blk.0.ssm_conv1d.weight", "blk.0.attn_q.bias")
    shapes = {name: (4, 64, 64) if "exps" in name else (64, 64) for name in names}
    tensors = {name: View(shape, get_format("F32"), np.zeros(0, np.uint8)) for name, shape in shapes.items()}
    assert [v.names for v in plan(tensors, [get_format("Q4_0")], arch="qwen3moe")] == [("blk.0.ffn_up_exps.weight",)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--types", "Q4_X"), "unknown type"),
        (("--only", "absent"), "no tensor with 'absent'"),
        (("--only", "("), "is no regular expression"),
        (("--types", "IQ2_XXS"), "needs an importance matrix"),
        (("--plot", "x.pdf"), "pictures are written as .svg or .png"),
    ],
)
def test_bad_sensitivity(tiny, capsys, options, message):
    assert main(["sensitivity", str(tiny["bf16"]), "-f", str(VALID), *options]) == 1
    assert message in capsys.readouterr().err
