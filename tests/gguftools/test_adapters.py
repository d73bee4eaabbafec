"""LoRA adapters and control vectors: the same as with changed weights or states, and part of what graphs depend on."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import gguftools
from engine import EngineError, ModelContext, Session
from gguftools.gguf import GGUF, Writer

RANK, ALPHA = 4, 6.0
CHANGED = ("blk.0.attn_q.weight", "blk.1.ffn_down.weight", "blk.2.attn_output.weight", "token_embd.weight")


@pytest.fixture(scope="module")
def session(tiny):
    return gguftools.load(tiny["f32"], threads=2)


@pytest.fixture(scope="module")
def ids(data):
    return [int(i) for i in np.load(data / "tiny" / "expected.npz")["ids1"][:30]]


def pairs(session, names, seed=0):
    """name -> (A, B) in NumPy's order, as an adapter file has them."""
    rng = np.random.default_rng(seed)
    found = {}
    for name in names:
        n, k = session.weights[name].shape[-2:]
        experts = session.weights[name].shape[1:2] if session.weights[name].ne[2] > 1 else ()
        a, b = ((n, RANK), (k, RANK)) if name == "token_embd.weight" else ((RANK, k), (n, RANK))
        found[name] = tuple((rng.standard_normal((*experts, *s)) * 0.1).astype(np.float32) for s in (a, b))
    return found


def written(path, found, arch="llama", kind="adapter", type="lora", alpha=ALPHA, formats=("F32", "F32")):
    with Writer(path) as w:
        w.add("general.type", kind)
        w.add("general.architecture", arch)
        w.add("adapter.type", type)
        w.add("adapter.lora.alpha", alpha, "float32")
        for name, (a, b) in found.items():
            w.declare(name + ".lora_a", a.shape, "F32")
            w.declare(name + ".lora_b", b.shape, "F32")
        for name, (a, b) in found.items():
            w.write(name + ".lora_a", [a])
            w.write(name + ".lora_b", [b])
    return path


class Changed:
    """A weight with other values."""

    def __init__(self, view, values):
        self.shape, self.format = view.shape, view.format
        self.data = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8)


def merged(path, found, factor):
    """A model whose weights are W + factor B A."""
    with GGUF(path) as f:
        tensors = dict(f.tensors)
        for name, (a, b) in found.items():
            w = f.tensors[name].dequantize()
            change = a @ b.T if name == "token_embd.weight" else b @ a
            tensors[name] = Changed(f.tensors[name], w + np.float32(factor) * change)
        return Session(f.metadata, tensors, threads=2)


def logits(context, ids):
    context.memory.clear()
    context.process(ids)
    return context.logits().copy()


def context(session):
    return ModelContext(session, n_ctx=256, type_k="F32", type_v="F32")


@pytest.mark.parametrize("strength", [1.0, 0.5, -1.0])
def test_an_adapter_is_a_change_of_weights(session, tiny, ids, tmp_path, strength):
    found = pairs(session, CHANGED)
    lora = gguftools.load_lora(written(tmp_path / "a.gguf", found), session)
    c = context(session)
    plain = logits(c, ids)
    c.set_adapters([(lora, strength)])
    changed = logits(c, ids)
    expected = merged(tiny["f32"], found, strength * ALPHA / RANK).logits(ids)[-1]
    np.testing.assert_allclose(changed, expected, atol=2e-3)
    assert np.abs(changed - plain).max() > 0.1
    c.set_adapters()
    np.testing.assert_allclose(logits(c, ids), plain, atol=1e-5)


