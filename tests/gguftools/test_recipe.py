"""Recipes at work: presets as TOML, recipes read off files, and files that tell how they were made."""

from __future__ import annotations

import json

import pytest

import gguftools
from gguftools import Settings
from gguftools.cli import main
from gguftools.errors import GGUFError
from gguftools.gguf import GGUF
from gguftools.quantizing.prepare import RECIPE, VERSION
from gguftools.recipe_file import load_recipe, packaged, recipe_of_file
from quant import QuantError
from quant.mixes import PlanOptions
from quant.presets import PRESETS
from tests.conftest import DATA
from tests.gguftools import small

IMATRIX = DATA / "tiny" / "imatrix.gguf"
GOLDEN = json.loads((DATA / "tiny" / "presets.json").read_text(encoding="utf-8"))

MINE = """
name = "mine"
extends = "Q4_K_M"
embeddings = "Q5_0"

[[rule]]
roles = ["ffn_down"]
blocks = "last 1/3"
type = "Q8_0"
"""


def run(*arguments: object) -> None:
    assert main(list(map(str, arguments))) == 0


def shown(capsys, *arguments: object) -> str:
    run("recipe", *arguments)
    return capsys.readouterr().out


def without_ours(path) -> tuple[dict, dict]:
    """Keys, but for what tells how the file was made, and data."""
    with GGUF(path) as f:
        return {k: v.raw for k, v in f.fields.items() if not k.startswith("gguftools.")}, small.data(path)


@pytest.mark.parametrize("preset", GOLDEN)
def test_preset_as_text_gives_the_same_bytes(tiny, tmp_path, capsys, preset):
    """`recipe show` into a file, `quantize --recipe` of it: keys and data are those of the preset."""
    text = shown(capsys, "show", preset.lower())
    (tmp_path / "r.toml").write_text(text, encoding="utf-8")
    run("quantize", tiny["bf16"], tmp_path / "a.gguf", "--recipe", tmp_path / "r.toml", "--imatrix", IMATRIX)
    run("quantize", tiny["bf16"], tmp_path / "b.gguf", preset, "--imatrix", IMATRIX)
    assert without_ours(tmp_path / "a.gguf") == without_ours(tmp_path / "b.gguf")
    with GGUF(tmp_path / "a.gguf") as f:
        assert f.metadata[RECIPE] == text


@pytest.mark.parametrize("preset", ["Q4_K_M", "IQ3_XS", "Q2_K", "MXFP4_MOE", "COPY", "F16"])
def test_recipe_of_an_existing_file(tiny, tmp_path, capsys, preset):
    """Read off the types of a plain file, it gives that file again."""
    gguftools.quantize(tiny["bf16"], tmp_path / "a.gguf", preset, IMATRIX)
    (tmp_path / "r.toml").write_text(shown(capsys, "from", tmp_path / "a.gguf"), encoding="utf-8")
    run("quantize", tiny["bf16"], tmp_path / "b.gguf", "--recipe", tmp_path / "r.toml", "--imatrix", IMATRIX)
    assert without_ours(tmp_path / "a.gguf") == without_ours(tmp_path / "b.gguf")


def test_recipe_of_shards(tiny, tmp_path):
    gguftools.quantize(tiny["bf16"], tmp_path / "a.gguf", "Q3_K_M")
    shards = gguftools.split(tmp_path / "a.gguf", tmp_path / "s", 20).shards
    assert recipe_of_file(shards[2].path).rules == recipe_of_file(tmp_path / "a.gguf").rules


def test_a_file_tells_how_it_was_made(tiny, tmp_path, capsys):
    """A recipe and what options add to it are in the metadata, and make the file again."""
    (tmp_path / "mine.toml").write_text(MINE, encoding="utf-8")
    run(
        "quantize", tiny["bf16"], tmp_path / "a.gguf", "--recipe", tmp_path / "mine.toml",
        "--tensor-type", r"blk\.0\.attn_v=Q6_K", "--output-tensor-type", "Q4_0", "--no-fallback",
    )  # fmt: skip
    found = small.types(tmp_path / "a.gguf")
    assert found["token_embd.weight"] == "Q4_0", "they serve as output matrix, and options go before the recipe"
    assert found["blk.0.attn_v.weight"] == "Q6_K"
    assert [found[f"blk.{i}.ffn_down.weight"] for i in (3, 4, 5)][1:] == ["Q8_0", "Q8_0"]
    capsys.readouterr()
    text = shown(capsys, "from", tmp_path / "a.gguf")
    with GGUF(tmp_path / "a.gguf") as f:
        assert (f.metadata[RECIPE], f.metadata[VERSION]) == (text, gguftools.__version__)
        assert f.metadata["general.file_type"] == 15
    (tmp_path / "told.toml").write_text(text, encoding="utf-8")
    run("quantize", tiny["bf16"], tmp_path / "b.gguf", "--recipe", tmp_path / "told.toml")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    read_off = shown(capsys, "from", "--types", tmp_path / "a.gguf")
    assert "extends" not in read_off
    assert read_off != text


