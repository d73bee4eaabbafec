"""Which tensor gets which format: presets, and the ordered rows that make a preset a mixture.

`plan` is a pure function of names, shapes and metadata. It follows llama.cpp's `quantize` (b11434) tensor by tensor, so
the plain presets give the same file. `ROWS` holds the mixture: the first row whose category, preset and conditions hold
decides. To add a rule, add a row.

Options do what their user asks for, where the reference surprises: patterns keep their case and also work with F32, F16
and BF16 presets; a pattern that matches nothing, and a requested type that does not divide the row, are errors.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quant.errors import QuantError
from quant.format import Format
from quant.formats import FORMATS, get_format

# --- presets ---------------------------------------------------------------------------------------------------------


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
COPY = Preset("COPY", -1, None, "copy")
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


# --- facts about a tensor --------------------------------------------------------------------------------------------

#: Copied, whatever the preset: small, or read by code that wants floats. Any of these in the name:
NEVER_CONTAINS = (
    "_norm.weight",
    "ffn_gate_inp.weight",
    "ffn_gate_tid2eid.weight",
    "altup",
    "laurel",
    "per_layer_model_proj",
    "ssm_conv1d",
    "shortconv.conv.weight",
    "indexer.k_proj.weight",
    "indexer.q_proj.weight",
    "time_mix_first.weight",
    *(f"time_mix_{part}.weight" for part in ("w0", "w1", "w2", "v0", "v1", "v2", "a0", "a1", "a2", "g1", "g2")),
    *(f"time_mix_{part}.weight" for part in ("decay_w1", "decay_w2", "lerp_fused")),
    "attn_rel_b.weight",
    ".position_embd",
    "sam.pos_embd",
    "sam.neck.",
    "sam.net_",
    ".rel_pos",
    ".patch_embd",
    ".patch_merger",
    "a.rvq.codebook",
    "mm.a.code_embd",
)
#: these exact names
NEVER_NAMES = ("position_embd.weight", "token_types.weight")
#: and in files of one architecture also these
NEVER_CONTAINS_OF = {
    "glm5-next": (
        "hc_",
        "indexer.attn_q_b",
        "indexer.attn_k",
        "indexer.proj",
        "indexer_compressor_gate",
        "indexer_compressor_ape",
        *(f"ssm_{part}.weight" for part in ("f_a", "f_b", "g_a", "g_b", "beta")),
        "attn_kv_a_mqa.weight",
        "attn_k_b.weight",
        "attn_v_b.weight",
    ),
}

OUTPUT = "output.weight"
EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
#: (part of the name, category), first match wins; before them the names above are "output" and "token_embd"
CATEGORIES = (
    ("attn_qkv.weight", "attn_qkv"),
    ("attn_kv_b.weight", "attn_kv_b"),
    ("attn_v.weight", "attn_v"),
    ("attn_k.weight", "attn_k"),
    ("attn_q.weight", "attn_q"),
    ("attn_output.weight", "attn_output"),
    ("ffn_up", "ffn_up"),
    ("ffn_gate", "ffn_gate"),
    ("ffn_down", "ffn_down"),
)
_VALUES = ("attn_v", "attn_qkv", "attn_kv_b")  # they carry attention's values: counted and treated as one
_FFN = ("ffn_up", "ffn_gate", "ffn_down")

#: architecture -> number of blocks by which the reference knows its 70B models
BLOCKS_OF_70B = {"llama": 80, "llama-embed": 80, "qwen2": 80, "deci": 80, "olmo": 80, "jais2": 68}
# in these, 80 blocks are a 70B only with grouped queries and without 8 experts
_MAY_BE_ANOTHER_SIZE = ("llama", "llama-embed")


def category_of(name: str) -> str:
    """The role of a tensor by its name: `output`, `token_embd`, one of CATEGORIES, or `other`."""
    if name == OUTPUT:
        return "output"
    if name in EMBEDDINGS:
        return "token_embd"
    return next((category for part, category in CATEGORIES if part in name), "other")


@dataclass(frozen=True)
class Case:
    """What the rows can ask about one tensor.

    category: its role, `head` for the output matrix and for embeddings that also serve as such; columns: row length;
    stacked: one matrix per expert; counted: tensors of its role before it; layer, layers: its place among those of its
    role (for experts, the block in its name); gqa: query heads per key head in block 0 (0 where it has none);
    experts: 0 for dense models; importance: whether there is an importance matrix.
    """

    name: str
    category: str
    preset: Preset
    columns: int
    stacked: bool
    counted: int
    layer: int
    layers: int
    arch: str
    gqa: int
    experts: int
    is_70b: bool
    importance: bool


def _gets_more_bits(i: int, n: int) -> bool:
    """The first and the last eighth of the layers, and every third between them."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


