"""Folders of sentence-transformers: the pooling that they name."""

import json
import shutil

import pytest

import gguftools
from gguftools.conversion.sentence import sentence_settings
from gguftools.errors import GGUFError

MODULES = [{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]


@pytest.fixture
def folder(tmp_path):
    """Function: a folder with that content of modules.json and of the pooling's config.json."""

    def make(modules=MODULES, pooling=None):
        (tmp_path / "1_Pooling").mkdir(exist_ok=True)
        (tmp_path / "modules.json").write_text(modules if isinstance(modules, str) else json.dumps(modules))
        if pooling is not None:
            (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("pooling", "number"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, 1),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}, 2),
        ({"pooling_mode_lasttoken": True}, 3),
        ({"pooling_mode": "mean"}, 1),
        ({"pooling_mode": "cls"}, 2),
        ({"pooling_mode": "lasttoken"}, 3),
    ],
)
def test_pooling(folder, pooling, number):
    assert sentence_settings(folder(pooling=pooling)) == {"pooling_type": number}


def test_folders_without_one(tmp_path, folder):
    assert sentence_settings(tmp_path) == {}
    assert sentence_settings(folder([{"type": "sentence_transformers.models.Transformer", "path": ""}])) == {}


@pytest.mark.parametrize(
    ("modules", "pooling", "words"),
    [
        (MODULES, {"pooling_mode_max_tokens": True}, "'pooling_mode_max_tokens' is True; GGUF has mean, cls, last"),
        (MODULES, {"pooling_mode": "weightedmean"}, "'pooling_mode' is 'weightedmean'"),
        (MODULES, {}, "no kind of pooling is set"),
        (MODULES, None, "has no config.json"),
        ([{"type": "Pooling"}], {}, "names no folder"),
        ("[1]", {}, "is no list of modules"),
        ("nonsense", {}, "is no list of modules"),
        ("{}", {}, "is no list of modules"),
    ],
)
def test_errors(folder, modules, pooling, words):
    with pytest.raises(GGUFError) as caught:
        sentence_settings(folder(modules, pooling))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_file_says_it(data, tmp_path):
    source = tmp_path / "bert"
    shutil.copytree(data / "families" / "bert", source)
    for mode, number in (("pooling_mode_cls_token", 2), ("pooling_mode_lasttoken", 3)):
        (source / "1_Pooling" / "config.json").write_text(json.dumps({mode: True}))
        gguftools.convert(source, tmp_path / "bert.gguf", "f32")
        assert gguftools.load(tmp_path / "bert.gguf", threads=1).hparams.pooling == number
