"""Any keys, types, shapes and alignments: what is written is what is read, by us and by the `gguf` package."""

import math
import tempfile
from pathlib import Path

import gguf as oracle
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gguftools.gguf import GGUF, ValueType, Writer
from gguftools.gguf.values import DTYPES, FLOATS
from quant.formats import FORMATS

names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def scalars(kind: ValueType) -> st.SearchStrategy:
    if kind is ValueType.STRING:
        return texts
    if kind is ValueType.BOOL:
        return st.booleans()
    if kind in FLOATS:
        return st.floats(width=32 if kind is ValueType.FLOAT32 else 64, allow_nan=False)
    limits = np.iinfo(DTYPES[kind])
    return st.integers(int(limits.min), int(limits.max))


kinds = st.sampled_from([kind for kind in ValueType if kind is not ValueType.ARRAY])
values = kinds.flatmap(lambda kind: st.tuples(st.just(kind), scalars(kind) | st.lists(scalars(kind), max_size=5)))
metadata = st.dictionaries(names.filter(lambda name: not name.startswith("general.")), values, max_size=6)
shapes = st.lists(st.integers(0, 4), max_size=3)
parts_of = st.tuples(st.sampled_from(sorted(FORMATS)), shapes, st.integers(1, 3))
tensors = st.dictionaries(names.filter(lambda name: len(name.encode()) <= 63), parts_of, max_size=4)
alignments = st.sampled_from([None, 1, 2, 8, 32, 64, 4096])

ANY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def write(path: Path, keys: dict, parts: dict, alignment: int | None, order: str, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    data = {}
    with Writer(path, byte_order=order, verify=True) as w:
        if alignment is not None:
            w.add("general.alignment", alignment, "uint32")
        for key, (kind, value) in keys.items():
            w.add(key, value, kind)
        for name, (fmt, shape, n_blocks) in parts.items():
            shape = (*shape, n_blocks * FORMATS[fmt].block_size)
            w.declare(name, shape, fmt)
            n_bytes = math.prod(shape) // FORMATS[fmt].block_size * FORMATS[fmt].type_size
            data[name] = rng.integers(0, 256, n_bytes).astype(np.uint8)
        for name, blocks in data.items():
            w.write(name, blocks)
    return data


@ANY
@given(metadata, tensors, alignments, st.sampled_from("<>"), st.integers(0, 1000))
def test_written_is_read(keys, parts, alignment, order, seed):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.gguf"
        data = write(path, keys, parts, alignment, order, seed)
        with GGUF(path) as f:
            assert f.byte_order == order
            assert f.alignment == (alignment or 32)
            assert [key for key in f.metadata if key != "general.alignment"] == list(keys)
            for key, (kind, value) in keys.items():
                found = f.fields[key]
                assert (found.element_type if isinstance(value, list) else found.type) is kind
                assert found.value == value
                assert type(value) is list or type(found.value) is type(value)
            assert list(f.tensors) == list(parts)
            for name, (fmt, shape, n_blocks) in parts.items():
                t = f.tensors[name]
                assert (t.format.name, t.shape) == (fmt, (*shape, n_blocks * FORMATS[fmt].block_size))
                assert t.data.tobytes() == data[name].tobytes()
                assert (f.data_offset + t.offset) % f.alignment == 0
            assert f.data_end == f.size


@settings(ANY, max_examples=40)
@given(metadata, tensors, st.sampled_from([None, 8, 32, 64]), st.integers(0, 1000))
def test_the_gguf_package_reads_the_same(keys, parts, alignment, seed):
    keys = {key: (kind, value) for key, (kind, value) in keys.items() if value != []}
    sizes = {kind.name: size for kind, size in oracle.GGML_QUANT_SIZES.items()}  # of Q8_1 its size is wrong
    known = {name for name, fmt in FORMATS.items() if sizes.get(name) == (fmt.block_size, fmt.type_size)}
    parts = {name: part for name, part in parts.items() if 0 not in part[1] and part[0] in known}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.gguf"
        data = write(path, keys, parts, alignment, "<", seed)
        theirs = oracle.GGUFReader(path)
        for key, (_, value) in keys.items():
            if "." + key not in ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count"):
                assert theirs.fields[key].contents() == value
        assert {t.name: t.data.tobytes() for t in theirs.tensors} == {name: d.tobytes() for name, d in data.items()}


@ANY
@given(st.binary(max_size=200), st.integers(0, 400))
def test_any_bytes_are_read_or_refused(data, at):
    """Bytes put into a good file anywhere."""
    from gguftools.errors import GGUFError

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.gguf"
        keys = {"k": (ValueType.STRING, ["a", "b"]), "n": (ValueType.UINT16, 3)}
        write(path, keys, {"t": ("Q4_0", [2], 1)}, None, "<", 0)
        whole = path.read_bytes()
        path.write_bytes(whole[:at] + data + whole[at + len(data) :])
        try:
            with GGUF(path) as f:
                shown = [repr(value) for value in f.metadata.values()]
        except GGUFError as error:
            shown = [str(error)]
        assert not any("\n" in line for line in shown)
