"""Recipes: which tensor gets which type, as data. An ordered list of rules, of which the first that holds decides.

Every preset is one (`presets.py`), users write their own as TOML:

    name = "Q4_K_L"
    extends = "Q4_K_M"        # a preset, whose rules follow; or: base = "Q4_K", the type where no rule holds
    embeddings = "Q8_0"
    output = "Q8_0"

    [[rule]]
    roles = ["ffn_down"]
    blocks = "first 1/8, last 2"
    type = "Q6_K"

`FIELDS` lists what a rule can ask. Rules of a recipe that extends another stand before the other's, and the tensors
that they decide are not counted by those. `mixes.plan` applies a recipe to a model.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from quant.errors import QuantError
from quant.format import Format
from quant.formats import get_format
from quant.roles import ROLES, role_of

#: type of a rule that leaves its tensors as they are
COPIED = "COPY"

#: Types of activations and plain numbers: not for weights
NOT_FOR_WEIGHTS = ("Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64")

#: What a type becomes where its block does not divide the row; where the result does not divide it either, F16.
FALLBACK: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"), "IQ4_NL"),
        **dict.fromkeys(("Q2_0", "Q2_K", "Q3_K", "TQ1_0", "TQ2_0"), "Q4_0"),
        "Q4_K": "Q5_0",
        "Q5_K": "Q5_1",
        "Q6_K": "Q8_0",
    }
)


@dataclass(frozen=True)
class Case:
    """What rules can ask about one tensor.

    role: `head` for the output matrix and for embeddings that also serve as such; rows, columns: of one matrix;
    stacked: holds one matrix per expert; block: number in its name (-1 outside of blocks), of `blocks`; counted:
    tensors of its role before it; layer, layers: its place among those of its role, as the reference reckons (for
    experts, the block in its name); fits: its rows are whole blocks of the base type; gqa: query heads per key head in
    block 0 (0 where it has none); experts: 0 for dense models; is_70b: by the reference's reckoning; importance:
    whether there is an importance matrix.
    """

    name: str
    role: str
    rows: int
    columns: int
    stacked: bool
    fits: bool
    block: int
    blocks: int
    counted: int
    layer: int
    layers: int
    arch: str
    gqa: int
    experts: int
    is_70b: bool
    importance: bool


Test = Callable[[Case], bool]

# --- what a rule can ask ----------------------------------------------------------------------------------------------

_COMPARE: dict[str, Callable[[int, int], bool]] = {
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    "<": lambda a, b: a < b,
    "": lambda a, b: a == b,
}
_COMPARISON = re.compile(r"(>=|<=|>|<|) *(\d+)")
_RANGE = re.compile(r"(\d+)(-)?(\d+)?")
_SHARE = re.compile(r"(first|last|middle) (\d+)(?:/([1-9]\d*))?")


def gets_more_bits(i: int, n: int) -> bool:
    """The first and the last eighth of n, and every third between them: where presets that end in M spend more."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def _place(text: str) -> Callable[[int, int], bool]:
    """One part of a place: `3`, `0-3`, `30-`, `first 1/8`, `last 2`, `middle 6/8` or `more`."""
    if text == "more":
        return gets_more_bits
    if found := _RANGE.fullmatch(text):
        low = int(found[1])
        high = int(found[3]) if found[3] else None if found[2] else low
        return lambda i, n: low <= i and (high is None or i <= high)
    if found := _SHARE.fullmatch(text):
        side, a, b = found[1], int(found[2]), int(found[3]) if found[3] else None
        if b is not None and a <= b:
            if side == "first":
                return lambda i, n: i < n * a // b
            if side == "last":
                return lambda i, n: i >= n * (b - a) // b
            return lambda i, n: n * (b - a) // (2 * b) <= i < n * (b + a) // (2 * b)
        if b is None and side != "middle":
            return (lambda i, n: i < a) if side == "first" else (lambda i, n: i >= n - a)
    raise QuantError(f"'{text}' is no place; write such as 0-3, first 1/8, last 2, middle 6/8 or more")


def _places(number: Callable[[Case], tuple[int, int]]) -> Callable[[Any], Test]:
    def parse(value: Any) -> Test:
        parts = [_place(part.strip()) for part in _text(value).split(",")]
        return lambda case: any(part(*number(case)) for part in parts) and number(case)[0] >= 0

    return parse


