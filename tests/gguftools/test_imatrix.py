"""Importance matrices: texts, files of both forms, merging, interruption, coverage, statistics, and bad input."""

import json
import struct

import numpy as np
import pytest

import gguftools
from engine import EngineError
from gguftools import GGUFError, measure
from gguftools.cli import main
from gguftools.corpus import read_corpus, split_weight
from gguftools.imatrix_file import read_imatrix, read_run, write_imatrix
from quant import QuantError
from quant.imatrix import Entry, IMatrix
from quant.imatrix_statistics import block_statistics, weight_statistics
from tests.conftest import DATA

TEXT = gguftools.demo_text("calibration")
GOLDEN = DATA / "tiny" / "imatrix.gguf"


def same(a: IMatrix, b: IMatrix, rtol: float = 1e-6) -> None:
    assert a.entries.keys() == b.entries.keys()
    for name, entry in a.entries.items():
        np.testing.assert_array_equal(entry.counts, b.entries[name].counts)
        np.testing.assert_allclose(entry.squares, b.entries[name].squares, rtol=rtol)


def collect(tiny, output, text=TEXT, **options):
    return gguftools.imatrix(tiny["bf16"], text, output, **({"n_ctx": 64, "chunks": 6} | options))


# --- collection -------------------------------------------------------------------------------------------------------


def test_batches_do_not_matter(tiny, tmp_path):
    one = collect(tiny, tmp_path / "a.gguf", n_batch=64)
    same(one, collect(tiny, tmp_path / "b.gguf", n_batch=256), rtol=1e-4)
    assert one.chunk_count == 6
    assert (one.entries["blk.0.attn_q.weight"].counts == 6 * 64).all()


def test_from_chunk(tiny, tmp_path):
    """What is left out at the beginning and what is taken there are the whole."""
    whole = collect(tiny, tmp_path / "a.gguf")
    first = collect(tiny, tmp_path / "b.gguf", chunks=2)
    first.merge(collect(tiny, tmp_path / "c.gguf", chunks=4, from_chunk=2))
    same(whole, first, rtol=1e-4)


def test_process_output_and_score(tiny, tmp_path):
    values = []
    m = collect(tiny, tmp_path / "a.gguf", process_output=True, score=False, on_chunk=lambda *a: values.append(a))
    assert "token_embd.weight" in m.entries  # it serves as the output matrix
    assert m.entries["token_embd.weight"].counts == [6 * 64]
    assert values[-1] == (6, 6, None)


def test_parse_special(tiny, tmp_path):
    session = gguftools.load(tiny["bf16"], vocab_only=True)
    control = session.tokenizer.token_to_piece(session.tokenizer.bos, special=True).decode()
    (tmp_path / "t.txt").write_text((control + " and some words. ") * 100)
    plain = collect(tiny, tmp_path / "a.gguf", tmp_path / "t.txt", chunks=2)
    parsed = collect(tiny, tmp_path / "b.gguf", tmp_path / "t.txt", chunks=2, parse_special=True)
    a, b = (m.entries["blk.0.attn_q.weight"].squares for m in (plain, parsed))
    assert not np.allclose(a, b, rtol=1e-3)


def test_weighted_texts(tiny, tmp_path):
    """Means are weighted by tokens times weights."""
    other = gguftools.demo_text("valid")
    (tmp_path / "one.txt").write_text(TEXT.read_text()[:3000])
    (tmp_path / "two.txt").write_text(other.read_text()[:3000])
    one, two = (collect(tiny, tmp_path / f"{n}.gguf", tmp_path / f"{n}.txt", chunks=None) for n in ("one", "two"))
    found = collect(
        tiny, tmp_path / "d.gguf", [f"{tmp_path / 'one.txt'}:0.5", f"{tmp_path / 'two.txt'}:2"], chunks=None
    )
    name = "blk.2.ffn_down.weight"
    x, y = one.entries[name], two.entries[name]
    want = (0.5 * x.squares + 2 * y.squares) / (0.5 * x.counts + 2 * y.counts)
    np.testing.assert_allclose(found.importance(name), want, rtol=1e-4)
    again = read_imatrix(tmp_path / "d.gguf")
    assert again.datasets == ["one.txt", "two.txt"]
    assert again.weights == {"one.txt": 0.5, "two.txt": 2}
    assert again.hashes["one.txt"] == one.hashes["one.txt"]
    assert one.hashes["one.txt"] != two.hashes["two.txt"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.txt:2", ("a.txt", 2.0)),
        ("a.txt", ("a.txt", 1.0)),
        ("C:\\x.txt", ("C:\\x.txt", 1.0)),
        ("a.txt:0.25", ("a.txt", 0.25)),
    ],
)
def test_weights_behind_names(name, expected):
    path, weight = split_weight(name)
    assert (str(path), weight) == expected