#: conditions that rows name
CONDITIONS: dict[str, Callable[[Case], bool]] = {
    "falcon": lambda c: c.arch == "falcon",
    "bailingmoe3": lambda c: c.arch == "bailingmoe3",
    "glm5-next query": lambda c: (
        c.arch == "glm5-next" and any(part in c.name for part in ("attn_q_a", "attn_q_b", "nextn.eh_proj"))
    ),
    "odd row": lambda c: c.columns % get_format(c.preset.format or "F32").block_size != 0,
    "stacked": lambda c: c.stacked,
    "gqa>=4": lambda c: c.gqa >= 4,
    "4+ experts": lambda c: c.experts >= 4,
    "8 experts": lambda c: c.experts == 8,
    "no importance": lambda c: not c.importance,
    "importance": lambda c: c.importance,
    "first 2": lambda c: c.counted < 2,
    "first 4": lambda c: c.counted < 4,
    "counted 1/8": lambda c: c.counted < c.layers // 8,
    "first 1/16": lambda c: c.layer < c.layers // 16,
    "first 1/8": lambda c: c.layer < c.layers // 8,
    "middle 6/8": lambda c: c.layers // 8 <= c.layer < 7 * c.layers // 8,
    "more bits": lambda c: _gets_more_bits(c.layer, c.layers),
    "70B": lambda c: c.is_70b,
}


# --- the mixture -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """Tensors of these categories, in these presets (empty: any), where all conditions hold, get `format` (empty: the
    preset's own type)."""

    categories: tuple[str, ...]
    presets: tuple[str, ...]
    conditions: tuple[str, ...]
    format: str

    def holds(self, case: Case) -> bool:
        return (
            (not self.categories or case.category in self.categories)
            and (not self.presets or case.preset.name in self.presets)
            and all(CONDITIONS[name](case) for name in self.conditions)
        )

    def explain(self, case: Case) -> str:
        return ", ".join((f"{case.preset}: {case.category}", *self.conditions))


def _row(categories: str, presets: str, conditions: str, format: str) -> Row:
    split = tuple(part.strip() for part in conditions.split(",") if part)
    return Row(tuple(categories.split()), tuple(presets.split()), split, format)


_ANY = ""
_KEEP = ""
_V = " ".join(_VALUES)
_TINY = "IQ2_XXS IQ2_XS IQ2_S IQ2_M IQ1_S IQ1_M"  # presets around two bits and below
_OUTPUT_8_EXPERTS = "Q2_K IQ3_XS IQ3_XXS Q3_K_S Q3_K_M IQ4_NL Q4_K_S Q4_K_M IQ3_S IQ3_M IQ4_XS"

