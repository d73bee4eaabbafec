"""The whole job on one model, in one call: convert, collect importance, quantize to a ladder of types, measure each.

The model that comes with the package is small (4.1 million parameters) and needs no network; see
`gguftools/data/tiny/README.md`.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gguftools import measure
from gguftools._version import __version__
from gguftools.conversion.run import convert
from gguftools.errors import GGUFError
from gguftools.gguf.reader import GGUF
from gguftools.measure import N_CTX
from gguftools.quantize_file import quantize
from gguftools.text import read_text
from quant.cache import cache_folder
from quant.presets import get_preset

if TYPE_CHECKING:
    from engine.evaluate import Evaluation

TYPES = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q3_K_M", "Q2_K")
CHUNKS = 64
_DATA = Path(__file__).parent / "data"
_TRAINED_WINDOW = 256  # tokens: what the model of the package was trained on


@dataclass(frozen=True)
class Rung:
    """One file of the ladder. bytes: of the file; bpw: over all its tensors; result: measured against the source."""

    type: str
    path: Path
    bytes: int
    bpw: float
    result: Evaluation

    def record(self) -> dict[str, Any]:
        """The rung as JSON can hold it."""
        return {"type": self.type, "path": str(self.path), "bytes": self.bytes, "bpw": self.bpw, **asdict(self.result)}


#: Called at every step: what is done, units done of it, units in all, a running value or None.
OnStep = Callable[[str, int, int, float | None], None]


def demo_folder() -> Path:
    """Folder of the model that comes with the package: safetensors, tokenizer, configuration.

    >>> (demo_folder() / "config.json").is_file()
    True
    """
    return _DATA / "tiny"


def demo_text(name: str) -> Path:
    """A text that comes with the package: `calibration`, or `valid`, which the model has not seen.

    >>> demo_text("valid").name
    'valid.txt'

    Raises GGUFError for another name.
    """
    path = _DATA / f"{name}.txt"
    if not path.is_file():
        raise GGUFError(f"{name}: no such text in the package; there are calibration and valid")
    return path


def demo_model() -> Path:
    """The model that comes with the package as a GGUF file, converted on first use and kept in the user's cache, or in
    a folder that goes with the process where that cannot be written.

    >>> import gguftools
    >>> len(gguftools.open(demo_model()).tensors)
    56
    """
    path = cache_folder() / f"tiny-{__version__}.gguf"
    if not path.is_file():
        convert(demo_folder(), path)
    return path


def demo(
    model: str | os.PathLike | None = None,
    text: str | os.PathLike | None = None,
    types: Sequence[str] = TYPES,
    out: str | os.PathLike | None = None,
    n_ctx: int | None = None,
    chunks: int = CHUNKS,
    threads: int | None = None,
    on_step: OnStep | None = None,
) -> list[Rung]:
    """Convert, collect importance, quantize to each of `types`, measure: the source first, then a rung per type.

    model: a Hugging Face folder or a GGUF file, None for the model of the package; text: to measure on, None for the
    held-out text of the package (importance always comes from its calibration text); out: folder to keep the files in,
    None keeps nothing; n_ctx: tokens of a chunk, None takes what suits the model; chunks: at most so many.

    >>> import gguftools
    >>> [rung.type for rung in gguftools.demo(types=["Q8_0"], chunks=2)]
    ['BF16', 'Q8_0']

    Raises GGUFError, QuantError and EngineError as the steps do; unknown types and unusable texts are refused before
    any work that takes long.
    """
    presets = [get_preset(name).name for name in types]
    text = Path(text) if text is not None else demo_text("valid")
    read_text(text)
    step = on_step or (lambda *_: None)
    with _folder(out) as folder:
        source = _source(Path(model) if model is not None else demo_folder(), folder, threads, step)
        n_ctx = n_ctx or _window(source, model is None)
        measure.check_text(source, text, n_ctx)
        matrix = folder / "imatrix.gguf"

        def on_imatrix(done: int, total: int, value: float | None) -> None:
            step("imatrix", done, total, value)

        measure.imatrix(source, demo_text("calibration"), matrix, n_ctx, chunks, threads=threads, on_chunk=on_imatrix)
        files = [source]
        for i, preset in enumerate(presets):
            files.append(folder / f"{source.stem}-{preset}.gguf")
            step(f"quantize {preset}", i, len(presets), None)
            quantize(source, files[-1], preset, matrix, allow_requantize=True, threads=threads)
        step("quantize", len(presets), len(presets), None)
        results = measure.compare(
            files,
            text,
            n_ctx,
            chunks,
            base=source,
            threads=threads,
            on_chunk=lambda done, total, scores: step("measure", done, total, scores[0].running_ppl()),
        )
        return [_rung(name, path, result) for name, path, result in zip(["source", *presets], files, results)]


@contextlib.contextmanager
def _folder(out: str | os.PathLike | None) -> Iterator[Path]:
    if out is None:
        with tempfile.TemporaryDirectory(prefix="gguftools-") as temporary:
            yield Path(temporary)
        return
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise GGUFError(f"{folder}: is a file; name a folder for the results")
    folder.mkdir(parents=True, exist_ok=True)
    yield folder


def _source(model: Path, folder: Path, threads: int | None, step: OnStep) -> Path:
    """The model as a GGUF file, converted into `folder` if it is not one yet."""
    if not model.is_dir():
        return model
    step("convert", 0, 1, None)
    converted = convert(model, folder / f"{model.resolve().name}.gguf", threads=threads).output
    step("convert", 1, 1, None)
    return converted


def _window(source: Path, is_ours: bool) -> int:
    if is_ours:
        return _TRAINED_WINDOW
    with GGUF(source) as f:
        trained = f.metadata.get(f"{f.metadata.get('general.architecture')}.context_length", N_CTX)
    return min(N_CTX, trained) if isinstance(trained, int) else N_CTX


def _rung(name: str, path: Path, result: Evaluation) -> Rung:
    with GGUF(path) as f:
        weights = sum(t.size for t in f.tensors.values())
        data = sum(t.nbytes for t in f.tensors.values())
        if name == "source":
            kinds: Counter[str] = Counter()
            for t in f.tensors.values():
                kinds[t.format.name] += t.nbytes
            name = kinds.most_common(1)[0][0]
        return Rung(name, path, f.size, 8 * data / weights, result)
