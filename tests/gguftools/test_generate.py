"""`gguftools generate`: prompts, conversations, what is reported, and use in a real terminal."""

import json
import os
import pty
import select
import subprocess
import sys
import time

import pytest

import gguftools
from gguftools import GGUFError, TextGenerator
from gguftools.commands.generate import read_bias

QUICK = {"threads": 1}
FLOATS = ("-ctk", "f32", "-ctv", "f32")


def run(*arguments, stdin=None, code=0):
    done = subprocess.run(
        [sys.executable, "-m", "gguftools", "generate", *map(str, arguments)],
        capture_output=True, text=True, input=stdin, check=False, encoding="utf-8",
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture(scope="module")
def demo():
    return str(gguftools.demo_model())


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    """The demonstration model with a template."""
    path = tmp_path_factory.mktemp("chat") / "chat.gguf"
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    with gguftools.open(gguftools.demo_model()) as f:
        from gguftools.gguf import Writer

        with Writer(path) as w:
            for key in f.metadata:
                w.add(key, f.metadata[key])
            w.add("tokenizer.chat_template", template)
            for name, t in f.tensors.items():
                w.declare(name, t.shape, t.format)
            for name, t in f.tensors.items():
                w.write(name, [t.data])
    return path


# --- from Python ---


def test_text_comes_in_pieces(demo):
    pieces = []
    result = gguftools.generate(demo, "The first", n=12, on_text=pieces.append, **QUICK)
    assert "".join(pieces) == result.text
    assert len(pieces) > 3
    assert len(result.ids) == 12


def test_a_seed_is_a_text(demo):
    from engine.sampling import Params

    texts = [gguftools.generate(demo, "The", n=10, sampling=Params(seed=s), **QUICK).text for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_stop_strings(demo):
    from engine.sampling import Params

    whole = gguftools.generate(demo, "The first", n=20, sampling=Params(temp=0), **QUICK).text
    stop = whole[10:14]
    result = gguftools.generate(demo, "The first", n=20, sampling=Params(temp=0), stops=[stop], **QUICK)
    assert result.text == whole[: whole.find(stop)]
    assert result.stop == "stop string"


def test_grammar_and_schema(demo):
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    result = gguftools.generate(demo, "The first", n=60, json_schema=schema, **QUICK)
    if result.stop == "end of text":
        assert set(json.loads(result.text)) == {"n"}
    assert result.text.startswith("{")
    letters = gguftools.generate(demo, "The first", n=10, grammar="root ::= [a-c]+", **QUICK).text
    assert letters
    assert set(letters) <= set("abc")
    with pytest.raises(GGUFError, match="exclude each other"):
        TextGenerator(demo, grammar="root ::= [a]", json_schema=schema, **QUICK)


def test_a_conversation_computes_what_is_new(chatty):
    from engine.sampling import Params

    writer = TextGenerator(chatty, sampling=Params(temp=0), **QUICK)
    first = writer.reply("Hello", 8)
    before = writer.context.counts.n_prompt + writer.context.counts.n_eval
    second = writer.reply("And then?", 8)
    assert [m["role"] for m in writer.messages] == ["user", "assistant", "user", "assistant"]
    computed = writer.context.counts.n_prompt + writer.context.counts.n_eval - before
    assert computed < len(second.prompt_ids)
    fresh = TextGenerator(chatty, sampling=Params(temp=0), **QUICK)
    fresh.messages = writer.messages[:2]
    assert fresh.reply("And then?", 8).text == second.text
    assert first.text


def test_a_model_without_a_template(demo):
    writer = TextGenerator(demo, **QUICK)
    with pytest.raises(GGUFError, match="has no chat template"):
        writer.reply("Hello")
    assert writer.messages == []


def test_an_interrupt_ends_a_reply(demo):
    def stop(text):
        raise KeyboardInterrupt

    result = TextGenerator(demo, **QUICK).write("The first", 20, stop)
    assert result.stop == "interrupted"
    assert len(result.ids) >= 1


# --- the command ---


def test_greedy_text_of_a_real_model(smollm2, shared):
    golden = json.loads((shared / "golden" / "smollm2-greedy.json").read_text())[0]
    n = 10
    done = run(
        smollm2, "-p", golden["prompt"], "-n", n, "--temp", 0, "--json", "--n-probs", 2, "-ctk", "f32", "-ctv", "f32"
    )
    found = json.loads(done.stdout)
    assert found["prompt_ids"] == golden["prompt_ids"]
    assert [t["id"] for t in found["tokens"]] == golden["new_ids"][:n]
    for token, nll, margin in zip(found["tokens"], golden["nll"], golden["margin"]):
        assert token["logprob"] == pytest.approx(-nll, abs=1e-3)
        assert token["top"][0]["logprob"] - token["top"][1]["logprob"] == pytest.approx(margin, abs=2e-3)
    assert found["text"] == "".join(t["piece"] for t in found["tokens"])
    assert found["stop"] == "length"
    assert found["timings"]["prompt_tokens"] == len(golden["prompt_ids"])
    assert found["timings"]["eval_runs"] == n - 1


def test_prompt_text_and_timings(demo):
    done = run(demo, "-p", "The first", "-n", 5, "--temp", 0)
    assert done.stdout.startswith("The first")
    assert done.stdout.endswith("\n")
    for line in ("load time", "prompt eval time", "eval time", "total time", "graphs reused"):
        assert line in done.stderr
    assert "4 runs" in done.stderr
    hidden = run(demo, "-p", "The first", "-n", 5, "--temp", 0, "--no-display-prompt")
    assert done.stdout == "The first" + hidden.stdout


def test_prompts_from_files_and_escapes(demo, tmp_path):
    (tmp_path / "p.txt").write_text("The first\n")
    plain = run(demo, "-p", "The first", "-n", 4, "--temp", 0).stdout
    assert run(demo, "-f", tmp_path / "p.txt", "-n", 4, "--temp", 0).stdout == plain
    assert run(demo, "-e", "-p", r"The\tfirst", "-n", 1).stdout.startswith("The\tfirst")


@pytest.mark.parametrize("options", [("--lookup",), ("-md", "{demo}"), ("--lookup", "--draft-max", "3")])
def test_drafts(demo, options):
    text = run(demo, "-p", "one two one two one two", "-n", 16, "--temp", 0).stdout
    done = run(demo, "-p", "one two one two one two", "-n", 16, "--temp", 0, *(o.format(demo=demo) for o in options))
    assert done.stdout == text
    assert "accepted" in done.stderr


def test_a_prompt_cache(demo, tmp_path):
    cache = tmp_path / "cache.gguf"
    first = run(demo, "-p", "The first program of the day", "-n", 4, "--temp", 0, "--prompt-cache", cache)
    again = run(demo, "-p", "The first program of the day", "-n", 4, "--temp", 0, "--prompt-cache", cache)
    assert again.stdout == first.stdout
    assert "     1 tokens" in again.stderr  # one token of the prompt is run again, for its result
    assert (
        "cache.gguf: the session was saved by another model"
        in run(demo, "-p", "x", "-n", 1, "--prompt-cache", cache, "-ctk", "f32", code=1).stderr
    )


def test_a_conversation_from_a_pipe(chatty):
    done = run(chatty, "--chat", "-n", 4, "--temp", 0, stdin="Hello\n\nAgain\n/exit\nnever read\n")
    assert len(done.stdout.splitlines()) >= 2
    one = run(chatty, "--chat", "-p", "Hello", "-n", 4, "--temp", 0)
    assert done.stdout.startswith(one.stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "which prompt? Give -p, -f, or --chat"),
        (("-p", "a", "-f", "b"), "-p and -f exclude each other"),
        (("-p", "a", "--lookup", "-md", "b"), "--model-draft and --lookup exclude each other"),
        (("--chat", "--json"), "--json wants a prompt"),
        (("-p", "a", "--samplers", "nonsense"), "unknown sampler 'nonsense'"),
        (("-p", "a", "--sampler-seq", "?"), "unknown letter '?'"),
        (("-p", "a", "--top-p", "-1"), "top_p is -1"),
        (("-p", "a", "-l", "x"), "--logit-bias x: expected an id and a bias"),
        (("-p", "a", "-j", "{"), "--json-schema: is no JSON"),
        (("-p", "a", "--grammar", "root ::= other"), "other"),
        (("-p", "a", "-ctk", "q6_k"), "a cache of keys cannot be of type q6_k; use one of F32"),
        (("-p", "a", "-lm", "fast"), "no load mode 'fast'"),
        (("-p", "a", "--activations", "q4"), "no activations 'q4'; use one of f32, q8"),
        (("-p", "a", "--override-kv", "x"), "expected KEY=TYPE:VALUE"),
        (("-p", "a", "-md", "missing.gguf"), "missing.gguf: no such file"),
        (("-p", "a", "--lora", "missing.gguf"), "missing.gguf: no such file"),
        (("-p", "a", "--lora-scaled", "missing.gguf"), "--lora-scaled missing.gguf: expected FILE:SCALE"),
        (("-p", "a", "--control-vector", "missing.gguf"), "missing.gguf: no such file"),
        (("-p", "a", "-r", ""), "an empty stop string"),
        (("-p", "word " * 400, "-c", "256"), "the context room for 256: use a larger -c"),
        (("-f", "missing.txt"), "missing.txt"),
        (("--chat", "-p", "a"), "has no chat template"),
    ],
)
def test_what_cannot_be(demo, arguments, message):
    done = run(demo, *arguments, code=1)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert message in line
    assert done.stdout in ("", *arguments)


