"""Presets and mixtures against the reference: the types of every tensor, and what options change."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest

from quant import QuantError
from quant.formats import FORMATS
from quant.mixes import Choice, PlanOptions, TensorInfo, check_plan, plan
from quant.presets import ALIASES, CONDITIONS, COPY, PRESETS, ROWS, file_type_label, get_preset
from quant.recipes import FALLBACK
from quant.roles import ROLES

DATA = Path(__file__).parent.parent / "data"
SHARED = Path(os.environ.get("GGUFTOOLS_SHARED", Path(__file__).parent.parent.parent.parent / "shared"))

TINY = json.loads((DATA / "tiny/presets.json").read_text(encoding="utf-8"))
TINY_METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 6,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
}
_ROWS_OF_TINY = {
    "token_embd": (2048, 256),
    "attn_q": (256, 256),
    "attn_k": (128, 256),
    "attn_v": (128, 256),
    "attn_output": (256, 256),
    "ffn_gate": (512, 256),
    "ffn_up": (512, 256),
    "ffn_down": (256, 512),
}
WITHOUT, WITH = "without", "with_imatrix"


def _tiny_tensors() -> list[TensorInfo]:
    """The tiny model's tensors, in no particular order."""
    names = sorted(TINY["COPY"][WITHOUT]["tensors"], reverse=True)
    found = []
    for name in names:
        shape = _ROWS_OF_TINY.get(name.split(".")[-2], (256,))
        found.append(TensorInfo(name, shape, "F32" if len(shape) == 1 else "BF16"))
    return found


def _model(blocks: int = 8, columns: int = 256, arch: str = "llama", **more) -> tuple[list[TensorInfo], dict]:
    """A made-up model and its metadata."""
    names = ["token_embd", "output"] + [
        f"blk.{i}.{part}"
        for i in range(blocks)
        for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "attn_norm")
    ]
    kinds = {True: ((columns,), "F32"), False: ((256, columns), "F16")}
    tensors = [TensorInfo(name + ".weight", *kinds["norm" in name]) for name in names]
    metadata = {"general.architecture": arch, f"{arch}.block_count": blocks} | {
        f"{arch}.{key.replace('__', '.')}": value for key, value in more.items()
    }
    return tensors, metadata


def _types(choices: list[Choice]) -> dict[str, str]:
    return {c.name: c.target.name for c in choices}


# --- against the reference ---


@pytest.mark.parametrize("with_importance", [WITHOUT, WITH])
@pytest.mark.parametrize("preset", TINY)
def test_tiny_model_gets_the_references_types(preset, with_importance):
    choices = plan(_tiny_tensors(), TINY_METADATA, preset, with_importance == WITH)
    if with_importance not in TINY[preset]:  # the reference refuses: so must we, and name a tensor that needs it
        assert any(c.needs_importance for c in choices)
        with pytest.raises(QuantError, match=r"weight: I?Q\w+ needs an importance matrix"):
            check_plan(choices)
        return
    types = TINY[preset][with_importance]["tensors"]
    expected = {name: FORMATS[kind.upper()].name for name, (kind, _) in types.items()}
    assert _types(choices) == expected
    assert list(_types(choices)) == list(expected), "order in the file"
    if with_importance == WITHOUT:
        check_plan(choices)


def _schemas() -> list[Path]:
    return sorted((SHARED / "golden/schemas").glob("*.json"))


@pytest.mark.skipif(not _schemas(), reason="no golden/schemas below GGUFTOOLS_SHARED")
@pytest.mark.parametrize("path", _schemas(), ids=lambda p: p.stem)
def test_schemas_of_published_models(path):
    schema = json.loads(path.read_text(encoding="utf-8"))
    arch = schema["general.architecture"]
    metadata = {
        "general.architecture": arch,
        f"{arch}.block_count": schema["block_count"],
        f"{arch}.attention.head_count": schema["n_head_over_n_head_kv"],
        f"{arch}.attention.head_count_kv": 1,
        f"{arch}.expert_count": schema["expert_count"],
    }
    # of the listed dimensions only the row length and the number of matrices are real
    tensors = [TensorInfo(n, (*ne[:1:-1], max(2, ne[1]), ne[0]), "F16") for n, ne in schema["tensors"]]
    assert len(schema["types"]) == 33
    for preset, types in schema["types"].items():
        expected = {n: types["exceptions"].get(n, types["default"]) for n, _ in schema["tensors"]}
        found = {c.name: c.target.ggml_name for c in plan(tensors, metadata, preset)}
        assert found == expected, preset


