"""From logits to tokens: samplers, grammars, JSON schemas, and the rules of speculative decoding.

`chain.py` is the way in. Filters are pure functions (`filters.py`), what has a memory is in `samplers.py` and `dry.py`;
`grammar.py` (with `gbnf.py` and `charsets.py`) constrains, `json_schema.py` writes grammars, `speculative.py` accepts
drafts. Nothing here knows a model: rows of logits in, ids out.
"""

from engine.sampling.candidates import Candidates, TokenProbability, log_probabilities
from engine.sampling.chain import Chain, recommended, samplers_from_letters, samplers_from_names
from engine.sampling.grammar import Grammar, GrammarMatcher
from engine.sampling.params import Params
from engine.sampling.texts import TokenTexts

__all__ = [
    "Candidates",
    "Chain",
    "Grammar",
    "GrammarMatcher",
    "Params",
    "TokenProbability",
    "TokenTexts",
    "log_probabilities",
    "recommended",
    "samplers_from_letters",
    "samplers_from_names",
]
