"""JSON schemas: tables of documents, what is refused, and random texts of the grammars held against `jsonschema`."""

import json
import random
import re

import pytest

from engine.errors import EngineError
from engine.sampling import Grammar
from engine.sampling.json_schema import integers, json_schema_to_gbnf, json_to_gbnf
from engine.sampling.patterns import chars_to_gbnf, literal, pattern_to_gbnf

PERSON = {
    "type": "object",
    "title": "a person",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name"],
}
TREE = {
    "$defs": {"node": {"type": "object", "properties": {"v": {"type": "null"}, "next": {"$ref": "#/$defs/node"}}}},
    "$ref": "#/$defs/node",
}

#: schema, documents of the grammar, documents that are not
TABLE = [
    (True, ["1", '{"a": [null, -1.5e3]}', '"x"'], ["", "nul", "[1,]"]),
    ({}, ["true", "[]"], ["{"]),
    ({"type": "boolean"}, ["true", "false"], ["1", "null"]),
    ({"type": "null"}, ["null"], ["0"]),
    ({"type": "number"}, ["0", "-1.25", "3e10", "1E-2"], ["01", "1.", ".5", "+1", "NaN"]),
    ({"type": "integer"}, ["0", "-12"], ["1.5", "007", "1e3"]),
    ({"type": ["integer", "null"], "minimum": 3}, ["3", "null", "1000"], ["2", "-3"]),
    ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 5}, ["4"], ["3", "5"]),
    (
        {"type": "integer", "minimum": 3, "exclusiveMinimum": 5, "maximum": 9, "exclusiveMaximum": 8},
        ["6", "7"],
        ["5", "8"],
    ),
    ({"type": "integer", "minimum": -0.5, "maximum": 1.5}, ["0", "1"], ["2", "-1"]),
    ({"type": "string"}, ['""', '"é\\n\\u00e9"', '"\\/"'], ['"', '"\n"', '"\\x"', '"\\ud800"']),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', '"abc"', '"\\n\\n"'], ['"a"', '"abcd"']),
    ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2024-13-01"', '"24-01-01"']),
    ({"type": "string", "format": "date-time"}, ['"2024-02-29T23:59:59Z"', '"2024-01-01T00:00:00.123+01:00"'], ['"x"']),
    ({"type": "string", "format": "time"}, ['"12:34:56-10:00"'], ['"24:00:00Z"']),
    ({"format": "uuid"}, ['"123e4567-e89b-12d3-a456-426614174000"'], ['"123e4567"']),
    ({"type": "string", "pattern": "^a+$"}, ['"aaa"'], ['""', '"b"', '"ba"']),
    ({"enum": [1, "x", None, {"a": [1]}, True]}, ["1", '"x"', "null", '{"a": [1]}', "true"], ["2", "x"]),
    ({"const": 'a"\\\n'}, [json.dumps('a"\\\n')], ['"a"']),
    ({"enum": [1, "a", 2.5], "type": "integer"}, ["1"], ['"a"', "2.5"]),
    ({"type": "array"}, ["[]", '[1, "a"]'], ["[1,]"]),
    ({"type": "array", "items": {"type": "null"}}, ["[]", "[null,null]"], ["[1]"]),
    ({"items": {"type": "null"}, "minItems": 2}, ["[null, null]", "[null,null,null]"], ["[]", "[null]"]),
    ({"items": {"type": "null"}, "minItems": 1, "maxItems": 2}, ["[null]", "[null,null]"], ["[]", "[null,null,null]"]),
    ({"items": {"type": "null"}, "maxItems": 1}, ["[]", "[null]"], ["[null,null]"]),
    ({"type": "array", "maxItems": 0}, ["[]", "[ ]"], ["[1]"]),
    ({"prefixItems": [{"const": 1}, {"const": 2}]}, ["[1,2]"], ["[1]", "[1,2,3]", "[]"]),
    ({"prefixItems": [{"const": 1}], "items": {"const": 2}, "maxItems": 3}, ["[1]", "[1,2,2]"], ["[]", "[1,2,2,2]"]),
    ({"prefixItems": [{"const": 1}], "items": False}, ["[1]"], ["[1,2]"]),
    ({"items": [{"const": 1}]}, ["[1]"], ["[1,1]"]),
    ({"type": "object"}, ["{}", '{"a": {"b": 1}}'], ["[]"]),
    ({"type": "object", "properties": {}}, ["{}"], ['{"a":1}']),
    ({"type": "object", "additionalProperties": False}, ["{}"], ['{"a":1}']),
    ({"additionalProperties": {"type": "null"}}, ["{}", '{"a": null, "b": null}'], ['{"a": 1}']),
    (
        PERSON,
        [
            '{"name": "Bo"}',
            '{"name":"Bo","age":150}',
            '{"name":"Bo","tags":["a", "b"]}',
            '{ "name":"B","age":0,"tags":[]}',
        ],
        ["{}", '{"age":1}', '{"name":""}', '{"name":"Bo","age":151}', '{"name":"Bo","tags":["c"]}', '{"name":"Bo",}'],
    ),
    (
        {"properties": {"a": {}, "b": {}, "c": {}}, "required": ["b"]},
        ['{"b":1}', '{"a":1,"b":2}', '{"b":1,"c":2}', '{"a":1,"b":2,"c":3}'],
        ["{}", '{"a":1}', '{"c":1}', '{"a":1,"c":1}'],
    ),
    (
        {"properties": {"a": {}, "b": {}}},
        ["{}", '{"a":1}', '{"b":1}', '{"a":1,"b":1}'],
        ['{"b":1,"a":1}', '{"c":1}'],
    ),
    (
        {"properties": {"ab": {"const": 1}}, "required": ["ab"], "additionalProperties": {"const": 2}},
        ['{"ab":1}', '{"ab":1,"a":2}', '{"ab":1,"abc":2,"":2}', '{"ab":1, "x-y é":2}'],
        ['{"a":2}', '{"ab":2}', '{"ab":1,"ab":2}', '{"ab":1,"a\\u0062":2}'],
    ),
    (TREE, ["{}", '{"next":{"v":null,"next":{}}}'], ['{"next":1}']),
    ({"$ref": "#/definitions/a~1b", "definitions": {"a/b": {"const": 1}}}, ["1"], ["2"]),
    ({"properties": {"x": {"$ref": "#"}}}, ["{}", '{"x":{"x":{}}}'], ['{"x":1}']),
    ({"anyOf": [{"type": "null"}, {"type": "object", "properties": {"a": {"const": 1}}}]}, ["null", '{"a":1}'], ["1"]),
    ({"oneOf": [{"const": 1}, {"const": 2}]}, ["1", "2"], ["3"]),
    (
        {"allOf": [{"properties": {"a": {"const": 1}}, "required": ["a"]}, {"properties": {"b": {"const": 2}}}]},
        ['{"a":1}', '{"a":1,"b":2}'],
        ["{}", '{"b":2}'],
    ),
    ({"allOf": [{"enum": [1, 2, 3]}, {"enum": [2, 3, 4]}], "type": "integer"}, ["2", "3"], ["1", "4"]),
    ({"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 3}]}, ["2", "3"], ["1", "4"]),
    (
        {"properties": {"a": {"const": 1}}, "anyOf": [{"required": ["a"]}, {"properties": {"b": {"const": 2}}}]},
        ["{}", '{"a":1}', '{"a":1,"b":2}', '{"b":2}'],
        ['{"a":2}'],
    ),
    ({"allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": {"type": "string", "maxLength": 1}}}, ['"a"'], ['"ab"']),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}], "allOf": [{"type": "integer"}]}, ["1"], ['"a"']),
]


