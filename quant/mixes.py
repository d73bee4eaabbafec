"""Which tensor gets which format: a recipe, or a preset, applied to a model.

`plan` is a pure function of names, shapes and metadata. It follows llama.cpp's `quantize` (b11434) tensor by tensor, so
the plain presets (`presets.py`) give the same file.

Options do what their user asks for, where the reference surprises: patterns keep their case and also work with F32, F16
and BF16 presets; a pattern that matches nothing, and a requested type that does not divide the row, are errors.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quant.errors import QuantError
from quant.format import Format
from quant.formats import FORMATS, get_format
from quant.presets import PRESETS, Preset, get_preset, recipe_of
from quant.recipes import COPIED, NOT_FOR_WEIGHTS, Case, Recipe, Rule, around, weight_type
from quant.roles import (
    EMBEDDINGS,
    FEED_FORWARD,
    NEVER_CONTAINS,
    NEVER_CONTAINS_OF,
    NEVER_NAMES,
    OUTPUT,
    VALUES,
    file_order,
    role_of,
)

#: architecture -> number of blocks by which the reference knows its 70B models
BLOCKS_OF_70B = {"llama": 80, "llama-embed": 80, "qwen2": 80, "deci": 80, "olmo": 80, "jais2": 68}
# in these, 80 blocks are a 70B only with grouped queries and without 8 experts
_MAY_BE_ANOTHER_SIZE = ("llama", "llama-embed")

#: Types that are useless without an importance matrix: refused, but for embeddings and output
NEEDS_IMPORTANCE = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS")
#: Types that cannot be written without one at all
CANNOT_WITHOUT = ("IQ1_S", "IQ2_XXS", "IQ2_XS")
_INTEGERS = ("I8", "I16", "I32", "I64")


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
    match wins; no_fallback: rows that a type's block does not divide are an error. What is never quantized stays so
    whatever the options.
    """

    pure: bool = False
    leave_output_tensor: bool = False
    output_tensor_type: str | None = None
    token_embedding_type: str | None = None
    tensor_types: tuple[tuple[str, str], ...] = ()
    no_fallback: bool = False


@dataclass(frozen=True)
class Choice:
    """What becomes of one tensor.

    rule: the row, option or list entry that decided; wanted: the type that it asked for, another than `target` where
    the row length forced a substitute; needs_importance: it is refused without an entry in the importance matrix.
    """

    name: str
    shape: tuple[int, ...]
    source: Format
    target: Format
    rule: str
    wanted: Format
    needs_importance: bool = False

    @property
    def is_copy(self) -> bool:
        return self.source == self.target

    @property
    def fallback(self) -> bool:
        """Whether the row length forced another type."""
        return self.target != self.wanted

    @property
    def n_weights(self) -> int:
        return math.prod(self.shape)

    @property
    def n_bytes(self) -> int:
        """Bytes of the tensor's data in its target type."""
        return self._size(self.target)

    @property
    def bytes_before(self) -> int:
        """Bytes of the tensor's data in its source type."""
        return self._size(self.source)

    def _size(self, fmt: Format) -> int:
        n = self.shape[-1] if self.shape else 1
        return math.prod(self.shape[:-1]) * fmt.row_size(n)


def apply_options(recipe: Recipe, options: PlanOptions) -> Recipe:
    """The recipe with the options as rules of its own.

    Raises QuantError for unknown types and for patterns that are no regular expressions.
    """
    if options == PlanOptions():
        return recipe

    def asked(kind: str | None, where: str) -> str | None:
        return None if kind is None else weight_type(kind, where)

    output = asked(options.output_tensor_type, "output tensor type")
    embeddings = asked(options.token_embedding_type, "token embedding type")
    rules = []
    for pattern, kind in options.tensor_types:
        label = f"tensor type '{pattern}={kind}'"
        try:
            re.compile(pattern)
        except re.error as error:
            raise QuantError(f"{label}: not a regular expression: {error}") from None
        when = (("name", pattern),)
        rules.append(Rule(weight_type(kind, label), when, exact=True, counts=False, required=True, label=label))
    own = around(tuple(rules), embeddings, output, exact=True, tied=not options.pure)
    if options.leave_output_tensor:
        kept = Rule(COPIED, (("name", r"^output\.weight$"),), counts=False, label="copied: leave_output_tensor")
        own = (kept, *own)
    if options.pure:
        recipe = replace(recipe, name=f"{recipe.name} --pure", rules=(), inherited=(), extends=None)
    elif recipe.name in PRESETS and recipe == recipe_of(PRESETS[recipe.name]):
        recipe = replace(recipe, rules=(), inherited=recipe.rules, extends=recipe.name)
    return replace(recipe, rules=own + recipe.rules, fallback=None if options.no_fallback else recipe.fallback)


