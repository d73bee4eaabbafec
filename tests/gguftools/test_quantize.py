"""`quantize`: its options, its refusals, what it says, and the bugs of others that must not be ours.

The bytes of every preset are in `test_golden.py`, types of published models in `tests/quant/test_mixes.py`.
"""

import hashlib
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import gguftools
from engine.models import ARCHS
from gguftools import Settings
from gguftools.cli import main
from gguftools.errors import GGUFError
from gguftools.gguf import GGUF, Writer
from gguftools.imatrix_file import read_imatrix, write_imatrix
from gguftools.quantizing.partial import Partial
from gguftools.toolbox.shards import open_set
from quant import QuantError, validate
from quant.formats import FORMATS
from quant.mixes import PlanOptions
from tests.conftest import DATA, SHARED
from tests.gguftools import small

IMATRIX = DATA / "tiny" / "imatrix.gguf"
GOLDEN = json.loads((DATA / "tiny" / "presets.json").read_text(encoding="utf-8"))
SCHEMAS = sorted((SHARED / "golden" / "schemas").glob("*.json"))


def run(*arguments: object) -> None:
    assert main(["quantize", *map(str, arguments)]) == 0


def fails(capsys, *arguments: object, code: int = 1) -> str:
    """The one error line of a command that must fail."""
    assert main(["quantize", *map(str, arguments)]) == code
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def dry(source, preset, imatrix=None, options=None, **settings) -> gguftools.quantize_file.Quantized:
    return gguftools.quantize(source, None, preset, imatrix, options, dry_run=True, settings=Settings(**settings))


@pytest.fixture
def model(tmp_path) -> Path:
    return small.model(tmp_path / "model.gguf")


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["q4_0"], "ggml-model-Q4_0.gguf"),
        (["Q4_K"], "ggml-model-Q4_K_M.gguf"),
        (["7", "1"], "ggml-model-Q8_0.gguf"),
        (["out.gguf", "iq4_nl"], "out.gguf"),
        (["out.gguf", "2", "2"], "out.gguf"),
        (["-o", "out.gguf", "Q8_0", "1"], "out.gguf"),
        (["out.gguf", "Q8_0", "-t", "1"], "out.gguf"),
    ],
)
def test_positionals(model, tmp_path, monkeypatch, arguments, output):
    monkeypatch.chdir(tmp_path)
    run("model.gguf", *arguments)
    assert leftovers(tmp_path) == sorted(["model.gguf", output])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "IN \\[OUT\\] TYPE"),
        (["out.gguf"], "'out.gguf' is no type"),
        (["Q4_KM"], "did you mean Q4_K_M"),
        (["out.gguf", "Q8_0", "many"], "'many' is no number of threads"),
        (["out.gguf", "Q8_0", "1", "2"], "one argument too many"),
        (["-o", "a.gguf", "b.gguf", "Q8_0"], "named twice"),
    ],
)
def test_positionals_that_cannot_be(model, capsys, arguments, message):
    assert main(["quantize", str(model), *arguments]) == 2
    assert re.search(message, " ".join(capsys.readouterr().err.replace("│", " ").split()))


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_and_buffer_do_not_matter(tiny, tmp_path, threads):
    run(tiny["bf16"], tmp_path / "q.gguf", "Q3_K_M", threads, "--max-buffer-size", 1, "--imatrix", IMATRIX)
    found = hashlib.sha256((tmp_path / "q.gguf").read_bytes()).hexdigest()
    assert found == GOLDEN["Q3_K_M"]["with_imatrix"]["sha256"]


# --- types ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SCHEMAS or [None], ids=lambda p: p.stem if p else "absent")
def test_dry_run_of_published_models(path, tmp_path, capsys):
    """The command, on a file with the tensors of a published model, for every preset."""
    if path is None:
        pytest.skip(f"no golden/schemas in {SHARED}")
    schema = json.loads(path.read_text(encoding="utf-8"))
    arch = schema["general.architecture"]
    metadata = {"general.architecture": arch, f"{arch}.block_count": schema["block_count"]} | {
        f"{arch}.attention.head_count": schema["n_head_over_n_head_kv"],
        f"{arch}.attention.head_count_kv": 1,
        f"{arch}.expert_count": schema["expert_count"],
    }
    # of the listed dimensions only the row length and the number of matrices are real
    shapes = {name: (*ne[:1:-1], 2, ne[0]) for name, ne in schema["tensors"]}
    source = small.sparse(tmp_path / "model.gguf", shapes, metadata)
    for preset, expected in schema["types"].items():
        choices = dry(source, preset).choices
        found = {c.name: c.target.ggml_name for c in choices}
        assert found == {n: expected["exceptions"].get(n, expected["default"]) for n, _ in schema["tensors"]}, preset
    run(source, "Q4_K_M", "--dry-run", "--json")
    told = {t["name"]: FORMATS[t["to"]].ggml_name for t in json.loads(capsys.readouterr().out)["tensors"]}
    expected = schema["types"]["Q4_K_M"]
    assert told == {n: expected["exceptions"].get(n, expected["default"]) for n in shapes}