@pytest.mark.parametrize(("schema", "fits", "fails"), TABLE, ids=[json.dumps(row[0])[:50] for row in TABLE])
def test_documents(schema, fits, fails):
    grammar = Grammar(json_schema_to_gbnf(schema))
    for text in fits:
        assert grammar.matches(text), text
    for text in fails:
        assert not grammar.matches(text), text


REFUSED = [
    ({"uniqueItems": True}, "#: the keyword 'uniqueItems' is not supported"),
    ({"type": "number", "minimum": 1}, "the keyword 'minimum' is not supported for the type number"),
    ({"type": "integer", "multipleOf": 2}, "'multipleOf'"),
    ({"properties": {"a": {"not": {}}}}, "#/properties/a: the keyword 'not' is not supported"),
    ({"patternProperties": {}}, "'patternProperties'"),
    ({"properties": {"a\nb\u2028": {"not\n": 1}}}, r"a\\nb\\u2028: the keyword 'not\\n'"),
    ({"if": {}}, "'if'"),
    ({"type": "string", "format": "email"}, "format 'email' is not supported; there are date, time, date-time, uuid"),
    ({"type": "text"}, "type 'text' is not supported; there are object"),
    ({"type": []}, "type '\\[\\]'"),
    ({"type": "string", "pattern": "^(?=a)$"}, "#: pattern .*character 2: groups that look around"),
    ({"type": "string", "pattern": "a", "maxLength": 1}, "pattern together with minLength or maxLength"),
    ({"type": "object", "properties": {}, "required": ["x"]}, "'x' is required but not among the properties"),
    ({"$ref": "http://a/b"}, "only #/... of this document"),
    ({"$ref": "#/nowhere"}, "there is no 'nowhere'"),
    ({"allOf": [{"$ref": "#"}]}, "schemas within one another"),
    ({"allOf": [{"type": "string"}, {"type": "null"}]}, "a value is not both string and null"),
    (
        {"allOf": [{"properties": {"a": {}}, "additionalProperties": False}, {"properties": {"b": {}}}]},
        "additionalProperties of one part of allOf forbids or changes 'b'",
    ),
    ({"anyOf": []}, "anyOf must be a list of schemas"),
    ({"enum": []}, "enum must be a list of 1 to"),
    ({"enum": [1], "type": "string"}, "another type"),
    (False, "no value is accepted"),
    ([], "expected a schema, an object; found '\\[\\]'"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "no integer lies between 3 and 2"),
    ({"type": "string", "minLength": -1}, "minLength must be a number, 0 or more"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "the smaller first"),
    ({"type": "array", "minItems": 20000}, "up to 10,000"),
    ({"type": "array", "prefixItems": [{}], "minItems": 2, "items": False}, "only 1 items are described"),
    ({"const": float("nan")}, "a value is not JSON"),
    ({"const": "\ud800"}, "a value is not JSON"),
    ({"minLength": 1, "minItems": 1}, "keywords of array and string: say the type"),
]


