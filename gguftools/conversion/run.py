"""A Hugging Face folder in, a GGUF file out: plan everything, refuse what cannot work, then stream tensor after tensor.

The rows of the model's family (`engine/models`) say which tensors there are, what they are called and how they change.
Weights are read from memory maps and converted in pieces, so memory does not grow with the model.
"""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.models import arch_of_config
from gguftools.conversion.card import Pair, describe, sampling
from gguftools.conversion.hf import check_handled, load_json, normalize, read_hparams
from gguftools.conversion.layouts import text_class, text_views
from gguftools.conversion.mapping import is_skipped, mapped, numbers
from gguftools.conversion.names import ModelName, file_name
from gguftools.conversion.options import Options, described
from gguftools.conversion.overflow import settle
from gguftools.conversion.sentence import sentence_settings
from gguftools.conversion.sources import logical
from gguftools.conversion.transforms import Rows
from gguftools.conversion.vocab import vocab_keys
from gguftools.errors import GGUFError
from gguftools.gguf.endian import BIG
from gguftools.gguf.keys import type_of
from gguftools.gguf.values import Field, encode
from gguftools.gguf.writer import Writer
from gguftools.quantizing.assemble import Progress, assemble, silent
from gguftools.quantizing.pipeline import Job, Place
from gguftools.quantizing.prepare import layout, split_fields
from gguftools.quantizing.scan import refuse, scan
from gguftools.quantizing.source import SourceTensor, of_item
from gguftools.safetensors import Checkpoint, SafetensorView, open_checkpoint
from gguftools.toolbox.shards import shard_path
from gguftools.toolbox.split import MAX_SHARDS
from quant.errors import QuantError
from quant.format import Format
from quant.formats import FORMATS
from quant.mixes import Choice
from quant.presets import get_preset

log = logging.getLogger(__name__)

QUANTIZATION_VERSION = 2  # of the block formats, as ggml counts them

#: outtype -> format of the weights, `general.file_type`
OUTTYPES = {"f32": ("F32", 0), "f16": ("F16", 1), "bf16": ("BF16", 32), "q8_0": ("Q8_0", 7)}

#: block formats that checkpoints come in and that are kept as they are -> `general.file_type`
NATIVE = {"MXFP4": 38, "NVFP4": 39}

#: matrices that stay F32, by the name between the block number and `.weight`; so do vectors and `*_norm.weight`
_F32_NAMES = (
    "ffn_gate_inp ffn_gate_inp_shexp position_embd token_types ssm_conv1d ssm_conv1d_q ssm_conv1d_k ssm_conv1d_v "
    "shortconv.conv time_mix_first time_mix_w1 time_mix_w2 time_mix_decay_w1 time_mix_decay_w2 time_mix_lerp_fused "
    "posnet.norm1 posnet.norm2 altup_correct_coef altup_predict_coef indexer.proj"
)
_ALWAYS_F32 = frozenset(_F32_NAMES.split())


@dataclass(frozen=True)
class Item:
    """One tensor of the output: its GGUF name, its weights, and the format that they get."""

    name: str
    rows: Rows
    format: Format

    @property
    def n_weights(self) -> int:
        return math.prod(self.rows.shape)

    @property
    def n_bytes(self) -> int:
        n = self.rows.shape[-1] if self.rows.shape else 1
        return self.n_weights // max(n, 1) * self.format.row_size(n)