def test_options_for_types(model, tmp_path):
    out = tmp_path / "out.gguf"
    (tmp_path / "types.txt").write_text("attn_q=Q5_1\n  attn_k=q5_0\tblk\\.1\\.ffn_up=IQ4_NL")
    run(
        model, out, "Q4_K_M", "--output-tensor-type", "f16", "--token-embedding-type", "Q8_0",
        "--tensor-type", r"blk\.0\.ffn_(up|gate)=Q6_K", "--tensor-type", "ffn_up=q3_K",
        "--tensor-type-file", tmp_path / "types.txt",
    )  # fmt: skip
    found = small.types(out)
    assert (found["output.weight"], found["token_embd.weight"]) == ("F16", "Q8_0")
    assert [found[f"blk.{i}.ffn_up.weight"] for i in (0, 1)] == ["Q6_K", "Q3_K"], "first match wins, options first"
    assert [found[f"blk.{i}.ffn_gate.weight"] for i in (0, 1)] == ["Q6_K", "Q4_K"]
    assert [found[f"blk.1.attn_{x}.weight"] for x in "qk"] == ["Q5_1", "Q5_0"]


def test_pure_and_output_left_alone(model, tmp_path):
    run(model, tmp_path / "out.gguf", "Q3_K_M", "--pure", "--leave-output-tensor")
    found = small.types(tmp_path / "out.gguf")
    assert {found.pop("output.weight")} == {"F16"}
    assert set(found.values()) == {"Q3_K", "F32"}
    assert small.data(tmp_path / "out.gguf")["output.weight"] == small.data(model)["output.weight"]


