"""`gguftools trace`: text, JSON, page, Graphviz; several backends; bad input."""

import json
import re

import pytest

from gguftools.cli import main

PROMPT = "Once upon a time"


def run(capsys, *arguments):
    code = main(["trace", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def model(tiny):
    return tiny["bf16"]


def test_json(capsys, model):
    code, out, _ = run(capsys, model, "-p", PROMPT, "--json", "-t", 2)
    assert code == 0
    found = json.loads(out)
    body, head = found["graphs"]
    assert (body["name"], head["name"]) == ("body", "head")
    n = len(found["tokens"])
    events = body["events"]
    assert [e["index"] for e in events] == list(range(len(events)))
    assert events[0]["op"] == "GET_ROWS"
    assert events[0]["sources"] == ["token_embd.weight", "tokens"]
    assert events[0]["shape"] == [1, 1, n, 256]
    assert body["planned"] < body["naive"] / 4
    assert {e["backend"] for e in events} == {"cpu"}
    fused = [e for e in events if e["fused_into"] is not None]
    assert fused
    assert all(events[e["fused_into"]]["nanoseconds"] is not None for e in fused)
    assert sum(t["steps"] for t in body["totals"]) == sum(e["nanoseconds"] is not None for e in events)
    assert sum(t["nanoseconds"] for t in body["totals"]) == body["nanoseconds"]
    assert [m["name"] for m in found["memory"]] == [
        "model headers", "weights", "graph headers", "compute buffers", "scratch",
    ]  # fmt: skip
    live = [(e["offset"], e["offset"] + e["bytes"]) for e in events if e["memory"] in ("own", "in place")]
    assert max(end for _, end in live) <= body["planned"]


def test_text(capsys, model):
    code, out, _ = run(capsys, model, "-p", PROMPT, "--no-fusion")
    assert code == 0
    assert "graph 'body'" in out
    assert re.search(r"^ *\d+ +node_\d+ +RMS_NORM +\d+x256 F32", out, re.M)
    assert re.search(r"compute buffer .* without reuse \(\d+%\), scratch", out)
    assert "in #" not in out
    assert "next token: " in out


@pytest.mark.parametrize("backend", ["reference", "cpu+reference"])
def test_other_backends_predict_the_same_token(capsys, model, backend):
    tokens = [json.loads(run(capsys, model, "-p", PROMPT, "--json", "--backend", b)[1]) for b in ("cpu", backend)]
    assert tokens[0]["next_token"] == tokens[1]["next_token"]
    used = {e["backend"] for e in tokens[1]["graphs"][0]["events"]}
    assert used == set(backend.split("+"))


def test_page_and_picture(capsys, model, tmp_path):
    page, dot = tmp_path / "t.html", tmp_path / "t.dot"
    code, _, _ = run(capsys, model, "-p", "<b>bold</b> & more", "--html", page, "--dot", dot)
    assert code == 0
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == 2
    assert text.count("<rect") > 100
    assert "blk.0.attn_q.weight" in text
    assert not re.search(r"https?://|<script|<b>", text)  # nothing from outside, nothing from the model unescaped
    assert dot.read_text(encoding="utf-8").count("digraph") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "cuda"], "unknown backend 'cuda'; there are: cpu, reference"),
        (["--backend", "cpu+cpu"], "two backends have one name"),
        (["-p", "word " * 3000], "beyond the 512 tokens|beyond the .* tokens that the model was trained for"),
    ],
)
def test_bad_input(capsys, model, arguments, message):
    arguments = arguments if "-p" in arguments else ["-p", PROMPT, *arguments]
    code, out, err = run(capsys, model, *arguments)
    assert (code, out) == (1, "")
    assert re.search(message, err)
    assert err.count("\n") == 1


def test_no_file(capsys, tmp_path):
    code, _, err = run(capsys, tmp_path / "none.gguf", "-p", "x")
    assert code == 1
    assert "none.gguf" in err
