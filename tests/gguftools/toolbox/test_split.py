"""Splitting and merging: the reference's names, keys and cuts; never onto a file, never half."""

import json

import pytest

import gguftools
from gguftools import cli
from gguftools.errors import GGUFError
from gguftools.gguf import GGUF, Writer
from gguftools.toolbox.shards import open_set, shard_path, siblings
from gguftools.toolbox.split import parse_size


def names(folder):
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize(
    ("limits", "counts"),
    [
        ({}, [56]),
        ({"max_tensors": 20}, [20, 20, 16]),
        ({"max_tensors": 28}, [28, 28]),
        ({"max_tensors": 56}, [56]),
        ({"max_tensors": 20, "no_tensor_first": True}, [0, 20, 20, 16]),
        ({"max_size": 2_000_000}, [7, 14, 14, 14, 7]),
        ({"max_size": 1}, [1] * 56),
    ],
)
def test_round_trip(limits, counts, tiny, tmp_path):
    done = gguftools.split(tiny["bf16"], tmp_path / "m", **limits)
    assert names(tmp_path) == [shard_path("m", i, len(counts)).name for i in range(len(counts))]
    assert [len(s.tensors) for s in done.shards] == counts
    source = GGUF(tiny["bf16"])
    for i, shard in enumerate(done.shards):
        with GGUF(shard.path) as f:
            assert list(f.tensors) == list(shard.tensors)
            assert list(f.fields)[-3:] == ["split.no", "split.tensors.count", "split.count"]
            assert [str(f.fields[k].type) for k in ("split.no", "split.count", "split.tensors.count")] == [
                "uint16",
                "uint16",
                "int32",
            ]
            assert (f.metadata["split.no"], f.metadata["split.count"]) == (i, len(counts))
            assert f.metadata["split.tensors.count"] == 56
            assert len(f.fields) == (len(source.fields) if i == 0 else 0) + 3
            if "max_size" in limits and len(f.tensors) > 1:
                assert shard.n_bytes <= limits["max_size"]
    with open_set(done.shards[-1].path) as model:
        assert list(model.tensors) == list(source.tensors)
        assert dict(model.metadata) == dict(source.metadata) or len(counts) == 1
    gguftools.merge([done.shards[-1].path], tmp_path / "whole.gguf")
    with GGUF(tmp_path / "whole.gguf") as f:
        assert f.metadata["split.count"] == 0
        for name, t in source.tensors.items():
            assert f.tensors[name].raw.tobytes() == t.raw.tobytes()
        assert {k: v.raw for k, v in f.fields.items() if k in source.fields} == {
            k: v.raw for k, v in source.fields.items()
        }


def test_other_alignments_reach_all_shards(tmp_path):
    with Writer(tmp_path / "a.gguf") as w:
        w.add("general.alignment", 256, "uint32")
        for i in range(4):
            w.declare(f"t{i}", (3,), "I8")
        for i in range(4):
            w.write(f"t{i}", bytes([i] * 3))
    gguftools.split(tmp_path / "a.gguf", tmp_path / "s", 2)
    with open_set(tmp_path / "s-00002-of-00002.gguf") as model:
        assert [f.alignment for f in model.files] == [256, 256]
        assert [t.raw.tolist() for t in model.tensors.values()] == [[i] * 3 for i in range(4)]


def test_nothing_is_replaced(tiny, tmp_path):
    (tmp_path / "m-00002-of-00003.gguf").write_bytes(b"mine")
    with pytest.raises(GGUFError, match="is there already"):
        gguftools.split(tiny["bf16"], tmp_path / "m", 20)
    assert names(tmp_path) == ["m-00002-of-00003.gguf"]
    shards = [s.path for s in gguftools.split(tiny["bf16"], tmp_path / "n", 20).shards]
    with pytest.raises(GGUFError, match=r"is the input file|is there already"):
        gguftools.merge(shards[:-1], shards[-1])  # as `merge n-0000*.gguf` does when the output is forgotten
    with pytest.raises(GGUFError, match="is there already"):
        gguftools.merge(shards, tmp_path / "m-00002-of-00003.gguf")
    assert (tmp_path / "m-00002-of-00003.gguf").read_bytes() == b"mine"


