"""What is fuzzed: readers by name, each with seeds, as functions of a file's bytes.

A reader may refuse (the three exceptions of our packages) and nothing else: any other exception, a crash or a hang is a
finding. What was found is kept below `corpus/<reader>` and is run by every test run.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.errors import EngineError
from engine.sampling import Grammar, GrammarMatcher, TokenTexts
from engine.sampling.json_schema import json_schema_to_gbnf
from engine.tokenizer import from_metadata
from gguftools.errors import GGUFError
from gguftools.gguf import GGUF, Writer
from gguftools.imatrix_file import read_imatrix, write_imatrix
from gguftools.logits_file import LogitsFile, LogitsWriter
from gguftools.recipe_file import load_recipe
from gguftools.safetensors import SafetensorsFile
from gguftools.toolbox.check import check
from quant.errors import QuantError
from quant.imatrix import IMatrix
from quant.mixes import TensorInfo, plan
from quant.recipes import write_recipe

REFUSALS = (GGUFError, EngineError, QuantError)
CORPUS = Path(__file__).parent / "corpus"


@dataclass(frozen=True)
class Target:
    """read: opens the file and touches all that it says; seeds: writes good files into a folder."""

    read: Callable[[Path], None]
    seeds: Callable[[Path], None]


def run(target: Target, data: bytes, scratch: Path) -> bool:
    """Give `data` to the reader; whether it was accepted. Anything but a refusal gets out."""
    scratch.write_bytes(data)
    try:
        target.read(scratch)
    except REFUSALS as error:
        message = str(error)
    else:
        return True
    assert len(message.splitlines()) == 1, "a refusal is one line"
    return False


def inputs(name: str) -> Iterator[tuple[str, bytes]]:
    """Everything that was kept for a reader: file name, content."""
    for path in sorted((CORPUS / name).glob("*")):
        yield path.name, path.read_bytes()


# --- readers ----------------------------------------------------------------------------------------------------------


def _gguf(path: Path) -> None:
    with GGUF(path) as f:
        for key, field in f.fields.items():
            assert field.encoded(">") is not None
            repr(f.metadata[key])
        for t in f.tensors.values():
            assert t.data.size == t.nbytes <= f.size


def _check(path: Path) -> None:
    for fault in check(path).faults:
        assert fault.message
        assert fault.remedy


def _safetensors(path: Path) -> None:
    with SafetensorsFile(path) as f:
        for view in f.tensors.values():
            with contextlib.suppress(GGUFError):  # types of less than a byte
                assert view.array().nbytes == view.nbytes


def _imatrix(path: Path) -> None:
    matrix = read_imatrix(path)
    for name in matrix.entries:
        assert np.isfinite(matrix.importance(name)).all()


def _tokenizer(path: Path) -> None:
    with GGUF(path) as f:
        tokenizer = from_metadata(f.metadata)
    ids = tokenizer.tokenize("Hello, wörld 123\n", add_special=True, parse_special=True)
    tokenizer.detokenize(ids, special=True)


_TENSORS = [
    TensorInfo(name, shape, "F16")
    for name, shape in (
        ("token_embd.weight", (64, 256)),
        ("blk.0.attn_v.weight", (64, 256)),
        ("blk.1.ffn_down_exps.weight", (4, 64, 96)),
        ("output.weight", (64, 256)),
    )
]


def _recipe(path: Path) -> None:
    recipe = load_recipe(path)
    again = path.with_name("again.toml")
    again.write_text(write_recipe(recipe), encoding="utf-8")
    assert load_recipe(again) == recipe
    for choice in plan(_TENSORS, {"general.architecture": "llama"}, recipe):
        assert choice.n_bytes > 0


def _logits(path: Path) -> None:
    found = LogitsFile(path)
    n = found.n_chunks * (found.n_ctx - 1 - found.n_ctx // 2)
    for lo in range(0, n, 64):
        rows = found.rows(lo, min(lo + 64, n))
        assert rows.shape == (min(64, n - lo), found.n_vocab)


_WORDS = ("a", "ab", '{"', '"', "é", "\n", "1", "<", ' ": [', "aaaaaaaaaaaaaaaa")
_PIECES = (*(word.encode() for word in _WORDS), b"\xc3")


def _follow(grammar: Grammar) -> None:
    """A few tokens in a grammar."""
    matcher = GrammarMatcher(grammar, TokenTexts(_PIECES, _PIECES, frozenset({7})))
    for step in range(4):
        allowed = np.flatnonzero(matcher.mask())
        if not len(allowed):
            return
        matcher.accept(int(allowed[step % len(allowed)]))


def _gbnf(path: Path) -> None:
    _follow(Grammar(path.read_bytes().decode(errors="replace"), lambda text: [len(text) % 11]))


def _json_schema(path: Path) -> None:
    try:
        schema = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise EngineError("not JSON") from None
    _follow(Grammar(json_schema_to_gbnf(schema)))


# --- seeds ------------------------------------------------------------------------------------------------------------


def _gguf_seeds(folder: Path) -> None:
    for order, version in (("<", 3), (">", 3), ("<", 2)):
        with Writer(
            folder / f"all{version}{'big' if order == '>' else ''}.gguf", byte_order=order, version=version
        ) as w:
            w.add("general.architecture", "llama")
            w.add("general.alignment", 8, "uint32")
            for kind in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
                w.add(kind, 1, kind)
                w.add(kind + "s", [1, 2], kind)
            w.add("bool", True)
            w.add("bools", [True, False])
            w.add("float", 0.5, "float64")
            w.add("strings", ["", "a", "bc"])
            w.declare("a", (2, 32), "Q4_0")
            w.declare("b", (3,), "F32")
            w.declare("c", (), "I16")
            w.write("a", np.zeros(36, np.uint8))
            w.write("b", np.ones(3, np.float32))
            w.write("c", np.zeros(2, np.uint8))


def _safetensors_seeds(folder: Path) -> None:
    entries = {
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
        "c": {"dtype": "F4", "shape": [4], "data_offsets": [26, 28]},
        "d": {"dtype": "F8_E4M3", "shape": [0, 7], "data_offsets": [28, 28]},
        "__metadata__": {"format": "pt"},
    }
    header = json.dumps(entries, separators=(",", ":")).encode()
    (folder / "all.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(28))


def _imatrix_seeds(folder: Path) -> None:
    matrix = IMatrix(datasets=["text.txt"], chunk_count=2)
    matrix.observe("blk.0.ffn_up.weight", np.ones((3, 8), np.float32))
    matrix.observe("blk.0.ffn_down.weight", np.ones((2, 3, 4), np.float32), 2)
    write_imatrix(folder / "imatrix.gguf", matrix)


def _tokenizer_seeds(folder: Path) -> None:
    letters = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ", "Ã", "¶"]
    merges = ["H e", "l l", "He ll", "Hell o", "Ġ w"]
    tokens = ["<|endoftext|>", *letters, *("".join(m.split()) for m in merges)]
    for pre in ("gpt-2", "llama-bpe"):
        with Writer(folder / f"{pre}.gguf") as w:
            w.add("general.architecture", "llama")
            w.add("tokenizer.ggml.model", "gpt2")
            w.add("tokenizer.ggml.pre", pre)
            w.add("tokenizer.ggml.tokens", tokens)
            w.add("tokenizer.ggml.token_type", [3] + [1] * (len(tokens) - 1))
            w.add("tokenizer.ggml.merges", merges)
            w.add("tokenizer.ggml.bos_token_id", 0)
            w.add("tokenizer.ggml.eos_token_id", 0)
            w.add("tokenizer.ggml.add_bos_token", True)


def _gbnf_seeds(folder: Path) -> None:
    texts = {
        "all": 'root ::= "a\\x41\\u00e9" | [^a-z\\n\\]] item* # note\nitem ::= (. | <[3]> | !<b>){2,5} "\\""+ item2?\n',
        "json": 'root ::= "{" (string ":" root ("," root)*)? "}" | [0-9]+\nstring ::= "\\"" [^"]* "\\""',
    }
    texts["all"] += "item2 ::=\n  [ぁ-ゟ] | (\n b )\nb ::= [x] root |\n"
    for name, text in texts.items():
        (folder / f"{name}.gbnf").write_text(text, encoding="utf-8")


def _json_schema_seeds(folder: Path) -> None:
    schemas = {
        "object": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": -7, "maximum": 300}, "b": {"$ref": "#/$defs/x"}},
            "required": ["a"],
            "additionalProperties": {"type": ["string", "null"], "maxLength": 3},
            "$defs": {"x": {"type": "array", "items": {"$ref": "#"}, "minItems": 1, "maxItems": 4}},
        },
        "choices": {
            "allOf": [{"anyOf": [{"enum": [1, "x", None]}, {"type": "number"}]}, {"type": ["integer", "string"]}]
        },
        "strings": {
            "oneOf": [{"pattern": '^[^"a-z]{2,3}(b|\\\\d)+$'}, {"format": "date-time"}, {"const": {"a": [1.5]}}],
        },
        "tuple": {"prefixItems": [{}, {"type": "boolean"}], "items": {"minLength": 2}, "maxItems": 5},
    }
    for name, schema in schemas.items():
        (folder / f"{name}.json").write_text(json.dumps(schema), encoding="utf-8")


_TEMPLATE = """{% for m in messages %}{{ '<|im_start|>' + m['role'] + m.content | trim }}<|im_end|>{% endfor %}"""


def _check_seeds(folder: Path) -> None:
    _gguf_seeds(folder)
    _tokenizer_seeds(folder)
    with GGUF(folder / "gpt-2.gguf") as f, Writer(folder / "model.gguf") as w:
        for field in f.fields.values():
            w.add_field(field)
        numbers = {"block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 32}
        numbers |= {"attention.head_count": 2, "rope.dimension_count": 16, "vocab_size": 101}
        for key, value in numbers.items():
            w.add("llama." + key, value)
        w.add("llama.attention.layer_norm_rms_epsilon", 1e-5)
        w.add("llama.rope.freq_base", 10000.0)
        w.add("llama.rope.scaling.type", "yarn")
        w.add("llama.rope.scaling.factor", 2.0)
        w.add("tokenizer.chat_template", _TEMPLATE)
        w.declare("token_embd.weight", (101, 32), "Q8_0")
        w.declare("rope_freqs.weight", (8,), "F32")
        w.write("token_embd.weight", np.zeros(101 * 34, np.uint8))
        w.write("rope_freqs.weight", np.ones(8, np.float32))


def _recipe_seeds(folder: Path) -> None:
    """Every key and every condition."""
    (folder / "base.toml").write_text(
        """name = "a"
