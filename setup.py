"""What pyproject.toml cannot say: `recipes/` is installed as a folder of the package `gguftools`."""

from setuptools import find_namespace_packages, setup

setup(
    packages=[*find_namespace_packages(include=["gguftools*", "quant*", "engine*"]), "gguftools.recipes"],
    package_dir={"gguftools.recipes": "recipes"},
)
