"""Every model family: tiny checkpoints as the original library writes them, converted, run, and compared with the
original's logits and with what the reference's converter writes."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import gguftools
from engine.models import ARCHS
from gguftools.gguf.reader import GGUF

#: folder -> keys whose value the reference has wrong, or that it lacks; see golden/README.md
KEYS_APART = {
    "mistral-swa": {"llama.attention.sliding_window"},  # the original has a window, the reference's graph none
}
#: folders whose reference file is not compared at all, and why
NO_REFERENCE = {}
#: folder -> end of the names of tensors whose bytes are not compared, and why. Ours are e^x rounded correctly; the
#: reference's come from a library whose last bit is wrong for one value in a hundred
BYTES_APART = {"mamba": ".ssm_a", "falcon-mamba": ".ssm_a"}
TOLERANCE = 2e-3

_HERE = Path(__file__).parents[1] / "data" / "families"


def folders(shared):
    """name -> path of all checkpoints: shared ones, and those that are committed."""
    found = {path.name: path for path in sorted((shared / "golden" / "arch").glob("*")) if path.is_dir()}
    return found | {path.name: path for path in sorted(_HERE.glob("*")) if path.is_dir()}


def is_known(path):
    names = json.loads((path / "config.json").read_text())["architectures"]
    return any(name in arch.hf_names for arch in ARCHS.values() for name in names)


@pytest.fixture(scope="session")
def converted(tmp_path_factory):
    """Function folder -> file with float32 weights."""
    done = {}

    def convert(folder):
        if folder not in done:
            done[folder] = tmp_path_factory.mktemp(folder.name) / "f32.gguf"
            gguftools.convert(folder, done[folder], "f32")
        return done[folder]

    return convert


def pytest_generate_tests(metafunc):
    from tests.conftest import SHARED

    if "checkpoint" in metafunc.fixturenames:
        found = {name: path for name, path in folders(SHARED).items() if is_known(path)}
        metafunc.parametrize("checkpoint", list(found.values()), ids=list(found))


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_logits(checkpoint, converted, backend):
    expected = np.load(checkpoint / "expected.npz")
    session = gguftools.load(converted(checkpoint), backend, threads=2)
    for n in (0, 1):
        ids = expected[f"ids{n}"]
        logits = session.logits(ids)
        np.testing.assert_allclose(logits[expected[f"rows{n}"]], expected[f"logits{n}"], atol=TOLERANCE, rtol=0)
        nll = -log_softmax(logits[:-1].astype(np.float64))[np.arange(len(ids) - 1), ids[1:]]
        np.testing.assert_allclose(nll, expected[f"nll{n}"], atol=TOLERANCE, rtol=0)


def test_windows_are_independent(checkpoint, converted):
    """Two sequences at once give what each gives alone."""
    expected = np.load(checkpoint / "expected.npz")
    session = gguftools.load(converted(checkpoint), threads=2)
    ids = expected["ids1"][:40]
    both = session.hidden(np.stack([ids[::-1], ids]))
    np.testing.assert_allclose(both[40:], session.hidden(ids[None]), atol=2e-4)
    np.testing.assert_allclose(session.hidden(np.stack([ids[::-1], ids]), 30, 40)[10:], both[70:], atol=2e-4)


def test_what_the_reference_writes(checkpoint, converted):
    path = checkpoint / "reference.json"
    if not path.is_file() or checkpoint.name in NO_REFERENCE:
        pytest.skip(NO_REFERENCE.get(checkpoint.name, "the reference's converter refuses this folder"))
    reference = json.loads(path.read_text())
    with GGUF(converted(checkpoint)) as f:
        ours, theirs = {}, {}
        for key, entry in reference["kv"].items():
            theirs[key] = (entry["type"], entry["value"])
        for key, field in f.fields.items():
            ours[key] = (_types(field), _value(field.value))
        apart = KEYS_APART.get(checkpoint.name, set()) | {"general.name", "general.basename", "general.finetune"}
        assert {k: v for k, v in ours.items() if k not in apart} == {k: v for k, v in theirs.items() if k not in apart}
        tensors = {
            name: {
                "ne": list(t.ne),
                "type": t.format.name,
                "sha256": hashlib.sha256(np.ascontiguousarray(t.data).tobytes()).hexdigest(),
            }
            for name, t in f.tensors.items()
        }
        expected = dict(reference["tensors"])
        for name in tensors:
            if name.endswith(BYTES_APART.get(checkpoint.name, "/")):
                tensors[name]["sha256"] = expected[name]["sha256"]
        assert tensors == expected


def _types(field):
    kind = field.type.name
    return [kind, field.element_type.name] if kind == "ARRAY" else [kind]


def _value(value):
    if not isinstance(value, str) and hasattr(value, "__len__"):
        items = [v.item() if isinstance(v, np.generic) else v for v in value]
        if len(items) > 64:
            digest = hashlib.sha256(json.dumps(items).encode()).hexdigest()
            return {"len": len(items), "first": items[:5], "sha256_of_json": digest}
        return items
    return value


def test_old_spelling_of_the_config(checkpoint, converted, tmp_path):
    """rope_theta and rope_scaling at the top instead of `rope_parameters`: the same file."""
    config = json.loads((checkpoint / "config.json").read_text())
    rope = config.pop("rope_parameters", None)
    if not rope or any(isinstance(v, dict) for v in rope.values()):
        pytest.skip("the model has no rotary settings that the old form could hold")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type", "default")
    if kind != "default":
        config["rope_scaling"] = {"type": kind, **rope}
    elif rope:
        config |= rope  # such as partial_rotary_factor
    folder = tmp_path / checkpoint.name
    shutil.copytree(checkpoint, folder)
    (folder / "config.json").write_text(json.dumps(config))
    gguftools.convert(folder, tmp_path / "old.gguf", "f32")
    assert (tmp_path / "old.gguf").read_bytes() == converted(checkpoint).read_bytes()
