"""Recipes as text: what a rule can ask, what is refused, and that every preset survives the way to TOML and back."""

from __future__ import annotations

import pytest

from quant import QuantError
from quant.mixes import PlanOptions, TensorInfo, apply_options, plan, recipe_from
from quant.presets import PRESETS, get_preset, recipe_of
from quant.recipes import COPIED, FIELDS, Case, Recipe, Rule, gets_more_bits, read_recipe, write_recipe
from tests.quant.test_mixes import _model, _types

WRITABLE = [p for p in PRESETS.values() if p.format or p.name == "COPY"]


def known(name: str) -> Recipe:
    return recipe_of(get_preset(name))


def read(text: str) -> Recipe:
    return read_recipe(text, "mine.toml", known)


CASE = Case(
    name="blk.3.ffn_down.weight", role="ffn_down", rows=4096, columns=11008, stacked=False, fits=True, block=3,
    blocks=32, counted=3, layer=3, layers=32, arch="llama", gqa=4, experts=0, is_70b=False, importance=True,
)  # fmt: skip


@pytest.mark.parametrize("preset", WRITABLE, ids=str)
def test_presets_survive_as_text(preset):
    recipe = recipe_of(preset)
    assert read(write_recipe(recipe)) == recipe


@pytest.mark.parametrize("preset", WRITABLE, ids=str)
@pytest.mark.parametrize("arch", ["llama", "falcon"])
def test_presets_as_text_give_the_same_plan(preset, arch):
    for experts in (0, 8):
        tensors, metadata = _model(16, arch=arch, expert_count=experts, attention__head_count=8)
        again = read(write_recipe(recipe_of(preset)))
        for has in (False, True):
            assert _types(plan(tensors, metadata, again, has)) == _types(plan(tensors, metadata, preset, has))


OPTIONS = (
    PlanOptions(pure=True),
    PlanOptions(leave_output_tensor=True),
    PlanOptions(output_tensor_type="Q8_0", token_embedding_type="F16"),
    PlanOptions(tensor_types=((r"blk\.\d\.attn_[qk]", "Q5_0"), ("ffn_up", "IQ4_NL")), no_fallback=True),
)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("preset", ["Q3_K_M", "Q4_K_M", "IQ3_XS", "MXFP4_MOE"])
def test_options_survive_as_text(preset, options):
    """What was applied, options and all, gives the same plan when it is read from a file's metadata."""
    tensors, metadata = _model(12)
    for tied in (False, True):
        some = [t for t in tensors if not (tied and t.name == "output.weight")]
        if tied and options.leave_output_tensor:
            continue
        again = read(write_recipe(apply_options(known(preset), options)))
        assert _types(plan(some, metadata, again)) == _types(plan(some, metadata, preset, options=options))


def test_recipe_that_extends_a_preset():
    recipe = read(
        """
        name = "mine"
        extends = "Q4_K_M"
        embeddings = "q8_0"
        output = "COPY"
        [[rule]]
        roles = ["ffn_down"]
        blocks = "first 1/8, last 2"
        type = "Q6_K"
        """
    )
    tensors, metadata = _model(16)
    found, plain = _types(plan(tensors, metadata, recipe)), _types(plan(tensors, metadata, "Q4_K_M"))
    assert (found["token_embd.weight"], found["output.weight"]) == ("Q8_0", "F16")
    down = [i for i in range(16) if found[f"blk.{i}.ffn_down.weight"] == "Q6_K"]
    assert {0, 1, 14, 15} <= set(down)
    changed = {name for name in found if found[name] != plain[name]}
    assert {name for name in changed if "ffn_down" not in name} == {"token_embd.weight", "output.weight"}
    assert read(write_recipe(recipe)) == recipe


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ('name = "ffn_(up|down)"', True), ('name = "^ffn"', False), ('name = "FFN"', False),
        ('roles = ["attn_q", "ffn_down"]', True), ('roles = ["head"]', False),
        ('arch = ["llama"]', True), ('arch = ["falcon", "bert"]', False),
        ('blocks = "3"', True), ('blocks = "0-2, 4-"', False), ('blocks = "2-"', True), ('blocks = "first 1/8"', True),
        ('blocks = "first 3"', False), ('blocks = "last 29"', True), ('blocks = "last 28"', False),
        ('blocks = "last 1/8"', False), ('blocks = "middle 6/8"', False), ('layers = "middle 7/8"', True),
        ('layers = "more"', gets_more_bits(3, 32)), ('counted = "first 4"', True),
        ("experts = 0", True), ('experts = ">=4"', False), ('gqa = ">3"', True), ('gqa = "<= 4"', True),
        ("rows = 4096", True), ('columns = "<11008"', False), ("stacked = false", True), ("fits = true", True),
        ("is_70b = true", False), ("importance = true", True),
    ],
)  # fmt: skip
def test_what_a_rule_can_ask(condition, holds):
    (rule,) = read(f'base = "Q4_K"\n[[rule]]\n{condition}\ntype = "Q6_K"').rules
    assert rule.holds(CASE) is holds
    assert rule.describe()