def test_patterns_do_what_is_meant(model, tmp_path, capsys):
    """Where the reference lowers their case, ignores some and accepts those that match nothing."""
    for pattern in (r"blk\.\D", "attn_Q"):
        line = fails(capsys, model, "Q8_0", "--tensor-type", f"{pattern}=Q4_0", "--dry-run")
        assert "matches no tensor that can be quantized" in line
    assert {
        c.target.name
        for c in dry(model, "Q8_0", options=PlanOptions(tensor_types=((r"^\D+$", "Q4_0"),))).choices
        if not c.name.startswith("blk.") and not c.is_copy
    } == {"Q4_0"}
    run(model, tmp_path / "d.gguf", "F16", "--tensor-type", "ffn_up=Q8_0")
    assert small.types(tmp_path / "d.gguf")["blk.0.ffn_up.weight"] == "Q8_0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tensor-type", "gone=Q8_0"], "'gone=Q8_0': matches no tensor"),
        (["--tensor-type", "ffn_up"], "expected PATTERN=TYPE"),
        (["--tensor-type", "ffn_up=Q9"], "unknown type 'Q9'"),
        (["--tensor-type", "ffn[=Q8_0"], "not a regular expression"),
        (["--tensor-type-file", "empty.txt"], "holds no PATTERN=TYPE"),
        (["--tensor-type-file", "absent.txt"], "absent.txt: "),
        (["--output-tensor-type", "Q8_K"], "not a type for weights"),
        (["--include-weights", "ffn"], "give one"),
        (["--prune-layers", "7"], "there is no layer 7; the model has 0 to 1"),
        (["--prune-layers", "0-1"], "no layer would be left"),
        (["--prune-layers", "1-0"], "no list of layers"),
        (["--override-kv", "a.b=int:x"], "'x' is no int"),
        (["--override-kv", "a.b=list:1"], "expected KEY=TYPE:VALUE"),
        (["--override-kv", "general.alignment=int:64"], "the alignment, which stays as it is"),
        (["--override-kv", "a.b=str:" + "x" * 128], "127 bytes"),
        (["--on-nonfinite", "ignore"], "there are error, zero"),
        (["--imatrix", "absent.gguf"], "absent.gguf: no such file"),
        (["--reuse", "absent.gguf"], "absent.gguf: no such file"),
        (["--recipe", "absent.toml"], "absent.toml: "),
    ],
)
def test_options_that_cannot_be(model, tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    before = leftovers(tmp_path)
    kind = [] if "--recipe" in arguments else ["Q8_0"]
    assert message in fails(capsys, "model.gguf", "out.gguf", *kind, *arguments)
    assert leftovers(tmp_path) == before


# --- keys and layout --------------------------------------------------------------------------------------------------


def test_keys_that_are_set(model, tmp_path):
    out = tmp_path / "out.gguf"
    values = ["x.number=int:7", "x.below=int:-3", "x.large=int:9000000000", "x.part=float:0.5", "x.flag=bool:true"]
    options = [text for value in [*values, "general.name=str:A = b"] for text in ("--override-kv", value)]
    run(model, out, "Q8_0", *options)
    with GGUF(out) as f:
        found = {key: (f.metadata[key], f.fields[key].type.name) for key in f.fields if key.startswith("x.")}
        assert found == {
            "x.number": (7, "UINT32"), "x.below": (-3, "INT32"), "x.large": (9_000_000_000, "UINT64"),
            "x.part": (0.5, "FLOAT32"), "x.flag": (True, "BOOL"),
        }  # fmt: skip
        assert f.metadata["general.name"] == "A = b"
        assert (f.metadata["general.file_type"], f.metadata["general.quantization_version"]) == (7, 2)


def test_keys_that_are_set_count_for_the_plan(model):
    plain, grouped = (
        {c.name: c.target.name for c in dry(model, "IQ4_XS", override_kv=override).choices}
        for override in ((), ("llama.attention.head_count_kv=int:1",))
    )
    assert (plain["blk.0.attn_v.weight"], grouped["blk.0.attn_v.weight"]) == ("IQ4_XS", "Q5_K")


def test_layers_that_are_left_out(tmp_path):
    """Blocks are numbered anew, their importance stays theirs, and keys with a value per block follow."""
    shapes = small.shapes(4)
    lists = {"attention__head_count_kv": [2, 1, 4, 2], "feed_forward_length": [512] * 4, "rope__sections": [1, 2, 3]}
    source = small.write(tmp_path / "m.gguf", small.weights(shapes), small.keys(4, **lists))
    matrix = small.importance(tmp_path / "i.gguf", shapes)
    pure = PlanOptions(pure=True)
    gguftools.quantize(source, tmp_path / "all.gguf", "IQ3_XXS", matrix, pure)
    run(source, tmp_path / "out.gguf", "IQ3_XXS", "--pure", "--imatrix", matrix, "--prune-layers", "0,2")
    with GGUF(tmp_path / "out.gguf") as f:
        assert f.metadata["llama.block_count"] == 2
        assert list(f.metadata["llama.attention.head_count_kv"]) == [1, 2]
        assert list(f.metadata["llama.feed_forward_length"]) == [512] * 2
        assert list(f.metadata["llama.rope.sections"]) == [1, 2, 3], "this one has no value per block"
        assert not any(name.startswith("blk.2.") for name in f.tensors)
    found, whole = small.data(tmp_path / "out.gguf"), small.data(tmp_path / "all.gguf")
    for name, old in (("blk.0", "blk.1"), ("blk.1", "blk.3")):
        assert found[f"{name}.ffn_down.weight"] == whole[f"{old}.ffn_down.weight"]
    assert len(found) == 3 + 2 * 9


def test_shards_are_kept(model, tmp_path):
    """One file for each of the source, with the types that a single file gets."""
    gguftools.split(model, tmp_path / "s", 8)
    names = [name for name in leftovers(tmp_path) if name.startswith("s-")]
    before = {name: (tmp_path / name).read_bytes() for name in names}
    assert len(names) == 3
    gguftools.quantize(model, tmp_path / "single.gguf", "Q4_K_M")
    run(tmp_path / names[1], tmp_path / "q.gguf", "Q4_K_M", "--keep-split")
    assert [n for n in leftovers(tmp_path) if n.startswith("q-")] == [f"q-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    with open_set(tmp_path / "q-00001-of-00003.gguf") as split, GGUF(tmp_path / "single.gguf") as single:
        assert {n: bytes(t.data) for n, t in split.tensors.items()} == small.data(tmp_path / "single.gguf")
        assert dict(split.metadata) == dict(single.metadata)
        assert [[*f.tensors] for f in split.files] == [[*GGUF(tmp_path / n).tensors] for n in names]
    run(tmp_path / names[0], tmp_path / "one.gguf", "Q4_K_M")
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "single.gguf").read_bytes()
    assert {name: (tmp_path / name).read_bytes() for name in names} == before


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_alignment_is_kept(tmp_path, alignment):
    wanted = small.shapes(1)
    metadata = {"general.alignment": alignment} | small.keys(1)
    source = small.write(tmp_path / "m.gguf", small.weights(wanted), metadata)
    run(source, tmp_path / "q.gguf", "Q3_K_S")
    with GGUF(tmp_path / "q.gguf") as f:
        assert f.metadata["general.alignment"] == alignment
        assert {view.offset % alignment for view in f.tensors.values()} == {0}
        assert f.data_offset % alignment == 0
    assert gguftools.check(tmp_path / "q.gguf").faults == gguftools.check(source).faults


@pytest.mark.parametrize("order", ["big"])
def test_big_endian_source(tiny, tmp_path, order):
    gguftools.convert_endian(tiny["bf16"], tmp_path / "be.gguf", order)
    run(tmp_path / "be.gguf", tmp_path / "q.gguf", "Q4_K_M")
    found = hashlib.sha256((tmp_path / "q.gguf").read_bytes()).hexdigest()
    assert found == GOLDEN["Q4_K_M"]["without"]["sha256"]


# --- importance -------------------------------------------------------------------------------------------------------


def test_parts_of_an_importance_matrix(tiny, tmp_path):
    how = {"include": ("--include-weights", "ffn"), "exclude": ("--exclude-weights", "attn")}
    with_it, without = tmp_path / "with.gguf", tmp_path / "without.gguf"
    gguftools.quantize(tiny["bf16"], with_it, "Q4_0", IMATRIX, PlanOptions(pure=True))
    gguftools.quantize(tiny["bf16"], without, "Q4_0", None, PlanOptions(pure=True))
    whole, plain = small.data(with_it), small.data(without)
    for name, options in how.items():
        out = tmp_path / f"{name}.gguf"
        run(tiny["bf16"], out, "Q4_0", "--pure", "--imatrix", IMATRIX, *options)
        found = small.data(out)
        for tensor in (t for t in found if t.startswith("blk.") and "norm" not in t):
            assert found[tensor] == (whole if "ffn" in tensor else plain)[tensor], tensor
            assert whole[tensor] != plain[tensor]
        with GGUF(out) as f:
            kept = [n for n in read_imatrix(IMATRIX).entries if "ffn" in n]
            assert f.metadata["quantize.imatrix.entries_count"] == len(kept)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--include-weights", "a", "--exclude-weights", "b"], "exclude each other"),
        (["--include-weights", "gone"], "no entry of the importance matrix is left"),
    ],
)
def test_parts_that_cannot_be(tiny, tmp_path, capsys, options, message):
    assert message in fails(capsys, tiny["bf16"], tmp_path / "q.gguf", "Q4_0", "--imatrix", IMATRIX, *options)


