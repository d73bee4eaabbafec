"""Options of conversion: several files, metadata, the vocabulary alone, byte order, overflow, ollama."""

import json

import numpy as np
import pytest

import gguftools
from gguftools.cli import main
from gguftools.conversion.options import Options, Split
from gguftools.conversion.run import convert, plan, planned
from gguftools.errors import GGUFError
from gguftools.gguf import GGUF
from tests.gguftools.test_convert import DOWN, changed, make, weights


def tensors_of(paths):
    return {t.name: (t.format.name, t.shape, bytes(t.data)) for path in paths for t in GGUF(path).tensors.values()}


@pytest.mark.parametrize("outtype", ["f16", "Q8_0"])
@pytest.mark.parametrize(
    ("split", "count"),
    [(Split(max_tensors=4), 3), (Split(max_tensors=4, no_tensor_first=True), 4), (Split(max_size=150_000), None)],
)
def test_split(tmp_path, split, count, outtype):
    folder = make(tmp_path / "m")
    whole = convert(folder, tmp_path / "whole.gguf", outtype)
    done = convert(folder, tmp_path / "out.gguf", outtype, options=Options(split=split))
    paths = [path for path, _ in done.outputs]
    assert sorted(tmp_path.glob("out*")) == paths
    assert [p.name for p in paths] == [f"out-{i + 1:05d}-of-{len(paths):05d}.gguf" for i in range(len(paths))]
    assert count is None or len(paths) == count
    assert tensors_of(paths) == tensors_of([whole.output])
    files = [GGUF(path) for path in paths]
    for i, f in enumerate(files):
        keys = (f.metadata["split.no"], f.metadata["split.count"], f.metadata["split.tensors.count"])
        assert keys == (i, len(paths), len(whole.items))
        assert len(f.fields) == 3 or i == 0
        assert not split.max_size or sum(t.nbytes for t in f.tensors.values()) <= 150_000 or len(f.tensors) == 1
    assert bool(files[0].tensors) != split.no_tensor_first
    gguftools.merge(paths, tmp_path / "merged.gguf")
    merged = [key for key in GGUF(tmp_path / "merged.gguf").fields if not key.startswith("split.")]
    assert merged == list(GGUF(whole.output).fields)


def test_vocab_only(tmp_path):
    folder = make(tmp_path / "My-Model-7B-v2")
    (folder / "model.safetensors").unlink()
    done = convert(folder, options=Options(vocab_only=True))
    assert done.output.name == "My-Model-v2-vocab.gguf"
    f = GGUF(done.output)
    assert not f.tensors
    assert f.metadata["llama.block_count"] == 1
    assert "general.size_label" not in f.metadata or f.metadata["general.size_label"] == "7B"
    assert gguftools.load(done.output, vocab_only=True).tokenize("Hello")


@pytest.mark.parametrize("outtype", ["f32", "bf16", "q8_0"])
def test_bigendian(tmp_path, outtype):
    folder = make(tmp_path / "m")
    little = convert(folder, tmp_path / "little.gguf", outtype).output
    big = convert(folder, tmp_path / "big.gguf", outtype, options=Options(bigendian=True)).output
    assert GGUF(big).byte_order == ">"
    assert tensors_of([big]) == tensors_of([little])
    gguftools.convert_endian(big, tmp_path / "back.gguf", "little")
    assert (tmp_path / "back.gguf").read_bytes() == little.read_bytes()
    with pytest.raises(GGUFError, match="convert-endian"):
        convert(folder, tmp_path / "x.gguf", "Q4_0", options=Options(bigendian=True))


def test_metadata(tmp_path):
    card = "---\nlicense: mit\ntags: [a, b]\nbase_model: org/Base-1B\n---\n"
    folder = make(tmp_path / "m", README_md=card)
    said = {
        "general.author": "Me",
        "general.basename": "Base",
        "general.license": "apache-2.0",
        "general.tags": ["c"],
        "general.base_models": [{"name": "Other", "repo_url": "https://example.org/other"}],
    }
    (tmp_path / "said.json").write_text(json.dumps(said))
    options = Options(metadata=tmp_path / "said.json", model_name="Mine")
    done = plan(folder, None, "f16", options=options)
    keys = dict(done.keys)
    assert (keys["general.name"], keys["general.author"], keys["general.license"]) == ("Mine", "Me", "apache-2.0")
    assert keys["general.tags"] == ["c"]
    assert keys["general.base_model.count"] == 1
    assert keys["general.base_model.0.name"] == "Other"
    assert "general.base_model.0.organization" not in keys
    assert done.output.name.startswith("Base-")
    order = [key for key, _ in done.keys if key.startswith("general.")]
    wanted = ["general.name", "general.author", "general.basename", "general.license", "general.base_model.count"]
    assert [key for key in order if key in wanted] == wanted


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"general.autor": "x"}, "'general.autor' does not describe a model"),
        ({"general.author": 7}, "'general.author' is '7', expected a text"),
        ({"general.tags": "a"}, "expected a list of texts"),
        ({"general.base_models": ["a"]}, "expected a list of objects"),
        ([1], "not a JSON object"),
    ],
)
def test_metadata_that_is_refused(tmp_path, said, message):
    (tmp_path / "said.json").write_text(json.dumps(said))
    with pytest.raises(GGUFError, match=message):
        plan(make(tmp_path / "m"), options=Options(metadata=tmp_path / "said.json"))


