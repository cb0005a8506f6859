"""Rules by which byte-level tokenizers split a text before merges, by the names that GGUF files have for them.

The merges of a vocabulary were learned within pieces of text, so a text that is split otherwise has other tokens. A
file names the way (`tokenizer.ggml.pre`) and does not define it. The rules are those of the checkpoints that the names
stand for; llama.cpp approximates some of them. Called by `specdec.checkpoints.gguf.tokenizer`.

Source: llama.cpp, `llama_vocab::impl::load` and `llm_tokenizer_bpe`; transformers, `models/*/tokenization_*.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

Step = Mapping[str, Any]
"""A pre-tokenizer as `tokenizer.json` has it."""


@dataclass(frozen=True, slots=True)
class Splitter:
    """Rule that turns the text between special tokens into the pieces that merges work on."""

    steps: tuple[Step, ...]
    ignores_merges: bool = False
    """A piece that is a token is that token, whatever the merges say."""
    adds_bos: bool = False
    """A text begins with the BOS token unless the file says otherwise."""
    composes: bool = False
    """Text is brought into Unicode's composed form (NFC) first."""


def _split(pattern: str) -> Step:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _byte_level(*, use_regex: bool) -> Step:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _splits(*patterns: str) -> tuple[Step, ...]:
    """Return steps that split at the matches of each pattern in turn and then spell bytes as characters."""
    return (*map(_split, patterns), _byte_level(use_regex=False))


def _words(number: str, *, contractions: bool = True) -> str:
    """Return the pattern of GPT-4's kind; words have a character before them, numbers match `number`."""
    first = f"{_CONTRACTIONS}|" if contractions else ""
    return rf"{first}[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}"


def _cased_words(number: str, suffix: str, *, but: str = "", after_symbols: str = r"[\r\n/]*") -> str:
    """Return the pattern of GPT-4o's kind, which also splits words before capitals; `but` excludes letters."""
    upper, lower = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]", rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    words = f"{before}{upper}*{lower}+{suffix}|{before}{upper}+{lower}*{suffix}"
    return rf"{words}|{number}| ?[^\s\p{{L}}\p{{N}}]+{after_symbols}|{_LINES_AND_SPACES}"


def _marked_words(symbols: str) -> str:
    """Return the pattern of DeepSeek V3's kind, in which a mark may begin an ASCII word."""
    marks = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
    return rf"{marks}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+{symbols}\s+(?!\S)|\s+"


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_ONE, _UP_TO_THREE = r"\p{N}", r"\p{N}{1,3}"
_CJK = r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+"
#: Letters of the scripts that have capitals, as of Unicode 11.
_CASED_LETTERS = (
    r"A-Za-z\x{b5}\x{c0}-\x{d6}\x{d8}-\x{f6}\x{f8}-\x{1ba}\x{1bc}-\x{1bf}\x{1c4}-\x{293}\x{295}-\x{2af}"
    r"\x{370}-\x{373}\x{376}\x{377}\x{37b}-\x{37d}\x{37f}\x{386}\x{388}-\x{38a}\x{38c}\x{38e}-\x{3a1}"
    r"\x{3a3}-\x{3f5}\x{3f7}-\x{481}\x{48a}-\x{52f}\x{531}-\x{556}\x{10a0}-\x{10c5}\x{13a0}-\x{13f5}"
    r"\x{13f8}-\x{13fd}\x{1c90}-\x{1cba}\x{1cbd}-\x{1cbf}\x{1d00}-\x{1d2b}\x{1d6b}-\x{1d77}\x{1d79}-\x{1d9a}"
    r"\x{1e00}-\x{1f15}\x{1f18}-\x{1f1d}\x{1f20}-\x{1f45}\x{1f48}-\x{1f4d}\x{1f50}-\x{1f57}\x{1f59}\x{1f5b}"
    r"\x{1f5d}\x{1f5f}-\x{1f7d}\x{1f80}-\x{1fb4}\x{1fb6}-\x{1fbc}\x{1fbe}\x{1fc2}-\x{1fc4}\x{1fc6}-\x{1fcc}"
    r"\x{1fd0}-\x{1fd3}\x{1fd6}-\x{1fdb}\x{1fe0}-\x{1fec}\x{1ff2}-\x{1ff4}\x{1ff6}-\x{1ffc}\x{2102}\x{2107}"
    r"\x{210a}-\x{2113}\x{2115}\x{2119}-\x{211d}\x{2124}\x{2126}\x{2128}\x{212a}-\x{212d}\x{212f}-\x{2134}\x{2139}"
    r"\x{213c}-\x{213f}\x{2145}-\x{2149}\x{214e}\x{2183}\x{2184}\x{2c00}-\x{2c7b}\x{2c7e}-\x{2ce4}"
    r"\x{2ceb}-\x{2cee}\x{2cf2}\x{2cf3}\x{a640}-\x{a66d}\x{a680}-\x{a69b}\x{a722}-\x{a76f}\x{a771}-\x{a787}"
    r"\x{a78b}-\x{a78e}\x{ab70}-\x{abbf}\x{fb00}-\x{fb06}\x{fb13}-\x{fb17}\x{ff21}-\x{ff3a}\x{ff41}-\x{ff5a}"
    r"\x{10400}-\x{1044f}\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}\x{10c80}-\x{10cb2}\x{10cc0}-\x{10cf2}"
    r"\x{118a0}-\x{118df}\x{1e900}-\x{1e943}"
)

