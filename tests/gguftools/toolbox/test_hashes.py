"""Hashes against llama.cpp's own script, and manifests."""

import hashlib
import json
import subprocess
import sys

import pytest

import gguftools
from gguftools import cli
from gguftools.errors import GGUFError
from gguftools.gguf import GGUF, Writer
from gguftools.toolbox.hashes import hash_file


def test_the_manifest_is_that_of_gguf_hash(tiny, capsys):
    command = [sys.executable, "-m", "gguf.scripts.gguf_hash", str(tiny["bf16"])]
    theirs = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert cli.main(["hash", str(tiny["bf16"]), "--sha1", "--sha256", "--uuid"]) == 0
    assert capsys.readouterr().out == theirs


def test_xxh64(tiny):
    xxhash = pytest.importorskip("xxhash")
    total = xxhash.xxh64()
    with GGUF(tiny["bf16"]) as f:
        for t in f.tensors.values():
            total.update(t.raw.tobytes())
    assert hash_file(tiny["bf16"], ["xxh64"], layers=False)[0].digest == total.hexdigest()


def test_order_counts_unless_told_otherwise(tiny, tmp_path):
    with GGUF(tiny["bf16"]) as f, Writer(tmp_path / "b.gguf") as w:
        views = list(f.tensors.values())[::-1]
        for view in views:
            w.declare(view.name, view.shape, view.format)
        for view in views:
            w.write(view.name, view.raw)
    one, two = tiny["bf16"], tmp_path / "b.gguf"
    assert hash_file(one, layers=False) != hash_file(two, layers=False)
    assert hash_file(one, layers=False, any_order=True) == hash_file(two, layers=False, any_order=True)
    assert set(hash_file(one)[:-1]) == set(hash_file(two)[:-1])


def test_keys_shards_and_byte_order_do_not_count(tiny, tmp_path):
    wanted = gguftools.hash(tiny["bf16"])
    gguftools.edit(tiny["bf16"], gguftools.Edits(set={"general.name": "other"}), tmp_path / "a.gguf")
    gguftools.convert_endian(tiny["bf16"], tmp_path / "b.gguf", "big")
    shards = gguftools.split(tiny["bf16"], tmp_path / "c", 20).shards
    for path in (tmp_path / "a.gguf", tmp_path / "b.gguf", shards[1].path):
        assert gguftools.hash(path) == wanted


def test_constants_of_old_checkpoints_are_left_out(tmp_path):
    with Writer(tmp_path / "a.gguf") as w:
        for name in ("a", "h.0.attention.bias"):
            w.declare(name, (4,), "I8")
        w.write("a", b"abcd")
        w.write("h.0.attention.bias", b"efgh")
    found = hash_file(tmp_path / "a.gguf")
    assert [h.tensor for h in found] == ["a", ""]
    assert found[1].digest == hashlib.sha256(b"abcd").hexdigest()


def test_checking_a_manifest(tiny, q4, tmp_path, capsys):
    path = str(tiny["bf16"])
    assert cli.main(["hash", path, "--sha1", "--sha256"]) == 0
    manifest = tmp_path / "m.manifest"
    manifest.write_text(capsys.readouterr().out)
    assert cli.main(["hash", path, "--check", str(manifest)]) == 0
    out = capsys.readouterr().out
    assert out.count("-  Ok") == 57
    assert "sha1 " not in out
    assert out.endswith("- Success\n")
    assert cli.main(["hash", str(q4), "-c", str(manifest), "--json"]) == 1
    verdicts = [row["verdict"] for row in json.loads(capsys.readouterr().out)["hashes"]]
    assert verdicts.count("Mismatch") == 44
    gguftools.edit(path, gguftools.Edits(drop_tensors=["output_norm.weight"]), tmp_path / "less.gguf")
    assert cli.main(["hash", str(tmp_path / "less.gguf"), "-c", str(manifest)]) == 1
    assert "Missing" in capsys.readouterr().out


def test_refusals(tiny, tmp_path):
    with pytest.raises(GGUFError, match="unknown hash 'md5'"):
        hash_file(tiny["bf16"], ["md5"])
    (tmp_path / "m").write_text("nothing here\n")
    assert cli.main(["hash", str(tiny["bf16"]), "-c", str(tmp_path / "m")]) == 1
    assert cli.main(["hash", str(tiny["bf16"]), "-c", str(tmp_path / "absent")]) == 1
