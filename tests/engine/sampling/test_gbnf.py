"""GBNF: what is accepted, by tables of texts; what is refused, with its place."""

import re

import pytest

from engine.errors import EngineError
from engine.sampling import Grammar
from engine.sampling.charsets import ANY, automaton, intersect, invert, normal
from engine.sampling.gbnf import parse

ACCEPTS = [
    # grammar, texts that fit, texts that do not
    ('root ::= "ab"', ["ab"], ["", "a", "abc", "b"]),
    ('root ::= "a" | "bc" |', ["a", "bc", ""], ["b", "abc"]),
    ('root ::= a b\na ::= "x"\nb ::= "y" | a', ["xy", "xx"], ["x", "yx"]),
    ('root ::= ("a" | "b" "c") "d"', ["ad", "bcd"], ["abd", "d"]),
    ("root ::= [a-cx]", ["a", "b", "c", "x"], ["d", "-", ""]),
    ("root ::= [^a-cx\\n]", ["d", "é", "😀", "-"], ["a", "x", "\n", "", "dd"]),
    ("root ::= [a-]", ["a", "-"], ["b"]),
    (r"root ::= [\]\[\-\\\"]+", ["]", "[-]", '\\"'], ["a", ""]),
    (r'root ::= "\t\r\n\\\"\x41\u00e9\U0001F600"', ['\t\r\n\\"Aé😀'], ["A"]),
    ("root ::= .", ["a", "\n", "é", "😀", "\0"], ["", "ab"]),
    ("root ::= [ぁ-ゟ]+", ["ひらがな"], ["カ", "a", ""]),
    ("root ::= []", [], ["", "a"]),
    ('root ::= "a"*', ["", "a", "aaaa"], ["b", "ab"]),
    ('root ::= "a"+', ["a", "aaaa"], ["", "ab"]),
    ('root ::= "a"?', ["", "a"], ["aa"]),
    ('root ::= "ab"{2}', ["abab"], ["ab", "ababab", "aab"]),
    ('root ::= "a"{2,}', ["aa", "aaaaa"], ["a", ""]),
    ('root ::= "a"{2,4}', ["aa", "aaa", "aaaa"], ["a", "aaaaa"]),
    ('root ::= "a"{ 0 , 2 }', ["", "a", "aa"], ["aaa"]),
    ('root ::= "a"{0}', [""], ["a"]),
    ('root ::= "a" "b"+ "c"', ["abc", "abbc"], ["ababc", "ac"]),
    ('root ::= ("a" | "b"){3}', ["aba", "bbb"], ["ab", "abab"]),
    ('root ::= ("a"?)* "b"', ["b", "aab"], ["a"]),
    ('root ::= (("a"*)+)* ', ["", "aaa"], ["b"]),
    ('root ::= "a"{2}{3}', ["a" * 6], ["a" * 5]),
    ('# a note\nroot ::= "a" # another\n\n\t # more\n  "b"\n'.replace('\n  "b"', '\nb ::= "b"'), ["a"], ["ab"]),
    ('root ::= (\n "a"\n # in the middle\n "b"\n)', ["ab"], ["a"]),
    ('root ::= "a" |\n "b"', ["a", "b"], ["ab"]),
    ('root ::=\n "a"', ["a"], []),
    ('root ::= "("  root ")" root |', ["", "()", "(())()"], ["(", ")(", "(()"]),
    ('root ::= "a" root "b" | "a" root "c" | ""', ["", "aabc", "ac"], ["aab", "abb"]),
    ('root ::= Long-Name1\r\nLong-Name1 ::= "a"\r\n', ["a"], []),
    ('root ::= ""', [""], ["a"]),
]


@pytest.mark.parametrize(("text", "fits", "fails"), ACCEPTS, ids=[row[0][:40] for row in ACCEPTS])
def test_accepts(text, fits, fails):
    grammar = Grammar(text)
    for one in fits:
        assert grammar.matches(one), one
    for one in fails:
        assert not grammar.matches(one), one