@pytest.mark.parametrize(("schema", "message"), REFUSED, ids=[row[1][:40] for row in REFUSED])
def test_refusals_name_the_keyword_and_the_place(schema, message):
    with pytest.raises(EngineError, match=message) as error:
        json_schema_to_gbnf(schema)
    assert str(error.value).startswith("JSON schema, #")
    assert str(error.value).isprintable()


def test_deep_schemas_are_refused():
    schema: dict = {}
    for _ in range(500):
        schema = {"items": schema}
    with pytest.raises(EngineError, match="within one another"):
        json_schema_to_gbnf(schema)
    chain = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(500)} | {"d500": {}}
    with pytest.raises(EngineError, match="within one another"):
        json_schema_to_gbnf({"$ref": "#/$defs/d0", "$defs": chain})


def test_wide_schemas_are_written():
    """Hundreds of optional properties with long names, and others beside them."""
    names = ["x" * 150 + str(i) for i in range(150)]
    schema = {"properties": {n: {"type": "null"} for n in names}, "additionalProperties": {"type": "null"}}
    grammar = Grammar(json_schema_to_gbnf(schema))
    assert grammar.matches(json.dumps(dict.fromkeys(names[::3])))
    assert grammar.matches('{"xx":null}')
    assert not grammar.matches(json.dumps({names[1]: None, names[0]: None}))


# --- random texts -----------------------------------------------------------------------------------------------------


def write(grammar, dice, limit=600):
    """A random text of a grammar, or None if none came to an end. Closing marks are likelier, or nothing would."""
    out, state = b"", grammar.start
    while len(out) < limit:
        if 0 in state and dice.random() < 0.5:
            return out.decode()
        following = [(b, s) for b in range(256) if (s := grammar.read(state, bytes([b])))]
        if not following:
            return out.decode()
        weights = [
            20 if b in b'"}]' else 4 if b in b",:0123456789abc" else 0.3 if b >= 0x80 or b < 33 else 1
            for b, _ in following
        ]
        byte, state = dice.choices(following, weights)[0]
        out += bytes([byte])
    return None


VALID = [row[0] for row in TABLE if isinstance(row[0], dict)]


@pytest.mark.parametrize("schema", VALID, ids=[json.dumps(s)[:50] for s in VALID])
def test_what_the_grammar_allows_the_schema_accepts(schema):
    jsonschema = pytest.importorskip("jsonschema")
    if isinstance(schema.get("items"), list):
        cls = jsonschema.Draft201909Validator
    else:
        cls = jsonschema.Draft202012Validator
    validator = cls(schema)
    grammar, dice, done = Grammar(json_schema_to_gbnf(schema)), random.Random(0), 0
    for _ in range(40):
        text = write(grammar, dice)
        if text is not None:
            validator.validate(json.loads(text))
            done += 1
    assert done >= 10