def _compared(number: Callable[[Case], int]) -> Callable[[Any], Test]:
    def parse(value: Any) -> Test:
        found = _COMPARISON.fullmatch(str(value) if type(value) is int else _text(value))
        if found is None:
            raise QuantError(f"{value!r} is no comparison; write such as 8 or '>=4'")
        holds, other = _COMPARE[found[1]], int(found[2])
        return lambda case: holds(number(case), other)

    return parse


def _flag(of: Callable[[Case], bool]) -> Callable[[Any], Test]:
    def parse(value: Any) -> Test:
        if not isinstance(value, bool):
            raise QuantError(f"{value!r} is neither true nor false")
        return lambda case: of(case) is value

    return parse


def _pattern(value: Any) -> Test:
    try:
        pattern = re.compile(_text(value))
    except re.error as error:
        raise QuantError(f"'{value}' is not a regular expression: {error}") from None
    return lambda case: pattern.search(case.name) is not None


def _roles(value: Any) -> Test:
    names = _texts(value)
    unknown = [name for name in names if name not in ROLES]
    if unknown:
        raise QuantError(f"there is no role '{unknown[0]}'; there are {', '.join(ROLES)}")
    return lambda case: case.role in names or role_of(case.name) in names


def _archs(value: Any) -> Test:
    names = _texts(value)
    return lambda case: case.arch in names


#: what a rule can ask -> function from the value in the recipe to a test
FIELDS: dict[str, Callable[[Any], Test]] = {
    "name": _pattern,  # a regular expression, searched in the tensor's name
    "roles": _roles,  # list of roles (quant/roles.py)
    "arch": _archs,  # list of architectures
    "blocks": _places(lambda c: (c.block, c.blocks)),  # by the number in the name
    "layers": _places(lambda c: (c.layer, c.layers)),  # by the place among tensors of the role
    "counted": _places(lambda c: (c.counted, c.layers)),  # by the number of tensors of the role before it
    "experts": _compared(lambda c: c.experts),  # experts of the model
    "gqa": _compared(lambda c: c.gqa),  # query heads per key head
    "rows": _compared(lambda c: c.rows),
    "columns": _compared(lambda c: c.columns),
    "stacked": _flag(lambda c: c.stacked),  # holds one matrix per expert
    "fits": _flag(lambda c: c.fits),  # its rows are whole blocks of the base type
    "is_70b": _flag(lambda c: c.is_70b),
    "importance": _flag(lambda c: c.importance),  # there is an importance matrix
}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise QuantError(f"{value!r} is no text")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not value:
        raise QuantError(f"{value!r} is no list of names")
    return tuple(_text(name) for name in value)


def weight_type(name: Any, where: str) -> str:
    """The name of a type that weights can have, as the table of formats spells it.

    Raises QuantError, which begins with `where`, for any other.
    """
    if not isinstance(name, str):
        raise QuantError(f"{where}: {name!r} is no name of a type")
    try:
        fmt = get_format(name)
    except QuantError as error:
        raise QuantError(f"{where}: {error}") from None
    if fmt.name in NOT_FOR_WEIGHTS:
        raise QuantError(f"{where}: {fmt} is not a type for weights; choose another")
    return fmt.name


