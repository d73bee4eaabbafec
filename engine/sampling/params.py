"""Parameters of sampling: names, defaults and bounds. The defaults are those of llama.cpp (b11434, `common.h`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import isfinite

from engine.errors import EngineError
from engine.sampling.rng import RANDOM_SEED

#: Order of the default chain; see `chain.TABLE` for the names.
DEFAULT_ORDER = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
DEFAULT_BREAKERS = ("\n", ":", '"', "*")


@dataclass(frozen=True)
class Params:
    """What a chain is built from; fixed from then on. What switches a sampler off stands behind it.

    Raises EngineError for a value out of its bounds, by name.
    """

    seed: int = RANDOM_SEED  # 32 bits; this one: a seed that nobody knows
    samplers: tuple[str, ...] = DEFAULT_ORDER
    min_keep: int = 0
    top_k: int = 40  # <= 0
    top_p: float = 0.95  # 1
    min_p: float = 0.05  # 0
    typ_p: float = 1.0  # 1
    top_n_sigma: float = -1.0  # <= 0
    xtc_probability: float = 0.0  # 0
    xtc_threshold: float = 0.1  # > 0.5
    temp: float = 0.8  # <= 0: the likeliest token
    dynatemp_range: float = 0.0  # 0
    dynatemp_exponent: float = 1.0
    repeat_last_n: int = 64  # 0
    repeat_penalty: float = 1.0  # 1, with the next two at 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    dry_multiplier: float = 0.0  # 0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64  # 0
    dry_sequence_breakers: tuple[str, ...] = DEFAULT_BREAKERS
    adaptive_target: float = -1.0  # < 0; only with "adaptive_p" among the samplers
    adaptive_decay: float = 0.9
    mirostat: int = 0  # 0; 1 and 2 replace the whole chain but biases and temperature
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    ignore_eos: bool = False  # tokens that end a text are banned

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, float | int) and not isfinite(value):
                raise EngineError(f"{f.name} is {value}: expected a finite number")
        for name, (holds, expected) in _BOUNDS.items():
            value = getattr(self, name)
            if not holds(value):
                raise EngineError(f"{name} is {value}: expected {expected}")
        for token, bias in self.logit_bias.items():
            if token < 0 or not bias < float("inf"):
                raise EngineError(f"logit bias {bias} of token {token}: expected an id, and a number or -inf")


_BOUNDS = {
    "seed": (lambda x: 0 <= x <= RANDOM_SEED, "32 bits, 0 to 4294967295"),
    "min_keep": (lambda x: x >= 0, "a number of tokens, 0 or more"),
    "top_p": (lambda x: x >= 0, "0 or more; 1 switches it off"),
    "min_p": (lambda x: x <= 1, "at most 1; 0 switches it off"),
    "typ_p": (lambda x: x >= 0, "0 or more; 1 switches it off"),
    "xtc_probability": (lambda x: 0 <= x <= 1, "0 to 1; 0 switches it off"),
    "dynatemp_range": (lambda x: x >= 0, "0 or more; 0 switches it off"),
    "repeat_last_n": (lambda x: 0 <= x <= 1 << 20, "0 to 1048576 tokens; 0 switches it off"),
    "repeat_penalty": (lambda x: x > 1e-38, "more than 0; 1 switches it off"),
    "dry_base": (lambda x: x >= 1, "1 or more"),
    "dry_allowed_length": (lambda x: x >= 0, "0 tokens or more"),
    "dry_penalty_last_n": (lambda x: 0 <= x <= 1 << 20, "0 to 1048576 tokens; 0 switches it off"),
    "adaptive_target": (lambda x: x <= 1, "0 to 1; a negative one switches it off"),
    "adaptive_decay": (lambda x: 0 <= x <= 0.99, "0 to 0.99"),
    "mirostat": (lambda x: x in (0, 1, 2), "0 (off), 1 or 2"),
    "mirostat_tau": (lambda x: x >= 0, "0 bits or more"),
}
