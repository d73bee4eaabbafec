"""What SentencePiece does to a text before it cuts it: characters replaced by a map, spaces joined and put in front.

The map, `tokenizer.ggml.precompiled_charsmap`, is SentencePiece's own: uint32 size in bytes of a trie, the trie as a
double array (Darts), then the replacements, each ended by a zero byte.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from engine.errors import EngineError
from engine.tokenizer.vocab import read_bool

CHARSMAP = "tokenizer.ggml.precompiled_charsmap"
ADD_SPACE = "tokenizer.ggml.add_space_prefix"
MERGE_SPACES = "tokenizer.ggml.remove_extra_whitespaces"

#: nodes of a trie that are walked: damaged ones may have loops; SentencePiece's largest map has about 300,000
_MAX_NODES = 1 << 19
_MAX_KEY = 256  # bytes of a sequence that a map replaces


class Normalizer:
    """The normalizer of a vocabulary's metadata.

    adds_space: whether it puts a space before texts, `by_default` where the file does not say; lossless: whether texts
    can be had back, but for those that hold U+2581. Raises EngineError for a map that is damaged.
    """

    def __init__(self, metadata: Mapping[str, Any], by_default: bool):
        adds_space = read_bool(metadata, ADD_SPACE)
        self.adds_space = by_default if adds_space is None else adds_space
        self._merges_spaces = bool(read_bool(metadata, MERGE_SPACES))
        self._table = table = read_charsmap(metadata)
        self.lossless = not self._table and not self._merges_spaces
        self._singles = str.maketrans({key: value for key, value in table.items() if len(key) == 1})
        self._longest: dict[str, int] = {}
        for key in table:
            self._longest[key[0]] = max(self._longest.get(key[0], 0), len(key))
        later = {c for key in table for c in key[1:]}
        self._later = re.compile(f"[{re.escape(''.join(sorted(later)))}]") if later else None

    def __call__(self, text: str) -> str:
        """The text that is cut; its spaces are written as U+2581.

        With `remove_extra_whitespaces` runs of spaces become one, and none stays at either end.
        """
        text = self._replace(text) if self._table else text
        if self._merges_spaces:
            text = re.sub("  +", " ", text.lstrip(" ").rstrip(" ▁"))
        if text and self.adds_space:
            text = " " + text
        return text.replace(" ", "▁")

    def _replace(self, text: str) -> str:
        """The longest sequences that the map has, replaced from left to right."""
        if self._later is None or not self._later.search(text):
            return text.translate(self._singles)  # no sequence of several characters can be in it
        parts = []
        at = 0
        while at < len(text):
            for length in range(self._longest.get(text[at], 0), 0, -1):
                found = self._table.get(text[at : at + length])
                if found is not None:
                    break
            else:
                length, found = 1, text[at]
            parts.append(found)
            at += length
        return "".join(parts)


def read_charsmap(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The map: sequence of characters -> what replaces it; {} if there is none.

    Raises EngineError for one that is not an array of bytes, or whose trie or texts are damaged.
    """
    value = metadata.get(CHARSMAP)
    if value is None:
        return {}
    data = np.frombuffer(value, "u1") if isinstance(value, bytes) else np.asarray(value)
    if data.ndim != 1 or data.dtype not in (np.uint8, np.int8):
        raise EngineError(f"key '{CHARSMAP}' is not an array of bytes: the file is damaged")
    blob = data.tobytes()
    size = int.from_bytes(blob[:4], "little")
    if size % 4 or not 4 <= size < len(blob) - 4:
        raise EngineError(f"key '{CHARSMAP}': a trie of {size:,} bytes is not in {len(blob):,}: the file is damaged")
    units = np.frombuffer(blob, "<u4", size // 4, 4)
    texts = blob[4 + size :]
    try:
        return {key.decode(): texts[at : texts.index(b"\0", at)].decode() for key, at in _keys(units)}
    except (ValueError, IndexError):
        raise EngineError(f"key '{CHARSMAP}': the trie or its texts are damaged") from None


def _keys(units: np.ndarray) -> list[tuple[bytes, int]]:
    """All keys of a double array with their values. Raises ValueError and IndexError for one that is no trie.

    A unit of an inner node holds its byte (bits 0 to 7), whether a value hangs on it (bit 8), and the offset of its
    children (bits 10 to 30, times 256 if bit 9 is set); child c of a node lies at place XOR offset XOR c. A value's
    unit has bit 31 set. Nodes may share their children.
    """
    place = np.arange(len(units), dtype=np.uint32)
    labels = units & np.uint32(0x8000_00FF)
    offsets = (units >> np.uint32(10)) << ((units & np.uint32(1 << 9)) >> np.uint32(6))
    below = place ^ offsets
    values = np.where((units >> np.uint32(8)) & np.uint32(1), below, 0)  # a value never lies at place 0, the root
    inner = (labels > 0) & (labels < 256)
    children: dict[int, list[tuple[bytes, int, int]]] = {}
    columns = ((place ^ labels)[inner], labels[inner], below[inner], values[inner])
    for parent, label, down, value in zip(*(column.tolist() for column in columns)):
        children.setdefault(parent, []).append((bytes([label]), down, value))
    found: list[tuple[bytes, int]] = []
    walked = 0
    todo = [(b"", int(offsets[0]))]
    while todo:
        prefix, base = todo.pop()
        for label, down, value in children.get(base, ()):
            key = prefix + label
            if value:
                found.append((key, int(units[value]) & 0x7FFF_FFFF))
            todo.append((key, down))
            walked += 1
            if walked > _MAX_NODES or len(key) > _MAX_KEY:
                raise ValueError("a loop")
    return found