# --- presets ---


def test_presets_are_the_references():
    numbers = [p.ftype for p in PRESETS.values()]
    assert len(set(numbers)) == len(numbers)
    assert set(TINY) <= set(PRESETS)
    assert all(p.format in FORMATS for p in PRESETS.values() if p.format)


@pytest.mark.parametrize(
    ("text", "name"),
    [("q4_k_m", "Q4_K_M"), ("Q3_K", "Q3_K_M"), ("q5_k", "Q5_K_M"), ("15", "Q4_K_M"), (7, "Q8_0"), ("0", "F32"),
     ("copy", "COPY"), ("mxfp4_moe", "MXFP4_MOE")],
)  # fmt: skip
def test_preset_by_name_alias_or_number(text, name):
    assert get_preset(text).name == name


@pytest.mark.parametrize(
    ("text", "message"),
    [("Q4_KM", "did you mean Q4_K_M"), ("NVFP4", "written by conversion only"), ("39", "written by conversion only"),
     ("5", "unknown preset '5'"), ("-1", "unknown preset"), ("", "unknown preset ''")],
)  # fmt: skip
def test_preset_unknown(text, message):
    with pytest.raises(QuantError, match=message):
        get_preset(text)


def test_labels():
    assert file_type_label(15) == "Q4_K - Medium"
    assert file_type_label(1024 | 32) == "(guessed) BF16"
    assert file_type_label(39) == "NVFP4"
    assert file_type_label(33).startswith("unknown")


def test_rows_name_only_what_exists():
    for row in ROWS:
        assert set(row.conditions) <= set(CONDITIONS)
        assert set(row.presets) <= set(PRESETS)
        assert row.type in FORMATS or not row.type
        assert set(row.roles) <= set(ROLES)
    assert set(FALLBACK) | set(FALLBACK.values()) <= set(FORMATS)
    used = {condition for row in ROWS for condition in row.conditions}
    assert used == set(CONDITIONS), "every condition is used"
    assert set(ALIASES.values()) <= set(PRESETS)


def test_no_row_is_dead():
    """No row says exactly what an earlier one already decided."""
    for i, row in enumerate(ROWS):
        for earlier in ROWS[:i]:
            covers = (
                (not earlier.roles or (row.roles and set(row.roles) <= set(earlier.roles)))
                and (not earlier.presets or (row.presets and set(row.presets) <= set(earlier.presets)))
                and set(earlier.conditions) <= set(row.conditions)
            )
            assert not covers, (earlier, row)


# --- rules that the published models do not reach ---


@pytest.mark.parametrize(
    ("preset", "more", "part", "expected"),
    [
        # eight experts (Mixtral)
        ("Q4_K_M", {"expert_count": 8}, "attn_v", ["Q8_0"] * 8),
        ("Q4_K_M", {"expert_count": 8}, "attn_k", ["Q8_0"] * 8),
        ("Q4_K_M", {"expert_count": 8}, "attn_output", ["Q5_K"] * 8),
        ("Q3_K_L", {"expert_count": 8}, "attn_output", ["Q3_K"] * 8),
        ("IQ2_XS", {"expert_count": 8}, "attn_output", ["Q5_K"] * 8),
        ("IQ2_XS", {"expert_count": 8}, "attn_k", ["Q4_K"] * 8),
        ("IQ2_XS", {"expert_count": 8}, "attn_v", ["Q4_K"] * 8),
        ("IQ3_M", {"expert_count": 8}, "ffn_down", ["Q4_K", *["IQ3_S", "IQ3_S", "Q4_K"] * 2, "Q4_K"]),
        # grouped queries: only block 0 counts, and it may have none
        ("IQ4_XS", {"attention__head_count": 8, "attention__head_count_kv": [2, 8]}, "attn_v", ["Q5_K"] * 8),
        ("IQ4_XS", {"attention__head_count": 8, "attention__head_count_kv": [0, 2]}, "attn_v", ["IQ4_XS"] * 8),
        ("IQ4_XS", {"attention__head_count": 8, "attention__head_count_kv": 3}, "attn_v", ["IQ4_XS"] * 8),
        # by place
        ("Q3_K_M", {}, "attn_v", ["Q5_K"] * 2 + ["Q4_K"] * 6),
        ("Q4_K_S", {}, "attn_v", ["Q5_K"] * 4 + ["Q4_K"] * 4),
        ("Q4_K_S", {}, "ffn_down", ["Q5_K"] + ["Q4_K"] * 7),
        ("IQ3_XS", {}, "ffn_up", ["IQ3_S"] + ["IQ3_XXS"] * 6 + ["IQ3_S"]),
        ("IQ2_M", {}, "ffn_down", ["IQ3_S"] + ["IQ2_S"] * 7),
    ],
)
def test_rules_by_experts_heads_and_place(preset, more, part, expected):
    tensors, metadata = _model(**more)
    found = _types(plan(tensors, metadata, preset))
    assert [found[f"blk.{i}.{part}.weight"] for i in range(8)] == expected