@pytest.mark.parametrize("name", ["a.txt:0", "a.txt:-1", "a.txt:inf", "a.txt:nan"])
def test_weights_that_are_none(name):
    with pytest.raises(GGUFError, match="use a positive number"):
        split_weight(name)


# --- texts ------------------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}!{% endif %}"
)


class Chatty:
    """As much of a session as rendering needs."""

    def __init__(self, tiny, template):
        self._session = gguftools.load(tiny["bf16"], vocab_only=True)
        self.tokenizer = self._session.tokenizer
        self.metadata = {"tokenizer.chat_template": template}


def test_json_lines(tiny, tmp_path):
    path = tmp_path / "t.jsonl"
    lines = [
        {"text": "One ü"},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]},
        {"conversations": [{"from": "human", "value": "Bye"}]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    found = read_corpus(path, Chatty(tiny, TEMPLATE))
    assert found.text == "One ü\n<user>Hi\n<assistant>Yes?\n<user>Bye\n"
    assert found.chat
    path.write_text(json.dumps(lines[0]) + "\n" + json.dumps({"content": "Two"}))
    found = read_corpus(path)
    assert (found.text, found.chat) == ("One ü\nTwo", False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\nnot json', "line 2 is not JSON"),
        ('{"other": 1}', "line 1 has neither a text"),
        ("[1, 2]", "line 1 has neither a text"),
        ('{"messages": ["Hi"]}', "line 1 has a message without role and content"),
        (
            '{"messages": [{"role": "user", "content": "Hi"}]}',
            "jsonl: its conversations cannot be rendered: the model",
        ),
    ],
)
def test_bad_json_lines(tiny, tmp_path, capsys, content, message):
    (tmp_path / "t.jsonl").write_text(content)
    assert main(["imatrix", str(tiny["bf16"]), "-f", str(tmp_path / "t.jsonl"), "-o", str(tmp_path / "o.gguf")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "o.gguf").exists()


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no system role') }}", "{% for %}", "{{ messages.append(1) }}"]
)
def test_templates_that_fail(tiny, tmp_path, template):
    (tmp_path / "t.jsonl").write_text('{"messages": [{"role": "user", "content": "Hi"}]}')
    with pytest.raises(GGUFError, match="the chat template cannot be rendered"):
        read_corpus(tmp_path / "t.jsonl", Chatty(tiny, template))


def test_many_conversations(tiny, tmp_path):
    """More than one rendering takes come out whole and in order."""
    lines = [json.dumps({"messages": [{"role": "user", "content": str(i)}]}) for i in range(1203)]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    text = read_corpus(tmp_path / "t.jsonl", Chatty(tiny, TEMPLATE)).text
    assert text == "".join(f"<user>{i}\n" for i in range(1203))


# --- interruption -----------------------------------------------------------------------------------------------------


def test_interrupted_runs_continue(tiny, tmp_path):
    (tmp_path / "one.txt").write_text(TEXT.read_text()[:2500])
    texts = [f"{tmp_path / 'one.txt'}:2", TEXT]
    options = {"chunks": 5, "n_batch": 64, "output_frequency": 2}
    seen = []
    whole = collect(tiny, tmp_path / "a.gguf", texts, on_chunk=lambda *a: seen.append(a), **options)
    assert seen[-1][:2] == (10, 10)
    for stop in (3, 8):

        def interrupt(done, total, value, stop=stop):
            if done == stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            collect(tiny, tmp_path / "b.gguf", texts, on_chunk=interrupt, **options)
        assert read_imatrix(tmp_path / "b.gguf").chunk_count == stop
    rest = []
    resumed = collect(tiny, tmp_path / "b.gguf", texts, on_chunk=lambda *a: rest.append(a), **options)
    assert [done for done, *_ in rest] == [9, 10]
    assert rest[-1][2] == pytest.approx(seen[-1][2], rel=1e-6)
    same(whole, resumed, rtol=1e-5)
    assert (resumed.chunk_count, resumed.datasets) == (whole.chunk_count, whole.datasets)
    assert read_run(tmp_path / "b.gguf") is None  # it is finished


