"""Chat templates: what real ones make of a conversation, hostile ones within bounds; the commands that show texts as
a model sees them."""

import json
import shutil
import time

import pytest

import gguftools
from gguftools import GGUFError
from gguftools.cli import main
from gguftools.gguf import GGUF, Writer
from gguftools.templates import SAMPLE, chat_template, chat_templates, encode_chat, render, render_all

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def test_render():
    messages = [{"role": "user", "content": "Hi <b>"}]
    assert render(CHATML, messages) == "<|im_start|>user\nHi <b><|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, messages, add_generation_prompt=False) == "<|im_start|>user\nHi <b><|im_end|>\n"
    assert render_all("{{ messages[0].content }}{{ eos_token }}", [messages, SAMPLE], **SPECIAL) == [
        "Hi <b></s>", "You are a helpful assistant.</s>"
    ]  # fmt: skip


WRITTEN = {
    "{% if true %}\n  a\n{% endif %}\nb": "  a\nb",  # blocks take their line along
    '{{ {"é": "<&>"} | tojson }}': '{"é": "<&>"}',  # as it stands, not for HTML
    '{{ {"b": 1, "a": [2]} | tojson(indent=1) }}': '{\n "b": 1,\n "a": [\n  2\n ]\n}',
    "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}": "01345678",
    "{% for i in range(9) %}{% if i > 3 %}{% break %}{% endif %}{{ i }}{% endfor %}": "0123",
    "{% generation %}{{ messages[2].content }}{% endgeneration %}": "Hi there",
    "{{ strftime_now('%Y') | length }}": "4",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}": "4",
    "{{ tools is defined }}": "False",
}


@pytest.mark.parametrize("template", WRITTEN)
def test_what_templates_are_written_for(template):
    assert render(template, SAMPLE) == WRITTEN[template]