def plan(
    tensors: Iterable[TensorInfo],
    metadata: Mapping[str, Any],
    recipe: str | int | Preset | Recipe,
    has_importance: bool = False,
    options: PlanOptions | None = None,
) -> list[Choice]:
    """The target type of every tensor, in the order in which the reference writes them: by (block or -1, name).

    metadata: GGUF keys of the source; of them `general.architecture` and the architecture's `block_count`,
    `expert_count`, `attention.head_count` and `attention.head_count_kv` matter. recipe: or a preset, or its name.

    >>> w = TensorInfo("blk.0.attn_v.weight", (512, 512), "F16")
    >>> plan([w], {"general.architecture": "llama"}, "Q3_K_L")[0].target.name
    'Q5_K'

    Raises QuantError for an unknown preset or type, a pattern that is no regular expression or matches nothing, a
    requested type that does not divide a row, metadata of a wrong kind, and a row that has no fallback.
    """
    if not isinstance(recipe, Recipe):
        recipe = recipe_of(get_preset(recipe))
    recipe = apply_options(recipe, options or PlanOptions())
    rules = recipe.rules + recipe.inherited
    ordered = sorted(tensors, key=lambda t: file_order(t.name))
    facts = _ModelFacts.read(ordered, metadata)
    counts: Counter[str] = Counter()
    unused = {i: rule for i, rule in enumerate(rules) if rule.required}
    plan = []
    for tensor in ordered:
        source = get_format(tensor.format)
        reason = why_never(tensor, facts.arch, recipe)
        if reason:
            plan.append(Choice(tensor.name, tensor.shape, source, source, reason, source))
            continue
        role = role_of(tensor.name)
        counter = "attn_v" if role in VALUES else role
        case = _case(tensor, role, counts[counter], recipe, facts, has_importance)
        rule = next((rule for rule in rules if rule.holds(case)), None)
        unused = {i: other for i, other in unused.items() if not other.holds(case)}
        counts[counter] += rule is None or rule.counts
        plan.append(_choose(tensor, source, rule, recipe))
    for rule in unused.values():
        raise QuantError(
            f"{rule.label or rule.describe()}: matches no tensor that can be quantized; see the names with "
            "`gguftools inspect`"
        )
    if recipe.fallback is None:
        _refuse_fallbacks(plan)
    return plan


def _refuse_fallbacks(choices: Sequence[Choice]) -> None:
    found = [c for c in choices if c.fallback]
    if found:
        first, weights = found[0], sum(c.n_weights for c in choices)
        share = sum(c.n_weights for c in found) / max(1, weights)
        raise QuantError(
            f"{first.name}: row length {first.shape[-1]} is not a multiple of {first.wanted.block_size} "
            f"({first.wanted}), nor are those of {len(found) - 1} more tensors ({share:.1%} of all weights), and "
            "substitutes are not allowed; name types for them with --tensor-type"
        )


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


def why_never(tensor: TensorInfo, arch: str, recipe: Recipe) -> str:
    """Why a tensor is copied whatever the rules say, or an empty text if it may be quantized."""
    name = tensor.name
    if recipe.copies:
        return "copied: COPY"
    if sum(1 for _ in _without_leading_ones(tensor.shape)) < 2:
        return "copied: has one dimension"
    if not name.endswith("weight"):
        return "copied: name does not end in 'weight'"
    if name in NEVER_NAMES:
        return f"copied: '{name}' is never quantized"
    for part in (*NEVER_CONTAINS, *NEVER_CONTAINS_OF.get(arch, ())):
        if part in name:
            return f"copied: '{part}' is never quantized"
    return ""


def _without_leading_ones(shape: Sequence[int]) -> Sequence[int]:
    first = next((i for i, n in enumerate(shape) if n != 1), len(shape))
    return shape[first:]


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
            values=sum(role_of(t.name) in VALUES for t in tensors),
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


def _case(
    tensor: TensorInfo, role: str, counted: int, recipe: Recipe, facts: _ModelFacts, has_importance: bool
) -> Case:
    return Case(
        name=tensor.name,
        role="head" if role == "output" or (role == "token_embd" and facts.tied) else role,
        rows=tensor.shape[-2] if len(tensor.shape) > 1 else 1,
        columns=tensor.shape[-1],
        stacked=len(tensor.shape) > 2 and tensor.shape[-3] > 1,
        fits=tensor.shape[-1] % recipe.base_format.block_size == 0,
        block=file_order(tensor.name)[0],
        blocks=facts.blocks,
        counted=counted,
        layer=_layer(tensor.name, facts, counted) if role in FEED_FORWARD else counted,
        layers=facts.values if role in VALUES else facts.blocks,
        arch=facts.arch,
        gqa=facts.gqa,
        experts=facts.experts,
        is_70b=facts.is_70b,
        importance=has_importance,
    )


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


