"""Task suites: the files, the reference's random choices, and the scores, against a plain computation."""

import json
import struct

import numpy as np
import pytest

import gguftools
from engine import EngineError
from engine.evaluate.choice import Answer, Question, choose, endings, winogrande
from gguftools import GGUFError, tasks
from gguftools.cli import main
from tests.conftest import DATA

TASKS = DATA / "tasks"


def packed(text: str) -> bytes:
    return struct.pack("<I", len(text.encode())) + text.encode()


def binary(items: list[dict]) -> bytes:
    """The reference's form of multiple choice tasks."""
    bodies = []
    for item in items:
        body = packed(item["question"])
        for key in ("mc1", "mc2"):
            body += struct.pack("<I", len(item[key])) + b"".join(packed(answer) for answer, _ in item[key])
            body += struct.pack(f"<{len(item[key])}i", *(label for _, label in item[key]))
        bodies.append(body)
    starts = np.cumsum([4 + 4 * len(bodies), *map(len, bodies)])[:-1]
    return struct.pack("<I", len(bodies)) + starts.astype("<u4").tobytes() + b"".join(bodies)


@pytest.fixture
def choice_file(tmp_path):
    path = tmp_path / "tasks.bin"
    path.write_bytes(binary(json.loads((TASKS / "multiple-choice.json").read_text())))
    return path


def log_probabilities(session, tokens: list[int]) -> np.ndarray:
    """Of every token but the first, float64."""
    logits = session.logits(tokens).astype(np.float64)
    wide = (
        logits
        - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
        - logits.max(1, keepdims=True)
    )
    return wide[np.arange(len(tokens) - 1), tokens[1:]]


@pytest.fixture(scope="module")
def session(tiny):
    return gguftools.load(tiny["bf16"], threads=2)


def test_generator_is_mt19937():
    draw = tasks.Draw()
    assert [draw.bits() for _ in range(4)] == [1791095845, 4282876139, 3093770124, 4005303368]


def test_uniform_draws():
    draw = tasks.Draw()
    assert [draw.below(10) for _ in range(4)] == [4, 9, 7, 9]  # 32 bits times 10, divided by 2^32
    assert tasks.hellaswag_order(5, 3) == [2, 4, 3]  # 0.417 of 5, 0.997 of 4, 0.720 of 3
    assert sorted(tasks.hellaswag_order(50, 400)) == list(range(50))


def test_subsets():
    assert tasks.subset(6, 0) == tasks.subset(6, 6) == tasks.subset(6, 9) == list(range(6))
    assert tasks.subset(6, 2) == [2, 4]  # 0.417 of 6; then 5 has taken the place of 2, and 0.997 of 5
    assert len(set(tasks.subset(1000, 999))) == 999


def test_hellaswag(tiny, session):
    lines = (TASKS / "hellaswag.txt").read_text().splitlines()
    choices, right = [], []
    for i in tasks.hellaswag_order(5, 400):
        context, gold, *answers = lines[6 * i : 6 * i + 6]
        ids = [session.tokenize(f"{context} {answer}") for answer in answers]
        common = next(k for k in range(99) if len({s[k] for s in ids}) > 1)
        choices.append(int(np.argmax([log_probabilities(session, s)[common - 1 :].mean() for s in ids])))
        right.append(int(gold))
    found = tasks.run(tiny["bf16"], TASKS / "hellaswag.txt", "hellaswag")
    assert found.choices == choices
    assert (found.n, found.correct, found.chance) == (5, sum(a == b for a, b in zip(choices, right)), 0.25)
    assert found.interval[0] <= found.accuracy.value <= found.interval[1]


def test_winogrande(tiny, session):
    choices = []
    for first, second, words, _ in tasks._csv_tasks(TASKS / "winogrande.csv"):
        ids = [session.tokenize(first + word + second) for word in words]
        bases = [len(session.tokenize(first + word)) for word in words]
        scores = [log_probabilities(session, s)[base - 1 : -1].mean() for s, base in zip(ids, bases)]
        choices.append(0 if scores[0] > scores[1] else 1)
    found = tasks.run(tiny["bf16"], TASKS / "winogrande.csv", "winogrande")
    assert found.choices == choices
    assert (found.n, found.chance) == (6, 0.5)


