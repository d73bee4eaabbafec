"""A model in, smaller ones out: plan everything, refuse what cannot work, then one pass over the weights.

The source is a GGUF file, a set of shards, or a Hugging Face folder; there may be several outputs, which share the
pass. The parts are in `gguftools/quantizing`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gguftools.conversion.options import Options
from gguftools.errors import GGUFError
from gguftools.files import check_output
from gguftools.gguf.reader import TensorView
from gguftools.imatrix_file import read_imatrix
from gguftools.quantizing import importance as importances
from gguftools.quantizing import record as records
from gguftools.quantizing.assemble import Progress, Written, assemble, silent
from gguftools.quantizing.pipeline import Job, Place
from gguftools.quantizing.prepare import (
    File,
    Recorded,
    layout,
    origin_fields,
    output_fields,
    override,
    prune,
    split_fields,
)
from gguftools.quantizing.result import Quantized
from gguftools.quantizing.scan import Scanned, digest, importance_digest, refuse, scan
from gguftools.quantizing.source import Model, SourceTensor, open_model
from gguftools.toolbox.shards import shard_path
from quant.errors import QuantError
from quant.format import Format
from quant.mixes import Choice, PlanOptions, TensorInfo, apply_options, check_plan, plan
from quant.presets import Preset, get_preset, recipe_of
from quant.recipes import Recipe

SLAB = 1 << 23  # weights that `convert_tensor` holds as float32 at a time
NON_FINITE = ("error", "zero")
WEIGHTINGS = ("reference", "robust")


@dataclass(frozen=True)
class Settings:
    """What else can be asked for, beside types.

    include_weights, exclude_weights: parts of names, which entries of the importance matrix are used; prune_layers:
    blocks to leave out; keep_split: one output per shard of the source; override_kv: `KEY=TYPE:VALUE`; on_nonfinite:
    "error", or "zero" to take 0 for values that are not finite; record, sidecar: note how each tensor was made, in the
    file or beside it; reuse: an older output whose unchanged tensors are taken over; max_buffer: bytes of weights in
    work at a time; conversion: options for Hugging Face folders, of which `split` also counts for the output; finished:
    tensors that are ready in the planned type, name -> file with their bytes: then importance counts as there, as it
    was used in making them; weighting: of weights without importance, "reference", or "robust": as if all columns were
    equally important, which is better for most types (see the README).
    """

    include_weights: tuple[str, ...] = ()
    exclude_weights: tuple[str, ...] = ()
    prune_layers: tuple[int, ...] = ()
    keep_split: bool = False
    override_kv: tuple[str, ...] = ()
    on_nonfinite: str = "error"
    record: bool = False
    sidecar: bool = False
    reuse: Path | None = None
    max_buffer: int | None = None
    conversion: Options | None = None
    finished: Mapping[str, Path] | None = None
    weighting: str = "reference"


def quantize(
    source: str | os.PathLike,
    output: str | os.PathLike | None,
    preset: str | int | Preset | Recipe,
    imatrix: str | os.PathLike | None = None,
    options: PlanOptions | None = None,
    allow_requantize: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
    dry_run: bool = False,
    settings: Settings | None = None,
) -> Quantized:
    """Quantize a model to a preset or by a recipe; presets give the bytes that llama.cpp's quantize tool writes.

    source: a GGUF file, any shard of a set, or a Hugging Face folder, which gives what converting it first with
    `outtype="auto"` would; output: None makes a name beside the source; preset: as `Q4_K_M`, in any case, or a recipe,
    which is written to the file's metadata; imatrix: an importance matrix file; progress: `gguftools.progress.progress`
    or the like; dry_run: plan and report, write nothing.

    A run that was stopped goes on where it was when the same is asked for again.

    >>> import gguftools, os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     out = os.path.join(folder, "tiny-q8.gguf")
    ...     result = gguftools.quantize(gguftools.demo_model(), out, "Q8_0")
    >>> round(result.bpw, 2)
    8.52

    Raises GGUFError and QuantError for everything that can be known before the first byte is written (a damaged
    source, an output that is the source, a missing importance matrix, too little space, weights that are not finite).
    """
    wish = _Wish(preset, None if output is None else Path(output))
    (result,) = _make(source, [wish], imatrix, options, allow_requantize, threads, progress, dry_run, settings)
    return result


def ladder(
    source: str | os.PathLike,
    presets: Sequence[str | int | Preset | Recipe],
    folder: str | os.PathLike,
    imatrix: str | os.PathLike | None = None,
    options: PlanOptions | None = None,
    allow_requantize: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
    dry_run: bool = False,
    settings: Settings | None = None,
) -> list[Quantized]:
    """Quantize a model to several presets in one pass: each tensor is read once. Files lie in `folder`, named after
    the source and the preset; the rest is as for `quantize`.

    >>> import gguftools, os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     results = gguftools.ladder(gguftools.demo_model(), ["Q8_0", "Q4_K_M"], folder)
    >>> [result.preset for result in results]
    ['Q8_0', 'Q4_K_M']

    Raises as `quantize` does; also if a preset comes twice.
    """
    if not presets:
        raise GGUFError("a ladder needs presets, such as Q8_0,Q6_K,Q4_K_M")
    names = [_recipe(preset).name for preset in presets]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise GGUFError(f"the ladder names {twice} twice; every rung is a file of its own")
    wishes = [_Wish(preset, None, Path(folder)) for preset in presets]
    return _make(source, wishes, imatrix, options, allow_requantize, threads, progress, dry_run, settings)


def convert_tensor(
    view: TensorView,
    target: Format,
    importance: np.ndarray | None = None,
    threads: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Iterator[np.ndarray]:
    """The tensor's data in another format, in pieces of at most SLAB weights; never more than two pieces in memory.

    importance: float32 [matrices, n], or None."""
    from quant.quantize import dequantize_blocks, quantize_into

    if view.format is target:
        yield view.data
        if progress is not None:
            progress(view.nbytes)
        return
    n = view.shape[-1]
    rows = view.data.view(view.format.block).reshape(-1, n // view.format.block_size)
    per_matrix = len(rows) // (1 if importance is None else len(importance))  # rows that share one vector of it
    step = max(1, min(SLAB // n, per_matrix))
    for matrix in range(len(rows) // max(1, per_matrix)):
        for lo in range(matrix * per_matrix, (matrix + 1) * per_matrix, step):
            piece = rows[lo : min(lo + step, (matrix + 1) * per_matrix)]
            out = np.empty((len(piece), n // target.block_size), target.block)
            quantize_into(
                dequantize_blocks(piece, view.format, threads),
                target,
                out,
                None if importance is None else importance[matrix],
                threads,
                view.name,
                lo,
            )
            yield out
            if progress is not None:
                progress(piece.nbytes)


# --- one pass ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Wish:
    """An output that is asked for: the type, and its file, or a folder for it."""

    preset: str | int | Preset | Recipe
    output: Path | None
    folder: Path | None = None


@dataclass(frozen=True)
class _Output:
    """An output that is planned. importance: by name of a tensor of the output."""

    recipe: Recipe
    choices: list[Choice]
    files: list[File]
    result: Quantized


def _recipe(preset: str | int | Preset | Recipe) -> Recipe:
    return preset if isinstance(preset, Recipe) else recipe_of(get_preset(preset))


def _make(
    source: str | os.PathLike,
    wishes: Sequence[_Wish],
    imatrix: str | os.PathLike | None,
    options: PlanOptions | None,
    allow_requantize: bool,
    threads: int | None,
    progress: Progress | None,
    dry_run: bool,
    settings: Settings | None,
) -> list[Quantized]:
    settings, options, progress = settings or Settings(), options or PlanOptions(), progress or silent
    recipes = [_recipe(wish.preset) for wish in wishes]
    if settings.on_nonfinite not in NON_FINITE:
        raise GGUFError(f"unknown way with values that are not finite '{settings.on_nonfinite}'; there are error, zero")
    if settings.weighting not in WEIGHTINGS:
        raise GGUFError(f"unknown weighting '{settings.weighting}'; there are {', '.join(WEIGHTINGS)}")
    with ExitStack() as stack:
        model = stack.enter_context(open_model(source, settings.conversion))
        model = prune(override(model, settings.override_kv), settings.prune_layers)
        importance = _importance(imatrix, model, settings)
        planned = [
            _plan(model, wish, recipe, importance, options, allow_requantize, settings, dry_run)
            for wish, recipe in zip(wishes, recipes)
        ]
        if dry_run:
            return [output.result for output in planned]
        old = None if settings.reuse is None else stack.enter_context(records.open_old(settings.reuse))
        inputs = [*model.files, *(Path(p) for p in (imatrix, settings.reuse) if p is not None)]
        for file in _files(planned):
            check_output(file.path, inputs)
        hashed = settings.record or settings.sidecar or old is not None
        scanned = _scan(model, settings, hashed, threads, progress)
        model = _repaired(model, scanned)
        fingerprints = _Fingerprints(model, importance, scanned, settings.weighting) if hashed else None
        plans = [_Made(output, _reused(output, old, fingerprints) | _ready(output, settings)) for output in planned]
        return _write(model, plans, importance, inputs, fingerprints, threads, progress, settings)


def _importance(imatrix: str | os.PathLike | None, model: Model, settings: Settings) -> importances.Importance | None:
    if imatrix is None:
        if settings.include_weights or settings.exclude_weights:
            raise GGUFError("--include-weights and --exclude-weights choose entries of an --imatrix; give one")
        return None
    matrix = read_imatrix(imatrix)
    importances.select(matrix, settings.include_weights, settings.exclude_weights)
    return importances.resolve(Path(imatrix), matrix, model.tensors.values())


def _plan(
    model: Model,
    wish: _Wish,
    recipe: Recipe,
    importance: importances.Importance | None,
    options: PlanOptions,
    allow_requantize: bool,
    settings: Settings,
    dry_run: bool,
) -> _Output:
    """Types, file layout and what is to be said. Raises what can be known without reading weights."""
    applied = apply_options(recipe, options)
    tensors = [TensorInfo(t.name, t.shape, t.format) for t in model.tensors.values()]
    weighted = importance is not None or settings.finished is not None
    choices = plan(tensors, model.metadata, applied, weighted)
    origins = {name: t.origin for name, t in model.tensors.items()}
    known = None if importance is None else {name for name, origin in origins.items() if origin in importance}
    warnings = []
    try:
        weighted_all = settings.finished is not None or settings.weighting == "robust"
        check_plan(choices, set(origins) if weighted_all else known, allow_requantize)
    except QuantError as error:
        if not dry_run:
            raise
        warnings.append(f"this would be refused: {error}")
    path = wish.output or _default_path(model, wish, recipe)
    fields = output_fields(model, applied, importance)
    if settings.record or isinstance(wish.preset, Recipe):
        fields += origin_fields(applied)
    files = _layouts(path, model, fields, choices, settings)
    covered = None if importance is None else importances.coverage(importance, choices, origins)
    result = Quantized(
        output=path,
        preset=recipe.name,
        choices=choices,
        outputs=tuple(file.path for file in files),
        file_bytes=sum(file.size for file in files),
        without_importance=covered.missing if covered else (),
        warnings=(*warnings, *(covered.warnings() if covered else ())),
    )
    return _Output(applied, choices, files, result)


def _default_path(model: Model, wish: _Wish, recipe: Recipe) -> Path:
    if wish.folder is None:
        return model.folder / model.name(recipe.name)
    if not wish.folder.is_dir():
        raise GGUFError(f"{wish.folder}: no such folder; make it first")
    stem = model.path.name if model.path.is_dir() else model.path.stem
    return wish.folder / (model.name(recipe.name) if model.is_hf else f"{stem}-{recipe.name}.gguf")


def _layouts(path: Path, model: Model, fields: list, choices: Sequence[Choice], settings: Settings) -> list[File]:
    shards = model.shards if settings.keep_split else ()
    if settings.conversion is not None and settings.conversion.split is not None:
        shards = tuple(map(tuple, settings.conversion.split.groups([(c.name, c.n_bytes) for c in choices])))
    if len(shards) < 2:
        return [layout(path, [*fields, *_recorded_fields(len(choices), settings)], choices)]
    by_name = {c.name: c for c in choices}
    stem = path.with_name(path.name.removesuffix(".gguf"))
    files = []
    for i, names in enumerate(shards):
        own = [by_name[name] for name in names]
        more = split_fields(i, len(shards), len(choices)) + _recorded_fields(len(own), settings)
        files.append(layout(shard_path(stem, i, len(shards)), [*(fields if i == 0 else []), *more], own))
    return files


def _recorded_fields(n: int, settings: Settings) -> list:
    """Room for the record, of the size that it will have."""
    if not settings.record:
        return []
    return Recorded(records.blank(n), records.blank(n), records.blank(n)).fields()


def _files(planned: Sequence[_Output]) -> list[File]:
    return [file for output in planned for file in output.files]


# --- before the first byte --------------------------------------------------------------------------------------------


def _scan(
    model: Model, settings: Settings, hashed: bool, threads: int | None, progress: Progress
) -> dict[str, Scanned]:
    """What a look at all weights finds. Raises QuantError for values that are not finite, if they may not be."""
    with progress("scanning", sum(t.n_bytes for t in model.tensors.values())) as advance:
        scanned = scan(model.tensors.values(), hashed, threads, advance)
    if settings.on_nonfinite == "error":
        refuse(model.tensors, scanned)
    return scanned


def _repaired(model: Model, scanned: dict[str, Scanned]) -> Model:
    """The model with 0 for values that are not finite."""
    tensors = {
        name: replace(t, zero=True) if name in scanned and scanned[name].not_finite else t
        for name, t in model.tensors.items()
    }
    return replace(model, tensors=tensors)


class _Fingerprints:
    """SHA-256 of what each tensor of an output is made from, by its name."""

    def __init__(
        self, model: Model, importance: importances.Importance | None, scanned: dict[str, Scanned], weighting: str
    ) -> None:
        self._model, self._importance, self._weighting = model, importance, weighting
        self._sources = {name: s.digest for name, s in scanned.items()}
        self._importances: dict[str, str] = {}

    def source(self, name: str) -> str:
        self._sources[name] = self._sources.get(name) or digest(self._model.tensors[name])
        return self._sources[name]

    def importance(self, choice: Choice) -> str:
        """Of what matters for this tensor: nothing, where it is copied or its type ignores importance."""
        find = _importance_of(self._model.tensors[choice.name], choice, self._importance, self._weighting)
        if find is None:
            return importance_digest(None)
        if choice.name not in self._importances:
            self._importances[choice.name] = importance_digest(find)
        return self._importances[choice.name]


def _importance_of(
    tensor: SourceTensor, choice: Choice, importance: importances.Importance | None, weighting: str
) -> Callable[[], np.ndarray] | None:
    if choice.is_copy or choice.target.kernels.quantize_weighted is None:
        return None
    found = None if importance is None else importance.of(tensor.origin)
    if found is None and weighting == "robust":
        return lambda: np.ones((1, tensor.n), np.float32)
    return found


@dataclass(frozen=True)
class _Made:
    """A planned output, and tensors of an older one that it takes over."""

    output: _Output
    reused: dict[str, SourceTensor]


def _reused(output: _Output, old: records.Old | None, fingerprints: _Fingerprints | None) -> dict[str, SourceTensor]:
    if old is None or fingerprints is None:
        return {}
    found = {}
    for choice in output.choices:
        if choice.is_copy:
            continue
        tensor = old.find(choice, fingerprints.source(choice.name), fingerprints.importance(choice))
        if tensor is not None:
            found[choice.name] = tensor
    if not found:
        raise GGUFError(
            f"{old.path}: none of its tensors was made from this source with the same types and importance; "
            "leave out --reuse"
        )
    return found


def _ready(output: _Output, settings: Settings) -> dict[str, SourceTensor]:
    """Tensors that were made before."""
    found = {}
    for choice in output.choices:
        path = (settings.finished or {}).get(choice.name)
        if path is None or choice.is_copy:
            continue
        if not path.is_file() or path.stat().st_size != choice.n_bytes:
            raise GGUFError(
                f"{path}: is not tensor '{choice.name}' as {choice.target}; remove the folder and run again"
            )
        found[choice.name] = _of_file(choice, np.memmap(path, np.uint8, "r"))
    return found


def _of_file(choice: Choice, data: np.ndarray) -> SourceTensor:
    size = choice.target.row_size(choice.shape[-1])

    def fetch(lo: int, hi: int) -> np.ndarray:
        return data[lo * size : hi * size].reshape(hi - lo, size)

    return SourceTensor(choice.name, choice.name, choice.name, choice.shape, choice.target, fetch)


# --- the pass ---------------------------------------------------------------------------------------------------------


def _write(
    model: Model,
    made: Sequence[_Made],
    importance: importances.Importance | None,
    inputs: Sequence[Path],
    fingerprints: _Fingerprints | None,
    threads: int | None,
    progress: Progress,
    settings: Settings,
) -> list[Quantized]:
    files = _files([m.output for m in made])
    recorded: dict[Path, Recorded] = {}

    def header(file: File, digests: Mapping[str, str]) -> bytes:
        """What the finished file begins with: its record is known now."""
        if fingerprints is None or not (settings.record or settings.sidecar):
            return file.header
        found = Recorded(
            tuple(fingerprints.source(c.name) for c in file.choices),
            tuple(fingerprints.importance(c) for c in file.choices),
            tuple(digests[c.name] for c in file.choices),
        )
        recorded[file.path] = found
        return _with_record(file, found) if settings.record else file.header

    ready = [(name, path.stat().st_mtime_ns) for name, path in sorted((settings.finished or {}).items())]
    about = (
        settings.on_nonfinite, settings.include_weights, settings.exclude_weights, settings.prune_layers, ready,
        settings.weighting,
    )  # fmt: skip
    written = assemble(
        files, _jobs(model, made, importance, settings.weighting), inputs, about, header, threads, settings.max_buffer,
        progress, hashed=settings.record or settings.sidecar,
    )  # fmt: skip
    results, number = [], 0
    for m in made:
        own = range(number, number + len(m.output.files))
        number = own.stop
        for file in m.output.files if settings.sidecar else ():
            records.write_sidecar(file.path, m.output.recipe, file.choices, recorded[file.path])
        results.append(_result(m, own, written, model))
    return results


def _jobs(model: Model, made: Sequence[_Made], importance: importances.Importance | None, weighting: str) -> list[Job]:
    """A job per tensor, in the order of the first output."""
    places: dict[str, list[Place]] = {}
    finders: dict[str, Callable[[], np.ndarray] | None] = {}
    number = 0
    for m in made:
        for file in m.output.files:
            for choice in file.choices:
                measured = choice.source.is_quantized and not choice.is_copy
                reused = m.reused.get(choice.name)
                place = Place(number, choice.target, file.offsets[choice.name], reused, measured)
                places.setdefault(choice.name, []).append(place)
                if not finders.get(choice.name):
                    finders[choice.name] = _importance_of(model.tensors[choice.name], choice, importance, weighting)
            number += 1
    return [
        Job(
            model.tensors[name],
            tuple(found),
            finders[name],
            by_matrix=finders[name] is not None and len(model.tensors[name].shape) > 2,
        )
        for name, found in places.items()
    ]


def _with_record(file: File, recorded: Recorded) -> bytes:
    """The file's header with blank digests replaced by the real ones."""
    header = file.header
    blank = Recorded(*(records.blank(len(file.choices)) for _ in Recorded.FIELDS))
    for old, new in zip(blank.fields(), recorded.fields()):
        assert header.count(_encoded(old)) == 1
        header = header.replace(_encoded(old), _encoded(new))
    assert len(header) == len(file.header), "the record's size was known"
    return header


def _encoded(field: Any) -> bytes:
    key = field.key.encode()
    return len(key).to_bytes(8, "little") + key + int(field.type).to_bytes(4, "little") + bytes(field.raw)


def _result(made: _Made, own: range, written: Written, model: Model) -> Quantized:
    errors = {name: sums.relative for (number, name), sums in written.errors.items() if number in own}
    zeroed = {}
    for name, tensor in model.tensors.items():
        if tensor.zero:
            zeroed[name] = sum(int(np.count_nonzero(tensor.not_finite(lo, hi))) for lo, hi in tensor.spans())
    return replace(
        made.output.result,
        reused=tuple(made.reused),
        resumed=sum(written.resumed[i] for i in own),
        errors=errors,
        zeroed=zeroed,
    )
