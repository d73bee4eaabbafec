"""Renders a chat template in a process of its own, which `templates.py` starts, bounds and ends.

Reads one JSON object from stdin: template, variables (a list, one object for each text), seconds, bytes, characters.
Writes one JSON object: texts, or error. A template is a program that came with a model: it runs in jinja2's immutable
sandbox, and what the sandbox does not bound (time, memory) the system does.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import sys
from collections.abc import Iterable
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    """`{% generation %}`, which marks what the assistant says: the text alone counts here."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, indent: Any = None, separators: Any = None, ensure_ascii: bool = False, **options: Any) -> str:
    """JSON as it stands in a prompt: nothing is escaped for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=bool(options.get("sort_keys"))
    )


def _environment() -> ImmutableSandboxedEnvironment:
    """As transformers makes it, which templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _joined(chunks: Iterable[str], characters: int) -> str:
    parts = []
    for chunk in chunks:
        characters -= len(chunk)
        if characters < 0:
            raise TemplateError("the text is too long")
        parts.append(chunk)
    return "".join(parts)


def _bound(seconds: int, n_bytes: int) -> None:
    """Limits of this process, where the system has such."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (n_bytes, n_bytes))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        template = _environment().from_string(request["template"])
        return {"texts": [_joined(template.generate(v), request["characters"]) for v in request["variables"]]}
    except MemoryError:
        return {"error": "it needs too much memory"}
    except RecursionError:
        return {"error": "it calls itself without end"}
    except Exception as error:  # templates raise whatever their expressions do
        line = getattr(error, "lineno", None)
        return {"error": f"{error or type(error).__name__}" + (f" (line {line})" if line else "")}


if __name__ == "__main__":
    request = json.loads(sys.stdin.buffer.read())
    _bound(request["seconds"], request["bytes"])
    sys.stdout.write(json.dumps(_answer(request)))