def test_coverage_is_said_before_work(model, tmp_path, capsys):
    """Missing entries: a warning with the remedy where the type can do without, else a refusal; nothing is read."""
    wanted = small.shapes(2)
    matrix = small.importance(tmp_path / "i.gguf", wanted, ["attn_output", r"blk\.1\.ffn_down"])
    result = dry(model, "Q4_K_M", matrix)
    assert set(result.without_importance) == {
        "blk.0.attn_output.weight", "blk.1.attn_output.weight", "blk.1.ffn_down.weight",
    }  # fmt: skip
    (line,) = result.warnings
    assert "covers 11 of 14 tensors" in line
    assert "gguftools imatrix" in line
    run(model, tmp_path / "q.gguf", "Q4_K_M", "--imatrix", matrix)
    assert "covers 11 of 14 tensors" in capsys.readouterr().err
    line = fails(capsys, model, tmp_path / "r.gguf", "IQ2_S", "--imatrix", matrix)
    assert "blk.1.ffn_down.weight: IQ" in line
    assert "needs an entry in the importance matrix; collect one with `gguftools imatrix`" in line
    assert not (tmp_path / "r.gguf").exists()


def test_importance_of_another_model(model, tmp_path, capsys):
    other = small.importance(tmp_path / "a.gguf", {f"other.{n}": s for n, s in small.shapes(2).items()} | {
        "blk.9.attn_q.weight": (256, 256)
    })  # fmt: skip
    assert "no entry fits a tensor of the model" in fails(
        capsys, model, tmp_path / "q.gguf", "Q4_0", "--imatrix", other
    )
    wide = small.importance(tmp_path / "b.gguf", small.shapes(2, n_ff=768))
    line = fails(capsys, model, tmp_path / "q.gguf", "Q4_0", "--imatrix", wide)
    assert re.search(r"'blk\.0\.ffn_down\.weight' has 1 x 768 values, the tensor needs 1 x 512", line)


def test_the_older_form_of_importance(tiny, tmp_path):
    """Under any name: forms are told apart by what is in them."""
    matrix = read_imatrix(IMATRIX)
    write_imatrix(tmp_path / "old.gguf", matrix, format="dat")
    shutil.copy(IMATRIX, tmp_path / "new.dat")
    run(tiny["bf16"], tmp_path / "new.gguf", "IQ2_XS", "--imatrix", tmp_path / "new.dat")
    run(tiny["bf16"], tmp_path / "from-old.gguf", "IQ2_XS", "--imatrix", tmp_path / "old.gguf")
    new = {c: t["to"] for c, t in ((t["name"], t) for t in dry(tiny["bf16"], "IQ2_XS", IMATRIX).summary()["tensors"])}
    assert small.types(tmp_path / "from-old.gguf") == small.types(tmp_path / "new.gguf") == new


# --- weights that are not finite --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_values_that_are_not_finite(tmp_path, capsys, kind):
    wanted = small.weights(small.shapes(1))
    wanted["blk.0.ffn_up.weight"][3, 7] = np.nan
    wanted["blk.0.ffn_up.weight"][500, 255] = -np.inf
    wanted["output_norm.weight"][9] = np.inf
    source = small.write(tmp_path / "m.gguf", wanted, small.keys(1), kind)
    before = leftovers(tmp_path)
    line = fails(capsys, source, tmp_path / "q.gguf", "Q8_0")
    assert re.search(r"output_norm\.weight: row 0, column 9 is inf; 1 more tensors hold such values; .*zero", line)
    assert leftovers(tmp_path) == before
    run(source, tmp_path / "q.gguf", "Q8_0", "--on-nonfinite", "zero", "--json")
    assert json.loads(capsys.readouterr().out)["zeroed"] == {"blk.0.ffn_up.weight": 2, "output_norm.weight": 1}
    for name, at in {"blk.0.ffn_up.weight": (3, 7), "output_norm.weight": (9,)}.items():
        wanted[name][~np.isfinite(wanted[name])] = 0
        assert wanted[name][at] == 0
    clean = small.write(tmp_path / "clean.gguf", wanted, small.keys(1), kind)
    run(clean, tmp_path / "c.gguf", "Q8_0")
    assert (tmp_path / "q.gguf").read_bytes() == (tmp_path / "c.gguf").read_bytes()


def test_blocks_that_are_not_finite(model, tmp_path, capsys):
    gguftools.quantize(model, tmp_path / "q8.gguf", "Q8_0")
    with GGUF(tmp_path / "q8.gguf") as f:
        view = f.tensors["blk.1.attn_k.weight"]
        at = f.data_offset + view.offset + 34 * 11
    with (tmp_path / "q8.gguf").open("r+b") as file:
        file.seek(at)
        file.write(b"\x00\x7c")  # the scale of block 11, row 1, is infinite
    line = fails(capsys, tmp_path / "q8.gguf", tmp_path / "q.gguf", "Q4_0", "--allow-requantize")
    assert "blk.1.attn_k.weight: row 1, column 96 is in a block of Q8_0 whose scale is not finite" in line
    run(tmp_path / "q8.gguf", tmp_path / "c.gguf", "COPY", "--on-nonfinite", "zero")
    copied = small.data(tmp_path / "c.gguf")["blk.1.attn_k.weight"]
    assert copied[34 * 11 : 34 * 12] == bytes(34)


# --- what is said -----------------------------------------------------------------------------------------------------


