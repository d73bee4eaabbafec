"""Everything that is wrong with a file, not only the first thing. Rules are small generators in one table.

The reader steps over what can be stepped over and reports it (`GGUF(path, on_fault)`); the rules then look at what the
file says. Chat templates are read, never rendered: rendering one runs the file's code.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gguftools.errors import GGUFError
from gguftools.gguf import GGUF, Field, ValueType, keys
from gguftools.gguf.faults import DAMAGED, Fault, Severity
from gguftools.gguf.values import FLOATS, Array, Strings
from gguftools.toolbox import shards
from gguftools.toolbox.weights import is_safetensors
from quant.errors import QuantError

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE

MAX_TEMPLATE = 1 << 20  # bytes that are read
MAX_VOCABULARY = 1 << 20  # tokens that are looked at

#: texts that the tokenizer must give back: words, digits, spaces, accents, other scripts, code
PROBES = (
    "Hello, world! It's 2024.",
    "  two  spaces\tand a tab\n\nand lines\r\n",
    "Café déjà vu — naïve 😊 日本語 Привет",
    "def f(x):\n    return x[0] != 1_000 # 12345678",
)


@dataclass
class Checked:
    """What was found: faults in the order of the rules; readable: whether there was a header to look at."""

    path: Path
    faults: list[Fault] = field(default_factory=list)
    readable: bool = True

    @property
    def is_clean(self) -> bool:
        """No errors and no warnings; notes are allowed."""
        return not any(fault.severity > NOTE for fault in self.faults)

    def counts(self) -> dict[str, int]:
        """Severity -> number of findings, most severe first."""
        found = Counter(fault.severity for fault in self.faults)
        return {str(severity): found[severity] for severity in Severity}

    def summary(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        names = ("code", "message", "remedy", "offset", "where")
        return {
            "file": str(self.path),
            "clean": self.is_clean,
            "counts": self.counts(),
            "findings": [{"severity": str(f.severity)} | {n: getattr(f, n) for n in names} for f in self.faults],
        }


def check(path: str | os.PathLike, data: bool = True) -> Checked:
    """Look for faults in a GGUF or safetensors file.

    data: also read the weights, not only the header.

    >>> import gguftools
    >>> gguftools.check(gguftools.demo_model()).is_clean
    True

    Raises GGUFError if there is no such file; anything that is wrong with its content is a fault.
    """
    result = Checked(Path(path))
    report = result.faults.append
    try:
        if is_safetensors(result.path):
            _check_safetensors(result.path, data, report)
            return result
        f = GGUF(path, report)
    except GGUFError as error:
        if error.offset is None:  # no such file, a folder, ...
            raise
        result.readable = False
        message = str(error).removeprefix(f"{path}: ")
        what, _, remedy = message.rpartition("; ")
        report(Fault("unreadable", what or message, remedy if what else DAMAGED, error.offset))
        return result
    with f:
        context = _Context(f, {key: f.fields[key].value for key in f.fields})
        for rule in RULES if data else [rule for rule in RULES if rule not in DATA_RULES]:
            result.faults.extend(rule(context))
    return result


@dataclass
class _Context:
    """What rules look at. values: key -> value, arrays undecoded."""

    f: GGUF
    values: Mapping[str, Any]

    @property
    def arch(self) -> str:
        found = self.values.get(keys.ARCHITECTURE)
        return found if isinstance(found, str) else ""

    @property
    def is_model(self) -> bool:
        """A whole model or the first of its shards: files of other kinds have no vocabulary."""
        kind = self.values.get("general.type", "model")
        return kind == "model" and bool(self.arch) and not self.values.get(keys.SPLIT_NO)

    def at(self, key: str) -> int | None:
        return self.f.fields[key].offset if key in self.f.fields else None

    def of_arch(self, name: str) -> Any:
        """Value of `{arch}.name`, or None."""
        return self.values.get(f"{self.arch}.{name}")

    def number(self, name: str) -> float | None:
        found = self.of_arch(name)
        return found if isinstance(found, (int, float)) and not isinstance(found, bool) else None

    def key_fault(self, code: str, key: str, message: str, remedy: str, severity: Severity = ERROR) -> Fault:
        return Fault(code, message, remedy, self.at(key), key, severity)

    def tensor_fault(self, code: str, name: str, message: str, remedy: str, severity: Severity = ERROR) -> Fault:
        t = self.f.tensors.get(name)
        at = None if t is None else self.f.data_offset + t.offset
        return Fault(code, f"tensor '{name}' {message}", remedy, at, name, severity)

    def tokens(self) -> list[str] | None:
        found = self.values.get("tokenizer.ggml.tokens")
        return found.tolist() if isinstance(found, Strings) and len(found) <= MAX_VOCABULARY else None


# --- the file as a container ------------------------------------------------------------------------------------------


def _layout(c: _Context) -> Iterator[Fault]:
    f = c.f
    for t in f.tensors.values():
        if not t.size:
            yield c.tensor_fault("empty-tensor", t.name, f"has no weights: {list(t.shape)}", "convert again", WARNING)
    extra = f.size - f.data_end
    if extra > 0:
        message = f"{extra:,} bytes after the last tensor"
        yield Fault(
            "trailing-bytes", message, "`gguftools edit FILE -o NEW` writes a copy without them", f.data_end, "", NOTE
        )


def _texts(c: _Context) -> Iterator[Fault]:
    for key, found in c.f.fields.items():
        value = c.values[key]
        if found.type is ValueType.STRING and not _is_utf8(found):
            yield c.key_fault("text", key, f"key '{key}' is not UTF-8", "set it again with `gguftools edit`", WARNING)
        elif found.type in FLOATS and not np.isfinite(value):
            yield c.key_fault("number", key, f"key '{key}' is {value}", "set it again with `gguftools edit`", WARNING)


def _is_utf8(found: Field) -> bool:
    try:
        str(memoryview(found.raw)[8:], "utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _general(c: _Context) -> Iterator[Fault]:
    if c.values.get("general.type", "model") == "model" and not c.arch and not c.values.get(keys.SPLIT_NO):
        yield Fault(
            "architecture", f"key '{keys.ARCHITECTURE}' is missing", "no program can load the file: convert again"
        )
    quantized = [t for t in c.f.tensors.values() if t.format.is_quantized]
    if quantized and keys.QUANTIZATION_VERSION not in c.values and not c.values.get(keys.SPLIT_NO):
        message = f"key '{keys.QUANTIZATION_VERSION}' is missing, {len(quantized):,} tensors are quantized"
        yield Fault("version", message, f"`gguftools edit --set {keys.QUANTIZATION_VERSION}=2`", None, "", NOTE)


def _split(c: _Context) -> Iterator[Fault]:
    count = c.values.get(keys.SPLIT_COUNT)
    if not isinstance(count, int) or count == 0:
        return
    try:
        with shards.open_set(c.f.path):
            pass
    except GGUFError as error:
        yield c.key_fault("split", keys.SPLIT_COUNT, str(error), "get all shards of one set into one folder")


# --- weights ----------------------------------------------------------------------------------------------------------


def _blocks(c: _Context) -> Iterator[Fault]:
    from quant.validate import first_bad_block

    for t in c.f.tensors.values():
        try:
            blocks = t.blocks
        except QuantError:  # integers: nothing to look for
            continue
        bad = first_bad_block(blocks, t.format)
        if bad >= 0:
            what = "scale" if t.format.is_quantized else "value"
            row, column = divmod(bad * t.format.block_size, t.ne[0] if t.ne else 1)
            message = f"tensor '{t.name}' has a {what} that is not finite in row {row:,}, column {column:,}"
            at = c.f.data_offset + t.offset + bad * t.format.type_size
            yield Fault("not-finite", message, "quantize or convert again from a sound source", at, t.name)
        elif t.size > 1 and len(t.ne) > 1 and not t.raw.any():
            yield c.tensor_fault(
                "zeros", t.name, "is zero throughout", "compare with the source; download again", WARNING
            )


# --- the model --------------------------------------------------------------------------------------------------------


def _tensors(c: _Context) -> Iterator[Fault]:
    """The family's own list of parameters and tensors, where the engine knows the family."""
    from engine.errors import EngineError
    from engine.models import get_arch

    if not c.is_model or not c.f.tensors:
        return
    try:
        arch = get_arch(c.arch)
    except EngineError:
        message = f"architecture '{c.arch}' is not known here: its tensors are not compared with a list"
        yield Fault("unknown-architecture", message, "nothing to do", None, "", NOTE)
        return
    metadata = dict(c.values)
    tokens = c.values.get("tokenizer.ggml.tokens")
    if isinstance(tokens, Array):
        metadata.setdefault(f"{c.arch}.vocab_size", len(tokens))
    try:
        h = arch.read_hparams(metadata)
        expected = arch.expected_tensors(h)
    except EngineError as error:
        message, again = str(error).rpartition(":")[0] or str(error), "convert the original model again"
        named = re.match(r"key '([^']+)'", message)
        if named is not None and named[1] in c.values:
            yield c.key_fault("parameter", named[1], message, again)
        else:
            yield Fault("parameter", message, again)
        return
    if c.values.get(keys.SPLIT_COUNT):
        return
    for name, (row, shape) in expected.items():
        t = c.f.tensors.get(name)
        if t is None and not row.optional:
            message = f"tensor '{name}' is missing"
            yield Fault("missing-tensor", message, "convert the original model again", None, name)
        elif t is not None and None not in shape and t.shape != tuple(shape) and name not in EMBEDDINGS:
            message = f"has shape {list(t.shape)}, the keys imply {list(shape)}"
            yield c.tensor_fault("shape", name, message, "convert the original model again")
    for name in c.f.tensors:
        if name not in expected:
            message = f"is none of a '{c.arch}' model"
            yield c.tensor_fault("extra-tensor", name, message, "remove it: `gguftools edit --drop-tensor`", NOTE)