def beyond():
    tensors = changed(DOWN, (1, 2), 70000.0)
    tensors[DOWN][1][3, 4] = -1e6
    return tensors


def test_overflow_is_counted(tmp_path):
    folder = make(tmp_path / "m", beyond())
    with pytest.raises(
        GGUFError, match=r"blk.0.ffn_down.weight: row 3, column 4: 1e\+06 overflows F16, 2 weights do; "
    ):
        convert(folder, tmp_path / "out.gguf", "f16")
    assert not (tmp_path / "out.gguf").exists()


def test_overflow_is_clipped(tmp_path):
    path = convert(
        make(tmp_path / "m", beyond()), tmp_path / "o.gguf", "f16", options=Options(on_overflow="clip")
    ).output
    x = GGUF(path).tensors["blk.0.ffn_down.weight"].dequantize()
    assert (x[1, 2], x[3, 4]) == (65504, -65504)
    expected = weights()[DOWN][1].astype(np.float16).astype(np.float32)
    expected[1, 2], expected[3, 4] = 65504, -65504
    np.testing.assert_array_equal(x, expected)


def test_overflow_takes_bf16(tmp_path):
    path = convert(
        make(tmp_path / "m", beyond()), tmp_path / "o.gguf", "f16", options=Options(on_overflow="bf16")
    ).output
    formats = {t.name: t.format.name for t in GGUF(path).tensors.values()}
    assert formats["blk.0.ffn_down.weight"] == "BF16"
    assert list(formats.values()).count("BF16") == 1
    with pytest.raises(GGUFError, match="there are error, clip, bf16"):
        Options(on_overflow="ignore")


def test_native_mxfp4(tmp_path):
    """A matrix that comes in MXFP4 stays so, and the file says so."""
    tensors = weights("BF16")
    del tensors[DOWN]
    rng = np.random.default_rng(3)
    tensors[DOWN + "_packed"] = "U8", rng.integers(0, 256, (64, 48)).astype(np.uint8)
    tensors[DOWN + "_scale"] = "U8", rng.integers(120, 130, (64, 3)).astype(np.uint8)
    quantized = {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32, "type": "float"}}},
    }
    done = convert(make(tmp_path / "m", tensors, {"quantization_config": quantized}), tmp_path / "o.gguf")
    f = GGUF(done.output)
    assert f.tensors["blk.0.ffn_down.weight"].format.name == "MXFP4"
    assert f.metadata["general.file_type"] == 38
    assert bytes(f.tensors["blk.0.ffn_down.weight"].data[:1])[0] == tensors[DOWN + "_scale"][1][0, 0]


def test_dry_run_writes_nothing(tmp_path, capsys):
    folder = make(tmp_path / "m")
    out = str(tmp_path / "out.gguf")
    assert main(["convert", str(folder), "-o", out, "--dry-run", "--split-max-tensors", "6"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if "out-" in line] == [
        str(tmp_path / f"out-0000{i}-of-00002.gguf") for i in (1, 2)
    ]
    assert main(["convert", str(folder), "-o", out, "--dry-run", "--outtype", "Q4_K_M", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outtype"] == "Q4_K_M"
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert planned(folder, out, "f16", None, Options()).output.name == "out.gguf"


def test_supported_models(capsys):
    assert main(["convert", "--print-supported-models"]) == 0
    assert "MixtralForCausalLM" in capsys.readouterr().out
    assert main(["convert"]) == 2


def test_ollama(tmp_path, capsys, caplog):
    folder = make(tmp_path / "m", generation_config_json={"temperature": 0.6, "top_k": 20})
    assert main(["convert", str(folder), "-o", str(tmp_path / "out.gguf"), "--for", "ollama"]) == 0
    text = (tmp_path / "Modelfile").read_text(encoding="utf-8")
    assert text.startswith("FROM ./out.gguf\nPARAMETER temperature 0.6\nPARAMETER top_k 20\n")
    assert 'PARAMETER stop "<|end_of_text|>"' in text
    assert "has no chat template" in caplog.text
    assert str(tmp_path / "Modelfile") in capsys.readouterr().out
    wrong = ["convert", str(folder), "-o", str(tmp_path / "x.gguf"), "--for"]
    assert main([*wrong, "ollama", "--split-max-tensors", "3"]) == 1
    assert "ollama does not read several files" in capsys.readouterr().err
    assert main([*wrong, "foo"]) == 1
    assert main(["convert", str(folder), "--mmproj"]) == 1
    assert "cannot be converted yet" in capsys.readouterr().err
