"""`gguftools quantize`: a model in other types."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from gguftools import report
from gguftools.commands.options import DryRun, Json, Threads
from gguftools.errors import GGUFError
from gguftools.progress import progress

HELP = """Quantize a GGUF file, a set of shards, or a Hugging Face folder (in one pass).

IN [OUT] TYPE [THREADS], as llama.cpp's quantize tool has them; without OUT the name is ggml-model-TYPE.gguf beside the
input. The bytes of plain presets are those that llama.cpp writes. Where its tool surprises, this one does what is
meant: patterns keep their case, work with every TYPE and must match something; a type that is asked for is never
exchanged; alignment is kept; per-layer keys follow --prune-layers; --keep-split does not change types. A run that was
stopped goes on where it was when the same command is given again."""


def quantize(
    arguments: Annotated[
        list[str], typer.Argument(metavar="IN [OUT] TYPE [THREADS]", help="See above.", show_default=False)
    ],
    imatrix: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Importance matrix (see `gguftools imatrix`).", show_default=False),
    ] = None,
    include_weights: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Use only importance of weights with this in the name; repeatable.", show_default=False
        ),
    ] = None,
    exclude_weights: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Leave out weights with this in the name; repeatable.", show_default=False),
    ] = None,
    pure: Annotated[bool, typer.Option("--pure", help="One type for all tensors, no mixture.")] = False,
    leave_output_tensor: Annotated[
        bool, typer.Option("--leave-output-tensor", help="Copy output.weight as it is.")
    ] = False,
    output_tensor_type: Annotated[
        str | None, typer.Option(metavar="TYPE", help="Type of the output matrix.", show_default=False)
    ] = None,
    token_embedding_type: Annotated[
        str | None, typer.Option(metavar="TYPE", help="Type of the embeddings.", show_default=False)
    ] = None,
    tensor_type: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN=TYPE",
            help="Type of tensors whose name matches this regular expression; repeatable.",
            show_default=False,
        ),
    ] = None,
    tensor_type_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File of PATTERN=TYPE, between white space.", show_default=False),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Recipe in place of TYPE (see `gguftools recipe`).", show_default=False),
    ] = None,
    ladder: Annotated[
        str | None,
        typer.Option(metavar="TYPES", help="Several types, with commas, in one pass, into -o DIR.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="PATH", help="Output; for --ladder a folder.", show_default=False),
    ] = None,
    allow_requantize: Annotated[
        bool,
        typer.Option("--allow-requantize", help="Accept tensors that are already quantized; says what it costs."),
    ] = False,
    no_fallback: Annotated[
        bool, typer.Option("--no-fallback", help="Refuse rows that a type's blocks do not divide.")
    ] = False,
    prune_layers: Annotated[
        str | None, typer.Option(metavar="N,N-N", help="Layers to leave out.", show_default=False)
    ] = None,
    keep_split: Annotated[bool, typer.Option("--keep-split", help="One output per shard of the input.")] = False,
    override_kv: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=TYPE:VALUE", help="Set a key; TYPE: int, float, bool, str; repeatable.", show_default=False
        ),
    ] = None,
    on_nonfinite: Annotated[
        str, typer.Option(metavar="HOW", help="error, or zero: take 0 for NaN and infinities in the weights.")
    ] = "error",
    record: Annotated[
        bool, typer.Option("--record", help="Write recipe and fingerprints of all sources to the metadata.")
    ] = False,
    sidecar: Annotated[
        bool, typer.Option("--sidecar", help="Write them to OUT.record.json instead; OUT stays plain.")
    ] = False,
    reuse: Annotated[
        Path | None,
        typer.Option(
            metavar="OLD", help="Take over unchanged tensors of an output with such a record.", show_default=False
        ),
    ] = None,
    max_buffer_size: Annotated[
        int | None,
        typer.Option(metavar="MIB", min=1, help="Memory for weights in work; 384 by default.", show_default=False),
    ] = None,
    pre: Annotated[
        str | None,
        typer.Option(help="Pre-tokenizer to name, for Hugging Face folders.", show_default=False),
    ] = None,
    target_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="In place of TYPE: types per tensor for the best file of at most so many bytes, as 4.2G.",
            show_default=False,
        ),
    ] = None,
    target_bpw: Annotated[
        float | None,
        typer.Option(metavar="BITS", min=1, max=32, help="The same by bits per weight.", show_default=False),
    ] = None,
    target_text: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="What the tensors are measured on, for a target.", show_default=False),
    ] = None,
    target_table: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Measurements: used if the file is there, else kept in it.", show_default=False
        ),
    ] = None,
    min_type: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN=TYPE", help="At least this for matching tensors, for a target.", show_default=False
        ),
    ] = None,
    max_type: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN=TYPE", help="At most this for matching tensors, for a target.", show_default=False
        ),
    ] = None,
    weighting: Annotated[
        str,
        typer.Option(
            metavar="HOW",
            help="Of weights without importance: reference, or robust (all columns alike: better, other bytes).",
        ),
    ] = "reference",
    refine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Stay close to the original on this text (`random`: on random tokens); repeatable.",
            show_default=False,
        ),
    ] = None,
    refine_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of it, for --refine.")] = 32768,
    refine_ctx: Annotated[int, typer.Option(metavar="N", min=16, help="Tokens of a window, for --refine.")] = 256,
    refine_eval: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Text of its own to report on, for --refine.", show_default=False),
    ] = None,
    dry_run: DryRun = False,
    threads: Threads = None,
    json: Json = False,
) -> None:
    from gguftools.conversion.options import Options
    from gguftools.quantize_file import Settings
    from gguftools.quantize_file import ladder as run_ladder
    from gguftools.quantize_file import quantize as run
    from gguftools.quantizing.prepare import layer_numbers
    from gguftools.recipe_file import load_recipe
    from quant.mixes import PlanOptions

    has_target = target_size is not None or target_bpw is not None
    if has_target and (
        recipe is not None or ladder is not None or (target_size is not None and target_bpw is not None)
    ):
        raise GGUFError("--target-size, --target-bpw, --recipe and --ladder exclude each other")
    source, output, kind, count = positionals(arguments, recipe is not None or has_target, ladder is not None, out)
    options = PlanOptions(
        pure=pure,
        leave_output_tensor=leave_output_tensor,
        output_tensor_type=output_tensor_type,
        token_embedding_type=token_embedding_type,
        tensor_types=tuple(tensor_types(tensor_type or [], tensor_type_file)),
        no_fallback=no_fallback,
    )
    settings = Settings(
        include_weights=tuple(include_weights or ()),
        exclude_weights=tuple(exclude_weights or ()),
        prune_layers=tuple(layer_numbers(prune_layers)) if prune_layers else (),
        keep_split=keep_split,
        override_kv=tuple(override_kv or ()),
        on_nonfinite=on_nonfinite,
        record=record,
        sidecar=sidecar,
        reuse=reuse,
        max_buffer=max_buffer_size and max_buffer_size << 20,
        conversion=Options(pre=pre),
        weighting=weighting,
    )
    wanted: Any = load_recipe(recipe) if recipe is not None else kind
    if has_target:
        from gguftools.allocating import recipe_for
        from gguftools.commands.running import running

        with running("measuring", "KLD", "passes") as step:
            wanted, chosen = recipe_for(
                source, target_size, target_bpw, target_text, target_table, imatrix,
                tensor_types(min_type or [], None), tensor_types(max_type or [], None), threads or count, step,
            )  # fmt: skip
        told = f"predicted mean KLD: {chosen.predicted:.6f} (of tensors measured one by one, plainly quantized)"
        report.warn(told)
    if refine and not dry_run:
        kinds = (("--ladder", ladder), ("--imatrix", imatrix), ("--reuse", reuse), ("--prune-layers", prune_layers))
        other = next((name for name, given in (*kinds, ("--keep-split", keep_split)) if given), None)
        if other is not None:
            raise GGUFError(f"--refine does not go with {other}")
        _refined(
            (source, output, wanted),
            (tuple(refine), refine_tokens, refine_ctx, refine_eval),
            (options, threads or count, progress, settings),
            json,
        )
        return
    shared = (imatrix, options, allow_requantize, threads or count, progress, dry_run, settings)
    if ladder is not None:
        results = run_ladder(
            source, [part.strip() for part in ladder.split(",") if part.strip()], output or ".", *shared
        )
    else:
        results = [run(source, output, wanted, *shared)]
    for line in dict.fromkeys(line for result in results for line in result.warnings):
        report.warn(line)
    if json:
        found = [result.summary() for result in results]
        report.print_json(found if ladder is not None else found[0])
        return
    for result in results:
        show(result)


quantize.__doc__ = HELP


def _refined(model: Any, wanted: Any, rest: Any, json: bool) -> None:
    """Quantize with refinement, and report."""
    from gguftools.refining import Calibration, refine

    texts, n_tokens, n_ctx, evaluation = wanted
    source, output, kind = model
    done = refine(source, output, kind, Calibration(texts, n_tokens, n_ctx, evaluation=evaluation), *rest)
    for line in dict.fromkeys((*done.quantized.warnings, *done.warnings)):
        report.warn(line)
    if json:
        report.print_json(done.summary())
        return
    show(done.quantized)
    rows = [
        (
            f"{d.layers[0]}-{d.layers[-1]}",
            f"{d.plain:.6f}",
            *(f"{d.refined[name]:.6f}" for name in d.refined),
            f"damping {d.choice:g}" if d.choice else "plain",
        )
        for d in done.decisions
    ]
    widest = max(done.decisions, key=lambda d: len(d.refined)).refined
    first = [(*row[:-1], *[""] * (len(widest) + 3 - len(row)), row[-1]) for row in rows]
    report.write()
    report.table(("layers", "KLD plain", *(f"damping {name}" for name in widest), "kept"), first)
    report.write()
    for found in (done.held, done.evaluation):
        if found is not None:
            report.write(
                f"{report.plain(found.text)}, {found.n_tokens:,} tokens: mean KLD {found.plain[0]:.6f} +- "
                f"{found.plain[1]:.6f} plain, {found.refined[0]:.6f} +- {found.refined[1]:.6f} refined "
                f"({found.change[0]:+.1%} +- {found.change[1]:.1%})"
            )


def positionals(
    found: list[str], has_recipe: bool, is_ladder: bool, out: Path | None
) -> tuple[Path, Path | None, str, int | None]:
    """Input, output, type and threads out of `IN [OUT] TYPE [THREADS]`; no TYPE with a recipe or a ladder.

    Raises GGUFError for any other number of them.
    """
    rest = list(found[1:])
    if is_ladder and has_recipe:
        raise GGUFError("--ladder and --recipe exclude each other")
    if not (is_ladder or has_recipe) and not rest:
        raise typer.BadParameter("expected IN [OUT] TYPE [THREADS]")
    kind = ""
    output = out
    if is_ladder or has_recipe:
        if rest and not rest[0].isdecimal() and not is_ladder:
            output = _one(output, rest.pop(0))
    elif _is_type(rest[0]):
        kind = rest.pop(0)
    else:
        if len(rest) < 2:
            raise typer.BadParameter(f"'{rest[0]}' is no type" + _nearest(rest[0]))
        output = _one(output, rest.pop(0))
        kind = rest.pop(0)
    threads = None
    if rest:
        text = rest.pop(0)
        if not text.isdecimal() or int(text) > 512:
            raise typer.BadParameter(f"'{text}' is no number of threads")
        threads = int(text) or None
    if rest:
        raise typer.BadParameter(f"'{rest[0]}' is one argument too many; expected IN [OUT] TYPE [THREADS]")
    return Path(found[0]), output, kind, threads


def _one(option: Path | None, argument: str) -> Path:
    if option is not None:
        raise typer.BadParameter("the output is named twice, as an argument and with -o")
    return Path(argument)


def _is_type(text: str) -> bool:
    from quant.errors import QuantError
    from quant.presets import get_preset

    try:
        get_preset(text)
    except QuantError:
        return False
    return True


def _nearest(text: str) -> str:
    from quant.errors import QuantError
    from quant.presets import get_preset

    try:
        get_preset(text)
    except QuantError as error:
        _, mark, near = str(error).partition("; ")
        return mark + near
    return ""


def tensor_types(given: list[str], file: Path | None) -> list[tuple[str, str]]:
    """(pattern, type) of options and of a file of them. The last `=` separates, as patterns may hold some.

    Raises GGUFError for text without one.
    """
    from gguftools.files import read_whole

    found = list(given)
    if file is not None:
        text = read_whole(file, "a text file").decode("utf-8", "replace")
        found += text.split()
        if not text.split():
            raise GGUFError(f"{file}: holds no PATTERN=TYPE")
    pairs = []
    for item in found:
        pattern, equals, kind = item.rpartition("=")
        if not (pattern and equals and kind):
            raise GGUFError(f"tensor type {shlex.quote(item)}: expected PATTERN=TYPE, such as ffn_down=Q6_K")
        pairs.append((pattern, kind))
    return pairs


def show(result: Any) -> None:
    """The report of one output: a row per tensor, then what they come to."""
    from gguftools.quantizing.result import COLUMNS

    report.table(COLUMNS, result.rows())
    report.write()
    for path in result.outputs or (result.output,):
        report.write(report.plain(str(path)))
    report.write(
        f"{result.preset}: {report.size(result.bytes_before)} -> {report.size(result.bytes_after)} of weights, "
        f"{result.bpw:.3f} bits per weight, {result.file_bytes:,} bytes of files"
    )
    types = ", ".join(f"{count} {name}" for name, count, _, _ in result.totals())
    report.write(f"tensors: {types}")
    if result.fallbacks:
        report.write(
            f"{result.fallbacks} tensors ({result.fallback_share:.1%} of the weights) took another type, because their "
            f"rows are not whole blocks: {result.bpw:.3f} bits per weight instead of {result.bpw_wanted:.3f}"
        )
    if result.reused:
        report.write(f"{len(result.reused)} tensors were taken over unchanged")
    if result.resumed:
        report.write(f"{report.size(result.resumed)} were done by an earlier run")
    if result.zeroed:
        total = sum(result.zeroed.values())
        report.write(f"{total:,} values in {len(result.zeroed)} tensors were not finite and are 0 now")
    if result.errors:
        name, worst = max(result.errors.items(), key=lambda pair: pair[1])
        mean = (sum(e * e for e in result.errors.values()) / len(result.errors)) ** 0.5
        report.write(
            f"quantizing again adds a relative error of {mean:.4f} to {len(result.errors)} tensors, most to {name}: "
            f"{worst:.4f}; the file it was made from would be better"
        )
