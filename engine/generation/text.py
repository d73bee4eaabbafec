"""Pieces of tokens as text that can be shown at once: characters that are cut wait for their rest, and what may become
a stop string waits until it is clear."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from engine.errors import EngineError


class TextStream:
    """Feed it the bytes of tokens; it returns what can be shown. stopped: the stop string that was met, which is not
    shown, nor what is behind it.

    >>> stream = TextStream(["END"])
    >>> [stream.feed(piece) for piece in (b"\\xc3", b"\\xa9 E", b"!", b" EN", b"D and more")]
    ['', 'é ', 'E!', ' ', '']
    >>> stream.stopped
    'END'
    """

    def __init__(self, stops: Sequence[str] = ()):
        if not all(stops):
            raise EngineError("an empty stop string would stop at once: leave it out")
        self.stops = tuple(stops)
        self.stopped: str | None = None
        self._held = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, piece: bytes) -> str:
        """The text that is certain now."""
        return self._release(self._decoder.decode(piece), final=False)

    def finish(self) -> str:
        """The rest: half a character becomes U+FFFD."""
        return self._release(self._decoder.decode(b"", final=True), final=True)

    def _release(self, text: str, final: bool) -> str:
        if self.stopped is not None:
            return ""
        text = self._held + text
        found = [(text.find(stop), -len(stop), stop) for stop in self.stops if stop in text]
        if found:
            at, _, self.stopped = min(found)
            self._held = ""
            return text[:at]
        keep = 0 if final else max((_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