_ROPE_TYPES = ("none", "linear", "yarn", "longrope")


def _rope(c: _Context) -> Iterator[Fault]:
    if not c.is_model:
        return
    again = "convert the original model again, or set the key with `gguftools edit`"
    base, key = c.number("rope.freq_base"), f"{c.arch}.rope.freq_base"
    if base is not None and not (np.isfinite(base) and base > 0):
        yield c.key_fault("rope", key, f"key '{key}' is {base}, expected a positive number", again)
    n_rot, key = c.number("rope.dimension_count"), f"{c.arch}.rope.dimension_count"
    n_head, n_embd = c.number("attention.head_count"), c.number("embedding_length")
    head = c.number("attention.key_length") or (n_embd // n_head if n_head and n_embd else None)
    if n_rot is not None and (n_rot % 2 or (head is not None and n_rot > head)):
        message = f"key '{key}' is {n_rot}, expected an even number" + (f" up to {head:.0f}" if head else "")
        yield c.key_fault("rope", key, message, again)
    kind, key = c.of_arch("rope.scaling.type"), f"{c.arch}.rope.scaling.type"
    factor = c.number("rope.scaling.factor")
    if kind is not None and kind not in _ROPE_TYPES:
        message = f"key '{key}' is {kind!r}; there are {', '.join(_ROPE_TYPES)}"
        yield c.key_fault("rope", key, message, again)
    if kind in ("linear", "yarn") and not (factor and np.isfinite(factor) and factor > 0):
        message = f"key '{key}' is {kind}, but '{c.arch}.rope.scaling.factor' is {factor}"
        yield c.key_fault("rope", key, message, again)
    if kind is None and factor not in (None, 0, 1):
        message = (
            f"'{c.arch}.rope.scaling.factor' is {factor:g}, but '{key}' is missing: the factor is ignored or linear"
        )
        yield c.key_fault("rope", f"{c.arch}.rope.scaling.factor", message, again, WARNING)
    if kind == "yarn" and c.number("rope.scaling.original_context_length") is None:
        message = f"key '{key}' is yarn, but '{c.arch}.rope.scaling.original_context_length' is missing"
        yield c.key_fault("rope", key, message, again, WARNING)
    if kind == "longrope" and c.f.tensors:
        for name in ("rope_factors_long.weight", "rope_factors_short.weight"):
            if name not in c.f.tensors and f"blk.0.{name}" not in c.f.tensors:
                yield c.key_fault("rope", key, f"key '{key}' is longrope, but tensor '{name}' is missing", again)
    freqs = c.f.tensors.get("rope_freqs.weight")
    width = n_rot or head
    if freqs is not None and width and freqs.size != width // 2:
        message = f"has {freqs.size:,} factors, {width // 2:.0f} rotations need as many"
        yield c.tensor_fault("rope", freqs.name, message, again)


# --- the vocabulary ---------------------------------------------------------------------------------------------------

EMBEDDINGS = ("token_embd.weight", "output.weight")


def _vocabulary(c: _Context) -> Iterator[Fault]:
    key = "tokenizer.ggml.tokens"
    found = c.values.get(key)
    if found is None:
        if c.is_model and c.f.tensors and c.values.get("tokenizer.ggml.model") not in (None, "none", "no_vocab"):
            message = f"key '{key}' is missing, although '{c.values['tokenizer.ggml.model']}' needs it"
            yield Fault("vocabulary", message, "convert the original model again")
        return
    again = "convert the original model again"
    if not isinstance(found, Strings):
        yield c.key_fault("vocabulary", key, f"key '{key}' is no array of strings", again)
        return
    n = len(found)
    tokens = c.tokens()
    if tokens is None:
        message = f"key '{key}' has {n:,} tokens; more than {MAX_VOCABULARY:,} are not looked at"
        yield c.key_fault("vocabulary", key, message, again, WARNING)
        return
    yield from _lengths(c, n)
    repeated = [token for token, times in Counter(tokens).items() if times > 1]
    if repeated:
        message = f"{len(repeated):,} tokens come twice, the first is {repeated[0]!r}"
        yield c.key_fault("repeated-token", key, message, again)
    bad = [i for i, token in enumerate(tokens) if any(0xDC80 <= ord(ch) <= 0xDCFF for ch in token)]
    if bad:
        message = f"{len(bad):,} tokens are not UTF-8, the first is token {bad[0]}"
        yield c.key_fault("text", key, message, again)
    kinds = c.values.get("tokenizer.ggml.token_type")
    if isinstance(kinds, Array) and not isinstance(kinds, Strings) and len(kinds) == n:
        outside = [i for i, kind in enumerate(kinds.tolist()) if not 1 <= kind <= 6]
        if outside:
            message = f"token {outside[0]} has type {kinds[outside[0]]}; there are 1 to 6"
            yield c.key_fault("token-type", "tokenizer.ggml.token_type", message, again, WARNING)
        form = re.compile(r"<0x[0-9A-Fa-f]{2}>")
        odd = [i for i, kind in enumerate(kinds.tolist()) if kind == 6 and not form.fullmatch(tokens[i])]
        if odd and c.values.get("tokenizer.ggml.model") != "gpt2":
            message = f"token {odd[0]} is a byte, but its text is {tokens[odd[0]]!r} instead of <0x00> to <0xFF>"
            yield c.key_fault("token-type", key, message, again)


def _lengths(c: _Context, n: int) -> Iterator[Fault]:
    """Everything that must have one entry per token."""
    again = "convert the original model again"
    for name, severity in (("token_type", ERROR), ("scores", ERROR)):
        key = f"tokenizer.ggml.{name}"
        entries = c.values.get(key)
        if entries is None:
            continue
        if not isinstance(entries, Array) or isinstance(entries, Strings):
            yield c.key_fault("vocabulary", key, f"key '{key}' is no array of numbers", again)
        elif len(entries) != n:
            message = f"key '{key}' has {len(entries):,} entries for {n:,} tokens"
            yield c.key_fault("vocabulary", key, message, again, severity)
    size = c.number("vocab_size")
    if size is not None and size != n:
        key = f"{c.arch}.vocab_size"
        severity = WARNING if size > n else ERROR
        yield c.key_fault("vocabulary", key, f"key '{key}' is {size}, there are {n:,} tokens", again, severity)
    for name in EMBEDDINGS:
        t = c.f.tensors.get(name)
        if t is None or len(t.shape) != 2 or t.shape[0] == n:
            continue
        if t.shape[0] < n:
            yield c.tensor_fault("embedding-rows", name, f"has {t.shape[0]:,} rows for {n:,} tokens", again)
        else:
            message = f"has {t.shape[0]:,} rows for {n:,} tokens: some programs refuse padded rows"
            yield c.tensor_fault("embedding-rows", name, message, "add tokens up to the rows: convert again", WARNING)


def _special(c: _Context) -> Iterator[Fault]:
    found = c.values.get("tokenizer.ggml.tokens")
    if not isinstance(found, Strings):
        return
    n = len(found)
    for key, value in c.values.items():
        if key.startswith("tokenizer.ggml.") and key.endswith("_token_id"):
            if isinstance(value, bool) or not isinstance(value, int):
                message = f"key '{key}' is {value!r}, expected a token id"
                yield c.key_fault("special-token", key, message, "set it again with `gguftools edit`")
            elif not 0 <= value < n:
                message = f"key '{key}' is {value:,}, the vocabulary has {n:,} tokens"
                yield c.key_fault("special-token", key, message, "set it again with `gguftools edit`")
    for name in ("bos", "eos"):
        if (
            c.values.get(f"tokenizer.ggml.add_{name}_token") is True
            and f"tokenizer.ggml.{name}_token_id" not in c.values
        ):
            key = f"tokenizer.ggml.add_{name}_token"
            message = f"key '{key}' is true, but 'tokenizer.ggml.{name}_token_id' is missing"
            yield c.key_fault("special-token", key, message, "set the id with `gguftools edit`", WARNING)


_STOP_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))


