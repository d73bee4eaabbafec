"""Texts that people have: plain text, and JSON lines with a text each or a conversation each.

A line of JSON is a text if it has one of TEXT_FIELDS, a conversation if it has one of CHAT_FIELDS; conversations are
rendered with the model's own chat template, and control tokens in them are recognised.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gguftools.errors import GGUFError
from gguftools.text import read_text

if TYPE_CHECKING:
    from engine.session import Session

TEXT_FIELDS = ("text", "content", "prompt")
CHAT_FIELDS = ("messages", "conversations", "conversation")
JSON_LINES = (".jsonl", ".ndjson")

_AT_ONCE = 500  # conversations that share the bounds of time and memory of one rendering

#: names of speakers in one widespread form of conversations -> roles of templates
_ROLES = {"human": "user", "gpt": "assistant"}


@dataclass(frozen=True)
class Text:
    """What a file says. sha256: of the file's bytes; chat: rendered conversations; weight: what it counts for."""

    path: Path
    text: str
    sha256: str
    chat: bool = False
    weight: float = 1.0

    @property
    def name(self) -> str:
        return self.path.name


def split_weight(name: str | os.PathLike) -> tuple[Path, float]:
    """`FILE:WEIGHT` or `FILE` -> both.

    >>> split_weight("code.txt:0.5"), split_weight("prose.txt")
    ((PosixPath('code.txt'), 0.5), (PosixPath('prose.txt'), 1.0))

    Raises GGUFError for a weight that is not positive.
    """
    path = Path(name)
    head, colon, tail = str(name).rpartition(":")
    if path.exists() or not colon:
        return path, 1.0
    try:
        weight = float(tail)
    except ValueError:
        return path, 1.0
    if not 0 < weight < 1e6:
        raise GGUFError(f"{name}: a text cannot have the weight {tail}; use a positive number")
    return Path(head), weight


def read_corpus(name: str | os.PathLike, session: Session | None = None) -> Text:
    """A text file or JSON lines. session: the model whose template renders conversations.

    Raises GGUFError for a file that is missing, empty, not UTF-8, or has a line that is neither text nor conversation.
    """
    path, weight = split_weight(name)
    text, chat = read_text(path), False
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    if path.suffix.lower() in JSON_LINES:
        text, chat = _json_lines(path, text, session)
    return Text(path, text, sha256, chat, weight)


def _json_lines(path: Path, content: str, session: Session | None) -> tuple[str, bool]:
    texts: list[str] = []
    chats: list[Sequence[Mapping[str, Any]]] = []
    for i, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise GGUFError(f"{path}: line {i} is not JSON ({error}); expected one object a line") from None
        text = _first(record, TEXT_FIELDS, str)
        messages = _first(record, CHAT_FIELDS, list)
        if messages is not None:
            chats.append([_message(path, i, m) for m in messages])
        elif text is not None:
            texts.append(text)
        else:
            raise GGUFError(f"{path}: line {i} has neither a text ({', '.join(TEXT_FIELDS)}) nor {CHAT_FIELDS[0]}")
    if not chats:
        return "\n".join(texts), False
    if session is None:
        raise GGUFError(f"{path}: conversations need a model with a chat template")
    try:
        rendered = render_chats(session, chats)
    except GGUFError as error:
        raise GGUFError(f"{path}: its conversations cannot be rendered: {error}") from None
    return "".join([*(t + "\n" for t in texts), *rendered]), True


def _first(record: object, fields: Sequence[str], kind: type) -> Any:
    if not isinstance(record, dict):
        return None
    return next((record[f] for f in fields if isinstance(record.get(f), kind)), None)


def _message(path: Path, line: int, message: object) -> dict[str, Any]:
    found = message if isinstance(message, dict) else {}
    role, content = found.get("role", found.get("from")), found.get("content", found.get("value"))
    if not isinstance(role, str) or not isinstance(content, str):
        raise GGUFError(f"{path}: line {line} has a message without role and content")
    return {**found, "role": _ROLES.get(role, role), "content": content}


def render_chats(session: Session, chats: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
    """Conversations as the model's template writes them, without the beginning of a reply.

    Raises GGUFError as `templates.chat_template` and `templates.render_all` do.
    """
    from gguftools.templates import chat_template, render_all, special_texts

    template = chat_template(session.metadata)
    special: dict[str, Any] = {**special_texts(session.tokenizer)}
    texts: list[str] = []
    for lo in range(0, len(chats), _AT_ONCE):
        texts += render_all(template, chats[lo : lo + _AT_ONCE], add_generation_prompt=False, **special)
    return texts