def test_winogrande_scores_what_follows_the_word():
    # two words of one and two tokens, five and six tokens behind where they part
    question = winogrande([[1, 5, 7, 8, 9, 3], [1, 5, 6, 4, 8, 9, 3]], [3, 4], right=1)
    assert [(a.first, a.last) for a in question.answers] == [(3, 5), (4, 6)]
    # too little behind the word: from where they part, without the last token
    question = winogrande([[1, 5, 7, 3], [1, 5, 6, 3]], [3, 3], right=0)
    assert [(a.first, a.last) for a in question.answers] == [(2, 3), (2, 3)]
    # one token only: that one
    question = winogrande([[1, 5, 7], [1, 5, 6]], [3, 3], right=0)
    assert [(a.first, a.last) for a in question.answers] == [(2, 3), (2, 3)]


def test_multiple_choice(tiny, session, choice_file):
    items = json.loads((TASKS / "multiple-choice.json").read_text())
    correct = 0
    for item in items:
        ids = [session.tokenize(f"{item['question']} {answer}") for answer, _ in item["mc1"]]
        common = next(k for k in range(99) if len({s[k] for s in ids}) > 1)
        best = int(np.argmax([log_probabilities(session, s)[common - 1 :].mean() for s in ids]))
        correct += item["mc1"][best][1]
    found = tasks.run(tiny["bf16"], choice_file, "multiple-choice")
    assert (found.n, found.correct) == (4, correct)
    assert found.chance == pytest.approx((1 / 4 + 1 / 3 + 1 / 5 + 1 / 2) / 4)
    assert tasks.run(tiny["bf16"], choice_file, "multiple-choice", n=2).n == 2


@pytest.mark.slow
def test_a_real_model_knows_more_than_chance(smollm2):
    found = tasks.run(smollm2, TASKS / "hellaswag.txt", "hellaswag")
    assert found.correct >= 4


def test_batches_do_not_change_scores(session):
    lines = (TASKS / "hellaswag.txt").read_text().splitlines()
    ids = [session.tokenize(f"{lines[0]} {answer}") for answer in lines[2:6]]
    questions = [endings(ids, frozenset({i % 4})) for i in range(7)]
    assert choose(session, questions, n_batch=32).choices == choose(session, questions, n_batch=4096).choices


@pytest.mark.parametrize(
    ("suite", "content", "message"),
    [
        ("hellaswag", b"one\n2\n", "no multiple of 6"),
        ("hellaswag", b"one\n7\na\nb\nc\nd\n", "line 2 is '7', expected the number of an ending"),
        ("hellaswag", b"one\n1\na\na\na\na\n", "adds no tokens"),
        ("winogrande", b"0,no blank here,a,b,1\n", "line 1 is not"),
        ("winogrande", b"0,a _ here,a,b,3\n", "line 1 is not"),
        ("multiple-choice", b"\xff\xff\xff\xff", "announces 4,294,967,295 tasks"),
        ("multiple-choice", binary([{"question": "a", "mc1": [["b", 0], ["c", 0]], "mc2": []}]), "no right one"),
        ("multiple-choice", binary([{"question": "a", "mc1": [["b", 1]], "mc2": []}])[:-9], "truncated"),
        ("multiple-choice", struct.pack("<III", 1, 8, 0) + struct.pack("<I", 10**6), "announces 1,000,000 answers"),
    ],
)
def test_bad_files(tiny, tmp_path, capsys, suite, content, message):
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises((GGUFError, EngineError), match=message):
        tasks.run(tiny["bf16"], tmp_path / "bad", suite)
    assert main(["perplexity", str(tiny["bf16"]), "-f", str(tmp_path / "bad"), f"--{suite}"]) == 1
    assert message in capsys.readouterr().err


def test_tasks_longer_than_the_context(session):
    long = [1] * 2000
    with pytest.raises(EngineError, match="task 0 has 2000 tokens"):
        choose(session, [Question([Answer(long, 5, 2000)], frozenset({0}))])
    with pytest.raises(EngineError, match="no tasks"):
        choose(session, [])