def _stop(c: _Context) -> Iterator[Fault]:
    """A model that never stops: no end token, or a chat format that ends turns with another one."""
    tokens = c.tokens()
    if not tokens or not c.is_model or c.values.get("tokenizer.ggml.model") == "bert":
        return
    if not any(key in c.values for key in _STOP_KEYS):
        message = "no stop token: none of " + ", ".join(_STOP_KEYS) + " is set"
        yield Fault("stop-token", message, f"`gguftools edit --set {_STOP_KEYS[0]}=ID`", None, _STOP_KEYS[0])
    template = c.values.get("tokenizer.chat_template")
    if not isinstance(template, str):
        return
    stops = {tokens[c.values[key]] for key in _STOP_KEYS if _is_id(c.values.get(key), len(tokens))}
    used = [text for text in _TURN_ENDS if text in template]
    if used and not stops.intersection(used):
        message = f"the chat template ends turns with {used[0]!r}, which none of {', '.join(_STOP_KEYS)} names"
        if used[0] in tokens:
            remedy = f"`gguftools edit --set {_STOP_KEYS[1]}={tokens.index(used[0])}`"
        else:
            remedy = "it is no token either: convert the original model again"
        yield c.key_fault("stop-token", "tokenizer.chat_template", message, remedy, WARNING)


