"""Measuring model files: perplexity, divergence from a base, importance of weights. Texts are read, models opened, and
the engine does the rest."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gguftools.corpus import Text, read_corpus, split_weight
from gguftools.errors import GGUFError, naming
from gguftools.files import check_output
from gguftools.gguf.reader import GGUF
from gguftools.imatrix_file import is_legacy, read_imatrix, read_run, write_imatrix
from gguftools.loading import load
from gguftools.logits_file import LogitsFile, LogitsWriter
from gguftools.overlap import NOTEWORTHY, seen, sketch

if TYPE_CHECKING:
    from engine.evaluate import Evaluation
    from engine.evaluate.importance import Collection
    from engine.evaluate.scoring import Windows
    from engine.session import Session
    from quant.imatrix import IMatrix

N_CTX = 512
N_BATCH = 512
OUTPUT_FREQUENCY = 10  # chunks between two saves of an importance matrix

_SAMPLES, _SAMPLE = 64, 4096  # pieces of a model's data that go into its fingerprint, and their bytes

Name = str | os.PathLike


@dataclass(frozen=True)
class ModelFile:
    """Which model was measured. bytes: of the file; bpw: bits per weight over all tensors; fingerprint: SHA-256 of the
    header and of samples of the data."""

    name: str
    bytes: int
    bpw: float
    fingerprint: str


@contextlib.contextmanager
def opened(model: Name, threads: int | None = None, activations: str = "f32") -> Iterator[tuple[Session, ModelFile]]:
    """A model to run and what is known of its file: GGUF, or a folder of safetensors, which is converted for the time
    being. activations: as `load` takes them. Raises GGUFError and EngineError as `load` and `convert` do."""
    path = Path(model)
    if not path.is_dir():
        yield load(path, threads=threads, activations=activations), describe(path)
        return
    from gguftools.conversion.run import convert

    with tempfile.TemporaryDirectory(prefix="gguftools-") as folder:
        converted = convert(path, Path(folder) / f"{path.resolve().name}.gguf", threads=threads).output
        yield load(converted, threads=threads, activations=activations), describe(converted, str(path))


def describe(path: Path, name: str | None = None) -> ModelFile:
    """What identifies a model file. Raises GGUFError for one that cannot be read."""
    with GGUF(path) as f:
        data = sum(t.nbytes for t in f.tensors.values())
        weights = sum(t.size for t in f.tensors.values())
        digest = hashlib.sha256(f"{f.size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(f.data_offset))
            for i in range(_SAMPLES):
                file.seek(f.data_offset + (f.size - f.data_offset) * i // _SAMPLES)
                digest.update(file.read(_SAMPLE))
    return ModelFile(name or str(path), path.stat().st_size, 8 * data / max(1, weights), digest.hexdigest())


def perplexity(
    model: Name,
    text: Name,
    n_ctx: int = N_CTX,
    chunks: int | None = None,
    base: Name | None = None,
    n_batch: int = N_BATCH,
    threads: int | None = None,
    on_chunk: Callable | None = None,
    stride: int = 0,
    partial: bool = False,
    activations: str = "f32",
) -> Evaluation:
    """Perplexity of a model file over a text file; with a base model also the divergence from it.

    model, base: GGUF files, or folders of safetensors; partial: an interruption ends the run, and what is measured by
    then is returned; activations: of the model, see `load` (the base's are float32).

    >>> import gguftools
    >>> result = gguftools.perplexity(gguftools.demo_model(), gguftools.demo_text("valid"), n_ctx=256, chunks=2)
    >>> result.n_tokens, 20 < result.ppl.value < 25
    (254, True)

    Raises GGUFError and EngineError as `load` and `engine.evaluate` do.
    """
    models = [model]
    return measured(models, text, n_ctx, chunks, base, n_batch, threads, on_chunk, stride, partial, activations)[0][1]


def compare(
    models: Sequence[Name],
    text: Name,
    n_ctx: int = N_CTX,
    chunks: int | None = None,
    base: Name | None = None,
    n_batch: int = N_BATCH,
    threads: int | None = None,
    on_chunk: Callable | None = None,
    stride: int = 0,
) -> list[Evaluation]:
    """As `perplexity`, several models side by side; the base runs once.

    >>> import gguftools
    >>> model, text = gguftools.demo_model(), gguftools.demo_text("valid")
    >>> [result] = gguftools.compare([model], text, n_ctx=256, chunks=2, base=model)
    >>> result.divergence.mean_kld.value
    0.0
    """
    return [result for _, result in measured(models, text, n_ctx, chunks, base, n_batch, threads, on_chunk, stride)]


def measured(
    models: Sequence[Name],
    text: Name,
    n_ctx: int = N_CTX,
    chunks: int | None = None,
    base: Name | None = None,
    n_batch: int = N_BATCH,
    threads: int | None = None,
    on_chunk: Callable | None = None,
    stride: int = 0,
    partial: bool = False,
    activations: str = "f32",
) -> list[tuple[ModelFile, Evaluation]]:
    """As `compare`, with what is known of the files. A model that is the base itself is not run twice."""
    from engine.evaluate import evaluate

    with contextlib.ExitStack() as stack:
        base_session = stack.enter_context(opened(base, threads))[0] if base is not None else None
        sessions: list[Session] = []
        files = []
        for model in models:
            session, file = stack.enter_context(opened(model, threads, activations))
            if activations == "f32" and base_session is not None and base is not None and Path(model) == Path(base):
                session = base_session
            sessions.append(session)
            files.append(file)
        first = (models[0], sessions[0]) if base_session is None or base is None else (base, base_session)
        tokens = _tokens(*first, read_corpus(text, first[1]), n_ctx)
        results = evaluate(sessions, tokens, base_session, n_ctx, chunks, n_batch, on_chunk, stride, partial=partial)
    return list(zip(files, results))


def check_text(model: Name, text: Name, n_ctx: int = N_CTX) -> None:
    """Raises GGUFError and EngineError for a text that `perplexity` would refuse, without loading the model."""
    session = load(model, vocab_only=True)
    _tokens(model, session, read_corpus(text, session), n_ctx)


def windows(model: Name, text: Name, n_ctx: int = N_CTX, chunks: int | None = None, stride: int = 0) -> Windows:
    """What `perplexity` would score, without loading the model's weights. Raises GGUFError and EngineError for a text
    that it would refuse."""
    from engine.evaluate.scoring import cut, cut_strided

    session = load(model, vocab_only=True)
    tokens = _tokens(model, session, read_corpus(text, session), n_ctx)
    return cut_strided(tokens, n_ctx, stride, chunks, None) if stride else cut(tokens, n_ctx, chunks, None)


def against_logits(
    model: Name,
    logits: Name,
    chunks: int | None = None,
    n_batch: int = N_BATCH,
    threads: int | None = None,
    on_chunk: Callable | None = None,
    text: Name | None = None,
    partial: bool = False,
) -> Evaluation:
    """Divergence of a model from the one whose logits were saved; text and context come from the file.

    text: checked, if given, to be the text that the file was made of. Raises GGUFError for a file that is damaged, and
    EngineError for one of another model.
    """
    from engine.evaluate import evaluate

    stored = LogitsFile(logits)
    with opened(model, threads) as (session, _):
        if text is not None:
            tokens = _tokens(model, session, read_corpus(text, session))
            if tokens[: len(stored.tokens)] != stored.tokens.tolist():
                raise GGUFError(f"{logits}: was made of another text than {text}, or by a model with another tokenizer")
        return evaluate(
            [session], stored.tokens, stored, chunks=chunks, n_batch=n_batch, on_chunk=on_chunk, partial=partial
        )[0]


def save_logits(
    model: Name,
    text: Name,
    output: Name,
    n_ctx: int = N_CTX,
    chunks: int | None = None,
    n_batch: int = N_BATCH,
    threads: int | None = None,
    on_chunk: Callable | None = None,
) -> Evaluation:
    """Perplexity of a model, and its logits in llama.cpp's file; see `logits_file`. Raises GGUFError as `perplexity`
    does, and before the run if the file cannot be written."""
    from engine.evaluate import evaluate
    from engine.evaluate.scoring import cut

    check_output(Path(output), [Path(model), Path(text)])
    with opened(model, threads) as (session, _):
        tokens = _tokens(model, session, read_corpus(text, session), n_ctx)
        session.check_context(n_ctx)
        with LogitsWriter(output, [model, text]) as writer:
            writer.begin(cut(tokens, n_ctx, chunks, None).text, session.n_vocab)
            found = evaluate([session], tokens, None, n_ctx, chunks, n_batch, on_chunk=on_chunk, on_logits=writer.write)
    return found[0]


# --- importance -------------------------------------------------------------------------------------------------------


def imatrix(
    model: Name,
    text: Name | Sequence[Name],
    output: Name,
    n_ctx: int = N_CTX,
    chunks: int | None = None,
    process_output: bool = False,
    parse_special: bool = False,
    score: bool = True,
    n_batch: int = N_BATCH,
    threads: int | None = None,
    on_chunk: Callable | None = None,
    from_chunk: int = 0,
    output_frequency: int = OUTPUT_FREQUENCY,
    save_frequency: int = 0,
    format: str = "gguf",
    resume: bool = True,
    all_experts: bool = False,
) -> IMatrix:
    """Collect the importance matrix of a model file over text files and write it.

    text: one or several files (`corpus.py`), each perhaps with a weight behind a colon; n_ctx, chunks, from_chunk: hold
    for each of them. The output is saved every `output_frequency` chunks and when the run is interrupted; the same call
    then continues, unless `resume` is off. Every `save_frequency` chunks a copy `OUTPUT.at_N` is kept (0: never).
    process_output, all_experts: see `engine.collect`.

    >>> import gguftools, os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     out = os.path.join(folder, "imatrix.gguf")
    ...     m = gguftools.imatrix(gguftools.demo_model(), gguftools.demo_text("calibration"), out, n_ctx=256, chunks=2)
    >>> len(m.entries), m.chunk_count
    (42, 2)

    Raises GGUFError and EngineError as `load` and `engine.collect` do, before the run if the output cannot be written.
    """
    names = [text] if isinstance(text, (str, os.PathLike)) else list(text)
    inputs = [Path(model), *(split_weight(name)[0] for name in names)]
    check_output(Path(output), inputs)
    with opened(model, threads) as (session, file):
        corpora = [read_corpus(name, session) for name in names]
        protocol: dict[str, Any] = {
            "model": file.fingerprint,
            "texts": [(c.sha256, c.weight) for c in corpora],
            "n_ctx": n_ctx,
            "chunks": chunks,
            "from_chunk": from_chunk,
            "process_output": process_output,
            "parse_special": parse_special,
            "score": score,
            "all_experts": all_experts,
        }
        run = _Run(Path(output), inputs, corpora, protocol, format, output_frequency, save_frequency)
        if resume:
            run.resume(n_ctx)
        from engine.evaluate import collect
        from engine.evaluate.scoring import cut

        texts = [_tokens(model, session, c, n_ctx, parse_special) for c in corpora]
        with naming(model):
            session.check_context(n_ctx)
            if all_experts:
                session.check_experts()
        sizes = [len(cut(tokens, n_ctx, chunks, None, from_chunk)) for tokens in texts]
        try:
            for i in range(run.at, len(texts)):
                before = sum(sizes[:i])

                def step(done: int, _: int, ppl: float | None, before: int = before) -> None:
                    run.step(before + done)
                    if on_chunk is not None:
                        on_chunk(before + done, sum(sizes), ppl)

                with naming(model):
                    collect(
                        session,
                        texts[i],
                        n_ctx,
                        chunks,
                        n_batch,
                        process_output,
                        score,
                        step,
                        from_chunk,
                        run.state,
                        all_experts,
                    )
                run.end_text()
        except (KeyboardInterrupt, SystemExit):  # by hand, or by a signal
            run.save()
            raise
        run.finish()
        return run.done


class _Run:
    """A collection on its way: `done` is what earlier texts (and earlier runs) gave, `state` what the text at hand has
    given so far."""

    def __init__(
        self,
        output: Path,
        inputs: Sequence[Path],
        corpora: Sequence[Text],
        protocol: dict[str, Any],
        format: str,
        output_frequency: int,
        save_frequency: int,
    ):
        from engine.evaluate.importance import Collection
        from quant.imatrix import IMatrix

        self.output, self._inputs, self._corpora, self._format = output, inputs, corpora, format
        self._protocol = hashlib.sha256(repr(sorted(protocol.items())).encode()).hexdigest()
        self._frequency, self._copies = output_frequency, save_frequency
        self.at, self._last = 0, 0
        self.done = IMatrix(chunk_size=protocol["n_ctx"])
        self.state: Collection = Collection()
        self._new = Collection

    def resume(self, n_ctx: int) -> None:
        """Take up what an interrupted run of the same protocol has saved."""
        run = read_run(self.output) if self.output.is_file() else None
        if run is None or run.get("protocol") != self._protocol:
            return
        self.done = read_imatrix(self.output)
        self.at = int(run["text"])
        self.state = self._new(chunks=int(run["chunks"]), nll=float(run["nll"]), scored=int(run["scored"]))

    def step(self, done: int) -> None:
        """After a batch; done: chunks of all texts."""
        last, self._last = self._last, done
        if self._frequency and done // self._frequency > last // self._frequency:
            self.save()
        if self._copies and done // self._copies > last // self._copies:
            self.save(self.output.with_name(f"{self.output.name}.at_{done}"))

    def end_text(self) -> None:
        self.done = self._whole()
        self.at += 1
        self.state = self._new(nll=self.state.nll, scored=self.state.scored)

    def save(self, path: Path | None = None) -> None:
        """What there is by now, with what is needed to go on."""
        matrix = self._whole()
        if not matrix.entries:
            return
        run = {
            "protocol": self._protocol,
            "text": self.at,
            "chunks": self.state.chunks,
            "nll": self.state.nll,
            "scored": self.state.scored,
        }
        write_imatrix(path or self.output, matrix, self._inputs, self._format, None if path else run)

    def finish(self) -> None:
        self.done = self._named(self.done)
        write_imatrix(self.output, self.done, self._inputs, self._format)

    def _whole(self) -> IMatrix:
        from quant.imatrix import IMatrix

        whole = IMatrix(chunk_size=self.done.chunk_size)
        whole.merge(self.done)
        if self.at < len(self._corpora):
            whole.merge(self.state.imatrix.scaled(self._corpora[self.at].weight))
        return self._named(whole)

    def _named(self, matrix: IMatrix) -> IMatrix:
        import numpy as np

        seen_by_now = self._corpora[: self.at + 1]
        matrix.datasets = [c.name for c in seen_by_now]
        matrix.hashes = {c.name: c.sha256 for c in seen_by_now}
        matrix.weights = {c.name: c.weight for c in seen_by_now if c.weight != 1}
        matrix.sketch = np.unique(np.concatenate([sketch(c.text) for c in seen_by_now]))
        return matrix


def merge(inputs: Sequence[Name], output: Name, format: str = "gguf", chunk_size: int | None = None) -> IMatrix:
    """Merge importance matrices as if their texts had been read together, and write the sum; one input is converted.

    chunk_size: tokens of a chunk in files of the older form, which do not say; None takes that of the first GGUF file,
    or 512. Raises GGUFError for files that are damaged, QuantError for matrices of different models.
    """
    from quant.imatrix import IMatrix

    check_output(Path(output), [Path(path) for path in inputs])
    known = [read_imatrix(path).chunk_size for path in inputs if not is_legacy(path)]
    matrices = [read_imatrix(path, chunk_size or next(iter(known), 0) or N_CTX) for path in inputs]
    whole = IMatrix(chunk_size=matrices[0].chunk_size)
    for matrix in matrices:
        whole.merge(matrix)
    # the count of chunks follows the tokens, as texts of different chunks may meet
    size = max(1, whole.chunk_size)
    largest = max(int(entry.counts.max()) for entry in whole.entries.values())
    if len(matrices) > 1:
        whole.chunk_count = (largest + size // 2) // size
    write_imatrix(output, whole, inputs, format)
    return whole


# --- calibration and evaluation text ----------------------------------------------------------------------------------


def overlaps(models: Sequence[Name], text: Name, imatrices: Sequence[Name] = ()) -> list[str]:
    """Warnings, a line each, where a text to measure on was used for calibration.

    imatrices: files to look into; those that quantized models name, and that lie beside them, are found without.
    """
    corpus, found = read_text_only(text), []
    files = {Path(path).resolve(): str(path) for path in imatrices}
    for model in map(Path, models):
        if model.is_dir():
            continue
        with GGUF(model) as f:
            name, data = (f.metadata.get(f"quantize.imatrix.{key}") for key in ("file", "dataset"))
        if isinstance(data, str) and Path(data).name == corpus.name:
            found.append(f"{model} was calibrated on a text of the same name as {text}: results may flatter it")
        if isinstance(name, str) and (beside := model.parent / Path(name).name).is_file():
            files.setdefault(beside.resolve(), str(beside))
    for path in files.values():
        matrix = read_imatrix(path)
        share = 1.0 if corpus.sha256 in matrix.hashes.values() else 0.0
        if not share and matrix.sketch is not None:
            share = seen(corpus.text, matrix.sketch)
        if share > NOTEWORTHY:
            found.append(
                f"{share:.0%} of {text} is in the text that {path} was made of: results may flatter its models"
            )
    return found


def read_text_only(text: Name) -> Text:
    """A text as it is in its file, whatever it holds."""
    from gguftools.text import read_text

    path = Path(text)
    content = read_text(path)
    return Text(path, content, hashlib.sha256(path.read_bytes()).hexdigest())


def record(file: ModelFile, result: Evaluation) -> dict[str, Any]:
    """A file and its result, as JSON can hold them."""
    return {**asdict(file), **asdict(result)}


def _tokens(
    model: Name, session: Session, corpus: Text, n_ctx: int | None = None, parse_special: bool = False
) -> list[int]:
    """The tokens of a text. Raises EngineError that names the model for a vocabulary that cannot be used, the text for
    one that is too short for n_ctx."""
    from engine.evaluate.scoring import cut

    with naming(model):
        tokens = session.tokenize(corpus.text, add_special=True, parse_special=parse_special or corpus.chat)
    if n_ctx is not None:
        with naming(corpus.path):
            cut(tokens, n_ctx, None, None)
    return tokens
