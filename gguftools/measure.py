"""Measuring model files: perplexity, divergence from a base, importance of weights. Texts are read, models opened, and
the engine does the rest."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gguftools.errors import naming
from gguftools.files import check_output
from gguftools.imatrix_file import write_imatrix
from gguftools.loading import load
from gguftools.text import read_text

if TYPE_CHECKING:
    from engine.evaluate import Evaluation
    from engine.session import Session
    from quant.imatrix import IMatrix

N_CTX = 512
N_BATCH = 512


def perplexity(
    model: str | os.PathLike,
    text: str | os.PathLike,
    n_ctx: int = N_CTX,
    chunks: int | None = None,
    base: str | os.PathLike | None = None,
    n_batch: int = N_BATCH,
    threads: int | None = None,
    on_chunk: Callable | None = None,
) -> Evaluation:
    """Perplexity of a model file over a text file; with a base model also the divergence from it.

    >>> import gguftools
    >>> result = gguftools.perplexity(gguftools.demo_model(), gguftools.demo_text("valid"), n_ctx=256, chunks=2)
    >>> result.n_tokens, 20 < result.ppl.value < 25
    (254, True)

    Raises GGUFError and EngineError as `load` and `engine.evaluate` do.
    """
    return compare([model], text, n_ctx, chunks, base, n_batch, threads, on_chunk)[0]


def compare(
    models: Sequence[str | os.PathLike],
    text: str | os.PathLike,
    n_ctx: int = N_CTX,
    chunks: int | None = None,
    base: str | os.PathLike | None = None,
    n_batch: int = N_BATCH,
    threads: int | None = None,
    on_chunk: Callable | None = None,
) -> list[Evaluation]:
    """As `perplexity`, several models side by side; the base runs once.

    >>> import gguftools
    >>> model, text = gguftools.demo_model(), gguftools.demo_text("valid")
    >>> [result] = gguftools.compare([model], text, n_ctx=256, chunks=2, base=model)
    >>> result.divergence.mean_kld.value
    0.0
    """
    from engine.evaluate import evaluate

    words = read_text(text)
    base_session = load(base, threads=threads) if base is not None else None
    sessions = [load(model, threads=threads) for model in models]
    first = (models[0], sessions[0]) if base_session is None or base is None else (base, base_session)
    tokens = _tokens(*first, text, words, n_ctx)
    return evaluate(sessions, tokens, base_session, n_ctx, chunks, n_batch, on_chunk)


def check_text(model: str | os.PathLike, text: str | os.PathLike, n_ctx: int = N_CTX) -> None:
    """Raises GGUFError and EngineError for a text that `perplexity` would refuse, without loading the model."""
    _tokens(model, load(model, vocab_only=True), text, read_text(text), n_ctx)


def imatrix(
    model: str | os.PathLike,
    text: str | os.PathLike,
    output: str | os.PathLike,
    n_ctx: int = N_CTX,
    chunks: int | None = None,
    process_output: bool = False,
    parse_special: bool = False,
    score: bool = True,
    n_batch: int = N_BATCH,
    threads: int | None = None,
    on_chunk: Callable | None = None,
) -> IMatrix:
    """Collect the importance matrix of a model file over a text file and write it.

    >>> import gguftools, os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     out = os.path.join(folder, "imatrix.gguf")
    ...     m = gguftools.imatrix(gguftools.demo_model(), gguftools.demo_text("calibration"), out, n_ctx=256, chunks=2)
    >>> len(m.entries), m.chunk_count
    (42, 2)

    Raises GGUFError and EngineError as `load` and `engine.collect` do, before the run if the output cannot be written.
    """
    from engine.evaluate import collect

    check_output(Path(output), [Path(model), Path(text)])
    words = read_text(text)
    session = load(model, threads=threads)
    tokens = _tokens(model, session, text, words, n_ctx, parse_special)
    with naming(model):
        matrix = collect(session, tokens, n_ctx, chunks, n_batch, process_output, score, on_chunk)
    matrix.datasets = [Path(text).name]
    write_imatrix(output, matrix, [model, text])
    return matrix


def _tokens(
    model: str | os.PathLike,
    session: Session,
    text: str | os.PathLike,
    words: str,
    n_ctx: int,
    parse_special: bool = False,
) -> list[int]:
    """The tokens of `words`. Raises EngineError that names the model for a vocabulary that cannot be used, the text for
    one that is too short."""
    from engine.evaluate.scoring import cut

    with naming(model):
        tokens = session.tokenize(words, add_special=True, parse_special=parse_special)
    with naming(text):
        cut(tokens, n_ctx, None, None)
    return tokens
