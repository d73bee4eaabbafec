"""The table of pre-tokenizers: how each byte-level BPE vocabulary cuts text into words before it merges bytes.

A row is one way of cutting and the names (`tokenizer.ggml.pre`) that stand for it; a new name is one word here. The
patterns are regular expressions of the Oniguruma engine, applied one after the other: each cuts the pieces that the
one before left, and both its matches and the text between them go on as pieces. They are those of the models' own
`tokenizer.json`; llama.cpp rewrites some for its regex engine (tekken, gpt-4o, kimi-k2, afmoe), which differs on rare
letters. Conversion finds a name by comparing a `tokenizer.json` with these rows (`find`).
"""

# ruff: noqa: RUF001  (patterns name letters of many scripts)

from __future__ import annotations

import difflib
from dataclasses import dataclass

from engine.errors import EngineError


@dataclass(frozen=True)
class PreTokenizer:
    """One way of cutting words.

    patterns: applied in order; ignore_merges: a word that is a token as a whole is not merged from bytes;
    add_bos: whether files without `tokenizer.ggml.add_bos_token` begin texts with BOS;
    written: the patterns as `tokenizer.json` has them, where that is longer.
    """

    names: tuple[str, ...]
    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    written: tuple[str, ...] = ()


_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # English contractions
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_ASCII_WORD = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""

#: What `ByteLevel` with `use_regex` does (GPT-2's own pattern).
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
#: `Digits`, one by one and in runs; `Punctuation`, in runs.
DIGIT, DIGITS, PUNCTUATION = r"\p{N}", r"\p{N}+", r"[\p{P}\$\+<=>\^~\|`]+"

_LLAMA3 = _SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = _SUFFIX + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _SPACES

# words that change case: upper-case start with lower-case rest, or upper-case throughout
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = r"[^\r\n\p{L}\p{N}]?" + _UPPER + "*" + _LOWER + r"+{s}|[^\r\n\p{L}\p{N}]?" + _UPPER + "+" + _LOWER + "*{s}"
_SYMBOLS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
_TEKKEN = _CASED.replace("{s}", "") + r"|\p{N}" + _SYMBOLS
_GPT4O = _CASED.replace("{s}", _SUFFIX + "?") + r"|\p{N}{1,3}" + _SYMBOLS
_YOUTU = _CASED.replace("{s}", _SUFFIX + "?") + r"|\p{N}" + _SYMBOLS
_NOT_HAN = _CASED.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace("{s}", _SUFFIX + "?")
_KIMI = r"\p{Han}+|" + _NOT_HAN + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES

