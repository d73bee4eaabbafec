"""`gguftools edit`: keys, array entries and tensors of a GGUF file."""

from __future__ import annotations

import json as json_module
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from gguftools import report
from gguftools.commands.options import DryRun, Json
from gguftools.errors import GGUFError
from gguftools.gguf import ValueType, keys
from gguftools.progress import progress
from gguftools.text import read_text


def _many(flag: str, metavar: str, text: str):
    return typer.Option(flag, metavar=metavar, help=text + " May be repeated.", show_default=False)


def edit(
    file: Annotated[Path, typer.Argument(help="GGUF file.", show_default=False)],
    set_: Annotated[
        list[str] | None,
        _many("--set", "KEY[:TYPE]=VALUE", "Set a key, or an entry of an array (KEY[3]=VALUE). Arrays as JSON lists."),
    ] = None,
    set_file: Annotated[
        list[str] | None, _many("--set-file", "KEY[:TYPE]=FILE", "Set a key to a file's content.")
    ] = None,
    special_token: Annotated[
        list[str] | None,
        _many("--special-token", "NAME=TOKEN", "Set the id of a special token by its text, as eos=</s>."),
    ] = None,
    rename: Annotated[list[str] | None, _many("--rename", "KEY=NEW", "Rename a key.")] = None,
    delete: Annotated[list[str] | None, _many("--delete", "KEY", "Delete a key.")] = None,
    rename_tensor: Annotated[list[str] | None, _many("--rename-tensor", "NAME=NEW", "Rename a tensor.")] = None,
    drop_tensor: Annotated[list[str] | None, _many("--drop-tensor", "PATTERN", "Drop tensors, as blk.3.*.")] = None,
    add_tensor: Annotated[list[str] | None, _many("--add-tensor", "NAME[:TYPE]=FILE.npy", "Add a tensor.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--outfile", help="Write here; FILE stays as it is.", show_default=False)
    ] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Change long stretches of the header in place too, with a journal.")
    ] = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Change keys, entries of arrays, and tensors. The file stays as it is until the new one is written and verified.

    A type is needed only for a new key whose value does not tell, or to change it: uint8 to float64, bool, string; for
    an array that of its elements.

    Example: gguftools edit model.gguf --set general.name="My model" --special-token "eot=<|im_end|>"
    """
    from gguftools.gguf import GGUF
    from gguftools.toolbox.edit import Edits, restore
    from gguftools.toolbox.edit import edit as run

    if not dry_run and restore(file):
        report.warn(f"{file}: an interrupted edit was undone")
    with GGUF(file) as f:
        known = {key: (field.type, field.element_type) for key, field in f.fields.items()}
    values: dict[str, Any] = {}
    entries: dict[tuple[str, int], Any] = {}
    for text in set_ or ():
        name, value = _pair(text, "--set")
        entry = re.fullmatch(r"(.+)\[(-?\d{1,9})\]", name)
        if entry:
            kind = known.get(entry[1], (None, None))[1]
            entries[entry[1], int(entry[2])] = value if kind is ValueType.STRING else _literal(name, value)
        else:
            key, kind = _typed(name)
            values[key] = (_value(key, value, kind, known), kind)
    for text in set_file or ():
        name, source = _pair(text, "--set-file")
        key, kind = _typed(name)
        values[key] = (_value(key, read_text(source), kind, known), kind)
    edits = Edits(
        rename=dict(_pair(text, "--rename") for text in rename or ()),
        delete=delete or (),
        set=values,
        entries=entries,
        special=dict(_pair(text, "--special-token") for text in special_token or ()),
        rename_tensors=dict(_pair(text, "--rename-tensor") for text in rename_tensor or ()),
        drop_tensors=drop_tensor or (),
        add_tensors=dict(_new_tensor(text) for text in add_tensor or ()),
    )
    with progress("writing", file.stat().st_size) as advance:
        result = run(file, edits, output, in_place, dry_run, advance)
    if json:
        report.print_json(result.summary() | {"dry_run": dry_run})
        return
    for change in result.changes:
        report.write(report.plain(change))
    how = f"would be written {result.way}" if dry_run else f"written {result.way}"
    report.write(f"{report.plain(str(result.output))}: {how if result.changes or output else result.way}")


def _pair(text: str, option: str) -> tuple[str, str]:
    name, found, value = text.partition("=")
    if not found or not name:
        raise GGUFError(f"{option} {text}: expected NAME=VALUE")
    return name, value


def _typed(name: str) -> tuple[str, ValueType | None]:
    """`key:type` -> key, type; a colon that no type follows is the key's own."""
    key, found, kind = name.rpartition(":")
    if found and kind.upper() in ValueType.__members__:
        return key, ValueType[kind.upper()]
    return name, None


def _value(key: str, text: str, kind: ValueType | None, known: dict[str, tuple]) -> Any:
    """The text of an option as a value: a string where the key holds one, else JSON if it is any, else a string."""
    old, _ = known.get(key, (None, None))
    wanted = kind if kind is not None else old if old is not None else keys.type_of(key)
    is_list = text.lstrip().startswith("[")
    if wanted is ValueType.STRING and not (kind is not None and is_list) and old is not ValueType.ARRAY:
        return text
    if wanted is None:
        try:
            value = json_module.loads(text)
        except ValueError:
            return text
        return text if isinstance(value, dict) or value is None else value
    return _literal(key, text)


def _literal(key: str, text: str) -> Any:
    try:
        return json_module.loads(text)
    except ValueError:
        raise GGUFError(
            f"{key}: {text!r} is no number, true, false or JSON list; name a type if it is a string"
        ) from None


def _new_tensor(text: str) -> tuple[str, Any]:
    import numpy as np

    from quant.formats import FORMATS

    name, source = _pair(text, "--add-tensor")
    key, found, kind = name.rpartition(":")
    if found and kind.upper() in FORMATS:
        name = key
    else:
        kind = ""
    try:
        values = np.load(source, allow_pickle=False)
    except OSError as error:
        raise GGUFError(f"{source}: cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise GGUFError(f"{source}: is no .npy file of numbers") from None
    if not isinstance(values, np.ndarray):
        raise GGUFError(f"{source}: holds several arrays; save one with numpy.save")
    return name, (values, kind or None)
