"""Generating text with a model file: prompts, conversations, and what `gguftools generate` reports."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gguftools.errors import GGUFError, naming
from gguftools.loading import load

if TYPE_CHECKING:
    from engine.contexts import ContextParams
    from engine.generation import Drafter, Generator, Token
    from engine.sampling import Params
    from engine.session import Session

Name = str | os.PathLike

N_CTX = 4096  # tokens of a context, unless the model was trained for fewer


@dataclass(frozen=True)
class Drafting:
    """Speculative decoding: by a smaller model, or by looking up what followed before.

    model: file of the draft model; look_up: without one; n_max: tokens of a draft; p_min: the least probability
    of a drafted token.
    """

    model: Name | None = None
    look_up: bool = False
    n_max: int = 16
    p_min: float = 0.0


@dataclass(frozen=True)
class Result:
    """What was generated. stop: why it ended: "end of text", "length", "context full", "stop string" or
    "interrupted"; timings: see `timings`."""

    text: str
    prompt_ids: list[int]
    ids: list[int]
    stop: str
    tokens: list[Token] = field(repr=False)
    timings: dict[str, float] = field(repr=False)


class TextGenerator:
    """A model that writes.

    params: of the context; sampling: of the chain; grammar: GBNF, json_schema: a schema as a dict; they exclude each
    other; stops: texts that end it; template: a named chat template.

    >>> import gguftools
    >>> writer = TextGenerator(gguftools.demo_model(), threads=2)
    >>> result = writer.write("The first", n=4)
    >>> len(result.ids), result.stop
    (4, 'length')

    Raises GGUFError and EngineError as `load` does, and for parameters that do not go together.
    """

    def __init__(
        self,
        model: Name,
        params: ContextParams | None = None,
        sampling: Params | None = None,
        *,
        threads: int | None = None,
        grammar: str | None = None,
        json_schema: Mapping[str, Any] | bool | None = None,
        stops: Sequence[str] = (),
        drafting: Drafting | None = None,
        template: str | None = None,
        shift: bool = False,
        keep: int = 0,
        n_probs: int = 0,
        special: bool = False,
        session: Session | None = None,
    ):
        from engine.contexts import ContextParams, ModelContext
        from engine.generation import Generator
        from engine.sampling import Chain, Params, TokenTexts

        self.model, self.stops, self.special, self.template = model, tuple(stops), special, template
        self.keep = keep
        with naming(model):
            self.session = session or load(model, threads=threads)
            params = params or ContextParams(n_ctx=min(N_CTX, self.session.n_ctx_train))
            self.context = ModelContext(self.session, params)
            texts = TokenTexts.of(self.session.tokenizer)
            matcher = _matcher(grammar, json_schema, texts)
            chain = Chain.of(sampling or Params(), texts, matcher, self.session.n_vocab)
        self.chain = chain
        with naming(model):
            self.generator: Generator = Generator(
                self.context,
                chain,
                self._drafter(drafting, params, threads),
                drafting.n_max if drafting is not None else 0,
                shift,
                keep,
                n_probs,
            )
        self.messages: list[dict[str, Any]] = []
        self._started = time.perf_counter()

    def _drafter(self, drafting: Drafting | None, params: ContextParams, threads: int | None) -> Drafter | None:
        from dataclasses import replace

        from engine.contexts import ModelContext
        from engine.generation import DraftModel, LookUp

        if drafting is None or (drafting.model is None and not drafting.look_up):
            return None
        if drafting.model is None:
            return LookUp()
        with naming(drafting.model):
            small = load(drafting.model, threads=threads)
            context = ModelContext(small, replace(params, n_ctx=self.context.n_ctx, n_seq_max=1))
            return DraftModel(context, self.session, drafting.p_min)

    # --- text ---

    def ids_of(self, prompt: str) -> list[int]:
        """The ids of a prompt, names of special tokens understood."""
        return self.session.tokenize(prompt, add_special=True, parse_special=True)

    def write(self, prompt: str | Sequence[int], n: int = -1, on_text: Callable[[str], None] | None = None) -> Result:
        """The text behind a prompt. n: tokens at most, -1 for as many as come; on_text: gets pieces of text as they
        come. An interrupt ends it: what is there is returned."""
        ids = self.ids_of(prompt) if isinstance(prompt, str) else [int(t) for t in prompt]
        return self._run(ids, n, on_text)

    def reply(self, message: str, n: int = -1, on_text: Callable[[str], None] | None = None) -> Result:
        """The next reply of a conversation, rendered by the model's chat template. Raises GGUFError for a model without
        one."""
        self.messages.append({"role": "user", "content": message})
        try:
            result = self._run(self._rendered(), n, on_text)
        except BaseException:
            self.messages.pop()
            raise
        self.messages.append({"role": "assistant", "content": result.text})
        return result

    def _rendered(self) -> list[int]:
        from gguftools import templates

        with naming(self.model):
            chosen = templates.chat_template(self.session.metadata, self.template)
            variables: dict[str, Any] = dict(templates.special_texts(self.session.tokenizer))
            text = templates.render(chosen, self.messages, **variables)
        return templates.encode_chat(self.session.tokenizer, text)

    def _run(self, ids: list[int], n: int, on_text: Callable[[str], None] | None) -> Result:
        from engine.generation import TextStream

        stream = TextStream(self.stops)
        tokens: list[Token] = []
        parts: list[str] = []
        stop = "interrupted"

        def give(text: str) -> None:
            parts.append(text)
            if text and on_text is not None:
                on_text(text)

        tokenizer = self.session.tokenizer
        try:
            with naming(self.model):
                if self.keep < 0:
                    self.generator.keep = len(ids)
                self.generator.feed(ids)
                for token in self.generator.run(n):
                    tokens.append(token)
                    give(stream.feed(tokenizer.token_to_piece(token.id, self.special)))
                    if stream.stopped is not None:
                        break
            stop = "stop string" if stream.stopped is not None else self.generator.stop
        except KeyboardInterrupt:
            pass
        give(stream.finish())
        return Result("".join(parts), ids, [t.id for t in tokens], stop, tokens, self.timings())

    # --- what is remembered ---

    def save(self, path: Name) -> None:
        """Write what is in memory, and its tokens; see `session_file`."""
        from gguftools.session_file import save_session

        save_session(path, self.context, self.generator.tokens)

    def resume(self, path: Name) -> None:
        """Begin with what `save` wrote: of a text that begins like it, only the rest is computed."""
        from gguftools.session_file import load_session

        self.generator.tokens = load_session(path, self.context)

    def timings(self) -> dict[str, float]:
        """Milliseconds and counts so far, of all prompts."""
        c = self.context.counts
        return {
            "load_ms": 1e3 * c.load,
            "prompt_ms": 1e3 * c.prompt,
            "prompt_tokens": c.n_prompt,
            "eval_ms": 1e3 * c.eval,
            "eval_runs": c.n_eval,
            "total_ms": 1e3 * (time.perf_counter() - self._started),
            "graphs_reused": c.reused,
            "drafted": self.generator.drafted,
            "accepted": self.generator.accepted,
        }


def timing_lines(t: Mapping[str, float]) -> list[str]:
    """Timings as llama.cpp prints them; counts are 1 at least.

    >>> timing_lines({"load_ms": 48.2, "prompt_ms": 50, "prompt_tokens": 5, "eval_ms": 100, "eval_runs": 10,
    ...     "total_ms": 151, "graphs_reused": 8, "drafted": 0, "accepted": 0})[1]
    'prompt eval time =      50.00 ms /     5 tokens (   10.00 ms per token,   100.00 tokens per second)'
    """

    def speed(what: str, ms: float, n: float, unit: str) -> str:
        n = max(1, n)
        per_second = 1e3 * n / ms if ms > 0 else 0.0
        return (
            f"{what:>16} = {ms:10.2f} ms / {n:5.0f} {unit:<6} ({ms / n:8.2f} ms per token, "
            f"{per_second:8.2f} tokens per second)"
        )

    n = max(1, t["prompt_tokens"]) + max(1, t["eval_runs"])
    lines = [
        f"{'load time':>16} = {t['load_ms']:10.2f} ms",
        speed("prompt eval time", t["prompt_ms"], t["prompt_tokens"], "tokens"),
        speed("eval time", t["eval_ms"], t["eval_runs"], "runs"),
        f"{'total time':>16} = {t['total_ms']:10.2f} ms / {n:5.0f} tokens",
        f"{'graphs reused':>16} = {t['graphs_reused']:10.0f}",
    ]
    if t["drafted"]:
        share = 100 * t["accepted"] / t["drafted"]
        lines.append(f"{'drafted':>16} = {t['drafted']:10.0f} tokens, {t['accepted']:.0f} accepted ({share:.1f} %)")
    return lines


def _matcher(grammar: str | None, json_schema: Mapping[str, Any] | bool | None, texts: Any) -> Any:
    from engine.sampling import GrammarMatcher
    from engine.sampling.json_schema import json_schema_to_gbnf

    if grammar is not None and json_schema is not None:
        raise GGUFError("a grammar and a JSON schema exclude each other; give one of them")
    if json_schema is not None:
        grammar = json_schema_to_gbnf(json_schema)
    return None if grammar is None else GrammarMatcher.of(grammar, texts)


def generate(model: Name, prompt: str, n: int = 128, on_text: Callable[[str], None] | None = None, **options: Any):
    """The text behind a prompt: a `Result`. options: as `TextGenerator` takes them.

    >>> import gguftools
    >>> gguftools.generate(gguftools.demo_model(), "The first", n=3, threads=2).stop
    'length'
    """
    return TextGenerator(model, **options).write(prompt, n, on_text)


def read_text(path: Path) -> str:
    """A prompt from a file. Raises GGUFError for text that is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise GGUFError(f"{path}: is no UTF-8 text at byte {error.start}") from None