def test_every_question_is_tested():
    asked = {mark.args[1][i][0].split()[0] for mark in test_what_a_rule_can_ask.pytestmark for i in range(29)}
    assert asked == set(FIELDS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base =", "not TOML"),
        ("", "needs either `base`"),
        ('base = "Q4_K"\nextends = "Q4_K_M"', "needs either `base`"),
        ('base = "Q9"', "base: unknown type 'Q9'"),
        ("base = 4", "base: 4 is no name of a type"),
        ('base = "Q8_K"', "not a type for weights"),
        ('extends = "Q4_KM"', "did you mean Q4_K_M"),
        ('base = "Q4_K"\ncolour = 1', "unknown key 'colour'"),
        ('base = "Q4_K"\nname = 1', "name is 1, expected a text"),
        ('base = "Q4_K"\nfile_type = -1', "file_type is -1"),
        ('base = "Q4_K"\nfile_type = 4294967296', "file_type is 4294967296"),
        ('base = "Q4_K"\nneeds_importance = "Q2_K"', "expected a list"),
        ('base = "Q4_K"\nfallback = "none"', "fallback is 'none'"),
        ('base = "Q4_K"\nfallback = { Q4_K = "Q9" }', "fallback: unknown type 'Q9'"),
        ('base = "Q4_K"\n[rule]\ntype = "Q6_K"', "double brackets"),
        ('base = "Q4_K"\nrule = [1]', "rule 1: 1 is no table"),
        ('base = "Q4_K"\n[[rule]]\nname = "x"', "rule 1: has no type"),
        ('base = "Q4_K"\n[[rule]]\ntype = "Q6_K"\nlayer = 1', "rule 1: unknown condition 'layer'"),
        ('base = "Q4_K"\n[[rule]]\ntype = "Q6_K"\nname = "("', "rule 1: name: '(' is not a regular expression"),
        ('base = "Q4_K"\n[[rule]]\ntype = "Q6_K"\nname = ["a"]', "is no text"),
        ('base = "Q4_K"\n[[rule]]\ntype = "Q6_K"\nroles = "head"', "no list of names"),
        ('base = "Q4_K"\n[[rule]]\ntype = "Q6_K"\nroles = ["attn_w"]', "no role 'attn_w'"),
        ('base = "Q4_K"\n[[rule]]\ntype = "Q6_K"\nblocks = "some"', "'some' is no place"),
        ('base = "Q4_K"\n[[rule]]\ntype = "Q6_K"\nblocks = "first 9/8"', "is no place"),
        ('base = "Q4_K"\n[[rule]]\ntype = "Q6_K"\nblocks = "middle 2"', "is no place"),
        ('base = "Q4_K"\n[[rule]]\ntype = "Q6_K"\nexperts = "many"', "no comparison"),
        ('base = "Q4_K"\n[[rule]]\ntype = "Q6_K"\nfits = 1', "neither true nor false"),
        ('base = "Q4_K"\n[[rule]]\ntype = "Q6_K"\nexact = "yes"', "exact is 'yes'"),
    ],
)
def test_recipes_that_cannot_be(text, message):
    with pytest.raises(QuantError, match=None) as raised:
        read(text)
    assert message in str(raised.value)
    assert str(raised.value).startswith("mine.toml")
    assert "\n" not in str(raised.value)