def test_record_writes_the_recipe_of_a_preset(tiny, tmp_path):
    settings, options = Settings(record=True), PlanOptions(pure=True)
    gguftools.quantize(tiny["bf16"], tmp_path / "a.gguf", "Q4_K_M", None, options, settings=settings)
    gguftools.quantize(tiny["bf16"], tmp_path / "b.gguf", "Q4_K_M", None, options)
    assert without_ours(tmp_path / "a.gguf") == without_ours(tmp_path / "b.gguf")
    recipe = recipe_of_file(tmp_path / "a.gguf")
    gguftools.quantize(tiny["bf16"], tmp_path / "c.gguf", recipe)
    assert small.data(tmp_path / "a.gguf") == small.data(tmp_path / "c.gguf")
    with GGUF(tmp_path / "b.gguf") as f:
        assert not [key for key in f.fields if key.startswith("gguftools.")], "plain presets stay the reference's"


def test_recipe_by_name(tiny, tmp_path):
    """A preset, a recipe of the package in any case, a file."""
    assert load_recipe("q4_k").name == "Q4_K_M"
    for name, path in packaged().items():
        assert load_recipe(name.upper()) == load_recipe(path)
    run("quantize", tiny["bf16"], tmp_path / "a.gguf", "--recipe", "q5_k_m")
    run("quantize", tiny["bf16"], tmp_path / "b.gguf", "Q5_K_M")
    assert small.data(tmp_path / "a.gguf") == small.data(tmp_path / "b.gguf")
    with pytest.raises(QuantError, match=r"unknown preset 'gone'.*no file either.*recipe of the package"):
        load_recipe("gone")


@pytest.mark.parametrize("name", packaged())
def test_recipes_of_the_package(tiny, tmp_path, name):
    """They plan and write the small model."""
    recipe = load_recipe(name)
    assert recipe.description
    gguftools.quantize(tiny["bf16"], tmp_path / "q.gguf", recipe, IMATRIX)
    gguftools.quantize(tiny["bf16"], tmp_path / "plain.gguf", recipe.extends or recipe.base, IMATRIX)
    assert small.types(tmp_path / "q.gguf") != small.types(tmp_path / "plain.gguf")
    assert recipe_of_file(tmp_path / "q.gguf") == recipe


def test_list_and_json(capsys):
    rows = json.loads(shown(capsys, "list", "--json"))
    assert {row["name"] for row in rows} >= {*PRESETS, *packaged()}
    assert shown(capsys, "list").count("\n") == len(rows) + 1
    found = json.loads(shown(capsys, "show", "Q8_0", "--json"))
    assert found == {"name": "Q8_0", "recipe": shown(capsys, "show", "Q8_0")}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", "not UTF-8 text"),
        (b"base = ", "not TOML"),
        (b'base = "Q9"', "unknown type 'Q9'"),
        (b"#" * (1 << 20) + b"#", "at most 1,048,576"),
        (b'base = "Q4_K"\n' + b"a = " + b"[" * 100_000, "not TOML"),
    ],
)
def test_files_that_are_no_recipes(tiny, tmp_path, capsys, content, message):
    (tmp_path / "r.toml").write_bytes(content)
    arguments = ["quantize", str(tiny["bf16"]), str(tmp_path / "q.gguf"), "--recipe", str(tmp_path / "r.toml")]
    assert main(arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "r.toml" in line
    assert message in line
    assert not (tmp_path / "q.gguf").exists()


def test_recipe_and_type_exclude_each_other(tiny, tmp_path, capsys):
    (tmp_path / "mine.toml").write_text(MINE)
    both = ["--recipe", str(tmp_path / "mine.toml"), "--ladder", "Q8_0"]
    assert main(["quantize", str(tiny["bf16"]), *both]) == 1
    assert "exclude each other" in capsys.readouterr().err
    assert main(["quantize", str(tiny["bf16"]), "out.gguf", "Q4_0", *both[:2]]) == 2
    with pytest.raises(GGUFError, match="no model's tensors"):
        recipe_of_file(IMATRIX)