@pytest.mark.parametrize("seed", range(60))
def test_integer_ranges(seed):
    dice = random.Random(seed)
    low, high = sorted(dice.randrange(-(10**n), 10**n) for n in (dice.randint(1, 4), dice.randint(1, 4)))
    grammar = Grammar(f"root ::= {integers(low, high)}")
    for n in {
        *range(low - 12, low + 12),
        *range(high - 12, high + 12),
        0,
        -1,
        *(dice.randint(-20000, 20000) for _ in range(50)),
    }:
        assert grammar.matches(str(n)) == (low <= n <= high), (low, n, high)
    assert not grammar.matches("00")
    assert not grammar.matches("-0") or low < 0


def test_open_integer_ranges():
    assert Grammar(f"root ::= {integers(None, -5)}").matches("-123456789012345678")
    assert not Grammar(f"root ::= {integers(None, -5)}").matches("-4")
    assert Grammar(f"root ::= {integers(17, None)}").matches("170")
    assert not Grammar(f"root ::= {integers(17, None)}").matches("16")


PATTERNS = [
    (r"^abc$", ["abc"], ["ab", "xabc"]),
    (r"b", ["b", "abc"], ["a", ""]),
    (r"^a|b$", ["ax", "xb"], ["xa", "bx"]),
    (r"^(a|bc)*$", ["", "abca"], ["b"]),
    (r"^(?:ab){2,3}$", ["abab", "ababab"], ["ab", "abababab"]),
    (r"^a{2}b?c+d*?$", ["aac", "aabccd"], ["ac", "aab"]),
    (r"^\d{3}-[A-Z_]\w\s$", ["000-_z "], ["12-Az ", "123-az "]),
    (r'^["\\/\n]+$', ['"', "\\", "/\n"], ["a", ""]),
    (r"^[^\"a-c]$", ["d", "\\", "\n", "é", "\x01"], ['"', "a", "dd"]),
    (r"^\x41\u00e9\.\-\$$", ["Aé.-$"], ["Aéx-$"]),
    (r"^.$", ["a", '"', "é"], ["\n", "", "ab"]),
    (r"^[\w.-]+@[\w-]+\.[a-z]{2,}$", ["a.b-c@d-e.org"], ["a@b", "@b.cc"]),
    (r"^\D\S\W$", ["ab!"], ["1b!", "a !", "abc"]),
    (r"^[]", None, "the class of characters is empty"),
    (r"^[\]a]$", ["]", "a"], ["b"]),
    (r"^[b-a]$", None, "this is no range"),
    (r"a**", None, "nothing to repeat"),
    (r"*a", None, "nothing to repeat"),
    (r"(a", None, "a parenthesis is not closed"),
    (r"a)", None, "closed that was not opened"),
    (r"^a$b", None, "at the beginning or the end"),
    (r"\bword", None, r"unsupported escape \b"),
    (r"\1", None, r"unsupported escape \1"),
    (r"\u12", None, "expected 4 hexadecimal digits"),
    ("\\ud800", None, "lone surrogate"),
    ("(" * 60 + ")" * 60, None, "more than 50 parentheses"),
    ("[a", None, "not closed"),
    ("a\\", None, "unsupported escape"),
]


@pytest.mark.parametrize(("pattern", "fits", "fails"), PATTERNS, ids=[row[0][:30] for row in PATTERNS])
def test_patterns(pattern, fits, fails):
    if fits is None:
        with pytest.raises(EngineError, match=re.escape(fails)):
            pattern_to_gbnf(pattern)
        return
    grammar = Grammar(f"root ::= {pattern_to_gbnf(pattern)}")
    for text in fits:
        assert re.search(pattern, text, re.ASCII), text
        assert grammar.matches(json.dumps(text, ensure_ascii=False)[1:-1]), text
    for text in fails:
        assert not re.search(pattern, text, re.ASCII), text
        assert not grammar.matches(json.dumps(text, ensure_ascii=False)[1:-1]), text


def test_characters_and_literals_come_back():
    for c in [*range(128), 0xE9, 0x2028, 0x1F600]:
        grammar = Grammar(f"root ::= {chars_to_gbnf(((c, c),))}")
        assert grammar.matches(json.dumps(chr(c), ensure_ascii=False)[1:-1]) or c == 127, hex(c)
        assert Grammar(f"root ::= {literal(chr(c))}").matches(chr(c))


def test_any_object():
    grammar = Grammar(json_to_gbnf())
    assert grammar.matches('{"a": [1, {"b": "c"}], "d": null}')
    assert not grammar.matches("[]")
