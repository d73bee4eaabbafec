"""Texts and the ids that they must give, carried in a model file: shows that a file is tokenized as its source was.

Keys: `gguftools.tokenizer.selftest.texts`, an array of strings; `.lengths`, the number of ids of each; `.ids`, the ids
of all of them, one after the other. No special tokens are added or parsed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from engine.errors import EngineError
from engine.tokenizer.vocab import log, read_numbers, read_strings

_KEY = "gguftools.tokenizer.selftest."
TEXTS, LENGTHS, IDS = (_KEY + name for name in ("texts", "lengths", "ids"))

#: what splitters are known to get wrong: spaces, line ends, digits, case, contractions, punctuation, scripts, emoji
PROBES = (
    "Hello WORLD, I'd say: it's 3 33 333 3333 (3.14) ... and 'we'LL see'!",
    " leading, double  and trailing spaces  ",
    "\n \n\n  def f(x):\n\t\treturn x_1**2  # ok\n",
    "Windows line\r\nends\r\n\r\n",
    "Café déjà vu, naïve Äpfel — 123 😊",
    "Привет мир! 你好\uff0c世界。こんにちは 안녕하세요",
    "สวัสดี नमस्ते ½ ﬁ Å 🙂👍🏽",
    "``'' --- /// https://example.org/?a=1&b=2 foo@bar.com 1,234,567.89",
    "camelCase snake_case UPPER ÀÉÎ",
)


def selftest_keys(tokenizer: Any, source: Callable[[str], list[int]] | None = None) -> list[tuple[str, Any]]:
    """The keys of a self-test for the vocabulary of a `Tokenizer`.

    source: the ids that the model's own tokenizer gives; where they differ a warning says so and the text is left out.
    """
    texts, lengths, flat = [], [], []
    for text in PROBES:
        ids = tokenizer.tokenize(text, add_special=False)
        if source is not None and source(text) != ids:
            log.warning("the model's own tokenizer gives other ids for %r", text)
            continue
        texts.append(text)
        lengths.append(len(ids))
        flat += ids
    return [(TEXTS, texts), (LENGTHS, np.array(lengths, np.int32)), (IDS, np.array(flat, np.int32))]


def verify_selftest(metadata: Mapping[str, Any], tokenizer: Any) -> list[str] | None:
    """What is wrong, a line for each text whose ids differ; [] if all are equal, None if the file has no self-test.

    tokenizer: the `Tokenizer` of the same metadata. Raises EngineError for a self-test that is damaged.
    """
    if TEXTS not in metadata:
        return None
    texts = read_strings(metadata, TEXTS)
    lengths, ids = (read_numbers(metadata, key, "iu").tolist() for key in (LENGTHS, IDS))
    if len(lengths) != len(texts) or min(lengths, default=0) < 0 or sum(lengths) != len(ids):
        raise EngineError(f"key '{LENGTHS}' does not fit '{TEXTS}' and '{IDS}': the file is damaged")
    wrong = []
    at = 0
    for text, length in zip(texts, lengths):
        wanted, found = ids[at : at + length], tokenizer.tokenize(text, add_special=False)
        at += length
        if found != wanted:
            same = next((n for n, (a, b) in enumerate(zip(found, wanted)) if a != b), min(len(found), len(wanted)))
            wrong.append(f"{text[:40]!r} gives other ids than when the file was made, from the token {same + 1} on")
    return wrong
