"""Grammars as constraints: which tokens may come next, given those that came.

`gbnf.py` makes rules of a text. The matcher is a pushdown automaton over bytes: a stack holds what must still come, top
first; a state is a set of stacks. Stacks are shared lists with numbers of their own, so equal ones are one. States and
their transitions are computed when a byte first needs them and kept in a table, and all tokens of the vocabulary go
through the table together, one byte a step: a mask costs some milliseconds, and nothing the next time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

import numpy as np

from engine.errors import EngineError
from engine.sampling.candidates import Candidates
from engine.sampling.charsets import Node, automaton
from engine.sampling.gbnf import Chars, Ref, Token, parse
from engine.sampling.texts import TokenTexts

#: bounds: stacks of one state, stacks and states in all, states at which the table is begun anew, masks that are kept
MAX_STACKS, MAX_CELLS, MAX_STATES, MANY_STATES, MAX_MASKS = 20_000, 4_000_000, 100_000, 16_384, 64

_UNKNOWN, _DEAD = -1, 0
_DONE = 0  # the empty stack: the text may end here
_END = -1  # no item follows
_INSIDE = -2  # and below: within a character

State = tuple[int, ...]  # numbers of stacks, sorted


class Grammar:
    """A grammar with the stacks and states that were met so far; matchers share it.

    text: GBNF; tokenize: ids of a text, for `<text>` in it. Raises EngineError as `gbnf.parse` does.
    """

    def __init__(self, text: str, tokenize: Callable[[str], list[int]] | None = None, root: str = "root"):
        rules = parse(text, tokenize, root)
        self.text = text
        # items: the symbols of all rules in a row; each knows its follower
        self._items: list[Chars | Token | Ref] = []
        self._next: list[int] = []
        self._first: list[list[int]] = []  # of each rule: the first item of each alternative
        self._items_of(rules.alternatives)
        self._nodes: list[Node] = []
        self._node_ids: dict[int, int] = {}
        # stacks: a top (an item, or _INSIDE - node within a character) and the stack below; 0 is the empty one
        self._top: list[int] = [_END]
        self._below: list[int] = [_DONE]
        self._cells: dict[tuple[int, int], int] = {}
        self.age = -1
        self._forget_states()
        self.start: State = self._closed([self._cell(item, _DONE) for item in self._first[rules.root]])

    def _items_of(self, rules: list[list[tuple[Chars | Token | Ref, ...]]]) -> None:
        for alternatives in rules:
            first = []
            for symbols in alternatives:
                first.append(len(self._items) if symbols else _END)
                self._items += symbols
                self._next += [*range(len(self._next) + 1, len(self._next) + len(symbols)), *[_END] * bool(symbols)]
            self._first.append(first)

    # --- stacks ---

    def _cell(self, top: int, below: int) -> int:
        """The stack with `top` on `below`."""
        if top == _END:
            return below
        key = (top, below)
        cell = self._cells.get(key)
        if cell is None:
            if len(self._top) >= MAX_CELLS:
                raise EngineError("the grammar needs too many stacks for this text: make it less nested")
            cell = self._cells[key] = len(self._top)
            self._top.append(top)
            self._below.append(below)
        return cell

    def _after(self, cell: int) -> int:
        """The stack when the symbol on top has come."""
        top = self._top[cell]
        return self._below[cell] if top < 0 else self._cell(self._next[top], self._below[cell])

    def _closed(self, cells: Iterable[int]) -> State:
        """The state of some stacks: references on top are replaced by what they stand for."""
        todo, seen, found = list(cells), set(cells), []
        while todo:
            cell = todo.pop()
            item = self._items[self._top[cell]] if cell != _DONE and self._top[cell] >= 0 else None
            if not isinstance(item, Ref):
                found.append(cell)
                continue
            rest = self._after(cell)
            for first in self._first[item.rule]:
                new = self._cell(first, rest)
                if new not in seen:
                    seen.add(new)
                    todo.append(new)
            if len(seen) > MAX_STACKS:
                raise EngineError(f"the grammar allows more than {MAX_STACKS:,} readings of the text: make it simpler")
        return tuple(sorted(found))

    def _step(self, state: State, byte: int) -> State:
        """The state behind one more byte."""
        cells: set[int] = set()
        for cell in state:
            to = self._node(cell)[byte] if cell != _DONE else None
            if to is True:
                cells.add(self._after(cell))
            elif isinstance(to, tuple):
                cells.add(self._cell(_INSIDE - self._number(to), self._after(cell)))
        return self._closed(cells) if cells else ()

    def _node(self, cell: int) -> Node:
        top = self._top[cell]
        if top < 0:
            return self._nodes[_INSIDE - top]
        item = self._items[top]
        return automaton(item.ranges) if isinstance(item, Chars) else _NO_BYTES

    def _number(self, node: Node) -> int:
        number = self._node_ids.get(id(node))
        if number is None:
            number = self._node_ids[id(node)] = len(self._nodes)
            self._nodes.append(node)  # kept, so its id() stays its own
        return number

    def step_token(self, state: State, token: int) -> State:
        """The state behind a token that the grammar names as a token."""
        cells = {self._after(cell) for cell, t in self.tokens(state) if (t.id == token) != t.negated}
        return self._closed(cells) if cells else ()

    def tokens(self, state: State) -> list[tuple[int, Token]]:
        """The stacks of a state on which a token is due, with the token."""
        on_top = ((cell, self._items[self._top[cell]]) for cell in state if cell != _DONE and self._top[cell] >= 0)
        return [(cell, item) for cell, item in on_top if isinstance(item, Token)]

    # --- states: numbers of sets of stacks, and their transitions ---

    def _forget_states(self) -> None:
        self._states: list[State] = [()]
        self._state_ids: dict[State, int] = {(): _DEAD}
        self.table = np.full((64, 256), _UNKNOWN, np.int32)  # [state, byte] -> state
        self.table[_DEAD] = _DEAD
        self.age += 1

    def number(self, state: State) -> int:
        """The number of a state, the same until `age` changes."""
        number = self._state_ids.get(state)
        if number is None:
            if len(self._states) >= MAX_STATES:
                raise EngineError(f"the grammar needs more than {MAX_STATES:,} states for one token: make it simpler")
            number = self._state_ids[state] = len(self._states)
            self._states.append(state)
            if number == len(self.table):
                self.table = np.concatenate([self.table, np.full_like(self.table, _UNKNOWN)])
        return number

    def tidy(self) -> None:
        """Begin the table anew if it has grown large. Called between tokens only."""
        if len(self._states) > MANY_STATES:
            self._forget_states()

    def _fill(self, keys: np.ndarray) -> None:
        """Compute transitions; keys: state * 256 + byte."""
        for key in keys.tolist():
            number, byte = divmod(key, 256)
            to = self.number(self._step(self._states[number], byte))  # may move the table
            self.table[number, byte] = to

    def read(self, state: State, data: bytes) -> State:
        """The state behind some bytes; () if they do not fit."""
        number = self.number(state)
        for byte in data:
            if self.table[number, byte] == _UNKNOWN:
                self._fill(np.array([number * 256 + byte]))
            number = int(self.table[number, byte])
        return self._states[number]

    def readable(self, state: State, texts: TokenTexts) -> np.ndarray:
        """Which tokens fit by their text: bool [n_vocab]. Tokens without a text do not."""
        mask = np.zeros(len(texts.pieces), bool)
        flat, offsets, lengths = texts.packed
        alive = np.flatnonzero(lengths)
        at = np.full(len(alive), self.number(state), np.int32)
        for i in range(int(lengths.max(initial=0))):
            bytes_ = flat[offsets[alive] + i]
            to = self.table[at, bytes_]
            unknown = to == _UNKNOWN
            if unknown.any():
                self._fill(np.unique(at[unknown].astype(np.int64) * 256 + bytes_[unknown]))
                to = self.table[at, bytes_]
            fits = to != _DEAD
            alive, at = alive[fits], to[fits]
            ends = lengths[alive] == i + 1
            mask[alive[ends]] = True
            alive, at = alive[~ends], at[~ends]
            if not len(alive):
                break
        return mask

    def matches(self, text: str | bytes) -> bool:
        """Whether the grammar holds for a whole text (one without tokens in it)."""
        data = text.encode() if isinstance(text, str) else text
        return _DONE in self.read(self.start, data)


_NO_BYTES: Node = (None,) * 256


class GrammarMatcher:
    """A grammar and how far a text has come in it.

    Control tokens have no text here: they fit only where the grammar names them, `<|think|>`. Tokens that end a text
    fit where the grammar is complete.
    """

    def __init__(self, grammar: Grammar, texts: TokenTexts):
        self.grammar, self.texts = grammar, texts
        self.state: State = grammar.start
        self._masks: OrderedDict[State, np.ndarray] = OrderedDict()

    @classmethod
    def of(cls, text: str, texts: TokenTexts, root: str = "root") -> GrammarMatcher:
        """A matcher for GBNF. Raises EngineError as `Grammar` does."""
        return cls(Grammar(text, texts.tokenize, root), texts)

    @property
    def complete(self) -> bool:
        """Whether the text may end here."""
        return _DONE in self.state

    def mask(self) -> np.ndarray:
        """Which tokens may come: bool [n_vocab], not to be written to."""
        mask = self._masks.get(self.state)
        if mask is None:
            self.grammar.tidy()
            mask = self.grammar.readable(self.state, self.texts)
            ends = [token for token in self.texts.eog if token < len(mask)]
            due = [token for _, token in self.grammar.tokens(self.state)]
            for token in due:
                if token.negated:
                    others = np.ones(len(mask), bool)
                    others[[token.id] if token.id < len(mask) else []] = False
                    mask |= others
            mask[ends] = self.complete
            mask[[token.id for token in due if not token.negated and token.id < len(mask)]] = True
            self._masks[self.state] = mask
            if len(self._masks) > MAX_MASKS:
                self._masks.popitem(last=False)
        else:
            self._masks.move_to_end(self.state)
        return mask

    def apply(self, c: Candidates) -> None:
        """Keep the candidates that fit. Raises EngineError if none does."""
        mask = self.mask()
        kept = np.flatnonzero(mask[: len(c)]) if c.dense else np.flatnonzero(_looked_up(mask, c.ids))
        if not len(kept):
            raise EngineError("no token of this vocabulary fits the grammar here")
        c.take(kept)

    def allows(self, token: int) -> bool:
        """Whether this token may come. Cheaper than a mask."""
        return (self.complete and token in self.texts.eog) or bool(self._behind(token))

    def _behind(self, token: int) -> State:
        """The state behind a token; () if it does not fit."""
        g = self.grammar
        named = [t for _, t in g.tokens(self.state)]
        if token in self.texts.eog:
            named = [t for t in named if not t.negated]
            return g.step_token(self.state, token) if any(t.id == token for t in named) else ()
        piece = self.texts.pieces[token] if 0 <= token < len(self.texts.pieces) else b""
        by_text = g.read(self.state, piece) if piece else ()
        by_name = g.step_token(self.state, token) if named else ()
        return tuple(sorted({*by_text, *by_name}))

    def accept(self, token: int) -> None:
        """Go on behind a token. Raises EngineError if it does not fit."""
        self.grammar.tidy()
        state = self._behind(token)
        if state:
            self.state = state
        elif not (token in self.texts.eog and self.complete):
            raise EngineError(f"token {token} does not fit the grammar here: accept only tokens that it allowed")

    def reset(self) -> None:
        """Back to the beginning."""
        self.state = self.grammar.start

    def clone(self) -> GrammarMatcher:
        """Another place in the same grammar; what was computed is shared."""
        other = GrammarMatcher(self.grammar, self.texts)
        other.state, other._masks = self.state, self._masks
        return other


def _looked_up(mask: np.ndarray, ids: np.ndarray) -> np.ndarray:
    inside = ids < len(mask)
    return np.where(inside, mask[np.where(inside, ids, 0)], False)
