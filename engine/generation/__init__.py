"""From a prompt to text: the loop that decodes, samples, and decodes again.

`generator.py` is the loop, `draft.py` makes drafts for speculative decoding, `text.py` turns tokens into text that can
be shown at once, and watches for stop strings.
"""

from engine.generation.draft import Drafter, DraftModel, LookUp
from engine.generation.generator import Generator, Token
from engine.generation.text import TextStream

__all__ = ["DraftModel", "Drafter", "Generator", "LookUp", "TextStream", "Token"]