description = "b"
base = "Q4_K"
embeddings = "Q8_0"
output = "COPY"
file_type = 15
fallback = { Q4_K = "IQ4_NL" }
needs_importance = ["Q2_K"]
[[rule]]
name = "attn_(v|k)"
roles = ["attn_v", "head"]
arch = ["llama"]
blocks = "0-3, first 1/8, last 2, middle 6/8, more, 30-"
layers = "more"
counted = "first 2"
type = "Q6_K"
exact = true
counts = false
required = true
[[rule]]
experts = ">=4"
gqa = 4
rows = "<=64"
columns = ">32"
stacked = true
fits = false
is_70b = false
importance = true
type = ""
"""
    )
    (folder / "extends.toml").write_text('extends = "Q4_K_M"\nfallback = "error"\n[[rule]]\ntype = "Q5_K"\n')


def _logits_seeds(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for n_ctx, n_vocab, n_chunks in ((4, 1, 1), (8, 31, 2)):
        with LogitsWriter(folder / f"{n_vocab}.logits") as w:
            w.begin(rng.integers(0, n_vocab, (n_chunks, n_ctx)).astype(np.int32), n_vocab)
            w.write(rng.standard_normal((n_chunks * (n_ctx - 1 - n_ctx // 2), n_vocab)).astype(np.float32))


TARGETS = {
    "gguf": Target(_gguf, _gguf_seeds),
    "check": Target(_check, _check_seeds),
    "safetensors": Target(_safetensors, _safetensors_seeds),
    "imatrix": Target(_imatrix, _imatrix_seeds),
    "tokenizer": Target(_tokenizer, _tokenizer_seeds),
    "recipe": Target(_recipe, _recipe_seeds),
    "logits": Target(_logits, _logits_seeds),
    "gbnf": Target(_gbnf, _gbnf_seeds),
    "json_schema": Target(_json_schema, _json_schema_seeds),
}
