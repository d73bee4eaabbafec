"""GBNF, the grammar notation of llama.cpp: from a text to rules.

    root  ::= "yes" | "no" answer*      # rules, alternatives, references
    answer ::= [ \\t] ([^a-z\\x00-\\x1F] | .){2,5} <[1000]> !<think>

Literals and classes know \\n \\r \\t \\\\ \\" \\[ \\] \\- \\xXX \\uXXXX \\UXXXXXXXX. `<[id]>` and `<text>` are single
tokens, `!` any but this. A rule ends with its line, except within parentheses and behind `|` and `::=`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.errors import EngineError
from engine.sampling.charsets import ANY, LAST, Ranges, intersect, invert, normal

#: bounds for what strangers write
MAX_BYTES, MAX_DEPTH, MAX_REPEAT, MAX_SYMBOLS = 1 << 20, 100, 10_000, 200_000

_HEX = {"x": 2, "u": 4, "U": 8}
_PLAIN = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
_NAME = re.compile(r"[A-Za-z0-9-]+")
_DIGITS = re.compile(r"[0-9]{1,10}")
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")


@dataclass(frozen=True)
class Chars:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True)
class Token:
    """One token: this id, or any but this."""

    id: int
    negated: bool = False


@dataclass(frozen=True)
class Ref:
    """A rule, by number."""

    rule: int


Symbol = Chars | Token | Ref
Symbols = tuple[Symbol, ...]


@dataclass
class Rules:
    """alternatives: of each rule; names: of each rule, or of the one that it is a part of; root: where to begin."""

    alternatives: list[list[Symbols]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    root: int = 0


def parse(text: str, tokenize: Callable[[str], list[int]] | None = None, root: str = "root") -> Rules:
    """Rules of a grammar. tokenize: ids of a text, for `<text>`.

    Raises EngineError with line and column for what is not GBNF, rules that are missing, left recursion, and grammars
    beyond the bounds above.
    """
    if len(text) > MAX_BYTES:
        raise EngineError(f"the grammar has {len(text):,} characters; at most {MAX_BYTES:,} are read")
    return _Parser(text, tokenize).parse(root)


class _Parser:
    """Recursive descent; `at` is the position in the text."""

    def __init__(self, text: str, tokenize: Callable[[str], list[int]] | None):
        self.text, self.tokenize = text, tokenize
        self.at = self.depth = self.symbols = 0
        self.rules = Rules()
        self.ids: dict[str, int] = {}
        self.used: dict[int, int] = {}  # rule -> where it is referred to first
        self.defined: dict[int, int] = {}  # rule -> where

    def parse(self, root: str) -> Rules:
        self._space(True)
        while self.at < len(self.text):
            self._rule()
        for rule, where in self.used.items():
            if rule not in self.defined:
                self.at = where
                raise self._error(f"there is no rule {self.rules.names[rule]!r}")
        if root not in self.ids or self.ids[root] not in self.defined:
            raise EngineError(f"the grammar has no rule {root!r}, which is where it begins")
        self.rules.root = self.ids[root]
        recursive = left_recursive(self.rules)
        if recursive is not None:
            name = self.rules.names[recursive]
            self.at = self.defined[self.ids[name]]
            raise self._error(f"the rule {name!r} begins with itself (left recursion); write what comes first, first")
        return self.rules

    def _error(self, what: str) -> EngineError:
        before = self.text[: self.at]
        line, column = before.count("\n") + 1, self.at - before.rfind("\n")
        return EngineError(f"grammar, line {line}, column {column}: {what}")

    def _expect(self, mark: str, why: str) -> None:
        if not self.text.startswith(mark, self.at):
            raise self._error(f"expected {mark} {why}, found {self._found()}")
        self.at += len(mark)

    def _found(self) -> str:
        rest = self.text[self.at : self.at + 12].splitlines()
        return repr(rest[0]) if rest and rest[0] else ("the end of the line" if rest else "the end of the grammar")

    def _space(self, lines: bool) -> None:
        match = (_SPACE_AND_LINES if lines else _SPACE).match(self.text, self.at)
        self.at = match.end() if match else self.at

    def _peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def _new(self, name: str) -> int:
        self.rules.alternatives.append([])
        self.rules.names.append(name)
        self._count(1)
        return len(self.rules.names) - 1

    def _count(self, n: int) -> None:
        self.symbols += n
        if self.symbols > MAX_SYMBOLS:
            raise self._error(f"the grammar grows beyond {MAX_SYMBOLS:,} symbols; repeat less, or use * and +")

    def _name(self) -> str:
        match = _NAME.match(self.text, self.at)
        if match is None:
            raise self._error(f"expected the name of a rule, found {self._found()}")
        self.at = match.end()
        return match.group()

    def _named(self, name: str) -> int:
        if name not in self.ids:
            self.ids[name] = self._new(name)
        return self.ids[name]

    def _rule(self) -> None:
        start = self.at
        name = self._name()
        rule = self._named(name)
        if rule in self.defined:
            self.at = start
            raise self._error(f"the rule {name!r} is there already")
        self.defined[rule] = start
        self._space(False)
        self._expect("::=", f"behind the name {name!r}")
        self._space(True)
        self._alternatives(rule, nested=False)
        if self.at < len(self.text) and self._peek() not in "\r\n":
            raise self._error(f"expected a symbol or the end of the line, found {self._found()}")
        self._space(True)

    def _alternatives(self, rule: int, nested: bool) -> None:
        found = [self._sequence(rule, nested)]
        while self._peek() == "|":
            self.at += 1
            self._space(True)
            found.append(self._sequence(rule, nested))
        self.rules.alternatives[rule] = [tuple(symbols) for symbols in found]

    def _sequence(self, rule: int, nested: bool) -> list[Symbol]:
        out: list[Symbol] = []
        last: list[Symbol] | None = None  # what a repetition would repeat
        while True:
            mark = self._peek()
            if mark and mark in "*+?{":
                if last is None:
                    raise self._error(f"nothing stands before {mark}")
                del out[len(out) - len(last) :]
                last = self._repeated(last, *self._times(nested), rule)
            elif (found := self._symbol(mark, rule)) is not None:
                last = found
            else:
                return out
            self._count(len(last))
            out += last
            self._space(nested)

    def _symbol(self, mark: str, rule: int) -> list[Symbol] | None:
        """What begins here, or None if nothing does."""
        if mark == '"':
            return [Chars(((c, c),)) for c in self._literal()]
        if mark == "[":
            return [Chars(self._class())]
        if mark == ".":
            self.at += 1
            return [Chars(ANY)]
        if mark and mark in "<!":
            return [self._token()]
        if mark == "(":
            return [self._group(rule)]
        if _NAME.match(mark):
            where = self.at
            target = self._named(self._name())
            self.used.setdefault(target, where)
            return [Ref(target)]
        return None

    def _group(self, rule: int) -> Symbol:
        if self.depth == MAX_DEPTH:
            raise self._error(f"more than {MAX_DEPTH} parentheses within one another")
        self.at += 1
        self._space(True)
        inner = self._new(self.rules.names[rule])
        self.depth += 1
        self._alternatives(inner, nested=True)
        self.depth -= 1
        self._expect(")", "for the parenthesis that was opened")
        return Ref(inner)

    def _literal(self) -> list[int]:
        self.at += 1
        out = []
        while self._peek() != '"':
            out.append(self._char("literal"))
        self.at += 1
        return out

    def _class(self) -> Ranges:
        self.at += 1
        negated = self._peek() == "^"
        self.at += negated
        ranges = []
        while self._peek() != "]":
            first = last = self._char("class of characters")
            if self._peek() == "-" and self.text[self.at + 1 : self.at + 2] != "]":
                self.at += 1
                last = self._char("class of characters")
                if last < first:
                    raise self._error("the range runs backwards")
            ranges.append((first, last))
        self.at += 1
        return intersect(invert(ranges), ANY) if negated else normal(ranges)

    def _char(self, where: str) -> int:
        """A code point, escaped or not."""
        c = self._peek()
        if not c:
            raise self._error(f"the {where} does not end")
        self.at += 1
        if c != "\\":
            return ord(c)
        kind = self._peek()
        if kind in _PLAIN:
            self.at += 1
            return ord(_PLAIN[kind])
        n = _HEX.get(kind, 0)
        digits = self.text[self.at + 1 : self.at + 1 + n]
        if not n:
            raise self._error(f"unknown escape {c + kind!r}")
        if not re.fullmatch(rf"[0-9A-Fa-f]{{{n}}}", digits):
            raise self._error(f"expected {n} hexadecimal digits behind \\{kind}")
        if int(digits, 16) > LAST:
            raise self._error(f"\\{kind}{digits} is beyond Unicode")
        self.at += 1 + n
        return int(digits, 16)

    def _token(self) -> Token:
        start = self.at
        negated = self._peek() == "!"
        self.at += negated
        self._expect("<", "behind !")
        if self._peek() == "[":
            self.at += 1
            token = self._number("the id of a token")
            self._expect("]>", "behind the id")
            if token >= 1 << 31:
                self.at = start
                raise self._error(f"{token} is no id of a token")
            return Token(token, negated)
        end = self.text.find(">", self.at)
        if end < 0 or "\n" in self.text[self.at : end]:
            raise self._error("expected > behind the text of a token")
        text = f"<{self.text[self.at : end]}>"
        self.at = start
        if self.tokenize is None:
            raise self._error(f"{text!r} needs a vocabulary; write the id, <[1000]>")
        ids = self.tokenize(text)
        if len(ids) != 1:
            raise self._error(f"{text!r} is {len(ids)} tokens of this vocabulary, not one; write an id, <[1000]>")
        self.at = end + 1
        return Token(ids[0], negated)

    def _number(self, what: str) -> int:
        match = _DIGITS.match(self.text, self.at)
        if match is None:
            raise self._error(f"expected {what}, found {self._found()}")
        self.at = match.end()
        return int(match.group())

    def _times(self, nested: bool) -> tuple[int, int | None]:
        """Bounds of the repetition that begins here; None: no upper one."""
        start = self.at
        mark = self._peek()
        self.at += 1
        if mark != "{":
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[mark]
        self._space(nested)
        low = self._number("a number of times")
        high: int | None = low
        self._space(nested)
        if self._peek() == ",":
            self.at += 1
            self._space(nested)
            high = self._number("a number of times") if self._peek() != "}" else None
            self._space(nested)
        self._expect("}", "behind the numbers of times")
        if max(low, high or 0) > MAX_REPEAT or (high is not None and high < low):
            self.at = start
            bad = f"at most {MAX_REPEAT:,} times" if max(low, high or 0) > MAX_REPEAT else "the smaller number first"
            raise self._error(f"cannot repeat {low} to {high} times: {bad}")
        return low, high

    def _repeated(self, what: list[Symbol], low: int, high: int | None, rule: int) -> list[Symbol]:
        """what{low,high}: `low` times as it is, then a rule for each more: R1 ::= what | ; R2 ::= what R1 | ; ..."""
        self._count(len(what) * low)
        out = what * low
        tail: list[Symbol] = []
        for _ in range(1 if high is None else high - low):
            more = self._new(self.rules.names[rule])
            rest: list[Symbol] = [Ref(more)] if high is None else tail
            self._count(len(what) + 1)
            self.rules.alternatives[more] = [tuple(what + rest), ()]
            tail = [Ref(more)]
        return out + tail


def nullable(rules: Rules) -> list[bool]:
    """Which rules match the empty text."""
    empty = [False] * len(rules.names)
    readers: list[list[int]] = [[] for _ in empty]
    for rule, alternatives in enumerate(rules.alternatives):
        for symbols in alternatives:
            for symbol in symbols:
                if isinstance(symbol, Ref):
                    readers[symbol.rule].append(rule)
    todo = list(range(len(empty)))
    while todo:
        rule = todo.pop()
        if not empty[rule] and any(
            all(isinstance(s, Ref) and empty[s.rule] for s in symbols) for symbols in rules.alternatives[rule]
        ):
            empty[rule] = True
            todo += readers[rule]
    return empty


def left_recursive(rules: Rules) -> int | None:
    """A rule that can stand at its own beginning, or None.

    Repetitions of what may be empty, `("a"?)*`, do so harmlessly: nothing follows the rule in itself.
    """
    empty = nullable(rules)
    edges: list[list[tuple[int, bool]]] = [[] for _ in rules.names]  # (rule, whether this one is harmless)
    for rule, alternatives in enumerate(rules.alternatives):
        for symbols in alternatives:
            for i, symbol in enumerate(symbols):
                if not isinstance(symbol, Ref):
                    break
                edges[rule].append((symbol.rule, 0 < i == len(symbols) - 1))
                if not empty[symbol.rule]:
                    break
    component = _components([[target for target, _ in row] for row in edges])
    for rule, row in enumerate(edges):
        for target, harmless in row:
            if component[rule] == component[target] and not harmless:
                return rule
    return None


def _components(edges: list[list[int]]) -> list[int]:
    """The strongly connected component of each node (Tarjan 1972), without recursion."""
    n = len(edges)
    order, low, component = [-1] * n, [0] * n, [-1] * n
    stack: list[int] = []
    count = 0
    for start in range(n):
        if order[start] >= 0:
            continue
        path = [(start, 0)]
        while path:
            node, i = path.pop()
            if i == 0:
                order[node] = low[node] = count
                count += 1
                stack.append(node)
            if i and component[edges[node][i - 1]] < 0:
                low[node] = min(low[node], low[edges[node][i - 1]])
            while i < len(edges[node]):
                target = edges[node][i]
                i += 1
                if order[target] < 0:
                    path += [(node, i), (target, 0)]
                    break
                if component[target] < 0:
                    low[node] = min(low[node], low[target])
            else:
                if low[node] == order[node]:
                    while component[node] < 0:
                        component[stack.pop()] = node
    return component
