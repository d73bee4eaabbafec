"""JSON schemas as grammars: GBNF whose texts are JSON documents that a schema accepts.

A schema is first put in order (`_Normal`): references are looked up, `allOf` and keywords beside one another are
merged, so that a node is one type, a choice, or a list of values. Then every node becomes a rule. What a grammar cannot
say, or this file does not, is refused by the keyword's name; notes (title, description, ...) are passed over.

Narrower than the schema, as in llama.cpp: properties come in the order of the schema, and others only if
`additionalProperties` asks for them; `prefixItems` alone means these items and no more. `oneOf` is read as `anyOf`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from math import ceil, floor
from typing import Any

from engine.errors import EngineError
from engine.sampling.patterns import literal, pattern_to_gbnf

#: bounds for what strangers write
MAX_DEPTH, MAX_NODES, MAX_CHOICES = 64, 20_000, 5_000

_NOTES = (
    *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
    *("$schema", "$id", "$comment", "$anchor", "$defs", "definitions", "contentMediaType", "contentEncoding"),
)
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems")
#: type -> keywords that belong to it
_OF_TYPE = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("pattern", "format", "minLength", "maxLength"),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "number": (),
    "boolean": (),
    "null": (),
}
_STRUCTURE = ("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref")
_KNOWN = {*_STRUCTURE, *(key for keys in _OF_TYPE.values() for key in keys)}

#: rules that are always the same: name -> (GBNF, rules that it uses)
_COMMON: dict[str, tuple[str, tuple[str, ...]]] = {
    "space": (r'| " " | "\n"{1,2} [ \t]{0,20}', ()),
    "boolean": ('"true" | "false"', ()),
    "null": ('"null"', ()),
    "digits": ('"0" | [1-9] [0-9]{0,15}', ()),
    "integer": ('"-"? digits', ("digits",)),
    "number": ('"-"? digits ("." [0-9]{1,16})? ([eE] [-+]? "0"? [1-9]? [0-9])?', ("digits",)),
    # surrogates are left out: a lone one is no character, and a pair would count twice
    "char": (
        r'[^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt/] | "u" ([0-9a-cefA-CEF] [0-9a-fA-F]{3} | [dD] [0-7] [0-9a-fA-F]{2}))',
        (),
    ),
    "string": (r'"\"" char* "\""', ("char",)),
    "value": (
        "object | array | string | number | boolean | null",
        ("object", "array", "string", "number", "boolean", "null"),
    ),
    "object": (
        r'"{" space (string space ":" space value (space "," space string space ":" space value)*)? space "}"',
        ("space", "string", "value"),
    ),
    "array": ('"[" space (value (space "," space value)*)? space "]"', ("space", "value")),
    "date": ('[0-9]{4} "-" ("0" [1-9] | "1" [0-2]) "-" ("0" [1-9] | [12] [0-9] | "3" [01])', ()),
    "time": (
        '([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9] ":" [0-5] [0-9] ("." [0-9]{3})? '
        '("Z" | [-+] ([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9])',
        (),
    ),
    "date-time": ('date "T" time', ("date", "time")),
    "uuid": ('[0-9a-fA-F]{8} ("-" [0-9a-fA-F]{4}){3} "-" [0-9a-fA-F]{12}', ()),
}
#: a character of a key that is not escaped
_KEY_CHAR = r'[^"\\\x00-\x1F\x7F]'
_FORMATS = {"date": "date", "time": "time", "date-time": "date-time", "uuid": "uuid"}
_FORMATS |= {f"uuid{i}": "uuid" for i in range(1, 6)}


def json_schema_to_gbnf(schema: Any) -> str:
    """GBNF of the JSON documents that a schema (a dict, or a bool) accepts, as far as this file goes; see above.

    >>> print(json_schema_to_gbnf({"type": "boolean"}))
    boolean ::= "true" | "false"
    root ::= boolean
    <BLANKLINE>

    Raises EngineError for keywords and values that are not supported, by name and place.
    """
    if _depth(schema) > 2 * MAX_DEPTH:
        raise _error("#", f"more than {2 * MAX_DEPTH} objects and lists within one another")
    return _Writer(schema).write()


def _depth(value: Any) -> int:
    """How many objects and lists lie within one another; no more than needed is looked at."""
    depth, level = 0, [value]
    while level and depth <= 2 * MAX_DEPTH:
        level = [v for one in level for v in _inside(one)]
        depth += 1
    return depth


def _inside(value: Any) -> list[Any]:
    inside = list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, list) else []
    return [v for v in inside if isinstance(v, Mapping | list)]


def json_to_gbnf() -> str:
    """GBNF of any JSON object: what "answer in JSON" means without a schema."""
    return json_schema_to_gbnf({"type": "object"})


def _error(path: str, what: str) -> EngineError:
    return EngineError(f"JSON schema, {repr(path[:200])[1:-1]}: {what}")  # names may hold ends of lines


class _Normal:
    """Puts nodes in order: without `$ref` (but alone), `allOf`, `oneOf`, lists of types, and notes."""

    def __init__(self, root: Any):
        self.root = root
        self.nodes = 0

    def node(self, schema: Any, path: str, depth: int = 0) -> dict[str, Any]:
        """A schema as {"$ref"}, {"anyOf": [...]}, {"enum"}, {"type", its keywords} or {} (anything)."""
        self.nodes += 1
        if depth > MAX_DEPTH or self.nodes > MAX_NODES:
            raise _error(path, f"more than {MAX_DEPTH} schemas within one another, or {MAX_NODES:,} in all")
        if schema is True:
            return {}
        if schema is False:
            raise _error(path, "no value is accepted (false)")
        if not isinstance(schema, Mapping):
            raise _error(path, f"expected a schema, an object; found {str(schema)[:40]!r}")
        out = {key: value for key, value in schema.items() if key not in _NOTES}
        for key in out:
            if key not in _KNOWN and out[key] is not False:  # `uniqueItems: false` and the like ask for nothing
                raise _error(path, f"the keyword {str(key)[:60]!r} is not supported")
        out = {key: value for key, value in out.items() if key in _KNOWN}
        if set(out) == {"$ref"}:
            return out
        parts = self._parts(out, path, depth)
        merged: list[dict[str, Any]] = [{}]
        for part in parts:
            choices = part.get("anyOf", [part])
            merged = self._product(merged, choices, path, depth)
        return merged[0] if len(merged) == 1 else {"anyOf": merged}

    def _product(
        self, left: list[dict[str, Any]], right: list[dict[str, Any]], path: str, depth: int
    ) -> list[dict[str, Any]]:
        if len(left) * len(right) > MAX_CHOICES:
            raise _error(path, f"more than {MAX_CHOICES:,} combinations of alternatives")
        if left == [{}]:
            return right
        out, last = [], None
        for a in left:
            for b in right:
                try:
                    out.append(self._both(a, b, path, depth))
                except _Contradiction as error:
                    last = error
        if not out:
            raise _error(path, f"no value is accepted: {last}")
        return out

    def _parts(self, schema: dict[str, Any], path: str, depth: int) -> list[dict[str, Any]]:
        """What must hold together: the node's own keywords, its alternatives, the schemas of allOf and $ref."""
        parts = []
        for key in ("allOf", "anyOf", "oneOf"):
            if key in schema and (not isinstance(schema[key], list) or not schema[key]):
                raise _error(path, f"{key} must be a list of schemas")
        own = {key: value for key, value in schema.items() if key not in ("allOf", "anyOf", "oneOf", "$ref")}
        if own:
            parts.append(self._own(own, path))
        for i, part in enumerate(schema.get("allOf", ())):
            parts.append(self._inlined(part, f"{path}/allOf/{i}", depth))
        for key in ("anyOf", "oneOf"):
            if key in schema:
                alone = not own and len(schema) == 1
                choices: list[dict[str, Any]] = []
                for i, choice in enumerate(schema[key]):
                    at = f"{path}/{key}/{i}"
                    node = self.node(choice, at, depth + 1) if alone else self._inlined(choice, at, depth)
                    choices += node.get("anyOf", [node])
                parts.append({"anyOf": choices})
        if "$ref" in schema:
            parts.append(self._inlined({"$ref": schema["$ref"]}, path, depth))
        return parts

    def _inlined(self, schema: Any, path: str, depth: int) -> dict[str, Any]:
        """A node with its alternatives, and no reference at its top."""
        node = self.node(schema, path, depth + 1)
        if "$ref" in node:
            return self._inlined(self.target(node["$ref"], path), node["$ref"], depth + 1)
        if "anyOf" in node:
            parts = [self._inlined(choice, path, depth + 1) for choice in node["anyOf"]]
            return {"anyOf": [one for part in parts for one in part.get("anyOf", [part])]}
        return node

    def _own(self, schema: dict[str, Any], path: str) -> dict[str, Any]:
        """The keywords of one node, its types apart."""
        values = schema.get("enum")
        if "enum" in schema and (not isinstance(values, list) or not values or len(values) > MAX_CHOICES):
            raise _error(path, f"enum must be a list of 1 to {MAX_CHOICES:,} values")
        if "const" in schema:
            values = [v for v in values if _same(v, schema["const"])] if values is not None else [schema["const"]]
        types = schema.get("type")
        types = [types] if isinstance(types, str) else types
        if types is not None and (
            not isinstance(types, list) or not types or not all(isinstance(t, str) and t in _OF_TYPE for t in types)
        ):
            raise _error(path, f"type {str(schema['type'])[:40]!r} is not supported; there are {', '.join(_OF_TYPE)}")
        if values is not None:
            kept = [v for v in values if types is None or any(_is_a(v, t) for t in types)]
            rest = {key for key in schema if key not in ("enum", "const", "type")}
            if rest:
                raise _error(path, f"{sorted(rest)[0]} beside enum or const is not supported: leave it out")
            if not kept:
                raise _error(path, "no value is accepted: those of enum or const are of another type")
            return {"enum": kept}
        if types is None:
            types = [t for t, keys in _OF_TYPE.items() if any(key in schema for key in keys)]
            if len(types) != 1:
                raise _error(path, f"keywords of {' and '.join(types)}: say the type")
        nodes = []
        for t in dict.fromkeys(types):
            node = {"type": t} | {key: schema[key] for key in _OF_TYPE[t] if key in schema}
            nodes.append(self._checked(node, path))
        used = {key for t in types for key in _OF_TYPE[t]}
        for key in schema:
            if key not in ("type", *used):
                raise _error(path, f"the keyword {key!r} is not supported for the type {', '.join(types)}")
        return nodes[0] if len(nodes) == 1 else {"anyOf": nodes}

    def _checked(self, node: dict[str, Any], path: str) -> dict[str, Any]:
        for key in _COUNTS:
            if key in node and (type(node[key]) is not int or node[key] < 0):
                raise _error(path, f"{key} must be a number, 0 or more")
        for key in _OF_TYPE["integer"]:
            if key in node and (type(node[key]) not in (int, float) or not abs(node[key]) < 1e18):
                raise _error(path, f"{key} must be a number of at most 18 digits")
        for key in ("pattern", "format"):
            if key in node and not isinstance(node[key], str):
                raise _error(path, f"{key} must be a string")
        if not isinstance(node.get("properties", {}), Mapping):
            raise _error(path, "properties must be an object")
        required = node.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise _error(path, "required must be a list of names")
        if not isinstance(node.get("prefixItems", []), list):
            raise _error(path, "prefixItems must be a list of schemas")
        return node

    def target(self, ref: Any, path: str) -> Any:
        """What a reference into the document means."""
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            raise _error(path, f"$ref {str(ref)[:60]!r} is not supported: only #/... of this document")
        at = self.root
        for step in ref.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(at, Mapping) and step in at:
                at = at[step]
            elif isinstance(at, list) and step.isascii() and step.isdigit() and int(step[:9]) < len(at):
                at = at[int(step[:9])]
            else:
                raise _error(path, f"$ref {ref[:60]!r}: there is no {step[:40]!r}")
        return at

    def _both(self, a: dict[str, Any], b: dict[str, Any], path: str, depth: int) -> dict[str, Any]:
        """A node that accepts what both accept."""
        if not a or not b:
            return a or b
        for one, other in ((a, b), (b, a)):
            if "enum" in one:
                if "enum" in other:
                    kept = [v for v in one["enum"] if any(_same(v, w) for w in other["enum"])]
                elif set(other) == {"type"}:
                    kept = [v for v in one["enum"] if _is_a(v, other["type"])]
                else:
                    raise _error(path, "allOf of enum and other keywords is not supported")
                if not kept:
                    raise _Contradiction("the values of enum exclude one another")
                return {"enum": kept}
        types = {a["type"], b["type"]}
        if len(types) == 2 and types != {"integer", "number"}:
            raise _Contradiction(f"a value is not both {a['type']} and {b['type']}")
        out = {**a, **b, "type": "integer" if "integer" in types else a["type"]}
        for key in a.keys() & b.keys() - {"type"}:
            out[key] = self._merged(key, a[key], b[key], path)
        self._closed(a, b, path)
        return out

    def _closed(self, a: dict[str, Any], b: dict[str, Any], path: str) -> None:
        """Properties of two schemas come together unless one of them excludes those of the other."""
        for one, other in ((a, b), (b, a)):
            extra = [name for name in other.get("properties", ()) if name not in one.get("properties", ())]
            if extra and one.get("additionalProperties", True) is not True:
                raise _error(path, f"additionalProperties of one part of allOf forbids or changes {extra[0][:40]!r}")

    def _merged(self, key: str, a: Any, b: Any, path: str) -> Any:
        if key == "properties":
            return {**a, **{n: {"allOf": [a[n], s]} if n in a else s for n, s in b.items()}}
        if key == "required":
            return list(dict.fromkeys([*a, *b]))
        if key in ("minimum", "exclusiveMinimum", "minLength", "minItems"):
            return max(a, b)
        if key in ("maximum", "exclusiveMaximum", "maxLength", "maxItems"):
            return min(a, b)
        if _same(a, b):
            return a
        raise _error(path, f"allOf with two values of {key} is not supported")


