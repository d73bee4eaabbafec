"""Inputs that were found to matter, the seeds, and some mutations of them, through every reader."""

import random

import pytest

from tests.fuzz.__main__ import _mutate
from tests.fuzz.targets import TARGETS, inputs, run


@pytest.mark.parametrize("name", TARGETS)
def test_corpus(name, tmp_path):
    (tmp_path / "seeds").mkdir()
    TARGETS[name].seeds(tmp_path / "seeds")
    seeds = [path.read_bytes() for path in sorted((tmp_path / "seeds").iterdir())]
    assert any(run(TARGETS[name], data, tmp_path / "input") for data in seeds), "no seed is accepted"
    for _, data in inputs(name):
        run(TARGETS[name], data, tmp_path / "input")
    dice = random.Random(name)
    for _ in range(300):
        data = bytearray(dice.choice(seeds))
        for _ in range(dice.randint(1, 3)):
            _mutate(data, dice)
        run(TARGETS[name], bytes(data), tmp_path / "input")
