"""`gguftools template`: the text and the tokens that a model sees of a conversation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gguftools import report
from gguftools.commands.options import Json
from gguftools.errors import GGUFError

if TYPE_CHECKING:
    from engine.tokenizer import Tokenizer

#: what stands around special tokens
OPEN, CLOSE = "⟦", "⟧"


def template(
    file: Annotated[Path, typer.Argument(help="GGUF file or model folder.", show_default=False)],
    messages: Annotated[
        Path | None,
        typer.Option(
            help="JSON: a list of messages, or an object with `messages`, `tools` and what else the template knows.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="A named template instead of the default one.", show_default=False)
    ] = None,
    no_generation_prompt: Annotated[
        bool, typer.Option("--no-generation-prompt", help="Do not begin the assistant's reply.")
    ] = False,
    source: Annotated[bool, typer.Option("--source", help="Print the template itself.")] = False,
    json: Json = False,
) -> None:
    """Show what a model would see of a conversation, its special tokens marked."""
    from gguftools import templates
    from gguftools.vocabulary import open_vocabulary

    metadata, tokenizer = open_vocabulary(file)
    try:
        chosen = templates.chat_template(metadata, name)
    except GGUFError as error:
        raise GGUFError(f"{file}: {error}") from None
    if source:
        report.write(chosen)
        return
    text = _rendered(chosen, tokenizer, messages, not no_generation_prompt)
    ids = templates.encode_chat(tokenizer, text)
    if json:
        names = list(templates.chat_templates(metadata))
        pieces = [tokenizer.token_to_piece(i, special=True).decode(errors="replace") for i in ids]
        report.print_json({"templates": names, "text": text, "ids": ids, "pieces": pieces, "tokens": len(ids)})
        return
    for line in marked(tokenizer, ids).split("\n"):
        report.write(report.plain(line))
    n_special = sum(_is_special(tokenizer, i) for i in ids)
    report.write()
    report.write(f"{len(ids):,} tokens, {n_special:,} of them special, shown in {OPEN}{CLOSE}")


def _rendered(chosen: str, tokenizer: Tokenizer, path: Path | None, add_generation_prompt: bool) -> str:
    """The text of the messages; without any, of a sample, which loses its system message if the template refuses it."""
    from gguftools import templates

    variables: dict[str, Any] = dict(templates.special_texts(tokenizer))
    if path is not None:
        given = read_messages(path)
        return templates.render(chosen, given.pop("messages"), add_generation_prompt, **(variables | given))
    try:
        return templates.render(chosen, templates.SAMPLE, add_generation_prompt, **variables)
    except GGUFError:
        return templates.render(chosen, templates.SAMPLE[1:], add_generation_prompt, **variables)


def read_messages(path: Path) -> dict[str, Any]:
    """A conversation and the other variables of a JSON file. Raises GGUFError for a file that holds something else."""
    import json

    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise GGUFError(f"{path}: is not JSON: {str(error)[:80]}") from None
    found = found if isinstance(found, dict) else {"messages": found}
    given = found.get("messages")
    fits = isinstance(given, list) and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in given)
    if not fits:
        raise GGUFError(f'{path}: expected messages such as [{{"role": "user", "content": "Hello"}}]')
    return found


def marked(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of ids with special tokens between marks."""
    parts: list[bytes] = []
    for i in ids:
        piece = tokenizer.token_to_piece(i, special=True)
        parts.append(f"{OPEN}{piece.decode(errors='replace')}{CLOSE}".encode() if _is_special(tokenizer, i) else piece)
    return b"".join(parts).decode(errors="replace")


def _is_special(tokenizer: Tokenizer, i: int) -> bool:
    from engine.tokenizer.vocab import TokenType

    return tokenizer.vocab.types[i] in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
