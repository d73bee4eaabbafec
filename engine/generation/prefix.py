"""Going on from what is in memory: of a text, only what is new has to be computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.batch import Batch

if TYPE_CHECKING:
    from engine.contexts import ModelContext


def continue_from(context: ModelContext, held: Sequence[int], tokens: Sequence[int], seq: int = 0) -> list[int]:
    """Make `tokens` what a sequence holds, and have the result of the last one; `held` is what it holds now. Returns
    the tokens that it holds then. Raises EngineError as `process`."""
    assert context.memory is not None
    tokens = [int(t) for t in tokens]
    held = held[: context.memory.pos_max(seq) + 1]
    same = 0
    while same < min(len(held), len(tokens) - 1) and held[same] == tokens[same]:
        same += 1
    if not context.memory.remove(seq, same):  # states do not go back
        context.memory.remove(seq)
        same = 0
    for lo in range(same, len(tokens), context.n_batch):
        part = tokens[lo : lo + context.n_batch]
        context.process(Batch(part, seqs=[(seq,)] * len(part)))
    return tokens