@dataclass(frozen=True)
class Conversion:
    """What is to be done, or was: everything but the weights is known.

    output: the file; keys: its metadata; items: its tensors in order; inputs: files that are read; model_name: what
    names of files are made of; fallbacks: names of tensors whose rows did not fit the format, and that became F16;
    options: what else was asked for.
    """

    output: Path
    architecture: str
    outtype: str
    keys: list[Pair]
    items: list[Item]
    inputs: list[Path]
    model_name: ModelName
    fallbacks: tuple[str, ...]
    options: Options = field(default_factory=Options)

    @property
    def outputs(self) -> list[tuple[Path, list[str]]]:
        """The files that are written, and the names of their tensors."""
        groups = [[item.name for item in self.items]]
        if self.options.split is not None:
            groups = self.options.split.groups([(item.name, item.n_bytes) for item in self.items])
        if len(groups) == 1:
            return [(self.output, groups[0])]
        if len(groups) > MAX_SHARDS:
            raise GGUFError(f"{len(groups):,} files are too many (at most {MAX_SHARDS:,}); raise the limit")
        stem = self.output.with_name(self.output.name.removesuffix(".gguf"))
        return [(shard_path(stem, i, len(groups)), names) for i, names in enumerate(groups)]

    @property
    def n_weights(self) -> int:
        return sum(item.n_weights for item in self.items)

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors in the output."""
        return sum(item.n_bytes for item in self.items)

    def summary(self) -> dict[str, Any]:
        """The essentials, as JSON can hold them."""
        keys = dict(self.keys)
        return {
            "output": str(self.output),
            "outputs": [str(path) for path, _ in self.outputs],
            "name": keys["general.name"],
            "architecture": self.architecture,
            "outtype": self.outtype,
            "vocabulary": keys["tokenizer.ggml.model"],
            "pre": keys["tokenizer.ggml.pre"],
            "tensors": len(self.items),
            "weights": self.n_weights,
            "bytes": self.n_bytes,
            "fallbacks": list(self.fallbacks),
        }


def convert(
    source: str | os.PathLike,
    output: str | os.PathLike | None = None,
    outtype: str = "auto",
    pre: str | None = None,
    threads: int | None = None,
    progress: Progress = silent,
    selftest: bool = False,
    imatrix: str | os.PathLike | None = None,
    options: Options | None = None,
) -> Conversion:
    """Convert a Hugging Face folder to a GGUF file; the bytes are those that llama.cpp's converter writes.

    output: a file, in whose name `{outtype}` stands for the type; a folder; or None for the model's own folder; a name
    is then made from the model's. outtype: f32, f16, bf16, q8_0, or auto: that of the source; or a preset such as
    Q4_K_M, which gives what quantizing the file of `auto` would, in one pass. pre: name of the pre-tokenizer, instead
    of the one found. threads: None means all cores. progress: `gguftools.progress.progress` or the like. selftest: also
    write texts with the ids that they must give (`engine.tokenizer`). imatrix: importance, for presets. options: more
    (`conversion.options.Options`); its `pre` and `selftest` count, too.

    >>> import gguftools, os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     done = gguftools.convert(gguftools.demo_folder(), os.path.join(folder, "tiny-{outtype}.gguf"), "f16")
    >>> done.output.name, done.architecture, len(done.items)
    ('tiny-f16.gguf', 'llama', 56)

    Raises GGUFError, EngineError and QuantError for everything that can be known before the first byte is written,
    and for weights that are not finite or do not fit the type; then no file is left behind.
    """
    options = _options(options, pre, selftest)
    if outtype.lower() in (*OUTTYPES, "auto") or options.vocab_only:
        if imatrix is not None:
            raise GGUFError(f"an importance matrix has no use for {outtype}; name a preset such as Q4_K_M")
        conversion = settled(plan(source, output, outtype, options=options), threads, progress)
        write(conversion, threads, progress)
        return conversion
    return _quantized(source, output, outtype, threads, progress, imatrix, options)


def _options(options: Options | None, pre: str | None, selftest: bool) -> Options:
    found = options or Options()
    return replace(found, pre=pre or found.pre, selftest=selftest or found.selftest)


def planned(
    source: str | os.PathLike,
    output: str | os.PathLike | None,
    outtype: str,
    imatrix: str | os.PathLike | None,
    options: Options,
) -> Conversion:
    """What `convert` would do, presets included; nothing is written."""
    if outtype.lower() in (*OUTTYPES, "auto") or options.vocab_only:
        return plan(source, output, outtype, options=options)
    return _quantized(source, output, outtype, None, silent, imatrix, options, dry_run=True)


def _quantized(
    source: str | os.PathLike,
    output: str | os.PathLike | None,
    outtype: str,
    threads: int | None,
    progress: Progress,
    imatrix: str | os.PathLike | None,
    options: Options,
    dry_run: bool = False,
) -> Conversion:
    """Conversion and quantization in one pass."""
    from gguftools.quantize_file import Settings, quantize

    try:
        preset = get_preset(outtype)
    except QuantError as error:
        kinds = f"{', '.join(OUTTYPES)}, auto and presets such as Q4_K_M"
        raise GGUFError(f"unknown outtype '{outtype}'; there are {kinds} ({error})") from None
    if options.bigendian:
        raise GGUFError(f"{preset.name} is written little-endian; use `gguftools convert-endian` on the file then")
    conversion = plan(source, None, "auto", options=options)
    names = file_name(conversion.model_name, preset.name)
    path = _output_path(Path(source), None if output is None else Path(output), names, preset.name)
    settings = Settings(conversion=options)
    done = quantize(source, path, preset, imatrix, None, False, threads, progress, dry_run, settings)
    items = {item.name: item for item in conversion.items}
    return replace(
        conversion,
        output=path,
        outtype=preset.name,
        keys=[(k, preset.ftype if k == "general.file_type" else v) for k, v in conversion.keys],
        items=[replace(items[c.name], format=c.target) for c in done.choices],
        fallbacks=tuple(c.name for c in done.substituted),
    )


def plan(
    source: str | os.PathLike,
    output: str | os.PathLike | None = None,
    outtype: str = "auto",
    pre: str | None = None,
    selftest: bool = False,
    options: Options | None = None,
) -> Conversion:
    """What `convert` would do. Reads no weights; raises all that `convert` does but for weights."""
    folder = Path(source)
    options = _options(options, pre, selftest)
    if outtype != "auto" and outtype.lower() not in OUTTYPES:
        raise GGUFError(f"unknown outtype '{outtype}'; there are {', '.join(OUTTYPES)} and auto")
    written = load_json(folder / "config.json")
    arch = arch_of_config(text_class(written))
    config = {**normalize(written), **sentence_settings(folder)}
    check_handled(written, config, arch)
    checkpoint = None if options.vocab_only else open_checkpoint(folder)
    views = [] if checkpoint is None else list(text_views(folder, _in_order(checkpoint)))
    h, common, own = read_hparams({**config, **numbers({view.name: view for view in views}, arch)}, arch)
    views = [view for view in views if not is_skipped(view.name, arch)]
    tensors = mapped(folder, logical(views, config, folder), arch, config, h) if checkpoint is not None else {}
    chosen = _auto(views) if outtype == "auto" else outtype.lower()
    target, file_type = OUTTYPES[chosen]
    items = [Item(name, rows, _format_of(name, rows, FORMATS[target])) for name, rows in tensors.items()]
    native = {item.format.name for item in items} & set(NATIVE)
    if native and target != "Q8_0":
        file_type = NATIVE[native.pop()]
    fallbacks = tuple(item.name for item in items if item.format.name == "F16" != target)
    for name in fallbacks:
        log.warning("%s: rows of %d do not fit %s: F16 is used", name, tensors[name].shape[-1], target)
    model_name, description = describe(folder, config, {item.name: item.rows.shape for item in items})
    if options.vocab_only:
        description = [pair for pair in description if pair[0] != "general.size_label"]
    model_name, description = described(model_name, description, options)
    keys: list[Pair] = [
        ("general.architecture", arch.name),
        ("general.type", "model"),
        *sampling(load_json(folder / "generation_config.json", required=False)),
        *description,
        *common,
        ("general.file_type", file_type),
        *own,
        ("general.quantization_version", QUANTIZATION_VERSION),
        *vocab_keys(folder, config, options.pre, options.selftest),
    ]
    name = file_name(model_name, target, "vocab" if options.vocab_only else "")
    path = _output_path(folder, None if output is None else Path(output), name, target)
    inputs = [*(checkpoint.files if checkpoint is not None else ()), *folder.glob("*.json")]
    return Conversion(path, arch.name, target, keys, items, inputs, model_name, fallbacks, options)


def settled(conversion: Conversion, threads: int | None = None, progress: Progress = silent) -> Conversion:
    """A plan in which no weight is beyond F16. Raises GGUFError with their number, if that is what was asked for."""
    n_bytes = sum(item.n_bytes for item in conversion.items if item.format.name == "F16" != item.rows.dtype)
    if not n_bytes:
        return conversion
    with progress("looking for overflow", n_bytes) as advance:
        return replace(conversion, items=settle(conversion.items, conversion.options.on_overflow, threads, advance))


def write(conversion: Conversion, threads: int | None = None, progress: Progress = silent) -> None:
    """Carry out a plan. Raises GGUFError and QuantError as `convert` does."""
    sources = {item.name: of_item(item) for item in conversion.items}
    with progress("scanning", sum(t.n_bytes for t in sources.values())) as advance:
        refuse(sources, scan(sources.values(), False, threads, advance))
    choices = {t.name: Choice(t.name, t.shape, t.format, t.format, "", t.format) for t in sources.values()}
    fields = [encode(key, value, type_of(key)) for key, value in conversion.keys]
    outputs = conversion.outputs
    count = [split_fields(i, len(outputs), len(sources)) if len(outputs) > 1 else [] for i in range(len(outputs))]
    keys = [[*(fields if i == 0 else ()), *count[i]] for i in range(len(outputs))]  # the first file has them all
    if conversion.options.bigendian:
        for (path, names), own in zip(outputs, keys):
            _write_big(path, own, [sources[name] for name in names], conversion.inputs)
        return
    files = [layout(path, own, [choices[name] for name in names]) for (path, names), own in zip(outputs, keys)]
    place = {name: i for i, (_, names) in enumerate(outputs) for name in names}
    jobs = [Job(t, (Place(i := place[t.name], t.format, files[i].offsets[t.name]),)) for t in sources.values()]
    assemble(files, jobs, conversion.inputs, "convert", threads=threads, progress=progress, verb="converting")


def _write_big(path: Path, keys: list[Field], tensors: list[SourceTensor], inputs: list[Path]) -> None:
    """A big-endian file, tensor after tensor."""
    with Writer(path, inputs, byte_order=BIG) as w:
        for key in keys:
            w.add_field(key)
        for t in tensors:
            w.declare(t.name, t.shape, t.format)
        for t in tensors:
            w.write(t.name, (np.ascontiguousarray(t.raw(lo, hi)) for lo, hi in t.spans()))


# --- tensors ----------------------------------------------------------------------------------------------------------


def _in_order(checkpoint: Checkpoint) -> list[SafetensorView]:
    """The order of the output: file by file, by name within each."""
    place = {path: i for i, path in enumerate(checkpoint.files)}
    return sorted(checkpoint.values(), key=lambda view: (place[view.path], view.name))


def _auto(views: list[SafetensorView]) -> str:
    """The type of the first matrix of 16 bits; F16 for wider sources."""
    names = {"BF16": "bf16", "F16": "f16"}
    return next((names[v.dtype] for v in views if len(v.shape) > 1 and v.dtype in names), "f16")


def _format_of(name: str, rows: Rows, target: Format) -> Format:
    shape = rows.shape
    if rows.dtype in NATIVE:
        return FORMATS[rows.dtype]
    stem = name.removesuffix(".weight")
    if stem.startswith("blk."):
        stem = stem.split(".", 2)[2]
    if len(shape) < 2 or not name.endswith(".weight") or stem.endswith("_norm") or stem in _ALWAYS_F32:
        return FORMATS["F32"]
    return FORMATS["F16"] if shape[-1] % target.block_size else target


def _output_path(folder: Path, output: Path | None, name: str, target: str) -> Path:
    if output is None or output.is_dir():
        return (output or folder) / name
    filled = output.name
    for word in ("ftype", "outtype"):
        filled = filled.replace(f"{{{word}}}", target.lower()).replace(f"{{{word.upper()}}}", target)
    return output.with_name(filled)