def test_adapters_of_experts(shared, tmp_path):
    folder = shared / "golden" / "arch" / "mixtral"
    gguftools.convert(folder, tmp_path / "m.gguf", "f32")
    session = gguftools.load(tmp_path / "m.gguf", threads=2)
    ids = [int(i) for i in np.load(folder / "expected.npz")["ids0"]]
    found = pairs(session, ["blk.0.ffn_up_exps.weight", "blk.1.ffn_down_exps.weight"])
    lora = gguftools.load_lora(written(tmp_path / "a.gguf", found), session)
    c = context(session)
    plain = logits(c, ids)
    c.set_adapters([(lora, 1.0)])
    expected = merged(tmp_path / "m.gguf", found, ALPHA / RANK).logits(ids)[-1]
    np.testing.assert_allclose(logits(c, ids), expected, atol=2e-3)
    assert np.abs(expected - plain).max() > 0.01


def test_two_adapters_add_up(session, ids, tmp_path):
    loras = [
        gguftools.load_lora(written(tmp_path / f"{s}.gguf", pairs(session, CHANGED[:2], s)), session) for s in (1, 2)
    ]
    c = context(session)
    c.set_adapters([(loras[0], 0.5), (loras[1], 0.5)])
    both = logits(c, ids)
    c.set_adapters([(loras[1], 0.5), (loras[0], 0.5)])
    np.testing.assert_allclose(logits(c, ids), both, atol=1e-4)
    c.set_adapters([(loras[0], 0.5)])
    assert np.abs(logits(c, ids) - both).max() > 0.01


def test_graphs_depend_on_adapters(session, ids, tmp_path):
    lora = gguftools.load_lora(written(tmp_path / "a.gguf", pairs(session, CHANGED[:1])), session)
    c = context(session)
    logits(c, ids)
    logits(c, ids)
    assert (c.counts.built, c.counts.reused) == (1, 1)
    c.set_adapters([(lora, 1.0)])
    logits(c, ids)
    assert (c.counts.built, c.counts.reused) == (2, 1)
    c.set_adapters([(lora, 0.5)])
    logits(c, ids)
    assert c.counts.built == 3
    c.set_adapters([(lora, 0.5)])
    logits(c, ids)
    assert c.counts.reused == 2
    c.set_adapters([(lora, 0.0)])  # none
    logits(c, ids)
    assert c.counts.reused == 3  # the first graph is still there


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "model"}, r"key 'general\.type' is 'model', expected 'adapter'"),
        ({"type": "other"}, r"key 'adapter\.type' is 'other'"),
        ({"arch": "qwen3"}, "the adapter is for 'qwen3', the model is of 'llama'"),
        ({"found": {"blk.9.attn_q.weight": (np.ones((4, 256)), np.ones((256, 4)))}}, "which the model has not"),
        ({"found": {"blk.0.attn_q.weight": (np.ones((4, 128)), np.ones((256, 4)))}}, "it is for another model"),
        ({"found": {"blk.0.attn_q.weight": (np.ones((256, 4)), np.ones((4, 256)))}}, "it is for another model"),
        ({"found": {"blk.0.attn_q.weight": (np.ones(256), np.ones((256, 4)))}}, "another number of axes"),
    ],
)
def test_files_that_are_no_adapter_of_the_model(session, tmp_path, changes, message):
    found = changes.pop("found", None) or pairs(session, CHANGED[:1])
    found = {name: tuple(np.float32(x) for x in pair) for name, pair in found.items()}
    path = written(tmp_path / "a.gguf", found, **changes)
    with pytest.raises(EngineError, match=message) as caught:
        gguftools.load_lora(path, session)
    assert str(path) in str(caught.value)


def test_half_of_a_pair(session, tmp_path):
    with Writer(tmp_path / "a.gguf") as w:
        for key, value in (("general.type", "adapter"), ("general.architecture", "llama"), ("adapter.type", "lora")):
            w.add(key, value)
        w.declare("blk.0.attn_q.weight.lora_a", (4, 256), "F32")
        w.write("blk.0.attn_q.weight.lora_a", [np.ones((4, 256), np.float32)])
    with pytest.raises(EngineError, match="lora_b' is missing: the adapter is incomplete"):
        gguftools.load_lora(tmp_path / "a.gguf", session)