@pytest.mark.parametrize(
    ("arch", "preset", "expected"),
    [
        ("falcon", "Q4_K_M", ["Q6_K", *["Q4_K"] * 2, "Q5_K"]),
        ("falcon", "Q3_K_M", ["Q5_K", *["Q3_K"] * 2, "Q4_K"]),
        ("falcon", "Q3_K_L", ["Q4_K"] * 4),
        ("falcon", "Q4_K_S", ["Q4_K"] * 4),
    ],
)
def test_falcon(arch, preset, expected):
    tensors, metadata = _model(16, arch=arch)
    found = _types(plan(tensors, metadata, preset))
    assert [found[f"blk.{i}.ffn_down.weight"] for i in (0, 2, 3, 4)] == expected
    assert found["output.weight"] == "Q8_0"


@pytest.mark.parametrize(
    ("arch", "blocks", "heads", "expected"),
    [("llama", 80, (64, 8), "Q5_K"), ("llama", 80, (64, 64), "Q3_K"), ("llama", 60, (64, 8), "Q3_K"),
     ("qwen2", 80, (64, 64), "Q5_K"), ("jais2", 68, (8, 8), "Q5_K"), ("gemma2", 80, (64, 8), "Q3_K")],
)  # fmt: skip
def test_70b(arch, blocks, heads, expected):
    more = {"attention__head_count": heads[0], "attention__head_count_kv": heads[1]}
    tensors, metadata = _model(blocks, arch=arch, **more)
    assert _types(plan(tensors, metadata, "Q3_K_S"))["blk.40.attn_v.weight"] == expected


@pytest.mark.parametrize(
    "name",
    ["blk.0.attn_q_norm.weight", "blk.0.ffn_gate_inp.weight", "blk.0.ssm_conv1d.weight", "position_embd.weight",
     "token_types.weight", "blk.0.time_mix_w2.weight", "blk.0.attn_q.bias", "v.patch_embd.weight", "altup_proj.weight"],
)  # fmt: skip
@pytest.mark.parametrize("options", [PlanOptions(), PlanOptions(pure=True)])
def test_never_quantized(name, options):
    (choice,) = plan([TensorInfo(name, (256, 256), "F32")], {"general.architecture": "llama"}, "Q8_0", options=options)
    assert choice.is_copy
    assert choice.rule.startswith("copied")


def test_never_quantized_by_shape_and_architecture():
    metadata = {"general.architecture": "glm5-next"}
    column = TensorInfo("blk.0.attn_q.weight", (1, 256), "F32")
    hyper = TensorInfo("blk.0.attn_k_b.weight", (2, 256, 256), "F32")
    kept = TensorInfo("blk.0.attn_q_a.weight", (256, 256), "F32")
    found = _types(plan([column, hyper, kept], metadata, "Q4_K_M"))
    assert found == {column.name: "F32", hyper.name: "F32", kept.name: "Q8_0"}
    assert _types(plan([hyper], {"general.architecture": "deepseek2"}, "Q4_0"))[hyper.name] == "Q4_0"


def test_experts_in_four_bits():
    experts = TensorInfo("blk.0.ffn_down_exps.weight", (4, 256, 256), "BF16")
    attention = TensorInfo("blk.0.attn_k_b.weight", (4, 256, 256), "BF16")
    for arch, of_attention in (("gpt-oss", "MXFP4"), ("bailingmoe3", "Q8_0")):
        found = _types(plan([experts, attention], {"general.architecture": arch}, "MXFP4_MOE"))
        assert found == {attention.name: of_attention, experts.name: "MXFP4"}


def test_expert_outside_of_the_blocks():
    tensors, metadata = _model(4, expert_count=16)
    metadata["llama.block_count"] = 3
    with pytest.raises(QuantError, match=r"blk\.3\.ffn_down.*outside of 0\.\.2.*damaged"):
        plan(tensors, metadata, "Q4_K_M")