def test_another_run_is_not_continued(tiny, tmp_path):
    def interrupt(done, total, value):
        raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            collect(tiny, tmp_path / "a.gguf", on_chunk=interrupt, n_batch=64, resume=False)
        assert read_imatrix(tmp_path / "a.gguf").chunk_count == 1
    assert read_run(tmp_path / "a.gguf")
    assert collect(tiny, tmp_path / "a.gguf", process_output=True).chunk_count == 6
    seen = []
    collect(tiny, tmp_path / "a.gguf", on_chunk=lambda done, *_: seen.append(done), n_batch=64)
    assert seen == [1, 2, 3, 4, 5, 6]


def test_copies_on_the_way(tiny, tmp_path):
    collect(tiny, tmp_path / "a.gguf", n_batch=64, save_frequency=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.gguf", "a.gguf.at_2", "a.gguf.at_4", "a.gguf.at_6"]
    assert read_imatrix(tmp_path / "a.gguf.at_4").chunk_count == 4


# --- files ------------------------------------------------------------------------------------------------------------


def legacy(entries: dict[str, tuple[int, list[float]]], tail: bytes = b"") -> bytes:
    data = struct.pack("<i", len(entries))
    for name, (calls, values) in entries.items():
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, len(values))
        data += np.array(values, "<f4").tobytes()
    return data + tail


def test_legacy_by_hand(tmp_path):
    (tmp_path / "a.gguf").write_bytes(legacy({"w": (3, [6.0, 9.0])}, struct.pack("<ii", 3, 5) + b"a.txt"))
    m = read_imatrix(tmp_path / "a.gguf")  # whatever its name
    assert m.importance("w").tolist() == [[2, 3]]
    assert (m.datasets, m.chunk_count, m.entries["w"].sums) == (["a.txt"], 3, None)
    (tmp_path / "b.dat").write_bytes(legacy({"w": (0, [6.0, 9.0])}))  # no calls, no trailer: values as they are
    assert read_imatrix(tmp_path / "b.dat").importance("w").tolist() == [[6, 9]]


def test_legacy_written(tmp_path):
    m = IMatrix(datasets=["a.txt", "b.txt"], chunk_count=5, chunk_size=10)
    m.entries["w"] = Entry(np.array([[20.0, 40.0], [0.0, 0.0]]), np.array([20, 0]), None)
    m.entries["none"] = Entry(np.zeros((1, 2)), np.array([0]), None)
    write_imatrix(tmp_path / "a.dat", m, format="dat")
    # two calls of ten tokens; ones for the expert without data; the entry without any is left out
    assert (tmp_path / "a.dat").read_bytes() == legacy(
        {"w": (2, [2.0, 4.0, 2.0, 2.0])}, struct.pack("<ii", 5, 5) + b"b.txt"
    )


def test_golden_through_the_older_form(tmp_path, capsys):
    """Importance survives both ways; quantized bytes are the same, whatever the file's name."""
    assert main(["imatrix", "convert", str(GOLDEN), "-o", str(tmp_path / "a.dat"), "--output-format", "dat"]) == 0
    assert main(["imatrix", "convert", str(tmp_path / "a.dat"), "-o", str(tmp_path / "b.gguf"), "-c", "256"]) == 0
    (tmp_path / "gguf.dat").write_bytes(GOLDEN.read_bytes())  # names deceive
    (tmp_path / "dat.gguf").write_bytes((tmp_path / "a.dat").read_bytes())
    same(read_imatrix(tmp_path / "gguf.dat"), read_imatrix(GOLDEN))
    same(read_imatrix(tmp_path / "dat.gguf"), read_imatrix(tmp_path / "a.dat"))
    a, b = read_imatrix(GOLDEN), read_imatrix(tmp_path / "b.gguf")
    for name, entry in a.entries.items():
        np.testing.assert_allclose(a.importance(name), b.importance(name), rtol=1e-6)
        np.testing.assert_array_equal(entry.counts, b.entries[name].counts)
    assert (b.chunk_count, b.chunk_size, b.datasets) == (256, 256, ["calibration.txt"])