_DEEPSEEK = _ASCII_WORD + r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*" + _SPACES
_CJK = "[一-龥\u3040-ゟ゠-ヿ]+"
_DEEPSEEK_HAN = "[一-龥\u0800-一가-\ud7ff]+"
_DEEPSEEK_LETTERS = (  # letters with case, of the Unicode version of that vocabulary
    "A-Za-z\u00b5À-ÖØ-öø-ƺƼ-ƿ\u01c4-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-\u03f5Ϸ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗ"
    "ὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼ\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124"
    "\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149ⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿ\ufb00"
    "-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_MARKS = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e‘-‟\u3000-。]+"
_GROUPS_OF_3 = r"\d{1,3}(?=(?:\d{3})*\b)"  # counted from the right
_ASIAN = (
    "[一-鿿㐀-䶿豈-\ufaff\u3040-\u309f゠-\u30ff\uff65-\uff9f"
    "\u2f00-\u2fdfเ-\u0e7f\u0e80-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7afᄀ-ᇿ]+"
)
_HANGUL = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u3040-ゟ゠-ヿ]+"
_EXAONE = (
    _SUFFIX + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_RUNS = (512, 256, 128, 64, 32, 16, 8, 4, "1,2")
_JAIS = _LLAMA3.removesuffix(r"\s+(?!\S)|\s+") + "".join(rf"\s{{{n}}}(?!\S)|" for n in _RUNS) + r"\s{1}"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


def _row(names: str, *patterns: str, **options) -> PreTokenizer:
    return PreTokenizer(tuple(names.split()), patterns, **options)


TABLE = (
    _row("default", PUNCTUATION.replace("`", ""), GPT2, DIGITS, "[0-9][0-9][0-9]"),
    _row(
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        _LLAMA3,
        ignore_merges=True,
        add_bos=True,
    ),
    _row("glm4 glm5", _LLAMA3, ignore_merges=True),
    _row("dbrx smaug-bpe chatglm-bpe", _LLAMA3),
    _row(
        "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en jina-v2-code "
        "roberta-bpe exaone4 mpt olmo jais trillion granite-docling",
        GPT2,
    ),
    _row("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", DIGIT, GPT2),
    _row("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", _QWEN2),
    _row("qwen35", _QWEN35),
    _row("deepseek-llm", r"[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", _DEEPSEEK_MARKS, r"\s+$", _DEEPSEEK_HAN, DIGITS),
    _row("deepseek-coder", r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_HAN, DIGIT),
    _row("deepseek-v3 hunyuan-dense joyai-llm hy_v4", r"\p{N}{1,3}", _CJK, _DEEPSEEK),
    _row("spark2_5", r"\p{N}{1,3}", _CJK, _DEEPSEEK.replace(r"+[\r\n]*|\s*[\r\n]+", r"+|[\r\n]"), DIGIT),
    _row("falcon", PUNCTUATION, GPT2, "[0-9][0-9][0-9]", written=(PUNCTUATION, GPT2, DIGITS, "[0-9][0-9][0-9]")),
    _row("gpt-4o llama4 kanana2 talkie minimax-m2", _GPT4O),
    _row("granite-embed-multi-97m", _GPT4O, ignore_merges=True),
    _row("tekken", _TEKKEN, ignore_merges=True, add_bos=True),
    _row("kimi-k2", _KIMI),
    _row("tiny_aya cohere2moe", _GROUPS_OF_3, _GPT4O),
    _row("afmoe", _GROUPS_OF_3, _ASIAN, _DEEPSEEK),
    _row("superbpe", DIGITS, r"(?=(\d{3})+(?!\d))"),
    _row("bailingmoe bailingmoe2 llada-moe", _QWEN2.replace(r"|\s*[\r\n]+", r"|\s*[\r\n]")),
    _row("seed-coder", _QWEN2.replace(r"]+[\r\n]*", r"\r\n]+")),
    _row("ufakzeka", _QWEN2.removeprefix(_SUFFIX + "|")),
    _row("laguna", r"[^\n]+|[\n]+", _QWEN2),
    _row("minicpm5", r"\p{N}{1,3}", _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+"), ignore_merges=True),
    _row("exaone-moe", _EXAONE),
    _row("youtu", _HANGUL, _YOUTU, ignore_merges=True),
    _row("jais-2", _JAIS),
    _row("poro-chat bloom gpt3-finnish", _BLOOM),
    _row("viking", _BLOOM, DIGIT),
    _row(
        "chameleon",
        "<sentinel:[0-9]+>",
        "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
        r"([\t\n]|    |  )",
        DIGIT,
        r"[\p{P}!-/:-@\[-`{-~]",
        GPT2,
        add_bos=True,
    ),
)

#: Names of vocabularies that merge the characters of whole lines instead of the bytes of words.
CHARACTER_NAMES = ("gemma4", "granite-embed-multi-311m", "sarvam-moe")

#: `tokenizer.ggml.pre` -> row
PRETOKENIZERS: dict[str, PreTokenizer] = {name: row for row in TABLE for name in row.names}


def get_pretokenizer(name: str) -> PreTokenizer:
    """The row of a name. Raises EngineError with the nearest names."""
    if name in PRETOKENIZERS:
        return PRETOKENIZERS[name]
    near = difflib.get_close_matches(name, PRETOKENIZERS, 3, 0.4)
    known = f"; the nearest known are {', '.join(near)}" if near else ""
    raise EngineError(f"unknown pre-tokenizer {name!r}{known}")


def find(patterns: tuple[str, ...], ignore_merges: bool) -> str | None:
    """The first name whose row cuts by these patterns, or None."""
    wanted = tuple(map(normal_form, patterns))
    for row in TABLE:
        forms = (row.patterns, row.written)
        if row.ignore_merges == ignore_merges and wanted in (tuple(map(normal_form, form)) for form in forms):
            return row.names[0]
    return None


def nearest(patterns: tuple[str, ...], count: int = 3) -> list[str]:
    """Names of the rows whose patterns look most like these, best first."""
    wanted = "\n".join(map(normal_form, patterns))

    def likeness(row: PreTokenizer) -> float:
        return difflib.SequenceMatcher(None, wanted, "\n".join(map(normal_form, row.patterns)), autojunk=False).ratio()

    return [row.names[0] for row in sorted(TABLE, key=likeness, reverse=True)[:count]]


#: Spellings of the same thing: (as found, as in the table).
_SPELLINGS = (
    ("\r", r"\r"),
    ("\n", r"\n"),
    ("\t", r"\t"),
    (r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])", _SUFFIX),
    (r"'(?i:[sdmt]|ll|ve|re)", _SUFFIX),
    (r"(?:'(?i:[sdmt]|ll|ve|re))", _SUFFIX),
    (r"\p{N}{1}", r"\p{N}"),
    ("?+", "?"),  # possessive: what follows cannot match what was taken, so giving back makes no difference
    ("++", "+"),
)


def normal_form(pattern: str) -> str:
    """A pattern with its equivalent spellings replaced by the table's."""
    for found, ours in _SPELLINGS:
        pattern = pattern.replace(found, ours)
    return pattern
