"""Chat templates: messages in, the text that a model sees out.

A template is a program that came with the model. It is rendered in a process of its own, in jinja2's immutable
sandbox, with bounds on time, memory and length (`template_worker.py`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gguftools.errors import GGUFError

if TYPE_CHECKING:
    from engine.tokenizer import Tokenizer

DEFAULT = "tokenizer.chat_template"

SECONDS = 10  # that rendering may take
_BYTES = 1 << 30  # of memory, where the system can bound it
_CHARACTERS = 1 << 24  # of the text
_MAX_TEMPLATE = 1 << 21  # characters; the longest in use have about 30,000

Message = Mapping[str, Any]  # role, content, and whatever else the template knows

#: what is shown of a template that no messages are given for
SAMPLE: tuple[Message, ...] = (
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi there"},
    {"role": "user", "content": "How are you?"},
)


def chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The templates of a model by name; the one without a name is "default". Raises GGUFError for values of wrong
    types."""
    found = {}
    for key, value in metadata.items():
        if key == DEFAULT or key.startswith(DEFAULT + "."):
            if not isinstance(value, str):
                raise GGUFError(f"key '{key}' is no text: the file is damaged")
            found[key[len(DEFAULT) + 1 :] or "default"] = value
    return found


def chat_template(metadata: Mapping[str, Any], name: str | None = None) -> str:
    """One of them. Raises GGUFError if there is none, or none of that name."""
    found = chat_templates(metadata)
    if not found:
        raise GGUFError(
            "the model has no chat template; it is no chat model, or lost the template when it was converted"
        )
    if (name or "default") not in found:
        raise GGUFError(f"there is no chat template '{name or 'default'}'; there are {', '.join(found)}")
    return found[name or "default"]


def special_texts(tokenizer: Tokenizer) -> dict[str, str]:
    """The variables that templates know special tokens by: `bos_token`, `eos_token` and so on."""
    return {f"{name}_token": tokenizer.vocab.tokens[i] for name, i in tokenizer.vocab.special.items()}


def render(
    template: str,
    messages: Sequence[Message],
    add_generation_prompt: bool = True,
    seconds: int = SECONDS,
    **variables: Any,
) -> str:
    """The text of a conversation.

    messages: mappings with `role` and `content`; add_generation_prompt: whether the beginning of a reply is added;
    variables: what else the template knows, such as `tools`, `documents`, and the texts of `special_texts`.

    >>> render("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", [{"role": "user", "content": "Hi"}])
    '<user>Hi'

    Raises GGUFError for a template that is wrong, refuses the messages, or goes beyond the bounds.
    """
    return render_all(template, [messages], add_generation_prompt, seconds, **variables)[0]


def render_all(
    template: str,
    conversations: Sequence[Sequence[Message]],
    add_generation_prompt: bool = True,
    seconds: int = SECONDS,
    **variables: Any,
) -> list[str]:
    """The texts of several conversations; `seconds` bounds all of them together. Raises GGUFError as `render` does."""
    if len(template) > _MAX_TEMPLATE:
        raise GGUFError(f"the chat template has {len(template):,} characters: it is refused")
    common = {"add_generation_prompt": add_generation_prompt, **variables}
    request = {
        "template": template,
        "variables": [{"messages": messages, **common} for messages in conversations],
        "seconds": seconds,
        "bytes": _BYTES,
        "characters": _CHARACTERS,
    }
    try:
        data = json.dumps(request).encode()
    except (TypeError, ValueError) as error:
        raise GGUFError(f"the messages cannot be given to a template: {error}") from None
    # -P: what lies beside the worker or in the current folder is not imported
    command = [sys.executable, "-P", str(Path(__file__).with_name("template_worker.py"))]
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=seconds, check=False)
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise GGUFError(f"the chat template takes more than {seconds} seconds: it is refused") from None
    except ValueError:
        raise GGUFError("the chat template went beyond its bounds of memory or time: it is refused") from None
    if "error" in answer:
        raise GGUFError(f"the chat template cannot be rendered: {' '.join(str(answer['error']).split())[:300]}")
    return answer["texts"]


def encode_chat(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a rendered conversation: special tokens count, and BOS is added unless the template wrote it."""
    ids = tokenizer.tokenize(text, add_special=False, parse_special=True)
    if not tokenizer.add_bos or ids[:1] == [tokenizer.bos]:
        return ids
    return [*tokenizer.tokenize("", add_special=True)[:1], *ids]