def test_report(model, tmp_path, capsys):
    run(model, tmp_path / "q.gguf", "Q4_K_M", "--tensor-type", r"blk\.0\.attn_q=Q4_K", "--dry-run")
    planned = capsys.readouterr().out
    run(model, tmp_path / "q.gguf", "Q4_K_M", "--tensor-type", r"blk\.0\.attn_q=Q4_K")
    assert capsys.readouterr().out == planned, "the dry run says what happens"
    rows = {line.split()[0]: line for line in planned.splitlines() if ".weight" in line}
    assert len(rows) == 21
    assert re.search(r"F16 +Q4_K +131,?072 +36,?864 .*tensor type 'blk", rows["blk.0.attn_q.weight"])
    assert re.search(r"F32 +F32 .*copied: has one dimension", rows["output_norm.weight"])
    assert re.search(r"F16 +Q6_K .*Q4_K_M: head", rows["output.weight"])
    assert f"{(tmp_path / 'q.gguf').stat().st_size:,} bytes of files" in planned


@pytest.mark.parametrize("preset", GOLDEN)
def test_size_is_known_before(tiny, tmp_path, preset):
    assert dry(tiny["bf16"], preset, IMATRIX).file_bytes == GOLDEN[preset]["with_imatrix"]["bytes"]


def test_substitutions(tmp_path, capsys):
    wanted = small.shapes(2, n=288, n_ff=512)
    source = small.write(tmp_path / "m.gguf", small.weights(wanted), small.keys(2))
    result = dry(source, "Q4_K_M")
    changed = [c for c in result.choices if c.fallback]
    assert len(changed) == result.fallbacks > 10
    wanted_bits = sum(c.n_weights * c.wanted.bpw if c.fallback else 8 * c.n_bytes for c in result.choices)
    assert result.bpw_wanted == pytest.approx(wanted_bits / result.n_weights)
    assert result.bpw_wanted < result.bpw
    run(source, tmp_path / "q.gguf", "Q4_K_M")
    text = capsys.readouterr().out
    assert f"{result.fallbacks} tensors ({result.fallback_share:.1%} of the weights) took another type" in text
    assert f"{result.bpw:.3f} bits per weight instead of {result.bpw_wanted:.3f}" in text
    line = fails(capsys, source, tmp_path / "r.gguf", "Q4_K_M", "--no-fallback")
    assert re.search(r"row length 288 is not a multiple of 256 .* nor are those of \d+ more tensors \(.*% of all", line)
    assert not (tmp_path / "r.gguf").exists()
    run(source, tmp_path / "r.gguf", "Q8_0", "--no-fallback")


def test_quantizing_again(tiny, tmp_path, capsys):
    """Refused unless it is allowed; then the added error is measured against what the source holds."""
    q8 = tmp_path / "q8.gguf"
    gguftools.quantize(tiny["bf16"], q8, "Q8_0")
    line = fails(capsys, q8, tmp_path / "q.gguf", "Q3_K_M")
    assert "is already quantized (Q8_0)" in line
    assert "--allow-requantize" in line
    run(q8, tmp_path / "q.gguf", "Q3_K_M", "--allow-requantize")
    text = capsys.readouterr().out
    assert re.search(r"quantizing again adds a relative error of 0\.\d+ to \d+ tensors, most to ", text)
    result = gguftools.quantize(q8, tmp_path / "q.gguf", "Q3_K_M", allow_requantize=True)
    with GGUF(q8) as a, GGUF(tmp_path / "q.gguf") as b:
        for name, error in result.errors.items():
            x, y = (f.tensors[name].dequantize().astype(np.float64) for f in (a, b))
            assert error == pytest.approx(math.sqrt(((y - x) ** 2).sum() / (x**2).sum()), rel=1e-6)
        assert set(result.errors) == {n for n in a.tensors if a.tensors[n].format != b.tensors[n].format}
    run(q8, tmp_path / "same.gguf", "Q8_0")
    assert small.data(tmp_path / "same.gguf") == small.data(q8), "the same type is copied"


def test_dry_run_says_what_would_be_refused(tiny, tmp_path, capsys):
    run(tiny["bf16"], "IQ2_XS", "--dry-run")
    assert "this would be refused: " in capsys.readouterr().err
    assert leftovers(tmp_path) == []


# --- nothing is lost --------------------------------------------------------------------------------------------------


def test_source_is_only_read(model, tmp_path):
    """Whatever opens the source opens it for reading."""
    code = f"""
import os, sys
def hook(event, args):
    if event == "open" and isinstance(args[0], (str, bytes)) and os.fsdecode(args[0]).endswith("model.gguf"):
        assert args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC) == 0, args
        print("opened")
    assert event not in ("os.truncate", "os.rename", "os.remove") or "model.gguf" != os.path.basename(str(args[0]))
sys.addaudithook(hook)
import gguftools
gguftools.quantize({str(model)!r}, {str(tmp_path / "q.gguf")!r}, "Q4_0")
"""
    before = model.read_bytes(), model.stat().st_mtime_ns
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "opened" in done.stdout
    assert (model.read_bytes(), model.stat().st_mtime_ns) == before


def test_disk_that_forgets(model, tmp_path, monkeypatch):
    """What is on the disk is read again before the file takes its name."""
    settle = Partial.settle

    def damaged(self):
        with self.partial.open("r+b") as file:
            file.seek(self.size - 1000)
            byte = file.read(1)
            file.seek(self.size - 1000)
            file.write(bytes([byte[0] ^ 1]))
        return settle(self)

    monkeypatch.setattr(Partial, "settle", damaged)
    (tmp_path / "q.gguf").write_bytes(b"old")
    with pytest.raises(GGUFError, match=r"tensor 'blk\.1\.\w+\.weight' reads differently from what was written"):
        gguftools.quantize(model, tmp_path / "q.gguf", "Q4_0")
    assert (tmp_path / "q.gguf").read_bytes() == b"old"
    assert leftovers(tmp_path) == ["model.gguf", "q.gguf"]