def _is_id(value: Any, n: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < n


#: what chat formats put after each turn
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<turn|>", "<|return|>", "<end_of_utterance>")


def _tokenizer(c: _Context) -> Iterator[Fault]:
    from engine.errors import EngineError
    from engine.tokenizer import from_metadata, verify_selftest

    if c.tokens() is None or not c.is_model:
        return
    try:
        tokenizer = from_metadata(c.f.metadata)
        differing = verify_selftest(c.f.metadata, tokenizer) or ()
    except EngineError as error:
        supported = "this version has" not in str(error)
        severity = ERROR if supported else NOTE
        yield Fault("tokenizer", f"self-test: {error}", "convert the original model again", None, "", severity)
        return
    for line in differing:
        yield Fault("tokenizer", f"self-test: {line}", "convert the original model again", None, "", ERROR)
    for text in PROBES if tokenizer.lossless else ():
        found = tokenizer.detokenize(tokenizer.tokenize(text, add_special=False))
        if found != text:
            message = f"self-test: {text!r} comes back as {found!r}"
            remedy = "the vocabulary lacks bytes or merges: convert the original model again"
            yield c.key_fault("tokenizer", "tokenizer.ggml.tokens", message, remedy, WARNING)
            return


# --- the chat template ------------------------------------------------------------------------------------------------

#: what no chat template needs, and attacks do
_UNSAFE_NAMES = frozenset(
    ("self", "cycler", "joiner", "lipsum", "config", "request", "url_for", "get_flashed_messages")
)
_MARK = re.compile(r"<\|[^|<>\s]{1,60}\|>|<(?:start|end)_of_turn>")


def _template(c: _Context) -> Iterator[Fault]:
    from jinja2 import Environment, TemplateSyntaxError, nodes
    from jinja2.ext import loopcontrols

    for key, text in c.values.items():
        if not key.startswith("tokenizer.chat_template") or not isinstance(text, str):
            continue
        mend = "get the vendor's template: `gguftools edit --set-file " + key + "=FILE`"
        if len(text) > MAX_TEMPLATE:
            message = f"key '{key}' has {len(text):,} characters; a template is shorter"
            yield c.key_fault("template", key, message, mend, WARNING)
            continue
        try:
            # parsing runs nothing of the template
            tree = Environment(extensions=[loopcontrols, _generation()]).parse(text)
        except TemplateSyntaxError as error:
            yield c.key_fault("template", key, f"key '{key}', line {error.lineno}: {error.message}", mend)
            continue
        except RecursionError:
            yield c.key_fault("template", key, f"key '{key}' is nested too deeply", mend)
            continue
        yield from (c.key_fault("unsafe-template", key, f"key '{key}' {m}", mend) for m in _unsafe(tree, nodes))
        tokens = c.tokens()
        if tokens:
            unknown = sorted(set(_MARK.findall(text)).difference(tokens))
            if unknown:
                message = f"key '{key}' uses {', '.join(unknown[:3])}, no token of the vocabulary"
                yield c.key_fault("template-token", key, message, mend, WARNING)


def _generation() -> Any:
    """The tag `{% generation %}` of transformers, which is not Jinja's."""
    from jinja2.ext import Extension
    from jinja2.nodes import Scope

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    return Generation


def _unsafe(tree: Any, nodes: Any) -> Iterator[str]:
    """What in a parsed template reaches out of it, one phrase each."""
    for kind, what in ((nodes.Include, "include"), (nodes.Import, "import"), (nodes.FromImport, "import"),
                       (nodes.Extends, "extends")):  # fmt: skip
        if tree.find(kind) is not None:
            yield f"has an '{what}' of another file"
    for node in tree.find_all((nodes.Getattr, nodes.Getitem, nodes.Const, nodes.Name, nodes.Filter)):
        line = f"in line {node.lineno}"
        if isinstance(node, nodes.Getattr) and node.attr.startswith("_"):
            yield f"reads the hidden attribute '{node.attr}' {line}"
        elif isinstance(node, nodes.Const) and isinstance(node.value, str) and re.search(r"__\w+__", node.value):
            yield f"names the hidden attribute {node.value[:40]!r} {line}"
        elif isinstance(node, nodes.Name) and (node.name in _UNSAFE_NAMES or node.name.startswith("__")):
            yield f"uses '{node.name}' {line}"
        elif isinstance(node, nodes.Filter) and node.name == "attr":
            yield f"reaches attributes by name (filter 'attr') {line}"


# --- safetensors ------------------------------------------------------------------------------------------------------


def _check_safetensors(path: Path, data: bool, report: Callable[[Fault], None]) -> None:
    from gguftools.conversion.transforms import SOURCE_TYPES
    from gguftools.safetensors import SafetensorsFile
    from quant.formats import FORMATS
    from quant.validate import first_bad_block

    with SafetensorsFile(path) as f:
        for view in f.tensors.values() if data else ():
            if view.dtype not in SOURCE_TYPES or not view.nbytes:
                continue
            fmt = FORMATS[view.dtype]
            bad = first_bad_block(view.data.view(fmt.block), fmt)
            if bad >= 0:
                message = f"tensor '{view.name}' has a value that is not finite: element {bad:,}"
                report(Fault("not-finite", message, "download it again, or repair the model", None, view.name))


Rule = Callable[[_Context], Iterator[Fault]]

RULES: tuple[Rule, ...] = (
    _layout, _texts, _general, _split, _blocks, _tensors, _rope, _vocabulary, _special, _stop, _tokenizer, _template,
)  # fmt: skip
#: rules that read the weights
DATA_RULES: tuple[Rule, ...] = (_blocks,)


# --- SARIF ------------------------------------------------------------------------------------------------------------


def sarif(results: list[Checked]) -> dict[str, Any]:
    """Findings as SARIF 2.1.0, which code hosts show beside files."""
    from gguftools._version import __version__

    codes = sorted({fault.code for result in results for fault in result.faults})
    driver = {"name": "gguftools", "version": __version__, "rules": [{"id": code} for code in codes]}
    found = [_sarif_result(result.path, fault) for result in results for fault in result.faults]
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": found}],
    }


def _sarif_result(path: Path, fault: Fault) -> dict[str, Any]:
    place: dict[str, Any] = {"physicalLocation": {"artifactLocation": {"uri": path.as_posix()}}}
    if fault.offset is not None:
        place["physicalLocation"]["region"] = {"byteOffset": fault.offset}
    if fault.where:
        place["logicalLocations"] = [{"fullyQualifiedName": fault.where}]
    return {
        "ruleId": fault.code,
        "level": str(fault.severity),
        "message": {"text": f"{fault.message}; {fault.remedy}"},
        "locations": [place],
    }