_BLOOM = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{ff0c}\x{3001}\x{964}\x{6d4}\x{60c})]+"
_EAST_ASIAN = r"[\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}]+"
_ASIAN = (
    r"[\x{4e00}-\x{9fff}\x{3400}-\x{4dbf}\x{f900}-\x{faff}\x{3040}-\x{30ff}\x{ff65}-\x{ff9f}\x{2f00}-\x{2fdf}"
    r"\x{e40}-\x{eff}\x{1780}-\x{17ff}\x{1000}-\x{109f}\x{aa60}-\x{aa7f}\x{a9e0}-\x{a9ff}\x{ac00}-\x{d7af}"
    r"\x{1100}-\x{11ff}]+"
)
_YOUTU = (
    r"[\x{ac00}-\x{d7a3}\x{3131}-\x{318e}]+"
    r"|[\x{ff01}\x{2026}\x{201c}\x{201d}\x{2018}\x{2019}\x{2014}\x{ff1a}\x{ff1b}\x{ff0c}\x{3001}-\x{303f}\x{fe30}-\x{fe4f}]+"
    rf"|[\x{{3105}}-\x{{312f}}]+|{_CJK}"
)
_EXAONE_MOE = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
    rf"|{_LINES_AND_SPACES}"
)
_KIMI = r"\p{Han}+|" + _cased_words(_UP_TO_THREE, f"{_CONTRACTIONS}?", but=r"&&[^\p{Han}]", after_symbols=r"[\r\n]*")
_SEED = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES_AND_SPACES}"
_JAIS2 = _words(_UP_TO_THREE).removesuffix(r"\s+(?!\S)|\s+") + "|".join(
    [rf"\s{{{count}}}(?!\S)" for count in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2")] + [r"\s"]
)
_DIGITS: Step = {"type": "Digits", "individual_digits": True}
_BYTES, _GPT2 = _byte_level(use_regex=False), _byte_level(use_regex=True)

GPT2 = Splitter((_GPT2,))
"""GPT-2's way. It loses no text with any vocabulary."""
_SINGLE_DIGITS = Splitter((_DIGITS, _GPT2))
_LLAMA3 = _splits(_words(_UP_TO_THREE))
_QWEN2 = _splits(_words(_ONE))
_GPT4O = _splits(_cased_words(_UP_TO_THREE, f"{_CONTRACTIONS}?"))
_DEEPSEEK3 = _splits(_UP_TO_THREE, _CJK, _marked_words(r"[\r\n]*|\s*[\r\n]+|"))

_SPLITTERS: tuple[tuple[str, Splitter], ...] = (
    ("gpt-2 phi-2 jais trillion granite-docling exaone4 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code "
     "gigachat a.x-4.0 mellum modern-bert roberta-bpe", GPT2),
    ("mpt olmo", replace(GPT2, composes=True)),
    ("starcoder refact smollm codeshell exaone minerva-7b mellum2", _SINGLE_DIGITS),
    ("command-r", replace(_SINGLE_DIGITS, composes=True)),
    ("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
     Splitter(_LLAMA3, ignores_merges=True, adds_bos=True)),
    ("dbrx smaug-bpe chatglm-bpe", Splitter(_LLAMA3)),
    ("glm4 glm5", Splitter(_LLAMA3, ignores_merges=True)),
    ("minicpm5", Splitter(_splits(_UP_TO_THREE, _words(r"\p{N}+")), ignores_merges=True)),
    ("jais-2", Splitter(_splits(_JAIS2))),
    ("qwen2 deepseek-r1-qwen f2llmv2 stablelm2 hunyuan", Splitter(_QWEN2, composes=True)),
    ("kormo megrez solar-open grok-2", Splitter(_QWEN2)),
    ("qwen35", Splitter(_splits(_QWEN35), composes=True)),
    ("seed-coder", Splitter(_splits(_SEED))),
    ("ufakzeka", Splitter(_splits(_words(_ONE, contractions=False)))),
    ("laguna", Splitter(_splits(r"[^\n]+|\n+", _words(_ONE)))),
    ("bailingmoe bailingmoe2 llada-moe", Splitter(_splits(_BAILING))),
    ("exaone-moe", Splitter(_splits(_EXAONE_MOE))),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", Splitter(_GPT4O)),
    ("granite-embed-multi-97m", Splitter(_GPT4O, ignores_merges=True)),
    ("tiny_aya cohere2moe", Splitter((_split(r"\d{1,3}(?=(?:\d{3})*\b)"), *_GPT4O), composes=True)),
    ("kimi-k2", Splitter(_splits(_KIMI))),
    ("tekken", Splitter(_splits(_cased_words(_ONE, "")), ignores_merges=True, adds_bos=True)),
    ("youtu", Splitter(_splits(_YOUTU, _cased_words(_ONE, f"{_CONTRACTIONS}?")), ignores_merges=True)),
    ("deepseek-llm", Splitter((
        *map(_split, (r"[\r\n]", rf"\s?[{_CASED_LETTERS}]+",
                      r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+", r"\s+$",
                      _EAST_ASIAN)), _DIGITS, _BYTES))),
    ("deepseek-coder",
     Splitter((*map(_split, (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN)), _DIGITS, _BYTES))),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", Splitter(_DEEPSEEK3)),
    ("spark2_5", Splitter(_splits(_UP_TO_THREE, _CJK, _marked_words(r"|[\r\n]|"), _ONE))),
    ("afmoe", Splitter((_split(r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"), _split(_ASIAN), *_DEEPSEEK3[2:]))),
    ("superbpe", Splitter(_splits(r"\p{N}+", r"(?=(\d{3})+(?!\d))"))),
    ("poro-chat bloom gpt3-finnish", Splitter(_splits(_BLOOM))),
    ("viking", Splitter((_split(_BLOOM), _DIGITS, _BYTES))),
    ("falcon", Splitter((
        {"type": "Punctuation", "behavior": "Contiguous"}, _GPT2, {"type": "Digits", "individual_digits": False},
        _split("[0-9][0-9][0-9]")))),
    ("chameleon", Splitter((
        *map(_split, ("<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )")), _DIGITS,
        {"type": "Punctuation", "behavior": "Isolated"}, _GPT2), adds_bos=True)),
)  # fmt: skip

SPLITTERS: Mapping[str, Splitter] = {name: splitter for names, splitter in _SPLITTERS for name in names.split()}
"""Ways of splitting by their names in `tokenizer.ggml.pre`."""