def test_every_block_is_validated_at_the_end(model, tmp_path, monkeypatch):
    """Also those whose bytes are what was written."""
    from gguftools.quantizing import pipeline

    blocks = pipeline._blocks

    def broken(piece, place, rows, memory):
        found = blocks(piece, place, rows, memory)
        if piece.job.source.name == "blk.0.ffn_up.weight":
            found["d"][-1] = 0x7C00
        return found

    monkeypatch.setattr(pipeline, "_blocks", broken)
    with pytest.raises(GGUFError, match=r"'blk\.0\.ffn_up\.weight' holds a block that is not finite"):
        gguftools.quantize(model, tmp_path / "q.gguf", "Q4_0")
    assert leftovers(tmp_path) == ["model.gguf"]


def test_room_is_checked_first(model, tmp_path, monkeypatch):
    needed = dry(model, "Q8_0").file_bytes
    usage = shutil.disk_usage(tmp_path)
    for free, enough in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr("gguftools.files.shutil.disk_usage", lambda path, free=free: usage._replace(free=free))
        if enough:
            gguftools.quantize(model, tmp_path / "q.gguf", "Q8_0")
            (tmp_path / "q.gguf").unlink()
            continue
        with pytest.raises(GGUFError, match=f"needs {needed:,} bytes, the disk has {free:,} free"):
            gguftools.quantize(model, tmp_path / "q.gguf", "Q8_0")
    assert leftovers(tmp_path) == ["model.gguf"]


# --- bugs of others ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", ["same", "symbolic", "hard", "imatrix"])
def test_output_is_an_input(tiny, tmp_path, capsys, link):
    """llama.cpp 12753: the model was wiped."""
    source, output = tmp_path / "a.gguf", tmp_path / "b.gguf"
    shutil.copy(tiny["bf16"], source)
    shutil.copy(IMATRIX, tmp_path / "i.gguf")
    if link == "symbolic":
        output.symlink_to(source)
    elif link == "hard":
        output.hardlink_to(source)
    else:
        output = source if link == "same" else tmp_path / "i.gguf"
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}
    assert "is the input file" in fails(capsys, source, output, "Q8_0", "--imatrix", tmp_path / "i.gguf")
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_override_that_equals_the_default(tiny):
    """llama.cpp 22544: it was ignored, and the mixture decided."""
    plain, asked = (
        {c.name: c for c in dry(tiny["bf16"], "Q4_K_M", options=PlanOptions(tensor_types=given)).choices}
        for given in ((), ((r"blk\.5\.attn_v", "q4_k"),))
    )
    assert plain["blk.5.attn_v.weight"].target.name == "Q6_K"
    assert asked["blk.5.attn_v.weight"].target.name == "Q4_K"
    assert asked["blk.5.attn_v.weight"].rule == r"tensor type 'blk\.5\.attn_v=q4_k'"


def test_patches_of_four_dimensions(tmp_path):
    """llama.cpp 20159: their size became 0."""
    wanted = small.weights(
        small.shapes(1) | {"v.patch_embd.weight": (1152, 3, 14, 14), "v.other.weight": (8, 3, 14, 32)}
    )
    source = small.write(tmp_path / "m.gguf", wanted, small.keys(1))
    result = gguftools.quantize(source, tmp_path / "q.gguf", "Q4_K_M")
    found = {c.name: c for c in result.choices}
    assert found["v.patch_embd.weight"].n_bytes == 1152 * 3 * 14 * 14 * 2
    assert found["v.patch_embd.weight"].is_copy
    assert found["v.other.weight"].target.name == "Q5_0"
    with GGUF(tmp_path / "q.gguf") as f:
        assert f.tensors["v.patch_embd.weight"].shape == (1152, 3, 14, 14)
        np.testing.assert_array_equal(
            f.tensors["v.patch_embd.weight"].dequantize(), np.float32(np.float16(wanted["v.patch_embd.weight"]))
        )
        assert f.tensors["v.other.weight"].shape == (8, 3, 14, 32)


@pytest.mark.parametrize(
    "kind", [name for name, fmt in FORMATS.items() if fmt.module and fmt.kernels.quantize_weighted]
)
def test_zeros_in_importance(tmp_path, kind):
    """llama.cpp 8661, 7311: 1024 zeros in a row; zero on a block's only weight that is not zero; all-zero blocks."""
    wanted = small.weights(small.shapes(1, n=2048, n_ff=256))
    down = wanted["blk.0.attn_q.weight"]
    down[0, :256] = 0
    down[1, :256] = 0
    down[1, 3] = 5.0
    means = np.ones((1, 2048))
    means[0, :1024] = 0
    source = small.write(tmp_path / "m.gguf", wanted, small.keys(1))
    matrix = small.importance(
        tmp_path / "i.gguf", {n: x.shape for n, x in wanted.items()}, values={"blk.0.attn_q.weight": means}
    )
    gguftools.quantize(source, tmp_path / "q.gguf", "Q8_0", matrix, PlanOptions(tensor_types=(("attn_q", kind),)))
    with GGUF(tmp_path / "q.gguf") as f:
        view = f.tensors["blk.0.attn_q.weight"]
        assert validate(view.data, view.format) == -1
        assert np.isfinite(view.dequantize()).all()
        assert not view.dequantize()[0, :256].any()


