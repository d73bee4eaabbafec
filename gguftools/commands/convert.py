"""`gguftools convert`: a Hugging Face folder, or an adapter, to a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gguftools import report
from gguftools.commands.options import DryRun, Json, Threads
from gguftools.progress import progress

if TYPE_CHECKING:
    from gguftools.conversion.options import Options, Split
    from gguftools.conversion.run import Conversion


def convert(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="Folder of a Hugging Face model or LoRA adapter.", show_default=False),
    ] = None,
    outfile: Annotated[
        Path | None,
        typer.Option("-o", "--outfile", help="File or folder to write; {outtype} in the name is filled in."),
    ] = None,
    outtype: Annotated[
        str, typer.Option(help="f32, f16, bf16, q8_0, or auto: that of the source; or a preset such as Q4_K_M.")
    ] = "auto",
    imatrix: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Importance matrix, for presets.", show_default=False)
    ] = None,
    on_overflow: Annotated[
        str, typer.Option(metavar="HOW", help="Weights beyond F16: error, clip, or bf16 for their tensors.")
    ] = "error",
    split_max_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Several files of at most 300M or 2G.", show_default=False)
    ] = None,
    split_max_tensors: Annotated[
        int, typer.Option(metavar="N", min=0, help="Several files of at most N tensors.", show_default=False)
    ] = 0,
    no_tensor_first_split: Annotated[
        bool, typer.Option("--no-tensor-first-split", help="The first of several files has keys only.")
    ] = False,
    vocab_only: Annotated[bool, typer.Option("--vocab-only", help="Keys and vocabulary, no tensors.")] = False,
    bigendian: Annotated[bool, typer.Option("--bigendian", help="Write a big-endian file.")] = False,
    metadata: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON of general.* keys that beat the model card's.", show_default=False),
    ] = None,
    model_name: Annotated[str | None, typer.Option(help="general.name.", show_default=False)] = None,
    remote: Annotated[
        bool, typer.Option("--remote", help="DIR is ORG/NAME on the hub: only what is needed is downloaded.")
    ] = False,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit, for --remote.", show_default=False)
    ] = None,
    base: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Base model's folder, for adapters.", show_default=False)
    ] = None,
    for_: Annotated[
        str | None,
        typer.Option("--for", metavar="PROGRAM", help="ollama: one file, and a Modelfile.", show_default=False),
    ] = None,
    mmproj: Annotated[bool, typer.Option("--mmproj", help="Not there yet; says so.", hidden=True)] = False,
    print_supported_models: Annotated[
        bool, typer.Option("--print-supported-models", help="List the classes of models and leave.")
    ] = False,
    pre: Annotated[str | None, typer.Option(help="Pre-tokenizer to name, instead of the one found.")] = None,
    selftest: Annotated[
        bool, typer.Option("--self-test", help="Also write texts and their token ids, which `check` compares.")
    ] = False,
    dry_run: DryRun = False,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Convert a Hugging Face model (safetensors) to GGUF."""
    from gguftools.conversion.options import Options
    from gguftools.errors import GGUFError

    if print_supported_models:
        _print_models(json)
        return
    if folder is None:
        raise typer.BadParameter("name the folder of a model", param_hint="DIR")
    if mmproj:
        raise GGUFError("the part of a model that sees cannot be converted yet; leave out --mmproj for the text part")
    if for_ not in (None, "ollama"):
        raise GGUFError(f"unknown program '{for_}'; there is ollama")
    options = Options(
        pre=pre,
        selftest=selftest,
        metadata=metadata,
        model_name=model_name,
        vocab_only=vocab_only,
        bigendian=bigendian,
        split=_split(split_max_size, split_max_tensors, no_tensor_first_split),
        on_overflow=on_overflow,
    )
    if remote:
        _convert_remote(str(folder), revision, outfile, outtype, threads, imatrix, options, for_, dry_run, json)
    elif (folder / "adapter_config.json").is_file():
        _convert_adapter(folder, base, outfile, outtype, dry_run, json)
    else:
        _convert(folder, outfile, outtype, threads, imatrix, options, for_, dry_run, json)


def _split(max_size: str | None, max_tensors: int, no_tensor_first: bool) -> Split | None:
    from gguftools.conversion.options import Split
    from gguftools.toolbox.split import parse_size

    if max_size is None and not max_tensors:
        return None
    return Split(0 if max_size is None else parse_size(max_size), max_tensors, no_tensor_first)


def _convert(
    folder: Path,
    outfile: Path | None,
    outtype: str,
    threads: int | None,
    imatrix: Path | None,
    options: Options,
    program: str | None,
    dry_run: bool,
    json: bool,
) -> None:
    from gguftools.conversion import ollama
    from gguftools.conversion.run import convert as run
    from gguftools.conversion.run import planned

    if program == "ollama":
        ollama.check(options)
    if dry_run:
        done = planned(folder, outfile, outtype, imatrix, options)
    else:
        done = run(folder, outfile, outtype, None, threads, progress, False, imatrix, options)
    more = [ollama.write_modelfile(done)] if program == "ollama" and not dry_run else []
    _report(done, more, json)


def _convert_remote(
    repo: str,
    revision: str | None,
    outfile: Path | None,
    outtype: str,
    threads: int | None,
    imatrix: Path | None,
    options: Options,
    program: str | None,
    dry_run: bool,
    json: bool,
) -> None:
    from gguftools.conversion.remote import fetched, local_name

    with fetched(repo, revision, weights=not (options.vocab_only or dry_run), progress=progress) as folder:
        target = outfile if outfile is not None else Path(local_name(repo))
        _convert(folder, target, outtype, threads, imatrix, options, program, dry_run, json)


def _convert_adapter(
    folder: Path, base: Path | None, outfile: Path | None, outtype: str, dry_run: bool, json: bool
) -> None:
    from gguftools.conversion.lora import convert_lora

    done = convert_lora(folder, outfile, base, outtype, dry_run)
    summary = done.summary()
    if json:
        report.print_json(summary)
        return
    report.write(report.plain(summary["output"]))
    report.write(f"LoRA for {summary['architecture']}: {summary['matrices']:,} matrices, rank {summary['rank']}")


def _print_models(json: bool) -> None:
    from engine.models import ARCHS

    if json:
        report.print_json({name: list(arch.hf_names) for name, arch in ARCHS.items()})
        return
    report.table(["architecture", "classes"], [[name, ", ".join(arch.hf_names)] for name, arch in ARCHS.items()])


def _report(done: Conversion, more: list[Path], json: bool) -> None:
    summary: dict[str, Any] = done.summary() | ({"modelfile": str(more[0])} if more else {})
    if json:
        report.print_json(summary)
        return
    for path in (*summary["outputs"], *map(str, more)):
        report.write(report.plain(path))
    counts = f"{summary['tensors']:,} tensors, {summary['weights']:,} weights, {report.size(summary['bytes'])}"
    report.write(f"{summary['architecture']}, {summary['outtype']}: {counts}; pre-tokenizer {summary['pre']}")