# --- rules and recipes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """Tensors for which all conditions hold get `type`; "" is the recipe's base type, COPY leaves them as they are.

    when: (field, value), of FIELDS; exact: a row that the type's block does not divide is an error; counts: whether
    its tensors count as `layers` and `counted` reckon; required: a rule that holds for no tensor is an error; label:
    what reports call it.
    """

    type: str
    when: tuple[tuple[str, Any], ...] = ()
    exact: bool = False
    counts: bool = True
    required: bool = False
    label: str = field(default="", compare=False)

    @cached_property
    def tests(self) -> tuple[Test, ...]:
        return tuple(FIELDS[name](value) for name, value in self.when)

    def holds(self, case: Case) -> bool:
        return all(test(case) for test in self.tests)

    def describe(self) -> str:
        """The conditions in a line."""
        return _one_line(", ".join(_condition(name, value) for name, value in self.when)) or "every tensor"


def _condition(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name if value else f"not {name}"
    if isinstance(value, (list, tuple)):
        return " ".join(value) if name == "roles" else f"{name} {' '.join(value)}"
    return f"{name} '{value}'" if name == "name" else f"{name} {value}"


@dataclass(frozen=True)
class Recipe:
    """A mixture.

    name: for people; base: type of tensors that no rule decides, COPY to leave everything as it is; rules: in order;
    inherited: rules that stand behind them, those of the recipe named `extends`; file_type: `general.file_type` of the
    output, None keeps the source's; fallback: what a type becomes where its block does not divide a row, None refuses;
    needs_importance: types that are refused without an importance matrix, beyond those that always are.
    """

    name: str
    base: str
    rules: tuple[Rule, ...] = ()
    inherited: tuple[Rule, ...] = ()
    file_type: int | None = None
    fallback: Mapping[str, str] | None = field(default_factory=lambda: FALLBACK)
    needs_importance: tuple[str, ...] = ()
    extends: str | None = None
    description: str = ""

    @property
    def base_format(self) -> Format:
        return get_format(self.base)

    @property
    def copies(self) -> bool:
        """Whether it leaves everything as it is."""
        return self.base == COPIED


# --- TOML -------------------------------------------------------------------------------------------------------------

_KEYS = ("name", "description", "extends", "base", "embeddings", "output", "file_type", "fallback", "needs_importance")
_REFUSE, _REFERENCE = "error", "ggml"


def read_recipe(text: str, where: str, known: Callable[[str], Recipe]) -> Recipe:
    """A recipe from its TOML. where: stands before messages; known: gives the recipe that `extends` names.

    >>> read_recipe('base = "q4_k"\\n[[rule]]\\nroles = ["attn_v"]\\ntype = "Q6_K"', "mine", Recipe).rules[0].describe()
    'attn_v'

    Raises QuantError for text that is no TOML, and for keys and values that are not understood.
    """
    try:
        return _read_recipe(text, where, known)
    except QuantError as error:
        raise QuantError(_one_line(str(error))) from None


def _one_line(text: str) -> str:
    """With control characters, which texts in TOML may hold, spelled out."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _read_recipe(text: str, where: str, known: Callable[[str], Recipe]) -> Recipe:
    try:
        found = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise QuantError(f"{where}: not TOML: {error}") from None
    unknown = [key for key in found if key not in (*_KEYS, "rule")]
    if unknown:
        raise QuantError(f"{where}: unknown key '{unknown[0]}'; there are {', '.join(_KEYS)} and [[rule]]")
    if ("base" in found) == ("extends" in found):
        raise QuantError(f"{where}: needs either `base` (a type such as Q4_K) or `extends` (a preset such as Q4_K_M)")
    entries = found.get("rule", [])
    if not isinstance(entries, list):
        raise QuantError(f"{where}: rules are written [[rule]], in double brackets")
    extends = "extends" in found
    rules = tuple(_read_rule(entry, f"{where}: rule {i + 1}", not extends) for i, entry in enumerate(entries))
    name = _one_line(_read(found, "name", str, where, ""))
    description = _read(found, "description", str, where, "")
    kinds = {key: _read_type(found[key], f"{where}: {key}") for key in ("embeddings", "output") if key in found}
    rules = around(rules, kinds.get("embeddings"), kinds.get("output"))
    if extends:
        asked = _read(found, "extends", str, where, "")
        try:
            parent = known(asked)
        except QuantError as error:
            raise QuantError(f"{where}: extends: {error}") from None
        recipe = replace(
            parent,
            name=name or parent.name,
            description=description,
            rules=rules,
            inherited=parent.rules + parent.inherited,
            extends=parent.name,
        )
    else:
        base = _read_type(found["base"], f"{where}: base")
        recipe = Recipe(name or base, base, rules, description=description)
    if "file_type" in found:
        recipe = replace(recipe, file_type=_read(found, "file_type", int, where, 0))
    if "needs_importance" in found:
        names = _read(found, "needs_importance", list, where, [])
        types = tuple(weight_type(name, f"{where}: needs_importance") for name in names)
        recipe = replace(recipe, needs_importance=types)
    return replace(recipe, fallback=_read_fallback(found["fallback"], where)) if "fallback" in found else recipe


def _read(found: Mapping[str, Any], key: str, kind: type, where: str, default: Any) -> Any:
    value: Any = found.get(key, default)
    if type(value) is not kind or (isinstance(value, int) and not 0 <= value < 1 << 32):
        raise QuantError(f"{where}: {key} is {value!r}, expected {_KINDS[kind]}")
    return value


_KINDS = {str: "a text", int: "a whole number", list: "a list"}