@pytest.mark.parametrize("value", ["3", 2.5, -1, True, None, [None]])
def test_metadata_of_a_wrong_kind(value):
    tensors, metadata = _model(2, attention__head_count=value)
    with pytest.raises(QuantError, match=r"'llama\.attention\.head_count' is .* expected a whole number"):
        plan(tensors, metadata, "Q4_K_M")


# --- row lengths ---


@pytest.mark.parametrize(
    ("preset", "columns", "expected"),
    [("Q4_K_M", 2880, "Q5_0"), ("Q3_K_S", 2880, "Q4_0"), ("Q6_K", 96, "Q8_0"), ("IQ2_XS", 96, "IQ4_NL"),
     ("Q5_K_S", 96, "Q5_1"), ("TQ1_0", 96, "Q4_0"), ("Q4_K_M", 80, "F16"), ("Q8_0", 80, "F16"), ("Q2_0", 96, "Q4_0")],
)  # fmt: skip
def test_fallback(preset, columns, expected):
    tensors, metadata = _model(columns=columns)
    choice = next(c for c in plan(tensors, metadata, preset) if c.name == "blk.3.attn_q.weight")
    assert (choice.target.name, choice.fallback) == (expected, True)
    assert choice.n_bytes == 256 * choice.target.row_size(columns)
    assert f"row length {columns} is not a multiple" in choice.rule


def test_type_without_fallback():
    tensors, metadata = _model(columns=96)
    with pytest.raises(QuantError, match=r"row length 96 is not a multiple of 128 \(Q1_0\)"):
        plan(tensors, metadata, "Q1_0")


# --- options ---


def test_pure_gives_one_type_but_falls_back():
    tensors, metadata = _model()
    assert set(_types(plan(tensors, metadata, "Q3_K_M", options=PlanOptions(pure=True))).values()) == {"Q3_K", "F32"}
    tensors, metadata = _model(columns=96)
    assert set(_types(plan(tensors, metadata, "Q3_K_M", options=PlanOptions(pure=True))).values()) == {"Q4_0", "F32"}


def test_options_for_output_and_embeddings():
    tensors, metadata = _model()
    options = PlanOptions(output_tensor_type="q8_0", token_embedding_type="Q5_1")
    found = _types(plan(tensors, metadata, "Q4_K_M", options=options))
    assert (found["output.weight"], found["token_embd.weight"]) == ("Q8_0", "Q5_1")
    found = _types(plan(tensors, metadata, "Q4_K_M", options=PlanOptions(leave_output_tensor=True)))
    assert (found["output.weight"], found["token_embd.weight"]) == ("F16", "Q4_K")
    tied = [t for t in tensors if t.name != "output.weight"]
    found = _types(plan(tied, metadata, "Q4_K_M", options=PlanOptions(output_tensor_type="F16")))
    assert found["token_embd.weight"] == "F16"
    assert _types(plan(tied, metadata, "Q4_K_M"))["token_embd.weight"] == "Q6_K"


def test_per_layer_embeddings_follow_a_pattern_first():
    table = TensorInfo("per_layer_token_embd.weight", (512, 256), "F16")
    other = TensorInfo("token_embd.weight", (512, 256), "F16")
    options = PlanOptions(token_embedding_type="Q8_0", tensor_types=(("token_embd", "Q4_0"),))
    found = _types(plan([table, other], {"general.architecture": "gemma3n"}, "Q4_K_M", options=options))
    assert found == {table.name: "Q4_0", other.name: "Q8_0"}


def test_patterns():
    tensors, metadata = _model()
    patterns = ((r"blk\.[01]\.ffn_down", "q8_0"), (r"ffn_down\.weight$", "Q4_K"), (r"attn_\D\.", "Q5_K"))
    choices = plan(tensors, metadata, "Q4_K_M", options=PlanOptions(tensor_types=patterns))
    found = _types(choices)
    down = [found[f"blk.{i}.ffn_down.weight"] for i in range(8)]
    assert down == ["Q8_0"] * 2 + ["Q4_K"] * 6, "first match wins, and the preset's own type counts as a request"
    assert found["blk.5.attn_v.weight"] == "Q5_K", r"\D keeps its case"
    rule = next(c.rule for c in choices if c.name == "blk.1.ffn_down.weight")
    assert rule == r"tensor type 'blk\.[01]\.ffn_down=q8_0'"


