"""The chain of samplers: from a row of logits to a token.

Candidates are made of the logits, every sampler narrows or weighs them in turn, the last selects; the selected token is
then told to all (`accept`), so that those with a memory know it the next time. TABLE lists what a chain can hold, by
the names and letters of llama.cpp's `--samplers` and `--sampler-seq`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from engine.errors import EngineError
from engine.sampling import filters
from engine.sampling.candidates import Candidates
from engine.sampling.dry import Dry, breakers_of
from engine.sampling.grammar import GrammarMatcher
from engine.sampling.params import Params
from engine.sampling.rng import Stream
from engine.sampling.samplers import (
    AdaptiveP,
    Dist,
    Filter,
    Greedy,
    LogitBias,
    Mirostat,
    Penalties,
    Sampler,
    Xtc,
    nothing,
)
from engine.sampling.texts import TokenTexts

Build = Callable[[Params, TokenTexts | None], Sampler]


@dataclass(frozen=True)
class Row:
    """One kind of sampler. name: as in `Params.samplers`; letter: in `--sampler-seq`; aliases: further names;
    build: makes it; selects: it chooses the token, and stands last."""

    name: str
    letter: str
    build: Build
    aliases: tuple[str, ...] = ()
    selects: bool = False


def _penalties(p: Params, texts: TokenTexts | None) -> Sampler:
    if p.repeat_last_n == 0 or (p.repeat_penalty, p.frequency_penalty, p.presence_penalty) == (1, 0, 0):
        return nothing("penalties")
    return Penalties(p.repeat_last_n, p.repeat_penalty, p.frequency_penalty, p.presence_penalty)


def _dry(p: Params, texts: TokenTexts | None) -> Sampler:
    if p.dry_multiplier == 0 or p.dry_penalty_last_n == 0:
        return nothing("dry")
    if texts is None:
        raise EngineError("the DRY sampler needs the vocabulary, for its sequence breakers")
    breakers = breakers_of(texts, p.dry_sequence_breakers)
    return Dry(p.dry_multiplier, p.dry_base, p.dry_allowed_length, p.dry_penalty_last_n, breakers)


def _xtc(p: Params, texts: TokenTexts | None) -> Sampler:
    if p.xtc_probability <= 0 or p.xtc_threshold > 0.5:
        return nothing("xtc")
    return Xtc(p.xtc_probability, p.xtc_threshold, p.min_keep, Stream(p.seed))


def _temperature(p: Params, texts: TokenTexts | None) -> Sampler:
    if p.dynatemp_range > 0:
        values = {"t": p.temp, "span": p.dynatemp_range, "exponent": p.dynatemp_exponent}
        return Filter("temp", filters.dynamic_temperature, values)
    return _filter("temp", filters.temperature, p.temp != 1, t=p.temp)


def _infill(p: Params, texts: TokenTexts | None) -> Sampler:
    if texts is None:
        raise EngineError("the infill sampler needs the vocabulary")
    return Filter("infill", partial(filters.infill, texts=texts))


def _filter(kind: str, function: Callable[..., None], on: bool, **values: Any) -> Sampler:
    return Filter(kind, function, values) if on else nothing(kind)


#: Everything that `Params.samplers` can name.
TABLE = (
    Row("penalties", "e", _penalties),
    Row("dry", "d", _dry),
    Row(
        "top_n_sigma",
        "s",
        lambda p, _: _filter("top-n-sigma", filters.top_n_sigma, p.top_n_sigma > 0, n=p.top_n_sigma),
    ),
    Row("top_k", "k", lambda p, _: _filter("top-k", filters.top_k, p.top_k > 0, k=p.top_k)),
    Row(
        "typ_p",
        "y",
        lambda p, _: _filter("typical", filters.typical, p.typ_p < 1, p=p.typ_p, min_keep=p.min_keep),
        aliases=("typ", "typical", "typical_p"),
    ),
    Row(
        "top_p",
        "p",
        lambda p, _: _filter("top-p", filters.top_p, p.top_p < 1, p=p.top_p, min_keep=p.min_keep),
        aliases=("nucleus",),
    ),
    Row("min_p", "m", lambda p, _: _filter("min-p", filters.min_p, p.min_p > 0, p=p.min_p, min_keep=p.min_keep)),
    Row("xtc", "x", _xtc),
    Row("temperature", "t", _temperature, aliases=("temp",)),
    Row("infill", "i", _infill),
    Row(
        "adaptive_p",
        "a",
        lambda p, _: AdaptiveP(p.adaptive_target, p.adaptive_decay, Stream(p.seed)),
        selects=True,
    ),
)

_BY_NAME = {name.replace("_", ""): row for row in TABLE for name in (row.name, *row.aliases)}
_BY_LETTER = {row.letter: row for row in TABLE}


def samplers_from_names(names: Iterable[str]) -> tuple[str, ...]:
    """Names as in `--samplers` ("top_k", "top-k", "topk", "nucleus", any case) as `Params.samplers`.

    Raises EngineError for a name that is not in TABLE.
    """
    return tuple(_named(name).name for name in names)


def _named(name: str) -> Row:
    row = _BY_NAME.get(name.strip().lower().replace("-", "").replace("_", ""))
    if row is None:
        raise EngineError(f"unknown sampler {name!r}; there are: {', '.join(row.name for row in TABLE)}")
    return row


def samplers_from_letters(letters: str) -> tuple[str, ...]:
    """Letters as in `--sampler-seq` ("edskypmxt") as `Params.samplers`. Raises EngineError for an unknown one."""
    unknown = [letter for letter in letters if letter not in _BY_LETTER]
    if unknown:
        have = ", ".join(f"{row.letter} ({row.name})" for row in TABLE)
        raise EngineError(f"unknown letter {unknown[0]!r} in the sequence of samplers; there are: {have}")
    return tuple(_BY_LETTER[letter].name for letter in letters)


#: Keys in which a model's file recommends parameters, behind "general.sampling."
_RECOMMENDED = {
    **{name: name for name in ("top_k", "top_p", "min_p", "xtc_probability", "xtc_threshold", "temp")},
    **{name: name for name in ("mirostat", "mirostat_tau", "mirostat_eta")},
    "penalty_last_n": "repeat_last_n",
    "penalty_repeat": "repeat_penalty",
}


def recommended(metadata: Mapping[str, Any], **asked: Any) -> Params:
    """Parameters as a model's file recommends them, but for those that are asked for.

    Raises EngineError for values of the wrong kind or out of bounds.
    """
    values: dict[str, Any] = {}
    for key, name in _RECOMMENDED.items():
        if name in asked or (value := metadata.get("general.sampling." + key)) is None:
            continue
        kind = int if name in ("top_k", "mirostat", "repeat_last_n") else float
        if isinstance(value, bool) or not isinstance(value, int | float) or (kind is int and value != int(value)):
            raise EngineError(f"key 'general.sampling.{key}' is {str(value)[:40]!r}, expected a number")
        values[name] = kind(value)
    sequence = metadata.get("general.sampling.sequence")
    if "samplers" not in asked and isinstance(sequence, str) and sequence:
        values["samplers"] = samplers_from_names(sequence.split(";"))
    return Params(**values, **asked)


def build(params: Params, texts: TokenTexts | None = None, n_vocab: int = 0) -> list[Sampler]:
    """The samplers of a chain, in order. texts: needed for DRY and `ignore_eos`; n_vocab: used by Mirostat 1."""
    links: list[Sampler] = []
    biases = dict(params.logit_bias)
    if params.ignore_eos:
        if texts is None:
            raise EngineError("ignore_eos needs the vocabulary, to know which tokens end a text")
        biases |= dict.fromkeys(texts.eog, float("-inf"))
    if biases:
        links.append(LogitBias(biases))
    if params.mirostat:
        links.append(_filter("temp", filters.temperature, params.temp != 1, t=params.temp))
        stream = Stream(params.seed)
        links.append(Mirostat(params.mirostat, params.mirostat_tau, params.mirostat_eta, stream, n_vocab))
        return links
    rows = [_named(name) for name in params.samplers]
    links += [row.build(params, texts) for row in rows if not row.selects]
    last = [row.build(params, texts) for row in rows if row.selects]
    links.append(last[-1] if last else Dist(Stream(params.seed)))
    return links


#: samplers whose copy shares their stream, and nothing else that changes
_DRAWING = (Xtc, Dist, Mirostat, AdaptiveP)


class Chain:
    """Samplers in order, and a grammar that may stand before them.

    >>> import numpy as np
    >>> chain = Chain.of(Params(seed=1, temp=0.0))
    >>> chain.sample(np.array([0.1, 2.0, 0.3]))
    1
    """

    def __init__(self, links: Sequence[Sampler], grammar: GrammarMatcher | None = None):
        self.links = list(links)
        self.grammar = grammar
        self.candidates: Candidates | None = None  # of the last `sample`, for those who want the probabilities

    @classmethod
    def of(
        cls,
        params: Params | None = None,
        texts: TokenTexts | None = None,
        grammar: GrammarMatcher | None = None,
        n_vocab: int = 0,
    ) -> Chain:
        """The chain that parameters describe. Raises EngineError for parameters that do not go together."""
        return cls(build(params or Params(), texts, n_vocab), grammar)

    @classmethod
    def greedy(cls) -> Chain:
        """Always the likeliest token."""
        return cls([Greedy()])

    def sample(self, logits: np.ndarray, grammar_first: bool = False) -> int:
        """Choose a token by a row of logits [n_vocab]; nothing is remembered until `accept`.

        With a grammar the token is chosen freely and, if the grammar does not allow it, once more among those that it
        allows, as in llama.cpp; grammar_first: among those from the start, which is the distribution to the letter.
        Raises EngineError for logits that are NaN or +inf, and if no token is left.
        """
        if self.grammar is None:
            return self._run(Candidates(logits))
        if not grammar_first:
            token = self._run(Candidates(logits))
            if self.grammar.allows(token):
                return token
        return self._run(self._allowed(logits))

    def _allowed(self, logits: np.ndarray) -> Candidates:
        c = Candidates(logits)
        if self.grammar is not None:
            self.grammar.apply(c)
        return c

    def _run(self, c: Candidates) -> int:
        for link in self.links:
            link.apply(c)
        self.candidates = c
        return c.token

    def distribution(self, logits: np.ndarray) -> np.ndarray:
        """Probabilities [n_vocab] that `sample` with grammar_first chooses by, float64: what speculation compares.

        Draws nothing but the coin of XTC. Raises EngineError for chains whose last sampler keeps a memory.
        """
        c = self._allowed(logits)
        *before, last = self.links
        for link in before:
            link.apply(c)
        p = np.zeros(len(logits))
        if isinstance(last, Greedy):
            last.apply(c)
            p[c.token] = 1
        elif isinstance(last, Dist):
            q = c.softmax().astype(np.float64)
            p[c.ids] = q / q.sum()
        else:
            raise EngineError(f"{last.name} has no fixed distribution: speculate by matching, or choose other samplers")
        return p

    def accept(self, token: int, generated: bool = True) -> None:
        """Tell the chain a token of the text; those of the prompt with generated=False, which the grammar ignores.

        Raises EngineError for a token that the grammar does not allow.
        """
        if self.grammar is not None and generated:
            self.grammar.accept(token)
        for link in self.links:
            link.accept(token)

    def reset(self) -> None:
        """Forget the text; streams of random numbers begin again."""
        if self.grammar is not None:
            self.grammar.reset()
        for link in self.links:
            link.reset()
        self.candidates = None

    def clone(self) -> Chain:
        """A chain that goes on alike, on its own."""
        grammar = self.grammar.clone() if self.grammar is not None else None
        return Chain([link.clone() for link in self.links], grammar)

    def fork(self) -> Chain:
        """A clone that draws from the same streams: what it draws, this one will not draw again."""
        links = [copy(link) if isinstance(link, _DRAWING) else link.clone() for link in self.links]
        return Chain(links, self.grammar.clone() if self.grammar is not None else None)

    def __str__(self) -> str:
        """The chain in one line; samplers that are off have a question mark."""
        links = ["logits", *(["grammar"] if self.grammar is not None else []), *(link.name for link in self.links)]
        return " -> ".join(links)