class _Contradiction(Exception):
    """Two schemas that no value meets at once; an alternative falls away."""


def _same(a: Any, b: Any) -> bool:
    """Equality of JSON values: true is not 1."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def _is_a(value: Any, kind: str) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return {
        "object": isinstance(value, Mapping),
        "array": isinstance(value, list),
        "string": isinstance(value, str),
        "integer": number and float(value).is_integer(),
        "number": number,
        "boolean": isinstance(value, bool),
        "null": value is None,
    }[kind]


class _Writer:
    """Writes a rule for every node."""

    def __init__(self, root: Any):
        self.normal = _Normal(root)
        self.root = root
        self.rules: dict[str, str] = {}
        self.refs: dict[str, str] = {}  # reference -> its rule
        self.counts: dict[str, int] = {}  # name -> how many rules wanted it
        self.depth = 0

    def write(self) -> str:
        self.refs["#"] = "root"
        self.rules["root"] = ""
        self.rules["root"] = self._node(self.root, "#", "")
        return "".join(f"{name} ::= {body}\n" for name, body in sorted(self.rules.items()))

    def _rule(self, name: str, body: str) -> str:
        """A rule under a name like this one."""
        name = re.sub(r"[^A-Za-z0-9-]+", "-", name).strip("-")[:60] or "rule"
        unique = name
        while unique in self.rules or unique in _COMMON:
            self.counts[name] = self.counts.get(name, 0) + 1
            unique = f"{name}-{self.counts[name]}"
        self.rules[unique] = body
        return unique

    def _common(self, name: str) -> str:
        todo = [name]
        while todo:
            one = todo.pop()
            if one not in self.rules:
                self.rules[one], uses = _COMMON[one]
                todo += uses
        return name

    def _node(self, schema: Any, path: str, name: str) -> str:
        """GBNF of a schema."""
        self.depth += 1
        body = self._body(self.normal.node(schema, path, self.depth), path, name)
        self.depth -= 1
        return body

    def _body(self, node: dict[str, Any], path: str, name: str) -> str:
        if "$ref" in node:
            return self._reference(node["$ref"], path)
        if "anyOf" in node:
            return " | ".join(
                self._rule(f"{name}-{i}", self._body(choice, path, f"{name}-{i}"))
                if len(choice) > 1
                else self._body(choice, path, name)
                for i, choice in enumerate(node["anyOf"])
            )
        if "enum" in node:
            return " | ".join(_value(value, path) for value in node["enum"])
        if not node:
            return self._common("value")
        write: Callable[..., str] | None = getattr(self, "_" + node["type"], None)
        if write is None or len(node) == 1:
            return self._common(node["type"])
        return write(node, path, name)

    def _reference(self, ref: Any, path: str) -> str:
        target = self.normal.target(ref, path)
        if ref not in self.refs:
            name = self._rule("ref-" + ref[2:], "")
            self.refs[ref] = name  # before its body, which may refer to itself
            self.rules[name] = self._node(target, ref, name)
        return self.refs[ref]

    def _integer(self, node: dict[str, Any], path: str, name: str) -> str:
        low, high = node.get("minimum"), node.get("maximum")
        low = None if low is None else ceil(low)
        high = None if high is None else floor(high)
        if "exclusiveMinimum" in node:
            bound = floor(node["exclusiveMinimum"]) + 1
            low = bound if low is None else max(low, bound)
        if "exclusiveMaximum" in node:
            bound = ceil(node["exclusiveMaximum"]) - 1
            high = bound if high is None else min(high, bound)
        if low is not None and high is not None and low > high:
            raise _error(path, f"no integer lies between {low} and {high}")
        return integers(low, high)

    def _string(self, node: dict[str, Any], path: str, name: str) -> str:
        kinds: list[str] = [key for key in ("pattern", "format") if key in node]
        kinds += ["minLength or maxLength"] * ("minLength" in node or "maxLength" in node)
        if len(kinds) > 1:
            raise _error(path, f"{kinds[0]} together with {kinds[1]} is not supported")
        if "pattern" in node:
            try:
                return f'"\\"" ({pattern_to_gbnf(node["pattern"])}) "\\""'
            except EngineError as error:
                raise _error(path, str(error)) from None
        if "format" in node:
            if node["format"] not in _FORMATS:
                known = ", ".join(["date", "time", "date-time", "uuid"])
                raise _error(path, f"format {node['format'][:40]!r} is not supported; there are {known}")
            return f'"\\"" {self._common(_FORMATS[node["format"]])} "\\""'
        low, high = node.get("minLength", 0), node.get("maxLength")
        self._bounds(low, high, "Length", path)
        return f'"\\"" {self._common("char")}{{{low},{"" if high is None else high}}} "\\""'

    def _bounds(self, low: int, high: int | None, what: str, path: str) -> None:
        if max(low, high or 0) > 10_000 or (high is not None and high < low):
            raise _error(path, f"min{what} {low} and max{what} {high}: expected up to 10,000, the smaller first")

    def _array(self, node: dict[str, Any], path: str, name: str) -> str:
        first: list[Any] = list(node.get("prefixItems", ()))
        rest = node.get("items", "prefixItems" not in node)
        if isinstance(rest, list):  # how drafts before 2020-12 spell prefixItems
            if first:
                raise _error(path, "prefixItems together with a list of items is not supported")
            first, rest = rest, False
        low, high = node.get("minItems", 0), node.get("maxItems")
        self._bounds(low, high, "Items", path)
        first = first[:high]
        items = [
            self._rule(f"{name}-item-{i}", self._node(item, f"{path}/prefixItems/{i}", f"{name}-item-{i}"))
            for i, item in enumerate(first)
        ]
        least, most = max(low - len(first), 0), None if high is None else high - len(first)
        if rest is False:
            if least:
                raise _error(path, f"minItems is {low}, but only {len(first)} items are described")
            most = 0
        body = ' space "," space '.join(items)
        if most != 0:
            item = self._rule(f"{name}-item", self._node(rest, f"{path}/items", f"{name}-item"))
            body = _listed(body, item, least, most)
        self._common("space")
        return f'"[" space {body} space "]"' if body else '"[" space "]"'

    def _object(self, node: dict[str, Any], path: str, name: str) -> str:
        properties, required = node.get("properties", {}), set(node.get("required", ()))
        more = node.get("additionalProperties", "properties" not in node)
        missing = sorted(required - properties.keys())
        if missing:
            raise _error(path, f"{missing[0][:60]!r} is required but not among the properties: describe it there")
        self._common("space")
        pairs: list[tuple[str, bool]] = []  # rule of a pair, whether it must come
        for key, schema in properties.items():
            value = self._rule(f"{name}-{key}", self._node(schema, f"{path}/properties/{key}", f"{name}-{key}"))
            pair = self._rule(f"{name}-{key}-kv", f'{_value(key, path)} space ":" space {value}')
            pairs.append((pair, key in required))
        tail = ""
        if more is not False:
            value = self._rule(f"{name}-more", self._node(more, f"{path}/additionalProperties", f"{name}-more"))
            key = self._other_keys(list(properties), f"{name}-key") if properties else self._common("string")
            tail = self._rule(f"{name}-more-kv", f'{key} space ":" space {value}')
        return self._pairs(pairs, tail, name)

    def _pairs(self, pairs: list[tuple[str, bool]], tail: str, name: str) -> str:
        """Pairs in order, each that is not required may be left out, then any number of `tail`.

        Two rules for every place: what may follow when a pair has come before (with a comma), and when none has.
        """
        after = f'(space "," space {tail})*' if tail else ""
        first = f"({tail} {after})?" if tail else ""
        for i, (pair, needed) in reversed(list(enumerate(pairs))):
            behind = self._rule(f"{name}-after-{i}", after) if after else ""
            here = f"{pair} {behind}".strip()
            if needed:
                first, after = self._rule(f"{name}-first-{i}", here), f'space "," space {here}'
            else:
                first = self._rule(f"{name}-first-{i}", f"{here} | {first}" if first else f"({here})?")
                after = f'(space "," space {pair})? {behind}'.strip()
        body = f"{first} space" if first else ""
        return f'"{{" space {body} "}}"'

    def _other_keys(self, names: list[str], name: str) -> str:
        """GBNF of JSON strings that are none of `names`, without escapes, which could spell one of them.

        A rule for every beginning of a name: what may follow so that the whole is another string.
        """
        trie: dict[str, Any] = {}
        for one in names:
            at = trie
            for c in one:
                at = at.setdefault(c, {})
            at[""] = {}
        order, todo = [], [trie]
        while todo:
            node = todo.pop()
            order.append(node)
            todo += [child for c, child in node.items() if c]
        rules: dict[int, str] = {}
        for node in reversed(order):  # the longest beginnings first
            children = {c: rules[id(child)] for c, child in node.items() if c}
            choices = [f"{literal(c)} {rule}" for c, rule in children.items() if c >= " " and c not in '"\\\x7f']
            taken = "".join(f"\\U{ord(c):08X}" for c in children)
            choices.append(f"{_KEY_CHAR[:-1]}{taken}] {_KEY_CHAR}*")
            rules[id(node)] = self._rule(name, " | ".join(choices + ['""'] * ("" not in node)))
        return f'"\\"" {rules[id(trie)]} "\\""'


def _listed(before: str, item: str, least: int, most: int | None) -> str:
    """Items behind others, with commas."""
    many = f'(space "," space {item})'
    if before:
        return f"{before} {many}{{{least},{'' if most is None else most}}}"
    more = "" if most is None else most - 1
    body = f"{item} {many}{{{max(least - 1, 0)},{more}}}"
    return body if least else f"({body})?"


def _value(value: Any, path: str) -> str:
    """One JSON value, as a literal."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, TypeError, RecursionError):
        raise _error(path, "a value is not JSON (NaN, infinite, a lone surrogate, or too deep)") from None
    return literal(text.replace("\x7f", "\\u007f"))