def test_a_tensor_named_by_a_pattern_is_not_counted():
    tensors, metadata = _model()
    options = PlanOptions(tensor_types=((r"blk\.0\.attn_v", "Q6_K"),))
    found = _types(plan(tensors, metadata, "Q3_K_M", options=options))
    assert [found[f"blk.{i}.attn_v.weight"] for i in range(4)] == ["Q6_K", "Q5_K", "Q5_K", "Q4_K"]


def test_patterns_work_with_float_presets():
    tensors, metadata = _model(2)
    found = _types(plan(tensors, metadata, "F16", options=PlanOptions(tensor_types=(("ffn", "Q8_0"),))))
    assert found["blk.0.ffn_up.weight"] == "Q8_0"
    assert found["blk.0.attn_q.weight"] == "F16"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (PlanOptions(tensor_types=(("ffn_gone", "Q8_0"),)), "'ffn_gone=Q8_0': matches no tensor"),
        (PlanOptions(tensor_types=(("attn_norm", "Q8_0"),)), "matches no tensor that can be quantized"),
        (PlanOptions(tensor_types=(("ffn[", "Q8_0"),)), "not a regular expression"),
        (PlanOptions(tensor_types=(("ffn", "Q9_0"),)), "unknown type 'Q9_0'"),
        (PlanOptions(tensor_types=(("ffn", "Q8_K"),)), "Q8_K is not a type for weights"),
        (PlanOptions(tensor_types=(("ffn", "Q4_K"),)), r"blk\.0\.ffn_down\.weight: row length 96 .* ask for Q8_0"),
        (PlanOptions(output_tensor_type="I32"), "output tensor type: I32 is not a type for weights"),
        (PlanOptions(output_tensor_type="Q6_K"), r"output\.weight: row length 96 is not a multiple of 256"),
        (PlanOptions(token_embedding_type="IQ4_XS"), r"token_embd\.weight: row length 96 is not a multiple of 256"),
    ],
)
def test_options_that_cannot_be(options, message):
    tensors, metadata = _model(columns=96)
    with pytest.raises(QuantError, match=message) as raised:
        plan(tensors, metadata, "Q8_0", options=options)
    assert "\n" not in str(raised.value)


def test_copy_copies_everything():
    tensors, metadata = _model()
    assert all(c.is_copy for c in plan(tensors, metadata, COPY))


# --- what importance is needed for ---


def test_importance_is_needed_where_the_reference_says():
    tensors, metadata = _model()
    needing = {c.name for c in plan(tensors, metadata, "Q2_K_S") if c.needs_importance}
    assert "blk.4.ffn_down.weight" in needing
    assert not needing & {"token_embd.weight", "output.weight", "blk.0.attn_norm.weight"}
    assert not any(c.needs_importance for c in plan(tensors, metadata, "Q2_K"))


def test_embeddings_in_a_type_that_cannot_do_without():
    tensors, metadata = _model()
    for kind, needed in (("IQ2_XXS", True), ("IQ2_S", False)):
        options = PlanOptions(token_embedding_type=kind)
        choice = plan(tensors, metadata, "Q8_0", options=options)[1]
        assert (choice.name, choice.needs_importance) == ("token_embd.weight", needed)


def test_a_plan_is_checked_before_it_is_carried_out():
    tensors, metadata = _model()
    choices = plan(tensors, metadata, "IQ2_S", has_importance=True)
    everything = {t.name for t in tensors}
    check_plan(choices, everything)
    with pytest.raises(QuantError, match=r"blk\.7\.ffn_up\.weight: IQ2_XS needs an entry in the importance matrix"):
        check_plan(choices, everything - {"blk.7.ffn_up.weight"})


def test_requantizing_and_integers_are_refused():
    metadata = {"general.architecture": "llama"}
    lossy = TensorInfo("blk.0.attn_q.weight", (256, 256), "Q8_0")
    check_plan(plan([lossy], metadata, "Q8_0"))  # a copy
    with pytest.raises(QuantError, match=r"attn_q\.weight: is already quantized \(Q8_0\)"):
        check_plan(plan([lossy], metadata, "Q4_0"))
    check_plan(plan([lossy], metadata, "Q4_0"), allow_requantize=True)
    with pytest.raises(QuantError, match="I32 is not a type of weights"):
        check_plan(plan([TensorInfo("blk.0.ids.weight", (256, 256), "I32")], metadata, "Q4_0"))


def test_order_of_blocks_is_by_number():
    tensors, metadata = _model(12)
    blocks = [int(c.name.split(".")[1]) for c in plan(tensors, metadata, "Q8_0") if c.name.startswith("blk")]
    assert all(a <= b for a, b in pairwise(blocks))