def test_a_failure_leaves_nothing(tiny, tmp_path, monkeypatch):
    from gguftools.toolbox import split as module

    written = []

    def write(output, *rest, **options):
        written.append(output)
        if len(written) == 3:
            raise GGUFError("the disk is full")
        original(output, *rest, **options)

    original = module.write
    monkeypatch.setattr(module, "write", write)
    with pytest.raises(GGUFError, match="full"):
        gguftools.split(tiny["bf16"], tmp_path / "m", 20)
    assert len(written) == 3
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("missing", "shard s-00002-of-00003.gguf is missing"),
        ("renamed", "not named as one"),
        ("swapped", "says it is shard"),
        ("count", "the set is mixed up"),
        ("repeated", "is in another shard too"),
    ],
)
def test_sets_that_do_not_fit(fault, says, tiny, tmp_path):
    paths = [s.path for s in gguftools.split(tiny["bf16"], tmp_path / "s", 20).shards]
    start = paths[0]
    if fault == "missing":
        paths[1].unlink()
    elif fault == "renamed":
        start = paths[1].rename(tmp_path / "other.gguf")
    elif fault == "swapped":
        data = paths[1].read_bytes(), paths[2].read_bytes()
        paths[2].write_bytes(data[0])
        paths[1].write_bytes(data[1])
    elif fault == "count":
        gguftools.edit(paths[1], gguftools.Edits(set={"split.count": 4}))
        start = paths[2]
    else:
        with GGUF(paths[2]) as f:
            name = next(iter(f.tensors))
        gguftools.edit(paths[1], gguftools.Edits(rename_tensors={next(iter(GGUF(paths[1]).tensors)): name}))
    with pytest.raises(GGUFError, match=says):
        open_set(start)


def test_tensors_must_add_up(tiny, tmp_path):
    paths = [s.path for s in gguftools.split(tiny["bf16"], tmp_path / "s", 20).shards]
    gguftools.edit(paths[1], gguftools.Edits(drop_tensors=[next(iter(GGUF(paths[1]).tensors))]))
    with pytest.raises(GGUFError, match="have 55 tensors, 56 are announced"):
        open_set(paths[0])


def test_merge_refusals(tiny, tmp_path):
    with pytest.raises(GGUFError, match="is not split"):
        gguftools.merge([tiny["bf16"]], tmp_path / "out.gguf")
    a = gguftools.split(tiny["bf16"], tmp_path / "a", 40).shards
    b = gguftools.split(tiny["bf16"], tmp_path / "b", 40).shards
    with pytest.raises(GGUFError, match="one set at a time"):
        gguftools.merge([a[0].path, b[1].path], tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_delete_splits(tiny, tmp_path):
    done = gguftools.split(tiny["bf16"], tmp_path / "a", 40)
    gguftools.merge([done.shards[0].path], tmp_path / "out.gguf", delete=True)
    assert names(tmp_path) == ["out.gguf"]


def test_siblings_and_sizes(tmp_path):
    assert siblings(tmp_path / "a.gguf") is None
    assert next(p.name for p in siblings(tmp_path / "x-00001-of-00002-00002-of-00002.gguf")) == (
        "x-00001-of-00002-00001-of-00002.gguf"
    )
    assert parse_size("300m") == 300_000_000
    for bad in ("", "2", "0G", "-1M", "2GB", "1.5G"):
        with pytest.raises(GGUFError, match="is no size"):
            parse_size(bad)


def test_commands(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["split", str(tiny["bf16"]), "m", "--split-max-size", "2M", "--dry-run"]) == 0
    assert "nothing was written" in capsys.readouterr().out
    assert names(tmp_path) == []
    assert cli.main(["split", str(tiny["bf16"]), "m", "--split-max-size", "2M", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["shards"]) == 5
    assert cli.main(["merge", *names(tmp_path), "out.gguf"]) == 0
    assert "56 tensors of 5 shards merged" in capsys.readouterr().out
    assert cli.main(["merge", "m-00001-of-00005.gguf"]) == 1
    assert cli.main(["split", str(tiny["bf16"]), "m", "--split-max-size", "2X"]) == 1
    assert cli.main(["split", str(tiny["bf16"]), "m", "--split-max-size", "2M", "--split-max-tensors", "3"]) == 1