def test_expert_that_no_text_reached(tmp_path, capsys):
    """llama.cpp 7816: its count of 0 made a mean of 0/0. Here it counts all columns alike, and that is said."""
    wanted = small.shapes(1) | {"blk.0.ffn_down_exps.weight": (3, 256, 256)}
    source = small.write(tmp_path / "m.gguf", small.weights(wanted), small.keys(1, expert_count=3))
    matrix = read_imatrix(small.importance(tmp_path / "i.gguf", wanted))
    entry = matrix.entries["blk.0.ffn_down_exps.weight"]
    entry.squares[1], entry.counts[1] = 0, 0
    write_imatrix(tmp_path / "i.gguf", matrix)
    run(source, tmp_path / "q.gguf", "IQ2_XS", "--imatrix", tmp_path / "i.gguf")
    assert "no text reached 1 experts in 1 tensors, such as expert 1 of blk.0.ffn_down_exps.weight" in (
        capsys.readouterr().err
    )
    matrix.entries["blk.0.ffn_down_exps.weight"].squares[1] = 7
    matrix.entries["blk.0.ffn_down_exps.weight"].counts[1] = 7
    write_imatrix(tmp_path / "ones.gguf", matrix)
    run(source, tmp_path / "ones-q.gguf", "IQ2_XS", "--imatrix", tmp_path / "ones.gguf")
    a, b = small.data(tmp_path / "q.gguf"), small.data(tmp_path / "ones-q.gguf")
    assert a == b


def test_importance_that_is_not_finite(tiny, tmp_path, capsys):
    matrix = tmp_path / "i.gguf"
    with GGUF(IMATRIX) as f:
        view = f.tensors["blk.0.ffn_up.weight.in_sum2"]
        at = f.data_offset + view.offset
    content = bytearray(IMATRIX.read_bytes())
    content[at : at + 4] = np.float32(np.nan).tobytes()
    matrix.write_bytes(content)
    line = fails(capsys, tiny["bf16"], tmp_path / "q.gguf", "Q4_K_M", "--imatrix", matrix)
    assert "'blk.0.ffn_up.weight.in_sum2' holds values that are not finite" in line


@pytest.mark.parametrize("of", ["merged", "split"])
def test_experts_named_another_way(tmp_path, of):
    """llama.cpp 6552: importance of merged experts, a model with split ones; and the reverse."""
    n, rest = 4, {"token_embd.weight": (64, 256), "blk.0.attn_q.weight": (256, 256)}
    merged = rest | {f"blk.0.ffn_{x}_exps.weight": (n, 256, 256) for x in ("gate", "up", "down")}
    split = rest | {f"blk.0.ffn_{x}.{i}.weight": (256, 256) for x in ("gate", "up", "down") for i in range(n)}
    x = small.weights(merged)
    parts = {name: x[re.sub(r"\.\d\.weight", "_exps.weight", name)] for name in split}
    parts = {name: v[int(name.split(".")[3])] if v.ndim == 3 else v for name, v in parts.items()}
    metadata = small.keys(1, expert_count=n)
    small.write(tmp_path / "merged.gguf", x, metadata)
    small.write(tmp_path / "split.gguf", parts, metadata)
    matrix = small.importance(tmp_path / "i-merged.gguf", merged)
    entries = read_imatrix(matrix)
    for x in ("gate", "up", "down"):
        entry = entries.entries.pop(f"blk.0.ffn_{x}_exps.weight")
        for i in range(n):
            entries.entries[f"blk.0.ffn_{x}.{i}.weight"] = type(entry)(
                entry.squares[i : i + 1], entry.counts[i : i + 1], None
            )
    write_imatrix(tmp_path / "i-split.gguf", entries)
    found = []
    for name in ("merged", "split"):  # the same importance under either name gives the same bytes
        out = tmp_path / f"q-{name}.gguf"
        options = PlanOptions(tensor_types=(("ffn", "IQ2_XS"),))
        gguftools.quantize(tmp_path / f"{of}.gguf", out, "Q4_0", tmp_path / f"i-{name}.gguf", options)
        found.append(small.data(out))
    assert found[0] == found[1]


def test_gate_takes_the_importance_of_up(tmp_path, capsys):
    """ik_llama.cpp 1805: they see the same input."""
    wanted = small.shapes(1)
    source = small.write(tmp_path / "m.gguf", small.weights(wanted), small.keys(1))
    whole = small.importance(tmp_path / "whole.gguf", wanted)
    matrix = read_imatrix(whole)
    matrix.entries["blk.0.ffn_gate.weight"] = matrix.entries["blk.0.ffn_up.weight"]
    write_imatrix(tmp_path / "whole.gguf", matrix)
    del matrix.entries["blk.0.ffn_gate.weight"]
    write_imatrix(tmp_path / "part.gguf", matrix)
    run(source, tmp_path / "a.gguf", "IQ2_XXS", "--imatrix", tmp_path / "whole.gguf")
    assert capsys.readouterr().err == ""
    run(source, tmp_path / "b.gguf", "IQ2_XXS", "--imatrix", tmp_path / "part.gguf")
    assert "blk.0.ffn_gate.weight that of blk.0.ffn_up.weight" in capsys.readouterr().err
    assert small.data(tmp_path / "a.gguf") == small.data(tmp_path / "b.gguf")


