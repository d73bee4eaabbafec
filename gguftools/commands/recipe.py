"""`gguftools recipe`: mixtures as text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gguftools import report
from gguftools.commands.options import Json

recipe_app = typer.Typer(name="recipe", help="Recipes: which tensor gets which type, as TOML.", no_args_is_help=True)


@recipe_app.command("show")
def show(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Preset, recipe of the package, or TOML file.", show_default=False)
    ],
    json: Json = False,
) -> None:
    """Print a preset or recipe in the form that `quantize --recipe` takes."""
    from gguftools.recipe_file import load_recipe

    _print(load_recipe(name), json)


@recipe_app.command("from")
def from_(
    model: Annotated[Path, typer.Argument(metavar="FILE", help="GGUF file.", show_default=False)],
    types: Annotated[
        bool, typer.Option("--types", help="Read the types off the tensors, even if the file names its recipe.")
    ] = False,
    json: Json = False,
) -> None:
    """Print the recipe that a GGUF file was made with, or one that gives the types that its tensors have."""
    from gguftools.recipe_file import recipe_of_file

    _print(recipe_of_file(model, types), json)


@recipe_app.command("list")
def list_(json: Json = False) -> None:
    """List presets and the recipes of the package."""
    from gguftools.recipe_file import load_recipe, packaged
    from quant.presets import PRESETS

    rows = [(p.name, p.format or "", p.label) for p in PRESETS.values()]
    own = [(name, load_recipe(path)) for name, path in packaged().items()]
    rows += [(name, recipe.base, recipe.description) for name, recipe in own]
    if json:
        report.print_json([dict(zip(("name", "base", "description"), row)) for row in rows])
        return
    report.table(("name", "base type", "description"), rows)


def _print(recipe, json: bool) -> None:
    from quant.recipes import write_recipe

    text = write_recipe(recipe)
    if json:
        report.print_json({"name": recipe.name, "recipe": text})
        return
    report.write(report.plain(text.rstrip("\n")) if "\x1b" in text else text.rstrip("\n"))
