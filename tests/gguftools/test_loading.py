"""Load modes, shards, progress, overrides, checks: the same model, however it comes into memory."""

import numpy as np
import pytest

import gguftools
from engine import EngineError
from gguftools import GGUFError
from gguftools.gguf import GGUF, Writer
from gguftools.loading import LOAD_MODES, LoadCancelled, read_overrides


@pytest.fixture(scope="module")
def logits(tiny):
    return gguftools.load(tiny["f32"], threads=1).logits([1, 2, 3])


@pytest.mark.parametrize("mode", LOAD_MODES)
def test_modes(tiny, logits, mode):
    session = gguftools.load(tiny["f32"], threads=1, mode=mode)
    np.testing.assert_array_equal(session.logits([1, 2, 3]), logits)
    with GGUF(tiny["f32"]) as f:
        mapped = f.tensors["token_embd.weight"].data
    weight = session.weights["token_embd.weight"]
    np.testing.assert_array_equal(weight.raw(), mapped)
    assert session.load_seconds > 0


def test_unbuffered_reads_in_pieces(tiny, logits, monkeypatch):
    monkeypatch.setattr("gguftools.loading.STAGING", 4096)
    np.testing.assert_array_equal(gguftools.load(tiny["f32"], threads=1, mode="dio").logits([1, 2, 3]), logits)


def test_unbuffered_reads_fall_back(tiny, logits, monkeypatch):
    def refuse(*args):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("os.preadv", refuse)
    np.testing.assert_array_equal(gguftools.load(tiny["f32"], threads=1, mode="dio").logits([1, 2, 3]), logits)


def test_a_lock_that_is_refused_is_a_warning(tiny, monkeypatch, capsys):
    class Library:
        @staticmethod
        def mlock(*args):
            return -1

    monkeypatch.setattr("ctypes.CDLL", lambda *args, **kwargs: Library)
    gguftools.load(tiny["f32"], threads=1, mode="mlock")
    assert "memory cannot be locked" in capsys.readouterr().err


@pytest.mark.parametrize("which", [1, 2])
def test_shards(tiny, logits, tmp_path, which):
    gguftools.split(tiny["f32"], tmp_path / "s", max_tensors=30)
    shards = sorted(tmp_path.glob("s-*.gguf"))
    assert len(shards) > 1
    session = gguftools.load(shards[which - 1], threads=1)
    np.testing.assert_array_equal(session.logits([1, 2, 3]), logits)
    shards[-1].unlink()
    with pytest.raises(GGUFError, match="is missing; put all shards into one folder"):
        gguftools.load(shards[0])


def test_progress_and_cancel(tiny):
    seen = []
    gguftools.load(tiny["f32"], threads=1, progress=lambda share: seen.append(share) or True)
    assert seen[0] == 0
    assert seen[-1] == 1
    assert seen == sorted(seen)
    with GGUF(tiny["f32"]) as f:
        assert len(seen) == len(f.tensors) + 1
    with pytest.raises(LoadCancelled, match="loading was cancelled") as caught:
        gguftools.load(tiny["f32"], progress=lambda share: share < 0.5)
    assert caught.value.status == -2


def test_overrides(tiny):
    session = gguftools.load(tiny["f32"], threads=1, overrides={"llama.context_length": 77})
    assert session.n_ctx_train == 77
    assert read_overrides(["llama.context_length=int:77"]) == {"llama.context_length": 77}
    with pytest.raises(GGUFError, match="--override-kv x: expected KEY=TYPE:VALUE"):
        read_overrides(["x"])
    with pytest.raises(EngineError, match=r"key 'llama\.block_count' is 'six'"):
        gguftools.load(tiny["f32"], overrides={"llama.block_count": "six"})


def _broken(source, target, arch=None):
    """A copy whose last norm holds a NaN, or of another architecture."""
    with GGUF(source) as f, Writer(target) as w:
        for key in f.metadata:
            w.add(key, arch if arch and key == "general.architecture" else f.metadata[key])
        for name, t in f.tensors.items():
            w.declare(name, t.shape, t.format)
        for name, t in f.tensors.items():
            data = t.data.copy()
            if name == "output_norm.weight":
                data.view(np.float32)[3] = np.nan
            w.write(name, [data])
    return target


def test_values_are_checked_on_request(tiny, tmp_path):
    path = _broken(tiny["f32"], tmp_path / "bad.gguf")
    gguftools.load(path, threads=1)
    with pytest.raises(GGUFError, match=r"tensor 'output_norm\.weight' is not finite in block 3: the file is damaged"):
        gguftools.load(path, threads=1, check_tensors=True)
    gguftools.load(tiny["f32"], threads=1, check_tensors=True)


@pytest.mark.parametrize(
    ("arch", "message"), [("clip", "a projector for pictures"), ("unheard", "unknown model architecture: 'unheard'")]
)
def test_models_that_cannot_be_run(tiny, tmp_path, arch, message):
    with pytest.raises((GGUFError, EngineError), match=message) as caught:
        gguftools.load(_broken(tiny["f32"], tmp_path / "bad.gguf", arch))
    assert str(caught.value).startswith(str(tmp_path / "bad.gguf"))


def test_a_mode_that_is_none(tiny):
    with pytest.raises(GGUFError, match="no load mode 'fast'; use one of auto, none, mmap"):
        gguftools.load(tiny["f32"], mode="fast")
