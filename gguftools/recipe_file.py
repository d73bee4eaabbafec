"""Recipes as files: presets by their name, TOML files, those that come with the package, and what a GGUF file tells of
how it was made."""

from __future__ import annotations

import os
from pathlib import Path

from gguftools.errors import GGUFError, naming
from gguftools.files import read_whole
from gguftools.quantizing.prepare import RECIPE
from quant.errors import QuantError
from quant.mixes import TensorInfo, recipe_from
from quant.presets import PRESETS, get_preset, recipe_of
from quant.recipes import Recipe, read_recipe

MAX_SIZE = 1 << 20  # bytes of a recipe


def recipe_folder() -> Path:
    """Where the package's recipes lie: beside the code where it is installed, beside the packages in a checkout."""
    here = Path(__file__).parent
    installed = here / "recipes"
    return installed if installed.is_dir() else here.parent / "recipes"


def packaged() -> dict[str, Path]:
    """Name -> file of the recipes that come with the package."""
    return {path.stem: path for path in sorted(recipe_folder().glob("*.toml"))}


def preset_recipe(name: str) -> Recipe:
    """The recipe of a preset. Raises QuantError for an unknown one."""
    return recipe_of(get_preset(name))


def load_recipe(name: str | os.PathLike) -> Recipe:
    """A TOML file, or a recipe of the package by its name, or a preset.

    >>> load_recipe("Q4_K_M").base
    'Q4_K'

    Raises GGUFError for a file that cannot be read, QuantError for a recipe that cannot be understood.
    """
    path = Path(name)
    if path.suffix.lower() != ".toml" and not path.is_file():
        found = packaged().get(str(name).lower())
        if found is None:
            return _preset(str(name))
        path = found
    data = read_whole(path, "a recipe in TOML")
    if len(data) > MAX_SIZE:
        raise GGUFError(f"{path}: has {len(data):,} bytes; a recipe has at most {MAX_SIZE:,}")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise GGUFError(f"{path}: not UTF-8 text (byte {error.start}); a recipe is TOML") from None
    return read_recipe(text, str(path), preset_recipe)


def _preset(name: str) -> Recipe:
    try:
        return preset_recipe(name)
    except QuantError as error:
        names = ", ".join(packaged())
        raise QuantError(f"{error}; it is no file either, and no recipe of the package: {names}") from None


def recipe_of_file(path: str | os.PathLike, exact: bool = False) -> Recipe:
    """The recipe of a GGUF file (or a set of shards): the one that it was made with, if it says so, else the types
    that its tensors have; exact: always the latter.

    >>> import gguftools
    >>> recipe_of_file(gguftools.demo_model()).base
    'BF16'

    Raises GGUFError for a file that cannot be read or is no model.
    """
    from gguftools.toolbox.shards import open_set

    with open_set(path) as model:
        if model.metadata.get("general.type") == "imatrix" or not model.tensors:
            raise GGUFError(f"{path}: holds no model's tensors, so no recipe can be read off it")
        told = model.metadata.get(RECIPE)
        if isinstance(told, str) and not exact:
            return read_recipe(told, f"{path}: {RECIPE}", preset_recipe)
        ftype = model.metadata.get("general.file_type")
        name = next((p.name for p in PRESETS.values() if p.ftype == ftype), "")
        tensors = [TensorInfo(t.name, t.shape, t.format) for t in model.tensors.values()]
        label = f"{Path(path).stem}"
        with naming(path):
            return recipe_from(
                tensors, str(model.metadata.get("general.architecture", "")), label, ftype if name else None
            )