def integers(low: int | None, high: int | None) -> str:
    """GBNF of the integers from `low` to `high`, both included; None: no bound (up to 18 digits, then)."""
    limit = 10**18 - 1
    low, high = -limit if low is None else low, limit if high is None else high
    out = []
    if low < 0:
        out.append(f'"-" ({" | ".join(naturals(max(1, -high), -low))})')
    if high >= 0:
        out += naturals(max(low, 0), high)
    return " | ".join(out)


def naturals(low: int, high: int) -> list[str]:
    """GBNF alternatives for low .. high, 0 <= low <= high: one for each way of sharing the leading digits."""
    out = []
    for n in range(len(str(low)), len(str(high)) + 1):
        first, last = max(low, 10 ** (n - 1) if n > 1 else 0), min(high, 10**n - 1)
        out += _same_length(str(first), str(last))
    return out


def _same_length(a: str, b: str) -> list[str]:
    n = len(a)
    if n == 0 or (a == "0" * n and b == "9" * n):
        return ["[0-9]" + (f"{{{n}}}" if n > 1 else "")] if n else [""]
    if a[0] == b[0]:
        return [f"{_digit(a[0], a[0])} {rest}".strip() for rest in _same_length(a[1:], b[1:])]
    low, high = int(a[0]), int(b[0])
    out = []
    if a[1:] != "0" * (n - 1):
        out += [f"{_digit(a[0], a[0])} {rest}" for rest in _same_length(a[1:], "9" * (n - 1))]
        low += 1
    top: list[str] = []
    if b[1:] != "9" * (n - 1):
        top = [f"{_digit(b[0], b[0])} {rest}" for rest in _same_length("0" * (n - 1), b[1:])]
        high -= 1
    if low <= high:
        rest = "" if n == 1 else " " + _same_length("0" * (n - 1), "9" * (n - 1))[0]
        out.append(_digit(str(low), str(high)) + rest)
    return out + top


def _digit(a: str, b: str) -> str:
    return f'"{a}"' if a == b else f"[{a}-{b}]"