def test_fallback_policies():
    tensors, metadata = _model(2, columns=96)
    down = "blk.0.ffn_down.weight"
    assert _types(plan(tensors, metadata, read('base = "Q4_K"')))[down] == "Q5_0"
    other = read('base = "Q4_K"\nfallback = { Q4_K = "IQ4_NL" }')
    assert _types(plan(tensors, metadata, other))[down] == "IQ4_NL"
    assert read(write_recipe(other)) == other
    strict = read('base = "Q4_K"\nfallback = "error"')
    with pytest.raises(QuantError, match="substitutes are not allowed"):
        plan(tensors, metadata, strict)
    assert read(write_recipe(strict)) == strict


def test_rule_that_must_hold_somewhere():
    tensors, metadata = _model(2)
    recipe = read('base = "Q4_K"\n[[rule]]\nname = "gone"\ntype = "Q6_K"\nrequired = true')
    with pytest.raises(QuantError, match="name 'gone': matches no tensor"):
        plan(tensors, metadata, recipe)
    recipe = read('base = "Q4_K"\n[[rule]]\nname = "gone"\ntype = "Q6_K"')
    assert set(_types(plan(tensors, metadata, recipe)).values()) == {"Q4_K", "F32"}


def test_exact_rule():
    tensors, metadata = _model(2, columns=96)
    recipe = read('base = "Q8_0"\n[[rule]]\nname = "ffn_up"\ntype = "Q6_K"\nexact = true')
    with pytest.raises(QuantError, match=r"ffn_up\.weight: row length 96 is not a multiple of 256 \(Q6_K\)"):
        plan(tensors, metadata, recipe)


# --- read off a file --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", WRITABLE, ids=str)
@pytest.mark.parametrize("columns", [256, 96])
def test_recipe_read_off_types(preset, columns):
    """It gives a model of the same shape the types that were read."""
    if columns == 96 and preset.name == "Q1_0":
        pytest.skip("has no type to fall back on")
    for experts in (0, 8):
        tensors, metadata = _model(12, columns=columns, expert_count=experts)
        planned = plan(tensors, metadata, preset, True)
        made = [TensorInfo(c.name, c.shape, c.target) for c in planned]
        recipe = recipe_from(made, "llama", "read", preset.ftype if preset.ftype >= 0 else None)
        again = read(write_recipe(recipe))
        assert again == recipe
        assert _types(plan(tensors, metadata, again, True)) == _types(planned)


def test_recipe_of_nothing_to_quantize():
    assert recipe_from([TensorInfo("output_norm.weight", (256,), "F32")], "llama", "x").base == COPIED


def test_texts_of_all_kinds_survive():
    text = 'quotes " and \\ and \n and \t and é and \x07 and \U0001f600'
    recipe = Recipe('a "name" é', "Q4_K", (Rule("Q6_K", (("name", r"a'\d\"$"),)),), description=text)
    assert read(write_recipe(recipe)) == recipe


@pytest.mark.parametrize("text", ['extends = """M]\nty"""', 'base = "Q4\\u0007"', 'base = "Q4_K"\n"a\\nb" = 1'])
def test_messages_are_one_line(text):
    with pytest.raises(QuantError) as raised:
        read(text)
    assert str(raised.value).isprintable()


def test_names_are_one_line():
    recipe = read('name = """a\nb"""\nbase = "Q4_K"\n[[rule]]\nname = "x\\ny"\ntype = "Q6_K"')
    assert recipe.name == r"a\nb"
    assert recipe.rules[0].describe() == r"name 'x\ny'"
