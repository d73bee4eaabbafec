"""`gguftools generate`: text behind a prompt, or a conversation."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gguftools import report
from gguftools.commands.loading import (
    Adapters,
    BatchSize,
    CacheK,
    CacheV,
    CheckTensors,
    Control,
    ControlLayers,
    ControlScaled,
    CtxSize,
    FullWindows,
    LoadMode,
    OverrideKv,
    RopeBase,
    RopeScale,
    ScaledAdapters,
    ThreadsBatch,
    UbatchSize,
    adapt,
    opened,
)
from gguftools.commands.options import Activations, Json, Threads
from gguftools.errors import GGUFError

if TYPE_CHECKING:
    from engine.sampling import Params
    from gguftools.generating import Drafting, Result, TextGenerator

SAMPLING = "Sampling"
DRAFTS = "Speculative decoding"


def _sampling(*names: str, help: str, **options: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=SAMPLING, show_default=False, **options)


def generate(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="GGUF file.", show_default=False)],
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", help="The prompt.", show_default=False)] = None,
    file: Annotated[
        Path | None, typer.Option("-f", "--file", help="The prompt from a text file.", show_default=False)
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", "-cnv", help="A conversation by the model's chat template; without -p, line by line."),
    ] = False,
    system: Annotated[
        str | None, typer.Option("-sys", "--system-prompt", help="What the model is told first.", show_default=False)
    ] = None,
    template: Annotated[
        str | None, typer.Option("--chat-template", help="A named chat template of the model.", show_default=False)
    ] = None,
    n_predict: Annotated[
        int, typer.Option("-n", "--predict", "--n-predict", min=-1, help="Tokens at most; -1: until the text ends.")
    ] = -1,
    ctx_size: CtxSize = None,
    batch_size: BatchSize = 2048,
    ubatch_size: UbatchSize = 512,
    threads: Threads = None,
    threads_batch: ThreadsBatch = None,
    cache_k: CacheK = "f16",
    cache_v: CacheV = "f16",
    full_windows: FullWindows = False,
    context_shift: Annotated[
        bool, typer.Option("--context-shift", help="When the context is full, forget half of it and go on.")
    ] = False,
    keep: Annotated[
        int, typer.Option("--keep", min=-1, help="Tokens of the prompt that are not forgotten then; -1: all.")
    ] = 0,
    prompt_cache: Annotated[
        Path | None,
        typer.Option(
            "--prompt-cache", help="Begin with what this file remembers, and save it at the end.", show_default=False
        ),
    ] = None,
    reverse_prompt: Annotated[
        list[str] | None,
        typer.Option("-r", "--reverse-prompt", "--stop", help="Stop at this text; may repeat.", show_default=False),
    ] = None,
    special: Annotated[bool, typer.Option("-sp", "--special", help="Show special tokens.")] = False,
    no_display_prompt: Annotated[
        bool, typer.Option("--no-display-prompt", help="Show the generated text only.")
    ] = False,
    escape: Annotated[bool, typer.Option("-e", "--escape", help=r"Read \n, \t and the like in -p, -r.")] = False,
    n_probs: Annotated[
        int, typer.Option("--n-probs", min=0, help="With --json: the likeliest tokens at each place.")
    ] = 0,
    seed: Annotated[int | None, _sampling("-s", "--seed", help="Seed; a random one by default.")] = None,
    samplers: Annotated[str | None, _sampling("--samplers", help="Samplers in order, apart by ';'.")] = None,
    sampler_seq: Annotated[
        str | None, _sampling("--sampler-seq", "--sampling-seq", help="The same by letters.")
    ] = None,
    temp: Annotated[float | None, _sampling("--temp", help="Temperature, 0.8; 0: the likeliest.")] = None,
    top_k: Annotated[int | None, _sampling("--top-k", help="Keep so many, 40; 0: off.")] = None,
    top_p: Annotated[float | None, _sampling("--top-p", help="Keep so much probability, 0.95; 1: off.")] = None,
    min_p: Annotated[float | None, _sampling("--min-p", help="Keep this share of the best, 0.05; 0: off.")] = None,
    top_n_sigma: Annotated[float | None, _sampling("--top-n-sigma", help="Keep n deviations; -1: off.")] = None,
    typ_p: Annotated[float | None, _sampling("--typical", "--typical-p", help="Locally typical; 1: off.")] = None,
    xtc_probability: Annotated[float | None, _sampling("--xtc-probability", help="XTC; 0: off.")] = None,
    xtc_threshold: Annotated[float | None, _sampling("--xtc-threshold", help="XTC's threshold, 0.1.")] = None,
    dynatemp_range: Annotated[float | None, _sampling("--dynatemp-range", help="Temperature by entropy.")] = None,
    dynatemp_exponent: Annotated[float | None, _sampling("--dynatemp-exp", help="Its exponent, 1.")] = None,
    repeat_last_n: Annotated[int | None, _sampling("--repeat-last-n", help="Tokens to penalize, 64.")] = None,
    repeat_penalty: Annotated[float | None, _sampling("--repeat-penalty", help="Of repetition; 1: off.")] = None,
    presence_penalty: Annotated[float | None, _sampling("--presence-penalty", help="Of presence; 0: off.")] = None,
    frequency_penalty: Annotated[float | None, _sampling("--frequency-penalty", help="Of frequency; 0: off.")] = None,
    dry_multiplier: Annotated[float | None, _sampling("--dry-multiplier", help="DRY; 0: off.")] = None,
    dry_base: Annotated[float | None, _sampling("--dry-base", help="DRY's base, 1.75.")] = None,
    dry_allowed_length: Annotated[int | None, _sampling("--dry-allowed-length", help="Free repetition, 2.")] = None,
    dry_penalty_last_n: Annotated[int | None, _sampling("--dry-penalty-last-n", help="DRY's reach, 64.")] = None,
    dry_breaker: Annotated[
        list[str] | None, _sampling("--dry-sequence-breaker", help="What ends a repetition; 'none': nothing.")
    ] = None,
    mirostat: Annotated[int | None, _sampling("--mirostat", help="Mirostat 1 or 2; 0: off.")] = None,
    mirostat_eta: Annotated[float | None, _sampling("--mirostat-lr", help="Its learning rate, 0.1.")] = None,
    mirostat_tau: Annotated[float | None, _sampling("--mirostat-ent", help="Its entropy, 5.")] = None,
    logit_bias: Annotated[
        list[str] | None, _sampling("-l", "--logit-bias", help="ID+BIAS or ID-BIAS, 15043-inf; may repeat.")
    ] = None,
    ignore_eos: Annotated[bool, _sampling("--ignore-eos", help="Never end the text.")] = False,
    grammar: Annotated[str | None, _sampling("--grammar", help="GBNF that the text follows.")] = None,
    grammar_file: Annotated[Path | None, _sampling("--grammar-file", help="The same from a file.")] = None,
    json_schema: Annotated[str | None, _sampling("-j", "--json-schema", help="JSON schema of the text.")] = None,
    json_schema_file: Annotated[
        Path | None, _sampling("-jf", "--json-schema-file", help="The same from a file.")
    ] = None,
    draft_model: Annotated[
        Path | None,
        typer.Option(
            "-md",
            "--model-draft",
            help="A smaller model that guesses ahead.",
            rich_help_panel=DRAFTS,
            show_default=False,
        ),
    ] = None,
    lookup: Annotated[
        bool, typer.Option("--lookup", help="Guess what came before in the text.", rich_help_panel=DRAFTS)
    ] = False,
    draft_max: Annotated[
        int, typer.Option("--draft-max", min=1, help="Tokens of a guess.", rich_help_panel=DRAFTS)
    ] = 16,
    draft_p_min: Annotated[
        float,
        typer.Option("--draft-p-min", min=0, max=1, help="Least probability of a token.", rich_help_panel=DRAFTS),
    ] = 0.75,
    lora: Adapters = None,
    lora_scaled: ScaledAdapters = None,
    control_vector: Control = None,
    control_vector_scaled: ControlScaled = None,
    control_layers: ControlLayers = None,
    rope_freq_base: RopeBase = 0.0,
    rope_freq_scale: RopeScale = 0.0,
    activations: Activations = "f32",
    load_mode: LoadMode = "auto",
    check_tensors: CheckTensors = False,
    override_kv: OverrideKv = None,
    json: Json = False,
) -> None:
    """Write text: continue a prompt, or hold a conversation. Ctrl-C ends a reply, twice the conversation."""
    from gguftools.generating import Drafting, TextGenerator, read_text, timing_lines

    given = locals()
    if prompt is not None and file is not None:
        raise GGUFError("-p and -f exclude each other; give one prompt")
    if draft_model is not None and lookup:
        raise GGUFError("--model-draft and --lookup exclude each other; choose one")
    if json and chat and prompt is None and file is None:
        raise GGUFError("--json wants a prompt: give -p or -f")
    text = read_text(file).removesuffix("\n") if file is not None else prompt
    if text is not None and escape:
        text = unescaped(text)
    if text is None and not chat:
        raise GGUFError("which prompt? Give -p, -f, or --chat for a conversation")
    stops = [unescaped(s) if escape else s for s in reverse_prompt or ()]
    session, params = opened(given)
    drafting: Drafting | None = None
    if draft_model is not None or lookup:
        drafting = Drafting(draft_model, lookup, draft_max, draft_p_min)
    writer = TextGenerator(
        model,
        params,
        sampling_of(given),
        threads=threads,
        grammar=read_text(grammar_file) if grammar_file is not None else grammar,
        json_schema=_schema(json_schema, json_schema_file),
        stops=stops,
        drafting=drafting,
        template=template,
        shift=context_shift,
        keep=keep,
        n_probs=n_probs if json else 0,
        special=special,
        session=session,
    )
    adapt(writer.context, given)
    if prompt_cache is not None and prompt_cache.exists():
        writer.resume(prompt_cache)
    if system is not None:
        writer.messages.append({"role": "system", "content": system})
    if chat and text is None:
        converse(writer, n_predict)
    else:
        assert text is not None
        result = _once(writer, text, n_predict, chat, json, no_display_prompt or chat)
        if json:
            _print_json(writer, model, text, result)
    if prompt_cache is not None:
        writer.save(prompt_cache)
    if not json:
        for line in timing_lines(writer.timings()):
            sys.stderr.write(line + "\n")


def _once(writer: TextGenerator, text: str, n: int, chat: bool, json: bool, hide_prompt: bool) -> Result:
    show = None if json else report.write_raw
    if show is not None and not hide_prompt:
        show(text)
    result = writer.reply(text, n, show) if chat else writer.write(text, n, show)
    if show is not None:
        show("\n")
    return result


def converse(writer: TextGenerator, n: int) -> None:
    """Lines from standard input, replies to standard output, until the input ends or the line is /exit."""
    watched = sys.stdin.isatty()
    if watched:
        _line_editing()
        sys.stderr.write("Type a message; /exit or Ctrl-D ends the conversation, Ctrl-C a reply.\n")
    while True:
        try:
            message = input("> ") if watched else sys.stdin.readline()
        except EOFError:
            break
        except KeyboardInterrupt:
            break
        if not watched and not message:
            break
        message = message.rstrip("\n")
        if message.strip() == "/exit":
            break
        if message.strip():
            result = writer.reply(message, n, report.write_raw)
            report.write_raw("\n")
            if result.stop == "context full":
                report.warn("the context is full: use a larger -c, or --context-shift")
    if watched:
        report.write_raw("\n")


def _line_editing() -> None:
    """Arrow keys and a history, where the system has them."""
    try:
        import readline  # noqa: F401
    except ImportError:
        return


def _print_json(writer: TextGenerator, model: Path, prompt: str, result: Result) -> None:
    tokenizer = writer.session.tokenizer

    def described(token: int, logprob: float) -> dict[str, Any]:
        piece = tokenizer.token_to_piece(token, special=True).decode(errors="replace")
        return {"id": token, "piece": piece, "logprob": logprob}

    tokens = [
        described(t.id, t.logprob) | ({"top": [described(*one) for one in t.top]} if t.top else {})
        for t in result.tokens
    ]
    report.print_json(
        {
            "model": str(model),
            "prompt": prompt,
            "prompt_ids": result.prompt_ids,
            "text": result.text,
            "tokens": tokens,
            "stop": result.stop,
            "sampler": str(writer.chain),
            "context": asdict(writer.context.params) | {"n_ctx": writer.context.n_ctx},
            "timings": result.timings,
        }
    )


def unescaped(text: str) -> str:
    r"""Backslash escapes as characters.

    >>> unescaped(r"a\nb\\n")
    'a\nb\\n'
    """
    import re

    known = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\\": "\\", "'": "'", '"': '"'}
    return re.sub(r"\\([ntr0\\'\"])", lambda m: known[m[1]], text)


#: options whose names are those of `Params`
_NAMED = (
    "seed", "temp", "top_k", "top_p", "min_p", "top_n_sigma", "typ_p", "xtc_probability", "xtc_threshold",
    "dynatemp_range", "dynatemp_exponent", "repeat_last_n", "repeat_penalty", "presence_penalty", "frequency_penalty",
    "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "mirostat", "mirostat_eta",
    "mirostat_tau",
)  # fmt: skip


def sampling_of(given: dict[str, Any]) -> Params:
    """The parameters of sampling that a command line sets. Raises EngineError for values out of bounds."""
    from engine.sampling import Params, samplers_from_letters, samplers_from_names

    values = {name: given[name] for name in _NAMED if given[name] is not None}
    if given["samplers"] is not None:
        values["samplers"] = samplers_from_names(given["samplers"].split(";"))
    if given["sampler_seq"] is not None:
        values["samplers"] = samplers_from_letters(given["sampler_seq"])
    if given["dry_breaker"]:
        values["dry_sequence_breakers"] = () if given["dry_breaker"] == ["none"] else tuple(given["dry_breaker"])
    values["logit_bias"] = dict(map(read_bias, given["logit_bias"] or ()))
    return Params(ignore_eos=given["ignore_eos"], **values)


def read_bias(text: str) -> tuple[int, float]:
    """`ID+BIAS` or `ID-BIAS` (`false` for -inf, as in the reference's server) as (id, bias).

    >>> read_bias("15043+1.5"), read_bias("2-inf")
    ((15043, 1.5), (2, -inf))

    Raises GGUFError for anything else.
    """
    at = next((i for i, c in enumerate(text) if c in "+-"), -1)
    try:
        if at > 0:
            return int(text[:at]), float(text[at:])
    except ValueError:
        pass
    raise GGUFError(f"--logit-bias {text}: expected an id and a bias, as in 15043+1 or 15043-inf")


def _schema(text: str | None, path: Path | None) -> Any:
    import json

    from gguftools.generating import read_text

    if path is not None:
        text = read_text(path)
    if text is None:
        return None
    try:
        return json.loads(text)
    except ValueError as error:
        raise GGUFError(f"{path or '--json-schema'}: is no JSON: {error}") from None
