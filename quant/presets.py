"""llama.cpp's presets (b11434): file-level types, and the ordered rows that make each a mixture.

`ROWS` holds the mixtures of all presets in one table, because most rows serve several; `recipe_of` picks a preset's
rows out of it as a recipe (`recipes.py`). The plain presets give the reference's files. To add a rule, add a row.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cache
from typing import Any

from quant.errors import QuantError
from quant.formats import get_format
from quant.recipes import COPIED, Recipe, Rule
from quant.roles import VALUES


@dataclass(frozen=True)
class Preset:
    """A file-level type. name: as on the command line; ftype: `general.file_type`; format: the default type of a
    tensor (None for labels that only conversion writes); label: text of llama.cpp for the number."""

    name: str
    ftype: int
    format: str | None
    label: str

    def __str__(self) -> str:
        return self.name


_PRESETS = (
    Preset("F32", 0, "F32", "all F32"),
    Preset("F16", 1, "F16", "F16"),
    Preset("Q4_0", 2, "Q4_0", "Q4_0"),
    Preset("Q4_1", 3, "Q4_1", "Q4_1"),
    Preset("Q8_0", 7, "Q8_0", "Q8_0"),
    Preset("Q5_0", 8, "Q5_0", "Q5_0"),
    Preset("Q5_1", 9, "Q5_1", "Q5_1"),
    Preset("Q2_K", 10, "Q2_K", "Q2_K - Medium"),
    Preset("Q3_K_S", 11, "Q3_K", "Q3_K - Small"),
    Preset("Q3_K_M", 12, "Q3_K", "Q3_K - Medium"),
    Preset("Q3_K_L", 13, "Q3_K", "Q3_K - Large"),
    Preset("Q4_K_S", 14, "Q4_K", "Q4_K - Small"),
    Preset("Q4_K_M", 15, "Q4_K", "Q4_K - Medium"),
    Preset("Q5_K_S", 16, "Q5_K", "Q5_K - Small"),
    Preset("Q5_K_M", 17, "Q5_K", "Q5_K - Medium"),
    Preset("Q6_K", 18, "Q6_K", "Q6_K"),
    Preset("IQ2_XXS", 19, "IQ2_XXS", "IQ2_XXS - 2.0625 bpw"),
    Preset("IQ2_XS", 20, "IQ2_XS", "IQ2_XS - 2.3125 bpw"),
    Preset("Q2_K_S", 21, "Q2_K", "Q2_K - Small"),
    Preset("IQ3_XS", 22, "IQ3_S", "IQ3_XS - 3.3 bpw"),
    Preset("IQ3_XXS", 23, "IQ3_XXS", "IQ3_XXS - 3.0625 bpw"),
    Preset("IQ1_S", 24, "IQ1_S", "IQ1_S - 1.5625 bpw"),
    Preset("IQ4_NL", 25, "IQ4_NL", "IQ4_NL - 4.5 bpw"),
    Preset("IQ3_S", 26, "IQ3_S", "IQ3_S - 3.4375 bpw"),
    Preset("IQ3_M", 27, "IQ3_S", "IQ3_S mix - 3.66 bpw"),
    Preset("IQ2_S", 28, "IQ2_XS", "IQ2_S - 2.5 bpw"),
    Preset("IQ2_M", 29, "IQ2_S", "IQ2_M - 2.7 bpw"),
    Preset("IQ4_XS", 30, "IQ4_XS", "IQ4_XS - 4.25 bpw"),
    Preset("IQ1_M", 31, "IQ1_M", "IQ1_M - 1.75 bpw"),
    Preset("BF16", 32, "BF16", "BF16"),
    Preset("TQ1_0", 36, "TQ1_0", "TQ1_0 - 1.69 bpw ternary"),
    Preset("TQ2_0", 37, "TQ2_0", "TQ2_0 - 2.06 bpw ternary"),
    Preset("MXFP4_MOE", 38, "MXFP4", "MXFP4 MoE"),
    Preset("NVFP4", 39, None, "NVFP4"),
    Preset("Q1_0", 40, "Q1_0", "Q1_0"),
    Preset("Q2_0", 41, "Q2_0", "Q2_0"),
)

#: Copies every tensor as it is; the file keeps its number.
COPY = Preset(COPIED, -1, None, "copy")
#: name -> preset, COPY among them
PRESETS: dict[str, Preset] = {p.name: p for p in (*_PRESETS, COPY)}
#: other names of presets
ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}

GUESSED = 1024  # flag in general.file_type: the writer guessed it from the tensors
_BY_NUMBER = {p.ftype: p for p in _PRESETS}


def get_preset(name: str | int | Preset) -> Preset:
    """The preset called `name`, in any case, by alias or by number.

    >>> get_preset("q4_k").name, get_preset("7").name, get_preset(15).label
    ('Q4_K_M', 'Q8_0', 'Q4_K - Medium')

    Raises QuantError, with the nearest name, if there is none or if it is a label that files cannot be made with.
    """
    if isinstance(name, Preset):
        return name
    text = str(name).upper()
    text = ALIASES.get(text, text)
    found = _BY_NUMBER.get(int(text)) if text.isdecimal() else PRESETS.get(text)
    if found is None:
        near = difflib.get_close_matches(text, [*PRESETS, *ALIASES], 1, 0.5)
        raise QuantError(f"unknown preset '{name}'" + (f"; did you mean {near[0]}?" if near else ""))
    if found.format is None and found is not COPY:
        raise QuantError(f"preset {found} is written by conversion only; choose another")
    return found


def file_type_label(number: int) -> str:
    """llama.cpp's text for a `general.file_type`.

    >>> file_type_label(15), file_type_label(1024 + 1)
    ('Q4_K - Medium', '(guessed) F16')
    """
    found = _BY_NUMBER.get(number & ~GUESSED)
    return ("(guessed) " if number & GUESSED else "") + (found.label if found else f"unknown ({number & ~GUESSED})")


# --- the mixtures -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """Tensors of these roles, in these presets (empty: any), where all conditions hold, get `type` (empty: the
    preset's own)."""

    roles: tuple[str, ...]
    presets: tuple[str, ...]
    conditions: tuple[str, ...]
    type: str


#: conditions that rows name -> what they ask (`recipes.FIELDS`)
CONDITIONS: dict[str, tuple[tuple[str, Any], ...]] = {
    "falcon": (("arch", ("falcon",)),),
    "bailingmoe3": (("arch", ("bailingmoe3",)),),
    "glm5-next query": (("arch", ("glm5-next",)), ("name", r"attn_q_a|attn_q_b|nextn\.eh_proj")),
    "odd row": (("fits", False),),
    "stacked": (("stacked", True),),
    "gqa>=4": (("gqa", ">=4"),),
    "4+ experts": (("experts", ">=4"),),
    "8 experts": (("experts", 8),),
    "no importance": (("importance", False),),
    "importance": (("importance", True),),
    "first 2": (("counted", "first 2"),),
    "first 4": (("counted", "first 4"),),
    "counted 1/8": (("counted", "first 1/8"),),
    "first 1/16": (("layers", "first 1/16"),),
    "first 1/8": (("layers", "first 1/8"),),
    "middle 6/8": (("layers", "middle 6/8"),),
    "more bits": (("layers", "more"),),
    "70B": (("is_70b", True),),
}


def _row(roles: str, presets: str, conditions: str, type: str) -> Row:
    split = tuple(part.strip() for part in conditions.split(",") if part)
    return Row(tuple(roles.split()), tuple(presets.split()), split, type)


_ANY = ""
_KEEP = ""
_V = " ".join(VALUES)
_TINY = "IQ2_XXS IQ2_XS IQ2_S IQ2_M IQ1_S IQ1_M"  # presets around two bits and below
_OUTPUT_8_EXPERTS = "Q2_K IQ3_XS IQ3_XXS Q3_K_S Q3_K_M IQ4_NL Q4_K_S Q4_K_M IQ3_S IQ3_M IQ4_XS"

#: The mixture: first row that holds decides; where none does, the preset's own type stays.
ROWS = (
    # roles, presets, conditions, type
    _row(_ANY, _ANY, "glm5-next query", "Q8_0"),
    # the output matrix, which may be the embeddings too
    _row("head", "MXFP4_MOE", "", "Q8_0"),
    _row("head", _ANY, "falcon", "Q8_0"),
    _row("head", _ANY, "odd row", "Q8_0"),
    _row("head", _TINY + " IQ3_XXS", "", "Q5_K"),
    _row("head", "Q8_0", "", _KEEP),
    _row("head", _ANY, "", "Q6_K"),
    # experts in four bits, the rest in eight
    _row("ffn_up ffn_gate ffn_down", "MXFP4_MOE", "stacked", "MXFP4"),
    _row(_ANY, "MXFP4_MOE", "bailingmoe3", "Q8_0"),  # its attention has stacked matrices too
    _row(_ANY, "MXFP4_MOE", "stacked", "MXFP4"),
    _row(_ANY, "MXFP4_MOE", "", "Q8_0"),
    # embeddings
    _row("token_embd", "IQ2_XXS IQ2_XS IQ1_S IQ1_M", "", "Q2_K"),
    _row("token_embd", "IQ2_S IQ2_M IQ3_XXS", "", "IQ3_S"),
    _row("token_embd", "TQ1_0 TQ2_0 Q2_0", "", "Q4_K"),
    # two bits and below
    _row(_V, _TINY, "gqa>=4", "Q4_K"),
    _row(_V, _TINY, "4+ experts", "Q4_K"),
    _row(_V, "IQ2_S IQ2_M", "", "IQ3_S"),
    _row(_V, _TINY, "", "Q2_K"),
    _row("attn_k", _TINY, "8 experts", "Q4_K"),
    _row("ffn_down", "IQ2_S IQ2_M", "counted 1/8", "IQ3_S"),
    _row("ffn_down", _TINY, "counted 1/8", "Q2_K"),
    _row("attn_output", _TINY, "8 experts", "Q5_K"),
    _row("attn_output", "IQ1_S IQ1_M", "", "IQ2_XXS"),
    _row("attn_output", "IQ2_S IQ2_M", "", "IQ3_S"),
    _row(_ANY, _TINY, "", _KEEP),
    # attention: values (models of 8 experts have few of them; those of 70B have eight heads to one)
    _row(_V, _ANY, "8 experts", "Q8_0"),
    _row(_V, "Q2_K", "70B", "Q5_K"),
    _row(_V, "Q2_K", "gqa>=4", "Q4_K"),
    _row(_V, "Q2_K", "", "Q3_K"),
    _row(_V, "Q2_K_S IQ3_XXS IQ3_XS IQ3_S", "gqa>=4, 70B", "Q5_K"),
    _row(_V, "Q2_K_S IQ3_XXS IQ3_XS IQ3_S", "gqa>=4", "Q4_K"),
    _row(_V, "IQ3_XXS", "no importance", "IQ3_S"),
    _row(_V, "IQ3_M", "70B", "Q5_K"),
    _row(_V, "IQ3_M", "", "Q4_K"),
    _row(_V, "Q3_K_M", "first 2", "Q5_K"),
    _row(_V, "Q3_K_M", "70B", "Q5_K"),
    _row(_V, "Q3_K_M", "", "Q4_K"),
    _row(_V, "Q3_K_L", "", "Q5_K"),
    _row(_V, "IQ4_NL IQ4_XS", "gqa>=4", "Q5_K"),
    _row(_V, "Q4_K_M Q5_K_M", "more bits", "Q6_K"),
    _row(_V, "Q4_K_S", "first 4", "Q5_K"),
    _row(_V, "Q3_K_S Q4_K_S Q4_K_M", "70B", "Q5_K"),
    # attention: keys and queries
    _row("attn_k", _ANY, "8 experts", "Q8_0"),
    _row("attn_k attn_q", "IQ3_XS", "", "IQ3_XXS"),
    _row("attn_k attn_q", "IQ3_XXS", "", "IQ2_S"),
    # attention: output
    _row("attn_output", "Q3_K_L", "falcon", "Q4_K"),
    _row("attn_output", _ANY, "falcon", _KEEP),
    _row("attn_output", _OUTPUT_8_EXPERTS, "8 experts", "Q5_K"),
    _row("attn_output", _ANY, "8 experts", _KEEP),
    _row("attn_output", "Q2_K", "", "Q3_K"),
    _row("attn_output", "IQ3_XXS", "", "IQ3_S"),
    _row("attn_output", "Q3_K_M IQ3_M", "", "Q4_K"),
    _row("attn_output", "Q3_K_L", "", "Q5_K"),
    # feed-forward: down
    _row("ffn_down", "Q2_K", "", "Q3_K"),
    _row("ffn_down", "Q2_K_S", "first 1/8", "Q4_K"),
    _row("ffn_down", "IQ3_XXS", "no importance, first 1/8", "Q4_K"),
    _row("ffn_down", "IQ3_XXS", "no importance", "Q3_K"),
    _row("ffn_down", "Q3_K_M", "first 1/16", "Q5_K"),
    _row("ffn_down", "Q3_K_M", "more bits", "Q4_K"),
    _row("ffn_down", "Q3_K_M", "falcon", "Q3_K"),
    _row("ffn_down", "Q3_K_M", "", "Q4_K"),
    _row("ffn_down", "IQ3_M", "first 1/8", "Q4_K"),
    _row("ffn_down", "IQ3_M", "8 experts, more bits", "Q4_K"),
    _row("ffn_down", "Q3_K_L", "falcon", "Q4_K"),
    _row("ffn_down", "Q3_K_L", "", "Q5_K"),
    _row("ffn_down", "Q4_K_M", "falcon, first 1/16", "Q6_K"),
    _row("ffn_down", "Q4_K_M", "falcon, more bits", "Q5_K"),
    _row("ffn_down", "Q4_K_M", "falcon", "Q4_K"),
    _row("ffn_down", "Q4_K_M Q5_K_M", "more bits", "Q6_K"),
    _row("ffn_down", "IQ4_NL IQ4_XS", "no importance, first 1/8", "Q5_K"),
    _row("ffn_down", "Q4_K_S", "falcon", _KEEP),
    _row("ffn_down", "Q4_K_S", "first 1/8", "Q5_K"),
    _row("ffn_down", "Q4_0", "importance, first 1/8", "Q4_1"),
    _row("ffn_down", "Q5_0", "importance, first 1/8", "Q5_1"),
    # feed-forward: gate and up
    _row("ffn_gate ffn_up", "IQ3_XS", "middle 6/8", "IQ3_XXS"),
)

#: types that a preset refuses without importance, beyond those that always are (`mixes.NEEDS_IMPORTANCE`)
_NEEDS_IMPORTANCE = {"Q2_K_S": ("Q2_K",)}


@cache
def recipe_of(preset: Preset) -> Recipe:
    """The preset as a recipe: the rows that it reaches.

    >>> recipe_of(get_preset("Q4_K_M")).rules[0].describe()
    "arch glm5-next, name 'attn_q_a|attn_q_b|nextn\\\\.eh_proj'"
    """
    if preset is COPY:
        return Recipe(preset.name, COPIED)
    rules = []
    if get_format(preset.format or "").is_quantized:
        for row in ROWS:
            if row.presets and preset.name not in row.presets:
                continue
            conditions = [asked for name in row.conditions for asked in CONDITIONS[name]]
            rules.append(Rule(row.type, ((("roles", row.roles),) if row.roles else ()) + tuple(conditions)))
            if not rules[-1].when:
                break  # it holds for everything that is left
    return Recipe(
        preset.name,
        preset.format or "",
        tuple(rules),
        file_type=preset.ftype,
        needs_importance=_NEEDS_IMPORTANCE.get(preset.name, ()),
    )
