"""llama.cpp's file of a base model's logits, written once to be compared with many models.

`_logits_`, int32 n_ctx, int32 n_vocab, int32 n_chunks, int32 tokens[n_chunks * n_ctx], then per scored position of
every chunk a record of 16-bit log-probabilities (`engine/kernels/score.py`). It takes two bytes per token of the
vocabulary and scored position: `perplexity --kl-divergence BASE.gguf` needs no file.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np

from gguftools.errors import GGUFError
from gguftools.files import atomic_output, check_space, map_file

MAGIC = b"_logits_"
_HEADER = struct.Struct("<8s3i")
_MAX = 1 << 24  # tokens of a context, of a vocabulary, chunks


def record_size(n_vocab: int) -> int:
    """Numbers of 16 bits in a record: four for scale and offset, and an even number of tokens."""
    return 4 + n_vocab + n_vocab % 2


class LogitsFile:
    """An open file, a `StoredBase` for `engine.evaluate`.

    Raises GGUFError for a file that is damaged, truncated or of another kind.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        data = map_file(self.path)
        if len(data) < _HEADER.size or bytes(data[:8]) != MAGIC:
            raise GGUFError(f"{path}: not a file of logits; write one with `perplexity --save-all-logits`")
        _, self.n_ctx, self.n_vocab, self.n_chunks = _HEADER.unpack(bytes(data[: _HEADER.size]))
        if not (4 <= self.n_ctx <= _MAX and 1 <= self.n_vocab <= _MAX and 1 <= self.n_chunks <= _MAX):
            raise GGUFError(
                f"{path}: announces {self.n_chunks:,} chunks of {self.n_ctx:,} tokens over a vocabulary of "
                f"{self.n_vocab:,}: the file is damaged"
            )
        start = _HEADER.size + 4 * self.n_ctx * self.n_chunks
        shape = (self.n_chunks * (self.n_ctx - 1 - self.n_ctx // 2), record_size(self.n_vocab))
        end = start + 2 * shape[0] * shape[1]
        if len(data) != end:
            raise GGUFError(
                f"{path}: has {len(data):,} bytes, its header asks for {end:,}: it is not whole, write it again"
            )
        self.tokens = data[_HEADER.size : start].view("<i4")
        if self.tokens.min() < 0 or self.tokens.max() >= self.n_vocab:
            raise GGUFError(f"{path}: holds tokens outside of its vocabulary of {self.n_vocab:,}: the file is damaged")
        self._records = data[start:].view("<u2").reshape(shape)

    def rows(self, lo: int, hi: int) -> np.ndarray:
        """Log-probabilities of scored positions lo..hi-1: float32 [hi - lo, n_vocab]. Raises GGUFError where they are
        not finite."""
        from engine.kernels.score import decode_rows

        records = np.ascontiguousarray(self._records[lo:hi])
        heads = records[:, :4].copy().view("<f4")
        if not np.isfinite(heads).all():
            raise GGUFError(f"{self.path}: log-probabilities from position {lo:,} are not finite: the file is damaged")
        out = np.empty((hi - lo, self.n_vocab), np.float32)
        decode_rows(records, out)
        return out


class LogitsWriter:
    """A file in the making: the tokens first, then logits in order. It appears under its name when the block ends with
    everything written."""

    def __init__(self, path: str | os.PathLike, inputs: Iterable[str | os.PathLike] = ()):
        self.path, self._inputs = Path(path), tuple(inputs)
        self._stack = ExitStack()
        self._file: IO[bytes] | None = None
        self._left = 0

    def __enter__(self) -> LogitsWriter:
        self._file = self._stack.enter_context(atomic_output(self.path, self._inputs))
        return self

    def __exit__(self, *failure: Any) -> bool | None:
        return self._stack.__exit__(*failure)

    def begin(self, tokens: np.ndarray, n_vocab: int) -> None:
        """tokens: of the text, int32 [n_chunks, n_ctx]. Raises GGUFError if the disk has too little room."""
        assert self._file is not None
        n_chunks, n_ctx = tokens.shape
        self._left = n_chunks * (n_ctx - 1 - n_ctx // 2)
        check_space(self.path, 2 * self._left * record_size(n_vocab) + tokens.nbytes)
        self._file.write(_HEADER.pack(MAGIC, n_ctx, n_vocab, n_chunks) + np.ascontiguousarray(tokens, "<i4").tobytes())

    def write(self, logits: np.ndarray) -> None:
        """Logits of the next scored positions: float32 [n, n_vocab]."""
        from engine.kernels.score import encode_rows

        assert self._file is not None
        assert len(logits) <= self._left, "more logits than announced"
        records = np.zeros((len(logits), record_size(logits.shape[1])), np.uint16)
        encode_rows(logits, records)
        self._file.write(records.astype("<u2", copy=False).tobytes())
        self._left -= len(logits)