def test_merge(tmp_path, capsys):
    output = tmp_path / "c.gguf"
    assert main(["imatrix", "merge", str(GOLDEN), str(GOLDEN), "-o", str(output), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["chunks"] == 512
    one, two = read_imatrix(GOLDEN), read_imatrix(output)
    for name, entry in one.entries.items():
        np.testing.assert_array_equal(two.importance(name), one.importance(name))
        np.testing.assert_array_equal(two.entries[name].counts, 2 * entry.counts)
        np.testing.assert_allclose(two.entries[name].sums, 2 * entry.sums, rtol=1e-6)
    assert main(["imatrix", "merge", str(GOLDEN), "-o", str(output)]) == 1
    assert "takes two" in capsys.readouterr().err


def test_merge_of_both_forms(tmp_path):
    measure.merge([GOLDEN], tmp_path / "a.dat", "dat")
    both = measure.merge([tmp_path / "a.dat", GOLDEN], tmp_path / "b.gguf")
    assert both.chunk_count == 512  # the older form takes the other's size of a chunk
    assert both.entries["blk.0.attn_q.weight"].sums is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\x01\x00", "neither a GGUF file"),
        (b"\x00" * 100, "not an importance matrix"),
        (struct.pack("<i", -5) + bytes(100), "not an importance matrix"),
        (struct.pack("<ii", 1, 1 << 30) + bytes(100), "not an importance matrix"),
        (legacy({"w": (1, [1.0, 2.0])})[:-1], "would end at byte"),
        (legacy({"w": (-3, [1.0])}), "1 values of -3 calls"),
        (legacy({"w": (3, [])}) + bytes(9), "0 values of 3 calls"),
        (legacy({"w": (1, [float("nan")])}), "not finite"),
        (legacy({"w": (1, [-1.0])}), "negative"),
        (b"Once upon a time there was a text, and it was no importance matrix at all.", "not an importance matrix"),
    ],
)
def test_damaged_files(tmp_path, capsys, content, message):
    (tmp_path / "a.dat").write_bytes(content)
    with pytest.raises(GGUFError, match=message):
        read_imatrix(tmp_path / "a.dat")
    assert main(["imatrix", str(tmp_path / "a.dat"), "--show-statistics"]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e.counts.__setitem__(0, -4), "out of range"),
        (lambda e: e.squares.__setitem__((0, 0), -1), "out of range"),
        (lambda e: e.squares.__setitem__((0, 0), np.inf), "not finite"),
        (lambda e: setattr(e, "sums", e.sums[:, :8]), "do not fit"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_damaged_values(tmp_path, change, message):
    m = read_imatrix(GOLDEN)
    for name in list(m.entries)[1:]:
        del m.entries[name]
    change(next(iter(m.entries.values())))
    from gguftools.gguf import Writer

    with Writer(tmp_path / "a.gguf") as w:
        w.add("general.type", "imatrix")
        ((name, e),) = m.entries.items()
        parts = {".in_sum2": e.squares, ".counts": e.counts[:, None], ".in_sum": e.sums}
        for suffix, values in parts.items():
            w.declare(name + suffix, values.shape, "F32")
        for suffix, values in parts.items():
            w.write(name + suffix, np.ascontiguousarray(values, np.float32))
    with pytest.raises(GGUFError, match=message):
        read_imatrix(tmp_path / "a.gguf")


def test_matrices_of_different_models(tmp_path):
    m = read_imatrix(GOLDEN)
    name = "blk.0.attn_q.weight"
    m.entries[name] = Entry(m.entries[name].squares[:, :8], m.entries[name].counts, m.entries[name].sums[:, :8])
    write_imatrix(tmp_path / "a.gguf", m)
    with pytest.raises(QuantError, match="different models"):
        measure.merge([GOLDEN, tmp_path / "a.gguf"], tmp_path / "b.gguf")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-c", "2048"), "beyond the 1024 tokens"),
        (("-c", "256", "--from-chunk", "100000"), "behind chunk 100000"),
        (("-f", "absent.txt"), "absent.txt: cannot be read"),
        (("--in-file", "absent.gguf"), "no such file"),
    ],
)
def test_bad_requests(tiny, tmp_path, capsys, options, message):
    out = tmp_path / "o.gguf"
    assert main(["imatrix", str(tiny["bf16"]), "-f", str(TEXT), "-o", str(out), *options]) == 1
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_text_too_short(tiny, tmp_path):
    (tmp_path / "t.txt").write_text("A few words.")
    with pytest.raises(EngineError, match="two contexts of 64"):
        collect(tiny, tmp_path / "o.gguf", tmp_path / "t.txt")


# --- experts and statistics -------------------------------------------------------------------------------------------


