"""`gguftools tokenize`: the ids and pieces of a text, and whether they give the text again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gguftools import report
from gguftools.commands.options import Json
from gguftools.errors import GGUFError

if TYPE_CHECKING:
    from gguftools.vocabulary import Tokens


def tokenize(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="GGUF file or model folder.", show_default=False)],
    text: Annotated[str | None, typer.Argument(metavar="TEXT", help="The text.", show_default=False)] = None,
    file: Annotated[
        Path | None, typer.Option("-f", "--file", help="Text file, UTF-8, read as it is.", show_default=False)
    ] = None,
    stdin: Annotated[bool, typer.Option("--stdin", help="Read the text from standard input.")] = False,
    ids: Annotated[bool, typer.Option("--ids", help="Print the ids alone, as a list.")] = False,
    no_bos: Annotated[bool, typer.Option("--no-bos", help="Add no special tokens around the text.")] = False,
    no_parse_special: Annotated[
        bool, typer.Option("--no-parse-special", help="Take the texts of special tokens as plain text.")
    ] = False,
    pre: Annotated[str | None, typer.Option(help="Pre-tokenizer of a folder, instead of the one found.")] = None,
    json: Json = False,
) -> None:
    """Show how a text is cut into tokens: ids, pieces, counts, and whether they give the text again."""
    from gguftools import vocabulary

    content = _content(text, file, stdin)
    _, tokenizer = vocabulary.open_vocabulary(model, pre)
    found = vocabulary.tokenize(tokenizer, content, not no_bos, not no_parse_special)
    if json:
        report.print_json(_as_json(found) | {"kind": tokenizer.kind})
    elif ids:
        report.write(str(found.ids))
    else:
        width = len(str(tokenizer.n_vocab))
        for i, piece in zip(found.ids, found.pieces):
            report.write(f"{i:>{width}}  {shown(piece)}")
        report.write(_summary(found, tokenizer.kind))
    if found.expected and not found.round_trip:
        raise typer.Exit(1)


def shown(piece: bytes) -> str:
    r"""A piece between quotes; bytes that are part of a character, and what does not print, are escaped.

    >>> shown(b" a\n"), shown(b"\xf0\x9f")
    ("' a\\n'", "'\\xf0\\x9f'")
    """
    try:
        return repr(piece.decode())
    except UnicodeDecodeError:
        return repr(piece)[1:]


def _content(text: str | None, file: Path | None, stdin: bool) -> str:
    if (text is not None) + (file is not None) + stdin != 1:
        raise typer.BadParameter("give the text, or a file with -f, or --stdin: one of them")
    if text is not None:
        return text
    source = "standard input" if file is None else str(file)
    data = sys.stdin.buffer.read() if file is None else file.read_bytes()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise GGUFError(f"{source}: is not UTF-8 text (byte {error.start:,}); convert it first") from None


def _as_json(found: Tokens) -> dict:
    return {
        "ids": found.ids,
        "pieces": [piece.decode(errors="replace") for piece in found.pieces],
        "tokens": len(found.ids),
        "characters": found.n_characters,
        "bytes": found.n_bytes,
        "round_trip": found.round_trip,
    }


def _summary(found: Tokens, kind: str) -> str:
    n = len(found.ids)
    rate = f", {found.n_bytes / n:.2f} bytes a token" if n else ""
    if found.round_trip:
        trip = "gives the text again"
    elif found.expected:
        trip = "does NOT give the text again"
    else:
        trip = "gives the text again but for what the vocabulary normalizes"
    return f"{n:,} tokens of {found.n_characters:,} characters{rate}; {kind}: {trip}"
