"""The command line: registers the commands and turns errors into one line. Nothing else.

Exit codes: 0 done; 1 failed, unreadable or findings; 2 wrong usage; 128 + n stopped by signal n. Results go to stdout,
progress to stderr.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from engine.errors import EngineError
from gguftools import report
from gguftools._version import __version__
from gguftools.commands.check import check
from gguftools.commands.compare import compare
from gguftools.commands.convert import convert
from gguftools.commands.convert_endian import convert_endian
from gguftools.commands.demo import demo
from gguftools.commands.dequantize import dequantize
from gguftools.commands.diff import diff
from gguftools.commands.edit import edit
from gguftools.commands.embed import embed
from gguftools.commands.export import export
from gguftools.commands.generate import generate
from gguftools.commands.hash import hash_
from gguftools.commands.imatrix import imatrix_app
from gguftools.commands.inspect import inspect
from gguftools.commands.merge_lora import merge_lora
from gguftools.commands.perplexity import perplexity
from gguftools.commands.quantize import quantize
from gguftools.commands.recipe import recipe_app
from gguftools.commands.report import report_
from gguftools.commands.sensitivity import sensitivity
from gguftools.commands.split import merge, split
from gguftools.commands.template import template
from gguftools.commands.tokenize import tokenize
from gguftools.commands.trace import trace
from gguftools.commands.verify import verify
from gguftools.errors import GGUFError
from gguftools.files import guard_maps
from quant.errors import QuantError

_INTERRUPTED = 130  # exit code, as shells have it

RUNNING = (demo, convert, export, quantize, generate, embed, perplexity, compare, sensitivity, report_)
LOOKING = (inspect, tokenize, template, trace)
TOOLBOX = (check, edit, diff, hash_, verify, split, merge, merge_lora, convert_endian, dequantize)
GROUPS = (imatrix_app, recipe_app)

app = typer.Typer(
    name="gguftools",
    help="Convert, quantize and judge language models in GGUF. No compiler, no torch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (*RUNNING, *LOOKING, *TOOLBOX):
    app.command(command.__name__.strip("_").replace("_", "-"))(command)
for group in GROUPS:
    app.add_typer(group)


def _print_version(wanted: bool) -> None:
    if wanted:
        report.write(f"gguftools {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Say more on stderr; show tracebacks.")] = False,
) -> None:
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.DEBUG if verbose else logging.WARNING)
    for noisy in ("numba", "matplotlib"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("gguftools").verbose = verbose  # type: ignore[attr-defined]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    guard_maps()
    _open_closed_streams()
    try:
        with _stop_by_exception():
            code = app(arguments, standalone_mode=False, prog_name="gguftools") or 0
            report.flush()
    except BaseException as error:
        return _report(error)
    if code == _INTERRUPTED:
        sys.stderr.write("\ninterrupted\n")
    return code


def _open_closed_streams() -> None:
    """Standard streams that the caller has closed swallow what is written, and no file gets their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115


@contextlib.contextmanager
def _stop_by_exception() -> Iterator[None]:
    """Signals that end a process raise SystemExit instead, so that unfinished files go. What is ignored stays so, as
    `nohup` wants it."""

    def stop(number: int, _: object) -> None:
        sys.exit(128 + number)

    names = ("SIGTERM", "SIGHUP") if threading.current_thread() is threading.main_thread() else ()
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    numbers = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _report(error: BaseException) -> int:
    """One line on stderr for what a user can cause; anything else is our bug and keeps its traceback."""
    usage = getattr(error, "show", None)  # the command line's own complaints show themselves
    if usage is not None:
        usage()
        return getattr(error, "exit_code", 2)
    if isinstance(error, typer.Exit):
        return error.exit_code
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        sys.stderr.write("\ninterrupted\n")
        return _INTERRUPTED
    if isinstance(error, BrokenPipeError):  # the reader of our output has gone, as `| head` does
        report.discard()
        return 1
    message = _message(error)
    if message is None:
        raise error
    if getattr(logging.getLogger("gguftools"), "verbose", False):
        traceback.print_exception(error)
    sys.stderr.write(f"error: {report.plain(message)}\n")
    return 1


def _message(error: BaseException) -> str | None:
    """The line for an error that is the user's to mend, or None."""
    if isinstance(error, (GGUFError, EngineError, QuantError)):
        return str(error)
    if isinstance(error, MemoryError):
        return "out of memory; close other programs, or use a smaller model or context"
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}"
    return None


if __name__ == "__main__":
    sys.exit(main())