REFUSED = [
    ('root ::= "a', 1, 12, "the literal does not end"),
    ("root ::= [a", 1, 12, "the class of characters does not end"),
    ('root ::= "a"\nb = "c"', 2, 3, "expected ::= behind the name 'b', found '= \"c\"'"),
    ("root ::= x", 1, 10, "there is no rule 'x'"),
    ('root ::= ("a"', 1, 14, "expected ) for the parenthesis"),
    ('root ::= "a")', 1, 13, "expected a symbol or the end of the line, found ')'"),
    ("root ::= *", 1, 10, "nothing stands before *"),
    ('root ::= "a"{', 1, 14, "expected a number of times, found the end of the grammar"),
    ('root ::= "a"{1,2', 1, 17, "expected } behind the numbers"),
    ('root ::= "a"{3,2}', 1, 13, "the smaller number first"),
    ('root ::= "a"{99999}', 1, 13, "at most 10,000 times"),
    (r'root ::= "\q"', 1, 12, r"unknown escape '\\q'"),
    ('root ::= "\\\n"', 1, 12, r"unknown escape '\\\n'"),
    (r'root ::= "\x4"', 1, 12, r"expected 2 hexadecimal digits behind \x"),
    (r'root ::= "\U00110000"', 1, 12, "beyond Unicode"),
    ("root ::= [z-a]", 1, 14, "the range runs backwards"),
    ('root ::= "a"\nroot ::= "b"', 2, 1, "the rule 'root' is there already"),
    ("root ::= <think>", 1, 10, "'<think>' needs a vocabulary"),
    ("root ::= <[x]>", 1, 12, "expected the id of a token"),
    ("root ::= <[1>", 1, 13, "expected ]> behind the id"),
    ("root ::= <[9999999999]>", 1, 10, "9999999999 is no id"),
    ("root ::= !a", 1, 11, "expected < behind !"),
    ("_x ::= a", 1, 1, "expected the name of a rule"),
    ('root ::= root "a" | "b"', 1, 1, "the rule 'root' begins with itself"),
    ('root ::= "x" a\na ::= b "c"\nb ::= "d"? a', 2, 1, "the rule 'a' begins with itself"),
    ("root ::= a\na ::= root", 1, 1, "begins with itself"),
    ("root ::= " + "(" * 200, 1, 110, "more than 100 parentheses"),
    ("root ::= " + '("a"{9999} "b"{9999}){9999}' * 30, 1, None, "grows beyond 200,000 symbols"),
]


@pytest.mark.parametrize(("text", "line", "column", "message"), REFUSED, ids=[row[3][:40] for row in REFUSED])
def test_refuses(text, line, column, message):
    with pytest.raises(EngineError, match=re.escape(message)) as error:
        parse(text)
    assert str(error.value).isprintable()
    place = f"grammar, line {line}, column " + (f"{column}: " if column else "")
    assert str(error.value).startswith(place), str(error.value)


def test_a_grammar_begins_somewhere():
    with pytest.raises(EngineError, match="has no rule 'root'"):
        parse('a ::= "b"')
    with pytest.raises(EngineError, match="has no rule 'root'"):
        parse("")
    assert Grammar('a ::= "b"', root="a").matches("b")
    with pytest.raises(EngineError, match="at most 1,048,576 are read"):
        parse("#" * (1 << 20) + "#")


def test_token_texts_are_one_token():
    ids = {"<a>": [5], "<b>": [1, 2]}
    parse("root ::= <a> !<a>", ids.__getitem__)
    with pytest.raises(EngineError, match="column 10: '<b>' is 2 tokens"):
        parse("root ::= <b>", ids.__getitem__)


# --- sets of characters -----------------------------------------------------------------------------------------------


def reads(node, data):
    for byte in data:
        if not isinstance(node, tuple):
            return False
        node = node[byte]
    return node is True


@pytest.mark.parametrize(
    "ranges", [ANY, ((97, 97),), ((0x7F, 0x800),), ((0xFFF, 0x10001), (0x1F600, 0x1F600)), ((0, 0x10FFFF),), ()]
)
def test_automata_read_utf8(ranges):
    node = automaton(ranges)
    edges = {0, 0x7F, 0x80, 0x7FF, 0x800, 0xFFFF, 0x10000, 0x10FFFF}
    edges |= {c + d for a, b in ranges for c in (a, b) for d in (-1, 0, 1)}
    for c in edges:
        if 0 <= c <= 0x10FFFF and not 0xD800 <= c < 0xE000:
            assert reads(node, chr(c).encode()) == any(a <= c <= b for a, b in ranges), hex(c)
    for bad in (b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\x80", b"\xff", b"\xe0\x80\x80"):
        assert not reads(node, bad)


def test_set_arithmetic():
    assert normal([(5, 9), (1, 2), (3, 4), (7, 8)]) == ((1, 9),)
    assert invert([(0, 4), (6, 0x10FFFF)]) == ((5, 5),)
    assert intersect(((0, 5), (8, 9)), ((4, 8),)) == ((4, 5), (8, 8))