def _choose(tensor: TensorInfo, source: Format, rule: Rule | None, recipe: Recipe) -> Choice:
    """What a rule makes of a tensor that may be quantized."""
    if rule is not None and rule.type == COPIED:
        return Choice(tensor.name, tensor.shape, source, source, rule.label or f"{recipe.name}: copied", source)
    if rule is not None:
        why = rule.label or f"{recipe.name}: {rule.describe()}"
    else:
        why = f"{recipe.name}: {'default' if recipe.rules or recipe.inherited else 'every tensor'}"
    wanted = FORMATS[rule.type] if rule is not None and rule.type else recipe.base_format
    columns = tensor.shape[-1]
    if columns % wanted.block_size == 0:
        target = wanted
    elif rule is not None and rule.exact:
        fitting = "Q8_0, Q5_0, Q4_0, IQ4_NL or F16" if columns % 32 == 0 else "F16 or BF16"
        raise QuantError(
            f"{tensor.name}: row length {columns} is not a multiple of {wanted.block_size} ({wanted}); "
            f"ask for {fitting}"
        )
    else:
        target = _fallback(tensor, wanted, recipe)
        why = f"{why}: {wanted}, but row length {columns} is not a multiple of {wanted.block_size}"
    needs = source != target and _needs_importance(tensor.name, target, recipe)
    return Choice(tensor.name, tensor.shape, source, target, why, wanted, needs)


def _fallback(tensor: TensorInfo, fmt: Format, recipe: Recipe) -> Format:
    columns, table = tensor.shape[-1], recipe.fallback or {}
    if recipe.fallback is not None and fmt.name not in table and fmt.block_size > 32:
        raise QuantError(
            f"{tensor.name}: row length {columns} is not a multiple of {fmt.block_size} ({fmt}), and {fmt} has no "
            "type to fall back on; name another with a tensor type"
        )
    result = FORMATS[table.get(fmt.name, fmt.name)]
    return FORMATS["F16"] if columns % result.block_size else result


def _needs_importance(name: str, target: Format, recipe: Recipe) -> bool:
    if name == OUTPUT or name in EMBEDDINGS:
        return target.name in CANNOT_WITHOUT
    return target.name in NEEDS_IMPORTANCE or target.name in recipe.needs_importance


# --- a recipe from a file ---------------------------------------------------------------------------------------------


def recipe_from(tensors: Iterable[TensorInfo], arch: str, name: str, file_type: int | None = None) -> Recipe:
    """The recipe that gives these tensors the types that they have: one rule per kind of tensor and type.

    Tensors that are never quantized have no rule. The base type is that of most weights.
    """
    base = Recipe(name, "F16")
    weights: Counter[str] = Counter()
    kinds: defaultdict[str, defaultdict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for tensor in sorted(tensors, key=lambda t: file_order(t.name)):
        fmt = get_format(tensor.format)
        if why_never(tensor, arch, base) or fmt.name in NOT_FOR_WEIGHTS:
            continue
        block = file_order(tensor.name)[0]
        weights[fmt.name] += math.prod(tensor.shape)
        kinds[_kind(tensor.name)][fmt.name].append(block)
    if not weights:
        return Recipe(name, COPIED, file_type=file_type)
    most = weights.most_common(1)[0][0]
    rules = []
    for kind, types in kinds.items():
        rest = most if most in types else max(types, key=lambda t: len(types[t]))
        for fmt_name, blocks in types.items():
            if fmt_name != rest:
                rules.append(Rule(fmt_name, (("name", kind), ("blocks", _ranges(blocks)))))
        if rest != most:
            rules.append(Rule(rest, (("name", kind),)))
    return Recipe(name, most, tuple(rules), file_type=file_type)


def _kind(name: str) -> str:
    """A regular expression for the tensors that are to their blocks what this one is to its own.

    >>> _kind("blk.12.attn_v.weight")
    '^blk\\\\.\\\\d+\\\\.attn_v\\\\.weight$'
    """
    block, own = file_order(name)[0], name
    prefix = f"blk.{block}."
    return r"^blk\.\d+\." + re.escape(own.removeprefix(prefix)) + "$" if block >= 0 else f"^{re.escape(name)}$"


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3, 7` for 0, 1, 2, 3, 7.

    >>> _ranges([7, 0, 1, 2, 3])
    '0-3, 7'
    """
    runs: list[list[int]] = []
    for n in sorted(set(numbers)):
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