def around(
    rules: tuple[Rule, ...], embeddings: str | None, output: str | None, exact: bool = False, tied: bool = True
) -> tuple[Rule, ...]:
    """Rules with others around them that give embeddings and output matrix their types.

    Both go before the rules, but for per-layer embeddings (a table of its own) and for embeddings that serve as output
    matrix (`tied`), of which rules may speak first.
    """

    def rule(kind: str, label: str, name: str, value: Any) -> Rule:
        return Rule(kind, ((name, value),), exact, counts=False, label=label)

    before, after = [], []
    if embeddings is not None:
        before.append(rule(embeddings, "token_embedding_type", "name", r"^token_embd\.weight$"))
        after.append(rule(embeddings, "token_embedding_type", "roles", ("token_embd",)))
    if output is not None:
        before.append(rule(output, "output_tensor_type", "name", r"^output\.weight$"))
        if tied:
            after.append(rule(output, "output_tensor_type (no output.weight)", "roles", ("head",)))
    return (*before, *rules, *after)


def _read_type(name: Any, where: str) -> str:
    return COPIED if name == COPIED else weight_type(name, where)


def _read_rule(entry: Any, where: str, counts: bool) -> Rule:
    if not isinstance(entry, dict):
        raise QuantError(f"{where}: {entry!r} is no table of conditions and a type")
    conditions = {key: value for key, value in entry.items() if key not in ("type", *_FLAGS)}
    unknown = [key for key in conditions if key not in FIELDS]
    if unknown:
        raise QuantError(f"{where}: unknown condition '{unknown[0]}'; there are {', '.join(FIELDS)}")
    if "type" not in entry:
        raise QuantError(f'{where}: has no type; give one, or "" for the base type')
    kind = "" if entry["type"] == "" else _read_type(entry["type"], where)
    flags = {"counts": counts} | {key: entry[key] for key in _FLAGS if key in entry}
    for key, value in flags.items():
        if not isinstance(value, bool):
            raise QuantError(f"{where}: {key} is {value!r}, neither true nor false")
    for name, value in conditions.items():
        try:
            FIELDS[name](value)
        except QuantError as error:
            raise QuantError(f"{where}: {name}: {error}") from None
    when = {name: tuple(value) if isinstance(value, list) else value for name, value in conditions.items()}
    return Rule(kind, tuple(when.items()), **flags)


_FLAGS = ("exact", "counts", "required")


def _read_fallback(value: Any, where: str) -> Mapping[str, str] | None:
    if value == _REFUSE:
        return None
    if value == _REFERENCE:
        return FALLBACK
    if not isinstance(value, dict):
        raise QuantError(f'{where}: fallback is {value!r}; write "{_REFERENCE}", "{_REFUSE}" or a table of types')
    place = f"{where}: fallback"
    return {**FALLBACK} | {weight_type(a, place): weight_type(b, place) for a, b in value.items()}


def write_recipe(recipe: Recipe) -> str:
    """The recipe as TOML; `read_recipe` gives an equal one.

    >>> print(write_recipe(Recipe("mine", "Q4_K", (Rule("Q6_K", (("roles", ("attn_v",)), ("blocks", "0-3"))),))))
    name = "mine"
    base = "Q4_K"
    <BLANKLINE>
    [[rule]]
    roles = ["attn_v"]
    blocks = "0-3"
    type = "Q6_K"
    <BLANKLINE>
    """
    lines = [f"name = {_toml(recipe.name)}"]
    if recipe.description:
        lines.append(f"description = {_toml(recipe.description)}")
    lines.append(f"extends = {_toml(recipe.extends)}" if recipe.extends else f"base = {_toml(recipe.base)}")
    if recipe.file_type is not None:
        lines.append(f"file_type = {recipe.file_type}")
    if recipe.needs_importance:
        lines.append(f"needs_importance = {_toml(recipe.needs_importance)}")
    if recipe.fallback is None:
        lines.append(f"fallback = {_toml(_REFUSE)}")
    elif other := {a: b for a, b in recipe.fallback.items() if FALLBACK.get(a) != b}:
        lines.append(f"fallback = {{ {', '.join(f'{a} = {_toml(b)}' for a, b in other.items())} }}")
    for rule in recipe.rules:
        lines += ["", "[[rule]]", *(f"{name} = {_toml(value)}" for name, value in rule.when)]
        lines.append(f"type = {_toml(rule.type)}")
        usual = {"exact": False, "counts": recipe.extends is None, "required": False}
        lines += [f"{key} = {_toml(getattr(rule, key))}" for key, value in usual.items() if getattr(rule, key) != value]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, int):
        return str(value)
    if "\\" in value and "'" not in value and value.isprintable():
        return f"'{value}'"  # a literal string: regular expressions stay readable
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t"}
    return '"' + "".join(escapes.get(c) or (c if c.isprintable() else f"\\U{ord(c):08x}") for c in value) + '"'