def test_biases():
    assert read_bias("7-inf") == (7, float("-inf"))
    for text in ("", "7", "+1", "7+", "x+1"):
        with pytest.raises(GGUFError, match="expected an id and a bias"):
            read_bias(text)


# --- a terminal ---


class Terminal:
    """A pseudo-terminal with the command in it."""

    def __init__(self, *arguments):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, [sys.executable, "-m", "gguftools", "generate", *map(str, arguments)], os.environ)
        self.seen = b""

    def until(self, text, seconds=120):
        """Read until the text is there; it is cut off."""
        end = time.monotonic() + seconds
        while text.encode() not in self.seen:
            assert time.monotonic() < end, self.seen
            if select.select([self.fd], [], [], 0.2)[0]:
                try:
                    self.seen += os.read(self.fd, 4096)
                except OSError:
                    break
        before, _, self.seen = self.seen.partition(text.encode())
        return before.decode(errors="replace")

    def write(self, text):
        os.write(self.fd, text.encode())

    def close(self):
        _, status = os.waitpid(self.pid, 0)
        os.close(self.fd)
        return os.waitstatus_to_exitcode(status)


def test_a_conversation_in_a_terminal(chatty):
    terminal = Terminal(chatty, "--chat", "-n", 6, "--temp", 0, "-t", 1)
    terminal.until("Type a message")
    terminal.until("> ")
    terminal.write("Hello\n")
    reply = terminal.until("> ")
    assert "Hello" in reply  # what was typed is seen, then the reply
    assert len(reply.strip()) > len("Hello")
    terminal.write("Again\x7fn\n")  # a correction
    terminal.until("> ")
    terminal.write("\x04")
    assert "eval time" in terminal.until("graphs reused")
    assert terminal.close() == 0


def test_an_interrupt_in_a_terminal(chatty):
    terminal = Terminal(chatty, "--chat", "--ignore-eos", "-t", 1)
    terminal.until("> ")
    terminal.write("Hello\n")
    terminal.until("\n")
    time.sleep(1.5)
    terminal.write("\x03")  # ends the reply
    terminal.until("> ")
    terminal.write("/exit\n")
    terminal.until("graphs reused")
    assert terminal.close() == 0
