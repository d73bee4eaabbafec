"""Quantizing with refinement: a plain file of the preset, closer to the original on text (`quantize --refine`).

The engine goes through the layers (`engine/refine`) and leaves finished tensors in a folder beside the output, from
which a run that was stopped goes on; then the usual pass of `quantize_file` puts the file together.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gguftools.corpus import read_corpus
from gguftools.errors import GGUFError
from gguftools.quantize_file import Settings, quantize
from gguftools.quantizing.assemble import Progress, silent
from gguftools.quantizing.result import Quantized
from quant.mixes import PlanOptions
from quant.presets import Preset
from quant.recipes import Recipe

if TYPE_CHECKING:
    from engine.refine.walk import Decision, Outcome
    from engine.session import Session

N_TOKENS = 32768  # of calibration, unless asked for otherwise
N_CTX = 256
HELD = 0.1  # share of the windows that decide instead of calibrating
LEAST_HELD = 8
OVERLAP_LENGTH = 16  # tokens in a row that two texts share where they overlap
RANDOM = "random"


@dataclass(frozen=True)
class Calibration:
    """What is asked for: texts (or the one word `random`, for random tokens), how many tokens of them, in windows of
    how many; dampings: that are tried; repair: None to choose by the number of tokens; evaluation: a text to report on,
    besides what was held back; seed: of random tokens."""

    texts: tuple[str, ...]
    n_tokens: int = N_TOKENS
    n_ctx: int = N_CTX
    dampings: tuple[float, ...] = (0.1, 0.3, 1.0)
    repair: float | None = None
    evaluation: str | None = None
    seed: int = 1


@dataclass(frozen=True)
class Compared:
    """Mean divergence from the original on one text, in nats a token, each with its standard error over windows;
    change: refined / plain - 1, with its error."""

    text: str
    n_tokens: int
    plain: tuple[float, float]
    refined: tuple[float, float]
    change: tuple[float, float]


@dataclass(frozen=True)
class Refined:
    """quantized: the file, as `quantize` reports it; decisions: what held-back text said, layer by layer; held: plain
    against refined on it; evaluation: the same on the text that was named, or None; warnings."""

    quantized: Quantized
    decisions: tuple[Decision, ...]
    held: Compared
    evaluation: Compared | None
    warnings: tuple[str, ...]

    def summary(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        from dataclasses import asdict

        return self.quantized.summary() | {
            "refined": {
                "decisions": [asdict(d) for d in self.decisions],
                "held_back": asdict(self.held),
                "evaluation": None if self.evaluation is None else asdict(self.evaluation),
                "warnings": list(self.warnings),
            }
        }


def refine(
    source: str | os.PathLike,
    output: str | os.PathLike | None,
    preset: str | int | Preset | Recipe,
    calibration: Calibration,
    options: PlanOptions | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    settings: Settings | None = None,
) -> Refined:
    """Quantize a model to a preset so that it stays close to the original on text; the file is a plain one, of the same
    types and size.

    source: a GGUF file with 16 or 32 bits a weight, or a Hugging Face folder. The rest is as for `quantize`; where that
    takes importance, this takes it from the text.

    >>> import gguftools, os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     out = os.path.join(folder, "q4.gguf")
    ...     text = str(gguftools.demo_text("calibration"))
    ...     wanted = gguftools.Calibration((text,), n_tokens=2048, n_ctx=64)
    ...     done = gguftools.refine(gguftools.demo_model(), out, "Q4_0", wanted)
    >>> done.held.refined[0] < done.held.plain[0]
    True

    Raises GGUFError, EngineError and QuantError: for texts that are too short (with how many tokens are needed),
    inputs that are not finite, and as `quantize` does. Nothing half-made is left but the folder that a second run goes
    on from.
    """
    from engine.errors import EngineError

    settings, progress = replace(settings or Settings(), finished={}), progress or silent
    planned = quantize(source, output, preset, None, options, False, threads, None, True, settings)
    quantized = next((c for c in planned.choices if c.source.is_quantized), None)
    if quantized is not None:
        raise GGUFError(
            f"{source}: tensor '{quantized.name}' is {quantized.source} already: refining needs the original, in 16 or "
            "32 bits a weight"
        )
    if any("would be refused" in line for line in planned.warnings):
        raise GGUFError(next(line for line in planned.warnings if "would be refused" in line))
    targets = {c.name: c.target for c in planned.choices if len(c.shape) > 1 and c.target is not c.source}
    work = planned.output.with_name(f".{planned.output.name}.refine")
    with _opened(source, work, threads, settings) as session:
        windows, held, warnings = _windows(session, calibration)
        _check_enough(session, targets, windows)
        try:
            outcome = _walk(session, targets, windows, held, calibration, work, threads, progress, planned)
        except EngineError as error:
            raise type(error)(f"{source}: {error}") from None
        compared = _compared("held back", held.size, outcome.plain, outcome.refined)
        finished = {name: work / f"{name}.bin" for name in targets}
        done = quantize(
            source, planned.output, preset, None, options, False, threads, progress, False,
            replace(settings, finished=finished),
        )  # fmt: skip
        evaluation = None
        if calibration.evaluation is not None:
            evaluation, more = _evaluated(session, calibration, targets, work, windows, threads)
            warnings += more
    shutil.rmtree(work, ignore_errors=True)
    return Refined(done, tuple(outcome.decisions), compared, evaluation, tuple(warnings))


# --- text -------------------------------------------------------------------------------------------------------------


def _windows(session: Session, calibration: Calibration) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Windows for calibration, windows that are held back, and warnings."""
    n_ctx = calibration.n_ctx
    session.check_context(n_ctx)
    wanted = max(1, calibration.n_tokens // n_ctx)
    n_held = max(LEAST_HELD, round(HELD * wanted))
    if calibration.texts == (RANDOM,):
        rng = np.random.default_rng(calibration.seed)
        windows = _begun(session, _random(session, rng, wanted + n_held, n_ctx))
        return windows[:wanted], windows[wanted:], []
    parts: list[np.ndarray] = []
    for text in calibration.texts:
        ids = np.asarray(session.tokenize(read_corpus(text, session).text, add_special=False), np.int64)
        parts.append(_cut(ids, n_ctx))
    found = np.concatenate(parts) if parts else np.zeros((0, n_ctx), np.int64)
    if len(found) < 2 * LEAST_HELD:
        raise GGUFError(
            f"{', '.join(calibration.texts)}: has {found.size:,} tokens; refining needs {2 * LEAST_HELD * n_ctx:,} at "
            "least, some of them to decide by; add text or use a smaller --refine-ctx"
        )
    warnings = []
    if len(found) < wanted + n_held:
        warnings.append(
            f"the text has {found.size:,} tokens, {(wanted + n_held) * n_ctx:,} were asked for: all of them are used"
        )
        n_held = max(LEAST_HELD, round(HELD * len(found)))
        wanted = len(found) - n_held
    keep = found[np.linspace(0, len(found) - 1, wanted + n_held).astype(int)]
    is_held = np.zeros(len(keep), bool)  # spread over all of the text, as every part of it counts
    is_held[np.linspace(0, len(keep) - 1, n_held).astype(int)] = True
    return _begun(session, keep[~is_held]), _begun(session, keep[is_held]), warnings


def _cut(ids: np.ndarray, n_ctx: int) -> np.ndarray:
    n = ids.size // n_ctx
    return ids[: n * n_ctx].reshape(n, n_ctx)


def _random(session: Session, rng: np.random.Generator, n: int, n_ctx: int) -> np.ndarray:
    """Ids of ordinary tokens, each as likely as any other."""
    vocab = session.tokenizer.vocab
    plain = np.array([i for i in range(session.n_vocab) if i < len(vocab.tokens) and vocab.types[i] == 1])
    return rng.choice(plain if plain.size else np.arange(session.n_vocab), (n, n_ctx))


def _begun(session: Session, windows: np.ndarray) -> np.ndarray:
    """Windows begin as texts do: with BOS where the model wants one."""
    first = session.tokenize("", add_special=True)
    if first:
        windows = windows.copy()
        windows[:, 0] = first[0]
    return windows


def _check_enough(session: Session, targets: dict, windows: np.ndarray) -> None:
    longest = max((session.weights[name].ne[0] for name in targets), default=0)
    if windows.size < longest:
        raise GGUFError(
            f"{windows.size:,} tokens are too few for matrices of {longest:,} columns; use {longest:,} or more "
            "(--refine-tokens, and as much text)"
        )


def overlap(a: np.ndarray, b: np.ndarray, length: int = OVERLAP_LENGTH) -> float:
    """Share of the stretches of `length` tokens in `a` that `b` has, too.

    >>> float(overlap(np.arange(100).reshape(2, 50), np.arange(50).reshape(1, 50)))
    0.5
    """

    def stretches(windows: np.ndarray) -> list[bytes]:
        rows = [np.lib.stride_tricks.sliding_window_view(row, length) for row in windows]
        return [np.ascontiguousarray(s, np.int32).tobytes() for row in rows for s in row]

    known, found = set(stretches(b)), stretches(a)
    return sum(s in known for s in found) / max(1, len(found))


# --- the run ----------------------------------------------------------------------------------------------------------


@contextmanager
def _opened(source: str | os.PathLike, work: Path, threads: int | None, settings: Settings) -> Iterator[Session]:
    """The original, to be run; a folder is converted beside the work first."""
    from gguftools.loading import load

    path = Path(source)
    if not path.is_dir():
        yield load(path, threads=threads)
        return
    from gguftools.conversion.run import convert

    work.mkdir(parents=True, exist_ok=True)
    converted = work / "original.gguf"
    if not converted.exists():
        convert(path, converted, threads=threads, options=settings.conversion)
    yield load(converted, threads=threads)


def _walk(
    session: Session,
    targets: dict,
    windows: np.ndarray,
    held: np.ndarray,
    calibration: Calibration,
    work: Path,
    threads: int | None,
    progress: Progress,
    planned: Quantized,
) -> Outcome:
    from engine.refine.walk import Settings as WalkSettings
    from engine.refine.walk import Store, Walk

    asked = [sorted((name, fmt.name) for name, fmt in targets.items()), calibration.dampings, calibration.repair]
    digest = hashlib.sha256(json.dumps(asked).encode())
    for array in (windows, held):
        digest.update(np.ascontiguousarray(array).tobytes())
    store = Store(work, digest.hexdigest())
    settings = WalkSettings(dampings=calibration.dampings, repair=calibration.repair)
    with progress("refining layers", session.hparams.n_layer) as advance:
        done = 0

        def moved(layer: int, _: int) -> None:
            nonlocal done
            advance(layer - done)
            done = layer

        return Walk(session, targets, windows, held, store, settings, threads).run(moved)


def _compared(name: str, n: int, plain: np.ndarray, refined: np.ndarray) -> Compared:
    """Means of windows, and of their ratio, with errors (delta method)."""
    a, b = plain.mean(1), refined.mean(1)

    def estimate(x: np.ndarray) -> tuple[float, float]:
        return float(x.mean()), float(x.std(ddof=1) / np.sqrt(len(x))) if len(x) > 1 else 0.0

    ratio = b.mean() / a.mean() if a.mean() else 1.0
    left = b - ratio * a
    error = float(left.std(ddof=1) / np.sqrt(len(a)) / a.mean()) if len(a) > 1 and a.mean() else 0.0
    return Compared(name, n, estimate(a), estimate(b), (float(ratio - 1), error))


def _evaluated(
    session: Session, calibration: Calibration, targets: dict, work: Path, windows: np.ndarray, threads: int | None
) -> tuple[Compared, list[str]]:
    """Plain against refined on another text. The plain tensors are those of the same importance."""
    from engine.refine.walk import divergence_of

    assert calibration.evaluation is not None
    text = read_corpus(calibration.evaluation, session).text
    ids = np.asarray(session.tokenize(text, add_special=False), np.int64)
    found = _cut(ids, calibration.n_ctx)
    if not len(found):
        raise GGUFError(f"{calibration.evaluation}: has {ids.size} tokens; a window of {calibration.n_ctx} is needed")
    chosen = _begun(session, found[np.linspace(0, len(found) - 1, min(len(found), 96)).astype(int)])
    warnings = []
    share = overlap(chosen, windows)
    if share > 0.01:
        warnings.append(
            f"{share:.0%} of the evaluation text was also calibrated on: its figures flatter; use text of its own"
        )
    plain = divergence_of(session, targets, work, "plain-", chosen)
    refined = divergence_of(session, targets, work, "", chosen)
    return _compared(calibration.evaluation, chosen.size, plain, refined), warnings