# --- control vectors ---


def vector(path, directions):
    with Writer(path) as w:
        w.add("general.architecture", "controlvector")
        for name, values in directions.items():
            w.declare(name, values.shape, "F32")
        for name, values in directions.items():
            w.write(name, [np.float32(values)])
    return path


def test_a_control_vector_is_added_between_layers(session, tiny, ids, tmp_path):
    """Behind the last layer it is a change of what the last norm sees; layer by layer it adds up."""
    n_layer, n_embd = session.hparams.n_layer, session.hparams.n_embd
    rng = np.random.default_rng(0)
    values = rng.standard_normal((n_layer, n_embd)).astype(np.float32)
    path = vector(tmp_path / "v.gguf", {f"direction.{i}": values[i] for i in range(1, n_layer)})
    c = context(session)
    plain = logits(c, ids)
    control = gguftools.load_control([(path, 1.0)], session)
    assert sorted(control.directions) == list(range(1, n_layer))
    c.set_adapters(control=control)
    assert np.abs(logits(c, ids) - plain).max() > 0.1
    assert c.counts.built == 2
    half = gguftools.load_control([(path, 0.25), (path, 0.75)], session)
    c.set_adapters(control=half)
    whole = logits(c, ids)
    c.set_adapters(control=control)
    np.testing.assert_allclose(logits(c, ids), whole, atol=1e-3)
    last = gguftools.load_control([(path, 1.0)], session, n_layer - 1, n_layer - 1)
    assert list(last.directions) == [n_layer - 1]
    c.set_adapters(control=last)
    hidden = ModelContext(session, n_ctx=256, type_k="F32", type_v="F32", embeddings=True)
    hidden.set_adapters(control=last)
    hidden.process(ids)
    expected = session.head(hidden.embedding()[None])[0]
    np.testing.assert_allclose(logits(c, ids), expected, atol=1e-3)
    none = gguftools.load_control([(path, 1.0)], session, 2, 1)
    c.set_adapters(control=none)
    np.testing.assert_allclose(logits(c, ids), plain, atol=1e-5)


@pytest.mark.parametrize(
    ("directions", "message"),
    [
        ({"direction.0": np.ones(256)}, "no direction of a layer from 1 on"),
        ({"direction.x": np.ones(256)}, "no direction of a layer"),
        ({"other.1": np.ones(256)}, "no direction of a layer"),
        ({"direction.1": np.ones(255)}, r"is F32 \[255\], expected F32 \[256\]"),
        ({}, "has no directions"),
    ],
)
def test_files_that_are_no_control_vector(session, tmp_path, directions, message):
    path = vector(tmp_path / "v.gguf", directions)
    with pytest.raises(EngineError, match=message):
        gguftools.load_control([(path, 1.0)], session)


def test_an_adapter_of_peft_is_what_merging_it_gives(tiny, tiny_folder, session, ids, tmp_path):
    """`convert` writes the adapter, `merge-lora` puts it into the weights: the same logits."""

    rng = np.random.default_rng(0)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    shapes = {"A": (RANK, 256), "B": (256, RANK)}
    save_file(
        {name.format(half): (0.1 * rng.standard_normal(shape)).astype(np.float32) for half, shape in shapes.items()},
        tmp_path / "adapter_model.safetensors",
    )
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA}))
    gguftools.convert_lora(tmp_path, tmp_path / "a.gguf", base=tiny_folder)
    gguftools.merge_lora(tiny["f32"], [(tmp_path / "a.gguf", 1.0)], tmp_path / "merged.gguf")
    c = context(session)
    c.set_adapters([(gguftools.load_lora(tmp_path / "a.gguf", session), 1.0)])
    expected = gguftools.load(tmp_path / "merged.gguf", threads=2).logits(ids)[-1]
    np.testing.assert_allclose(logits(c, ids), expected, atol=2e-3)
    assert np.abs(expected - session.logits(ids)[-1]).max() > 0.01