@pytest.mark.parametrize("length", [63, 64, 74])
def test_long_names(tmp_path, capsys, length):
    """llama.cpp 10100, 21776: readers hold 63 bytes of a name; longer ones are neither read nor written."""
    name = "blk.0." + "x" * (length - len("blk.0..weight")) + ".weight"
    short = name[: 63 - len(".weight")] + ".weight" if length > 63 else name
    wanted = small.weights(small.shapes(1) | {short: (64, 256)})
    source = small.write(tmp_path / "m.gguf", wanted, small.keys(1))
    if length == 63:
        run(source, tmp_path / "q.gguf", "Q4_0")
        assert small.types(tmp_path / "q.gguf")[name] == "Q4_0"
        return
    content = source.read_bytes().replace(
        len(short).to_bytes(8, "little") + short.encode(), length.to_bytes(8, "little") + name.encode()
    )
    source.write_bytes(content)
    assert f"has {length} bytes, at most 63 are allowed" in fails(capsys, source, tmp_path / "q.gguf", "Q4_0")
    with pytest.raises(GGUFError, match=f"has {length} bytes; at most 63"):
        Writer(tmp_path / "w.gguf").declare(name, (64, 256), "F16")
    assert leftovers(tmp_path) == ["m.gguf"]


def test_offsets_that_are_too_tight(model, tmp_path, capsys):
    """ik_llama.cpp 2437: a region that is smaller than its type needs."""
    with GGUF(model) as f:
        first, second = list(f.tensors.values())[1:3]
        head = model.read_bytes()[: f.data_offset]
    entry = second.offset.to_bytes(8, "little")
    at = head.index(second.name.encode()) + len(second.name)
    at = head.index(entry, at)
    content = bytearray(model.read_bytes())
    content[at : at + 8] = (second.offset - 32).to_bytes(8, "little")
    (tmp_path / "tight.gguf").write_bytes(content)
    line = fails(capsys, tmp_path / "tight.gguf", tmp_path / "q.gguf", "Q4_0")
    assert second.name in line or first.name in line
    assert leftovers(tmp_path) == ["model.gguf", "tight.gguf"]


def test_more_than_2_31_weights(tmp_path, capsys):
    """llama.cpp 2715: sizes beyond 32 bits, by header and plan."""
    shapes = {"token_embd.weight": (1 << 20, 1 << 12), "blk.0.ffn_up_exps.weight": (3, 1 << 18, 1 << 13)}
    source = small.sparse(tmp_path / "large.gguf", shapes, small.keys(1))
    assert source.stat().st_size > 21e9
    run(source, "Q4_K_S", "--dry-run", "--json")
    found = json.loads(capsys.readouterr().out)
    assert [t["bytes"] for t in found["tensors"]] == [(1 << 32) // 256 * 210, 3 * (1 << 31) // 256 * 144]
    assert found["file_bytes"] > sum(t["bytes"] for t in found["tensors"]) > 7e9


# --- straight from safetensors ----------------------------------------------------------------------------------------

FOLDERS = [p for place in (SHARED / "golden" / "arch", DATA / "families") for p in place.glob("*/config.json")]
FAMILIES = [
    path.parent
    for path in sorted(FOLDERS)
    if any(path.parent.glob("*.safetensors"))  # some share the weights of another
    and any(n in arch.hf_names for arch in ARCHS.values() for n in json.loads(path.read_text())["architectures"])
]


@pytest.mark.parametrize(
    ("how", "preset"),
    [("quantize", name) for name in ("Q4_K_M", "IQ2_XS", "Q8_0", "TQ2_0", "F16", "F32", "COPY")]
    + [("convert", name) for name in ("Q4_K_M", "IQ2_XS", "TQ2_0", "COPY")],
)
def test_folder_equals_two_steps(tiny_folder, tmp_path, preset, how):
    gguftools.convert(tiny_folder, tmp_path / "auto.gguf", "auto")
    run(tmp_path / "auto.gguf", tmp_path / "two.gguf", preset, "--imatrix", IMATRIX)
    if how == "quantize":
        run(tiny_folder, tmp_path / "one.gguf", preset, "--imatrix", IMATRIX)
    else:
        gguftools.convert(tiny_folder, tmp_path / "one.gguf", preset, imatrix=IMATRIX)
    assert leftovers(tmp_path) == ["auto.gguf", "one.gguf", "two.gguf"]
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()


@pytest.mark.parametrize("folder", FAMILIES, ids=lambda path: path.name)
def test_other_folders_equal_two_steps(tmp_path, folder):
    """Heads that are interleaved, experts that are stacked, tensors that the config alone makes: every family."""
    gguftools.convert(folder, tmp_path / "auto.gguf", "auto")
    run(tmp_path / "auto.gguf", tmp_path / "two.gguf", "Q4_K_M")
    run(folder, tmp_path / "one.gguf", "Q4_K_M")
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()


def test_names_of_outputs_of_folders(tiny_folder, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    before = set(leftovers(folder))
    run(folder, "Q4_0")
    (made,) = set(leftovers(folder)) - before
    assert made.endswith("Q4_0.gguf")
    (folder / made).unlink()
    assert main(["convert", str(folder), "--outtype", "q4_0"]) == 0
    assert set(leftovers(folder)) - before == {made}


def test_convert_and_importance(tiny_folder, tmp_path):
    with pytest.raises(GGUFError, match="no use for f16"):
        gguftools.convert(tiny_folder, tmp_path / "x.gguf", "f16", imatrix=IMATRIX)
    with pytest.raises(QuantError, match="needs an importance matrix"):
        gguftools.convert(tiny_folder, tmp_path / "x.gguf", "IQ2_XS")
    assert leftovers(tmp_path) == []