REFUSED = {
    "endless": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}" * 9,
        "more than 2 seconds",
    ),
    "large": ('{{ "a" * 10**10 }}', "too much memory"),
    "padded": ('{{ "%10000000000d" % 1 }}', "too much memory"),
    "long": ('{% for i in range(99999) %}{{ "a" * 1000 }}{% endfor %}', "too long"),
    "recursive": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "without end"),
    "nested": ("{{" + "(" * 9999 + "1" + ")" * 9999 + "}}", "without end"),
    "classes": ('{{ "".__class__.__mro__ }}', "unsafe"),
    "globals": ("{{ raise_exception.__globals__.sys }}", "unsafe"),
    "changes": ("{{ messages.append(1) }}", "unsafe"),
    "files": ('{% include "/etc/passwd" %}', "no loader"),
    "syntax": ("a\n{% if %}", r"line 2"),
    "undefined": ("{{ x.y }}", "'x' is undefined"),
    "objects": ("{{ raise_exception('no\nsystem message') }}", "no system message"),
    "huge": ("a" * (3 << 20), "3,145,728 characters"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_hostile_templates(case):
    template, message = REFUSED[case]
    start = time.monotonic()
    with pytest.raises(GGUFError, match=message) as caught:
        render(template, SAMPLE, seconds=2)
    assert time.monotonic() - start < 30  # ended, however busy the machine
    assert "\n" not in str(caught.value)


def test_messages_that_are_no_json():
    with pytest.raises(GGUFError, match="cannot be given"):
        render("a", [{"role": "user", "content": object()}])


def test_real_templates(llama_cpp_models):
    """Every template that llama.cpp collects, without its system message where it refuses one."""
    texts = {}
    for path in sorted((llama_cpp_models / "templates").glob("*.jinja")):
        variables = SPECIAL | ({"functions": "", "datetime": ""} if "firefunction" in path.name else {})
        template = path.read_text("utf-8")
        try:
            texts[path.stem] = render(template, SAMPLE, **variables)
        except GGUFError:
            texts[path.stem] = render(template, SAMPLE[1:], **variables)
    assert len(texts) > 60
    assert [name for name, text in texts.items() if "How are you?" not in text] == []
    assert texts["google-gemma-2-2b-it"].startswith("<s><start_of_turn>user\nHello<end_of_turn>\n")
    assert texts["Qwen-Qwen2.5-7B-Instruct"].endswith("How are you?<|im_end|>\n<|im_start|>assistant\n")
    assert texts["meta-llama-Llama-3.1-8B-Instruct"].endswith("<|start_header_id|>assistant<|end_header_id|>\n\n")


def test_templates_of_a_file():
    keys = {"tokenizer.chat_template": "D", "tokenizer.chat_template.rag": "R", "tokenizer.chat_templates": ["rag"]}
    assert chat_templates(keys) == {"default": "D", "rag": "R"}
    assert chat_template(keys) == "D"
    assert chat_template(keys, "rag") == "R"
    with pytest.raises(GGUFError, match="'tools'; there are default, rag"):
        chat_template(keys, "tools")
    with pytest.raises(GGUFError, match="has no chat template"):
        chat_template({})
    with pytest.raises(GGUFError, match="is no text"):
        chat_templates({"tokenizer.chat_template": ["a"]})


# --- commands ---------------------------------------------------------------------------------------------------------

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}\n{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The tiny model's vocabulary with a chat template, as a folder and as a file."""
    folder = tmp_path_factory.mktemp("chat") / "m"
    folder.mkdir()
    source = gguftools.demo_folder()
    shutil.copy(source / "tokenizer.json", folder)
    shutil.copy(source / "config.json", folder)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    templates = [{"name": "default", "template": TEMPLATE}, {"name": "short", "template": "{{ messages[0].role }}\x1b"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": templates}))
    metadata, _ = gguftools.open_vocabulary(folder)
    with Writer(folder.parent / "m.gguf", []) as w:
        for key, value in metadata.items():
            w.add(key, value)
    return folder.parent / "m.gguf"


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    found = capsys.readouterr()
    return code, found.out, found.err


def test_template_command(model, capsys, tmp_path):
    code, out, _ = run(capsys, "template", model)
    assert code == 0
    assert f"⟦{BEGIN}⟧[system]You are a helpful assistant.⟦{END}⟧\n[user]Hello⟦{END}⟧\n" in out
    assert "5 of them special" in out
    assert run(capsys, "template", model.with_suffix("")) == (0, out, "")
    messages = tmp_path / "messages.json"
    messages.write_text(json.dumps({"messages": [{"role": "user", "content": "Hi"}], "tools": []}))
    code, out, _ = run(capsys, "template", model, "--messages", messages, "--json")
    found = json.loads(out)
    assert found["text"] == f"{BEGIN}[user]Hi{END}\n"
    assert found["ids"][0] == 0
    assert found["ids"].count(0) == 1
    assert "".join(found["pieces"]) == found["text"]
    assert found["templates"] == ["short", "default"]
    assert run(capsys, "template", model, "--name", "short")[1].startswith(f"⟦{BEGIN}⟧system\\x1b\n")
    assert run(capsys, "template", model, "--source")[1] == TEMPLATE + "\n"


WRONG_MESSAGES = {
    "[3": "is not JSON",
    "3": "expected messages",
    '[{"content": "x"}]': "expected messages",
    "{}": "expected",
}


@pytest.mark.parametrize("text", WRONG_MESSAGES)
def test_wrong_messages(text, model, capsys, tmp_path):
    path = tmp_path / "messages.json"
    path.write_text(text)
    code, out, err = run(capsys, "template", model, "--messages", path)
    assert (code, out) == (1, "")
    assert WRONG_MESSAGES[text] in err
    assert err.count("\n") == 1


def test_template_command_without_one(tiny, capsys, tmp_path):
    assert "has no chat template" in run(capsys, "template", tiny["bf16"])[2]
    assert run(capsys, "template", tmp_path)[0] == 1
    assert "no tokenizer.json" in run(capsys, "template", tmp_path)[2]


def test_tokenize_command(model, capsys, tmp_path):
    code, out, _ = run(capsys, "tokenize", model, "Hé <|end_of_text|>")
    lines = out.splitlines()
    assert code == 0
    assert lines[0] == "   0  '<|begin_of_text|>'"
    assert lines[-2] == "   1  '<|end_of_text|>'"
    assert lines[-1].endswith("of 18 characters, 3.17 bytes a token; byte-level BPE: gives the text again")
    ids = json.loads(run(capsys, "tokenize", model, "--ids", "--no-bos", "a\tb")[1])
    assert gguftools.load(model, vocab_only=True).detokenize(ids) == "a\tb"
    text = tmp_path / "text.txt"
    text.write_bytes("a\r\n\u2603\n".encode())
    code, out, _ = run(capsys, "tokenize", model, "-f", text, "--json", "--no-parse-special")
    found = json.loads(out)
    assert found["tokens"] == len(found["ids"]) == len(found["pieces"])
    assert (found["characters"], found["bytes"], found["round_trip"], found["kind"]) == (5, 7, True, "byte-level BPE")


def test_tokenize_command_says_what_is_wrong(model, capsys, tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(b"ab\xff")
    assert run(capsys, "tokenize", model, "-f", text)[2] == (
        f"error: {text}: is not UTF-8 text (byte 2); convert it first\n"
    )
    assert run(capsys, "tokenize", model)[0] == 2
    assert run(capsys, "tokenize", model, "a", "-f", text)[0] == 2
    assert run(capsys, "tokenize", model, "a", "--pre", "qwen2")[0] == 1
    assert run(capsys, "tokenize", tmp_path / "no.gguf", "a")[0] == 1
    assert run(capsys, "tokenize", model, "-f", tmp_path / "no.txt")[0] == 1


def test_selftest_of_a_converted_file(tmp_path, capsys):
    from engine.tokenizer import from_metadata, verify_selftest

    plain, tested = tmp_path / "plain.gguf", tmp_path / "tested.gguf"
    gguftools.convert(gguftools.demo_folder(), plain, "bf16")
    assert run(capsys, "convert", gguftools.demo_folder(), "-o", tested, "--outtype", "bf16", "--self-test")[0] == 0
    metadata = GGUF(tested).metadata
    assert verify_selftest(metadata, from_metadata(metadata)) == []
    assert verify_selftest(GGUF(plain).metadata, from_metadata(metadata)) is None
    assert set(metadata) - set(GGUF(plain).metadata) == {
        f"gguftools.tokenizer.selftest.{name}" for name in ("texts", "lengths", "ids")
    }


def test_chat_begins_once():
    _, t = gguftools.open_vocabulary(gguftools.demo_folder())
    assert encode_chat(t, BEGIN + "a") == encode_chat(t, "a") == t.tokenize("a")
