"""Spaces that a tokenizer of words leaves before punctuation and within English contractions."""

from __future__ import annotations

import re

#: The rules of transformers' `clean_up_tokenization_spaces`, in their order.
_RULES = (
    (re.compile(r" ([.?!,])"), r"\1"),
    (re.compile(r" ' "), "'"),
    (re.compile(r" (n't|'m|'s|'ve|'re)"), r"\1"),
)


def clean_up(text: str) -> str:
    """`text` without the spaces that no writer would put there.

    >>> clean_up("it 's here , is n't it ?")
    "it's here, isn't it?"
    """
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text