#: The mixture: first row that holds decides; where none does, the preset's own type stays.
ROWS = (
    # categories, presets, conditions, format
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

#: What a type becomes where its block does not divide the row; where the result does not divide it either, F16.
FALLBACK = {
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"), "IQ4_NL"),
    **dict.fromkeys(("Q2_0", "Q2_K", "Q3_K", "TQ1_0", "TQ2_0"), "Q4_0"),
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}

#: Types that are useless without an importance matrix: refused, but for embeddings and output
NEEDS_IMPORTANCE = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS")
#: Types that cannot be written without one at all
CANNOT_WITHOUT = ("IQ1_S", "IQ2_XXS", "IQ2_XS")
#: Types of activations and plain numbers: not for weights
NOT_FOR_WEIGHTS = ("Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64")
_INTEGERS = ("I8", "I16", "I32", "I64")


# --- the plan --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as a file lists it: shape in NumPy order (last axis contiguous)."""

    name: str
    shape: tuple[int, ...]
    format: str | Format


@dataclass(frozen=True)
class PlanOptions:
    """Departures from the preset.

    pure: no mixture, every tensor gets the preset's type; leave_output_tensor: copy output.weight;
    output_tensor_type: type of the output matrix, and of embeddings that serve as such unless they are named otherwise;
    token_embedding_type: type of the embeddings; tensor_types: (regular expression searched in the name, type), first
    match wins. What is never quantized stays so whatever the options.
    """

    pure: bool = False
    leave_output_tensor: bool = False
    output_tensor_type: str | None = None
    token_embedding_type: str | None = None
    tensor_types: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Choice:
    """What becomes of one tensor.

    rule: the row, option or list entry that decided; fallback: the row length forced another type; needs_importance:
    it is refused without an entry in the importance matrix.
    """

    name: str
    shape: tuple[int, ...]
    source: Format
    target: Format
    rule: str
    fallback: bool = False
    needs_importance: bool = False

    @property
    def is_copy(self) -> bool:
        return self.source == self.target

    @property
    def n_bytes(self) -> int:
        """Bytes of the tensor's data in its target type."""
        rows = 1
        for n in self.shape[:-1]:
            rows *= n
        return rows * self.target.row_size(self.shape[-1] if self.shape else 1)


def plan(
    tensors: Iterable[TensorInfo],
    metadata: Mapping[str, Any],
    preset: str | int | Preset,
    has_importance: bool = False,
    options: PlanOptions | None = None,
) -> list[Choice]:
    """The target type of every tensor, in the order in which the reference writes them: by (block or -1, name).

    metadata: GGUF keys of the source; of them `general.architecture` and the architecture's `block_count`,
    `expert_count`, `attention.head_count` and `attention.head_count_kv` matter.

    >>> w = TensorInfo("blk.0.attn_v.weight", (512, 512), "F16")
    >>> plan([w], {"general.architecture": "llama"}, "Q3_K_L")[0].target.name
    'Q5_K'

    Raises QuantError for an unknown preset or type, a pattern that is no regular expression or matches nothing, a
    requested type that does not divide a row, metadata of a wrong kind, and a row that has no fallback.
    """
    chosen = get_preset(preset)
    options = options or PlanOptions()
    ordered = sorted(tensors, key=lambda t: file_order(t.name))
    requests = _requests(options)
    facts = _ModelFacts.read(ordered, metadata)
    counts: Counter[str] = Counter()
    matched: set[str] = set()
    plan = []
    for tensor in ordered:
        source = get_format(tensor.format)
        reason = why_never(tensor, facts.arch, chosen, options)
        if reason:
            plan.append(Choice(tensor.name, tensor.shape, source, source, reason))
            continue
        matched.update(pattern.pattern for pattern, _ in requests.patterns if pattern.search(tensor.name))
        target, rule, fallback = _choose(tensor, chosen, has_importance, options, requests, facts, counts)
        needs = source != target and _needs_importance(tensor.name, target, chosen)
        plan.append(Choice(tensor.name, tensor.shape, source, target, rule, fallback, needs))
    for pattern, fmt in requests.patterns:
        if pattern.pattern not in matched:
            raise QuantError(
                f"tensor type '{pattern.pattern}={fmt}': matches no tensor that can be quantized; "
                "see the names with `gguftools inspect`"
            )
    return plan


def check_plan(
    choices: Iterable[Choice], importance_names: Container[str] | None = None, allow_requantize: bool = False
) -> None:
    """Refuse a plan that cannot be carried out, before any byte is written.

    importance_names: names that the importance matrix has entries for, None if there is no matrix. Raises QuantError,
    naming the tensor, where importance is needed and missing, where an already quantized tensor would change its type
    without `allow_requantize`, and where integers would be converted.
    """
    for choice in choices:
        if choice.is_copy:
            continue
        name, source, target = choice.name, choice.source, choice.target
        if source.name in _INTEGERS:
            raise QuantError(f"{name}: {source} is not a type of weights and cannot become {target}; leave it as it is")
        if source.is_quantized and not allow_requantize:
            raise QuantError(
                f"{name}: is already quantized ({source}) and would lose twice; start from the F16 or BF16 file, "
                "or allow it with --allow-requantize"
            )
        if choice.needs_importance and (importance_names is None or name not in importance_names):
            missing = "an importance matrix" if importance_names is None else "an entry in the importance matrix"
            raise QuantError(
                f"{name}: {target} needs {missing}; collect one with `gguftools imatrix`, or choose another type"
            )


def file_order(name: str) -> tuple[int, str]:
    """Sort key of tensors in a file: block number (-1 outside of blocks), then name."""
    block = _BLOCK.match(name)
    return int(block[1]) if block else -1, name


_BLOCK = re.compile(r"blk\.(\d+)\.")


def why_never(tensor: TensorInfo, arch: str, preset: Preset, options: PlanOptions) -> str:
    """Why a tensor is copied whatever its row in the mixture, or an empty text if it may be quantized."""
    name = tensor.name
    if preset is COPY:
        return "copied: preset COPY"
    if sum(1 for _ in _without_leading_ones(tensor.shape)) < 2:
        return "copied: has one dimension"
    if not name.endswith("weight"):
        return "copied: name does not end in 'weight'"
    if name in NEVER_NAMES:
        return f"copied: '{name}' is never quantized"
    for part in (*NEVER_CONTAINS, *NEVER_CONTAINS_OF.get(arch, ())):
        if part in name:
            return f"copied: '{part}' is never quantized"
    if name == OUTPUT and options.leave_output_tensor:
        return "copied: leave_output_tensor"
    return ""


def _without_leading_ones(shape: Sequence[int]) -> Sequence[int]:
    first = next((i for i, n in enumerate(shape) if n != 1), len(shape))
    return shape[first:]


@dataclass(frozen=True)
class _Requests:
    """The types that options ask for, checked."""

    output: Format | None
    embedding: Format | None
    patterns: tuple[tuple[re.Pattern, Format], ...]

    def pattern_for(self, name: str) -> tuple[re.Pattern, Format] | None:
        return next(((p, fmt) for p, fmt in self.patterns if p.search(name)), None)


def _requests(options: PlanOptions) -> _Requests:
    def weight_type(name: str | None, where: str) -> Format | None:
        if name is None:
            return None
        try:
            fmt = get_format(name)
        except QuantError as error:
            raise QuantError(f"{where}: {error}") from None
        if fmt.name in NOT_FOR_WEIGHTS:
            raise QuantError(f"{where}: {fmt} is not a type for weights; choose another")
        return fmt

    patterns = []
    for text, name in options.tensor_types:
        try:
            pattern = re.compile(text)
        except re.error as error:
            raise QuantError(f"tensor type '{text}={name}': not a regular expression: {error}") from None
        fmt = weight_type(name, f"tensor type '{text}={name}'")
        assert fmt is not None
        patterns.append((pattern, fmt))
    return _Requests(
        weight_type(options.output_tensor_type, "output tensor type"),
        weight_type(options.token_embedding_type, "token embedding type"),
        tuple(patterns),
    )


@dataclass(frozen=True)
class _ModelFacts:
    """What the rows need to know of the model as a whole."""

    arch: str
    blocks: int
    values: int  # tensors of attention's values in the file
    gqa: int
    experts: int
    is_70b: bool
    tied: bool  # embeddings serve as output matrix

    @classmethod
    def read(cls, tensors: Sequence[TensorInfo], metadata: Mapping[str, Any]) -> _ModelFacts:
        arch = str(metadata.get("general.architecture", ""))
        in_names = 1 + max((file_order(t.name)[0] for t in tensors), default=-1)
        blocks = _whole(metadata, f"{arch}.block_count", in_names)
        heads = _whole(metadata, f"{arch}.attention.head_count", 0)
        kv_heads = _whole(metadata, f"{arch}.attention.head_count_kv", heads)
        experts = _whole(metadata, f"{arch}.expert_count", 0)
        another_size = arch in _MAY_BE_ANOTHER_SIZE and (heads == kv_heads or experts == 8)
        return cls(
            arch=arch,
            blocks=blocks,
            values=sum(category_of(t.name) in _VALUES for t in tensors),
            gqa=heads // kv_heads if kv_heads else 0,
            experts=experts,
            is_70b=BLOCKS_OF_70B.get(arch) == blocks and not another_size,
            tied=all(t.name != OUTPUT for t in tensors),
        )


def _whole(metadata: Mapping[str, Any], key: str, default: int) -> int:
    """A count; of a list with one per block, that of block 0."""
    value = metadata.get(key, default)
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = value[0] if len(value) else default
    elif hasattr(value, "tolist"):  # NumPy array or scalar
        return _whole({key: value.tolist()}, key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise QuantError(f"key '{key}' is {value!r}, expected a whole number: the file is damaged")
    return value


def _choose(
    tensor: TensorInfo,
    preset: Preset,
    has_importance: bool,
    options: PlanOptions,
    requests: _Requests,
    facts: _ModelFacts,
    counts: Counter[str],
) -> tuple[Format, str, bool]:
    """(format, rule, fallback) of one tensor that may be quantized; counts its role in `counts`."""
    category = category_of(tensor.name)
    pattern = requests.pattern_for(tensor.name)
    columns = tensor.shape[-1]
    is_embedding, is_output = category == "token_embd", category == "output"
    # per_layer_token_embd is a table of its own: a pattern that names it goes before the option for embeddings
    named = pattern is not None and tensor.name == EMBEDDINGS[1]
    if requests.embedding and is_embedding and not named:
        return _requested(tensor, requests.embedding), "token_embedding_type", False
    if requests.output and is_output:
        return _requested(tensor, requests.output), "output_tensor_type", False
    if pattern is not None:
        return _requested(tensor, pattern[1]), f"tensor type '{pattern[0].pattern}'", False
    default = get_format(preset.format or "")
    if not default.is_quantized:
        return default, f"{preset}: every tensor", False
    if options.pure:
        return _fallback(tensor, default, f"{preset}: pure")
    if requests.output and is_embedding and facts.tied:
        return _requested(tensor, requests.output), "output_tensor_type (no output.weight)", False

    role = "attn_v" if category in _VALUES else category
    counted = counts[role]
    counts[role] += 1
    case = Case(
        name=tensor.name,
        category="head" if is_output or (is_embedding and facts.tied) else category,
        preset=preset,
        columns=columns,
        stacked=len(tensor.shape) > 2 and tensor.shape[-3] > 1,
        counted=counted,
        layer=_layer(tensor.name, facts, counted) if category in _FFN else counted,
        layers=facts.values if category in _VALUES else facts.blocks,
        arch=facts.arch,
        gqa=facts.gqa,
        experts=facts.experts,
        is_70b=facts.is_70b,
        importance=has_importance,
    )
    row = next((row for row in ROWS if row.holds(case)), None)
    if row is None or not row.format:
        return _fallback(tensor, default, f"{preset}: default")
    return _fallback(tensor, FORMATS[row.format], row.explain(case))


def _layer(name: str, facts: _ModelFacts, counted: int) -> int:
    """Place of a feed-forward tensor. With experts, the block in its name: they may be sprinkled over the blocks."""
    block = file_order(name)[0]
    if facts.experts <= 1 or block < 0:
        return counted
    if block >= facts.blocks:
        raise QuantError(
            f"{name}: block {block} is outside of 0..{facts.blocks - 1} (key '{facts.arch}.block_count'): "
            "the file is damaged"
        )
    return block


def _requested(tensor: TensorInfo, fmt: Format) -> Format:
    columns = tensor.shape[-1]
    if columns % fmt.block_size:
        fitting = "Q8_0, Q5_0, Q4_0, IQ4_NL or F16" if columns % 32 == 0 else "F16 or BF16"
        raise QuantError(
            f"{tensor.name}: row length {columns} is not a multiple of {fmt.block_size} ({fmt}); ask for {fitting}"
        )
    return fmt


def _fallback(tensor: TensorInfo, fmt: Format, rule: str) -> tuple[Format, str, bool]:
    columns = tensor.shape[-1]
    if columns % fmt.block_size == 0:
        return fmt, rule, False
    if fmt.name not in FALLBACK and fmt.block_size > 32:
        raise QuantError(
            f"{tensor.name}: row length {columns} is not a multiple of {fmt.block_size} ({fmt}), and {fmt} has no "
            "type to fall back on; name another with a tensor type"
        )
    result = FORMATS[FALLBACK.get(fmt.name, fmt.name)]
    if columns % result.block_size:
        result = FORMATS["F16"]
    return result, f"{rule}: {fmt}, but row length {columns} is not a multiple of {fmt.block_size}", True


def _needs_importance(name: str, target: Format, preset: Preset) -> bool:
    if name == OUTPUT or name in EMBEDDINGS:
        return target.name in CANNOT_WITHOUT
    return target.name in NEEDS_IMPORTANCE or (target.name == "Q2_K" and preset.name == "Q2_K_S")