def test_experts_that_no_token_reached(tmp_path, capsys):
    m = IMatrix(datasets=["t"], chunk_count=1)
    x = np.ones((4, 1, 8), np.float32)
    m.observe_experts("blk.0.ffn_up_exps.weight", x, np.array([[0, 2], [2, 0], [0, 2], [4, 0]]), 5)
    assert m.unreached() == {"blk.0.ffn_up_exps.weight": [1, 3]}
    write_imatrix(tmp_path / "a.gguf", m)
    again = read_imatrix(tmp_path / "a.gguf")
    assert again.importance("blk.0.ffn_up_exps.weight")[[1, 3]].tolist() == [[1] * 8] * 2
    assert main(["imatrix", "show", str(tmp_path / "a.gguf")]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.endswith("1, 3"))
    assert row.split() == ["blk.0.ffn_up_exps.weight", "5", "3", "1,", "3"]


def test_flat_entries_of_experts_are_cut(tiny):
    """The older form does not say how many matrices a weight has; the model does."""
    m = IMatrix()
    m.entries["w"] = Entry(np.arange(6.0)[None], np.array([2]), None)
    m.fit({"w": (3, 2), "absent": (1, 1)})
    assert m.importance("w").tolist() == [[0, 0.5], [1, 1.5], [2, 2.5]]


def test_scaling_keeps_means():
    m = IMatrix(datasets=["t"])
    m.observe("w", np.float32([[1, 2], [3, 4], [5, 6]]))
    half = m.scaled(0.5)
    assert half.entries["w"].counts == [2]  # 1.5, to even
    np.testing.assert_allclose(half.importance("w"), m.importance("w"), rtol=1e-6)
    assert half.weights == {"t": 0.5}
    assert m.scaled(0.01).entries["w"].counts == [1]
    for weight in (0, -1, float("nan"), float("inf")):
        with pytest.raises(QuantError, match="positive number"):
            m.scaled(weight)


def matrix(**columns) -> IMatrix:
    """Entries with these mean squares and means, from ten inputs."""
    m = IMatrix()
    for name, (squares, means) in columns.items():
        e = Entry(10 * np.array([squares], float), np.array([10]), 10 * np.array([means], float))
        m.entries[f"blk.{name[1]}.{name[3:]}.weight"] = e
    return m


def test_statistics_by_hand():
    m = matrix(b0_up=([1, 1, 1, 1], [1, -1, 1, -1]), b1_up=([4, 4, 8, 0], [2, -2, 0, 0]))
    a, b = weight_statistics(m)
    assert (a.block, a.role, a.energy, a.elements, a.mean) == (0, "up", 4, 4, 0)
    assert (a.deviation, a.skewness, a.kurtosis, a.entropy, a.evenness) == (1, 0, -2, 2, 100)
    assert np.isnan([a.gain, a.distance, a.cosine]).all()
    assert b.deviation == pytest.approx(np.sqrt(2))
    assert b.kurtosis == pytest.approx((16 + 16) / 4 / 4 - 3)
    assert b.entropy == pytest.approx(1.5)  # shares of 1/4, 1/4, 1/2
    assert b.gain == pytest.approx(2)  # energy 16 against 4
    assert b.distance == pytest.approx(np.sqrt(1 + 1 + 1 + 1))
    assert b.cosine == b.pearson == pytest.approx(4 / np.sqrt(8 * 4))
    assert b.covariance == pytest.approx(1)
    (first, second) = block_statistics([a, b])
    assert np.isnan(first.gain)
    assert (second.gain, second.distance) == (pytest.approx(2), pytest.approx(2))


def test_statistics_skip_blocks_without_the_weight():
    found = weight_statistics(matrix(b0_up=([1], [1]), b2_up=([4], [2])))
    assert found[1].gain == 2
    assert block_statistics(found) == []  # block 1 is missing


def test_show(tmp_path, capsys):
    plot = tmp_path / "map.svg"
    assert main(["imatrix", "--in-file", str(GOLDEN), "--show-statistics", "--json", "--plot", str(plot)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (len(found["tensors"]), len(found["blocks"]), found["chunks"]) == (42, 6, 256)
    drawn = plot.read_text()
    assert drawn.count("<rect") == 42 + 20  # cells, and the scale
    assert "blk.5.ffn_down: " in drawn
    assert main(["imatrix", str(GOLDEN), "--show-statistics"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 1 + 42 + 1 + 1 + 6
