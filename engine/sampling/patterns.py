"""Regular expressions of JSON schemas, as GBNF for the JSON text of a string.

The dialect is what schemas use: literals, `.`, classes, \\d \\w \\s (ASCII) and their opposites, groups, `|`, `* + ?
{m,n}` (lazy ones mean the same here), `^` at the beginning and `$` at the end. A character that JSON must escape stands
for its escape.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from engine.errors import EngineError
from engine.sampling.charsets import ANY, Ranges, intersect, invert, normal

MAX_DEPTH = 50

_DIGITS: Ranges = ((48, 57),)
_WORDS: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
_SPACES: Ranges = normal([(9, 13), (32, 32), (160, 160), (0x2028, 0x2029), (0x3000, 0x3000), (0xFEFF, 0xFEFF)])
_CLASSES = {"d": _DIGITS, "w": _WORDS, "s": _SPACES, "D": invert(_DIGITS), "W": invert(_WORDS), "S": invert(_SPACES)}
_NAMED = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0}
_DOT: Ranges = invert([(10, 10), (13, 13), (0x2028, 0x2029)])
_TIMES = re.compile(r"\{(\d{1,6})(,(\d{0,6}))?\}")

#: what JSON writes as an escape
_ESCAPES = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}
_RAW: Ranges = invert([(0, 31), (34, 34), (92, 92), (127, 127)])


def pattern_to_gbnf(pattern: str) -> str:
    """GBNF for the JSON strings in which a pattern is found; quotes are not part of it.

    >>> pattern_to_gbnf("^[0-9]{3}$")
    '[0-9]{3}'

    Raises EngineError with the position for what is not supported.
    """
    return _Pattern(pattern).parse()


@dataclass
class _Pattern:
    text: str
    at: int = 0
    depth: int = 0

    def parse(self) -> str:
        body = self._alternatives(top=True)
        if self.at < len(self.text):
            raise self._error("a parenthesis is closed that was not opened")
        return body

    def _error(self, what: str) -> EngineError:
        return EngineError(f"pattern {self.text[:60]!r}, character {self.at + 1}: {what}")

    def _peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def _alternatives(self, top: bool) -> str:
        found = [self._sequence(top)]
        while self._peek() == "|":
            self.at += 1
            found.append(self._sequence(top))
        return " | ".join(found)

    def _sequence(self, top: bool) -> str:
        """One alternative. At the top what is not anchored may have anything around it."""
        begins = ends = False
        if top and self._peek() == "^":
            begins = True
            self.at += 1
        parts: list[str] = []
        while (c := self._peek()) and c not in "|)":
            if c == "$" and top and self.text[self.at + 1 : self.at + 2] in ("", "|"):
                ends = True
                self.at += 1
                break
            if c in "^$":
                raise self._error(f"{c} is supported at the beginning or the end of a pattern only")
            parts.append(self._repeated(self._atom()))
        if top:
            anything = f"({chars_to_gbnf(ANY)})*"
            parts = [*([] if begins else [anything]), *parts, *([] if ends else [anything])]
        return " ".join(parts) or '""'

    def _repeated(self, atom: str) -> str:
        c = self._peek()
        times = ""
        if c and c in "*+?":
            times, self.at = c, self.at + 1
        elif c == "{" and (match := _TIMES.match(self.text, self.at)):
            times, self.at = match.group(), match.end()
        if times and self._peek() == "?":
            self.at += 1
        if times and ((self._peek() and self._peek() in "*+?") or _TIMES.match(self.text, self.at)):
            raise self._error("nothing to repeat")
        return atom + times

    def _atom(self) -> str:
        c = self._peek()
        if c == "(":
            return self._group()
        if c == "[":
            return _single(self._class())
        if c in "*+?":
            raise self._error("nothing to repeat")
        self.at += 1
        if c == ".":
            return _single(_DOT)
        ranges = self._escape() if c == "\\" else ((ord(c), ord(c)),)
        if not intersect(ranges, ANY):
            raise self._error("a lone surrogate is no character")
        return _single(ranges)

    def _group(self) -> str:
        if self.text.startswith("(?", self.at) and not self.text.startswith("(?:", self.at):
            raise self._error("groups that look around or have names are not supported")
        if self.depth == MAX_DEPTH:
            raise self._error(f"more than {MAX_DEPTH} parentheses within one another")
        self.at += 3 if self.text.startswith("(?:", self.at) else 1
        self.depth += 1
        inner = self._alternatives(top=False)
        self.depth -= 1
        if self._peek() != ")":
            raise self._error("a parenthesis is not closed")
        self.at += 1
        return f"({inner})"

    def _escape(self) -> Ranges:
        """Behind a backslash."""
        c = self._peek()
        self.at += 1
        if c in _CLASSES:
            return _CLASSES[c]
        if c and c in "xu":
            n = 2 if c == "x" else 4
            digits = self.text[self.at : self.at + n]
            if not re.fullmatch(rf"[0-9A-Fa-f]{{{n}}}", digits):
                raise self._error(f"expected {n} hexadecimal digits")
            self.at += n
            return ((int(digits, 16),) * 2,)
        if c in _NAMED:
            return ((_NAMED[c],) * 2,)
        if not c or c.isalnum():
            raise self._error(f"unsupported escape \\{c}")
        return ((ord(c), ord(c)),)

    def _class(self) -> Ranges:
        self.at += 1
        negated = self._peek() == "^"
        self.at += negated
        found: list[tuple[int, int]] = []
        while (c := self._peek()) != "]":
            if not c:
                raise self._error("a class of characters is not closed")
            one = self._class_member()
            if self._peek() == "-" and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                other = self._class_member()
                if len(one) != 1 or len(other) != 1 or one[0][0] > other[0][1]:
                    raise self._error("this is no range of characters")
                one = ((one[0][0], other[0][1]),)
            found += one
        self.at += 1
        ranges = invert(found) if negated else normal(found)
        if not intersect(ranges, ANY):
            raise self._error("the class of characters is empty")
        return ranges

    def _class_member(self) -> Ranges:
        c = self._peek()
        self.at += 1
        if c != "\\":
            return ((ord(c), ord(c)),) if c else ()
        if self._peek() == "b":
            self.at += 1
            return ((8, 8),)
        return self._escape()


def _single(ranges: Ranges) -> str:
    """`chars_to_gbnf`, so that a repetition may follow."""
    text = chars_to_gbnf(ranges)
    return f"({text})" if " | " in text or " " in text else text


def chars_to_gbnf(ranges: Ranges) -> str:
    """GBNF for one character of a set as JSON writes it within a string."""
    ranges = intersect(ranges, ANY)
    raw = intersect(ranges, _RAW)
    out = []
    if len(raw) == 1 and raw[0][0] == raw[0][1]:
        out.append(literal(chr(raw[0][0])))
    elif raw:
        out.append("[" + "".join(_in_class(a) if a == b else f"{_in_class(a)}-{_in_class(b)}" for a, b in raw) + "]")
    escaped = [c for a, b in intersect(ranges, invert(_RAW)) for c in range(a, b + 1)]
    short = [_ESCAPES[c] for c in escaped if c in _ESCAPES]
    if short:
        out.append(
            '"\\\\" ' + (literal(short[0]) if len(short) == 1 else "[" + "".join(map(_escaped_letter, short)) + "]")
        )
    # the other control characters, and DEL, which may stand for itself as well
    long = [c for c in escaped if c not in _ESCAPES]
    out += [_long(low) for low in _by_high_digit(long)]
    return " | ".join(out)


def _escaped_letter(c: str) -> str:
    return _in_class(ord(c))


def _by_high_digit(codes: list[int]) -> list[tuple[int, list[int]]]:
    """Two-digit codes: high digit, and the low ones that go with it."""
    rows: dict[int, list[int]] = {}
    for code in codes:
        rows.setdefault(code >> 4, []).append(code & 15)
    return list(rows.items())


def _long(row: tuple[int, list[int]]) -> str:
    high, lows = row
    digits = "".join(f"{low:x}{low:X}" if low > 9 else str(low) for low in lows)
    return f'"\\\\u00{high}" [{digits}]'


def _in_class(code: int) -> str:
    """A code point within a GBNF class."""
    c = chr(code)
    if c in '\\"[]-':
        return "\\" + c
    if c.isascii() and c.isprintable() and c != "^":
        return c
    return f"\\x{code:02X}" if code < 256 else (f"\\u{code:04X}" if code < 65536 else f"\\U{code:08X}")


def literal(text: str) -> str:
    """A text as a GBNF literal."""
    shorts = {"\n": "\\n", "\r": "\\r", "\t": "\\t", '"': '\\"', "\\": "\\\\"}
    return '"' + "".join(shorts.get(c) or (c if c >= " " else f"\\x{ord(c):02X}") for c in text) + '"'
