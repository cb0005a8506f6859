"""Texts are split as the names in GGUF files say, with llama.cpp and transformers as oracles."""

from __future__ import annotations

import json

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from specdec.checkpoints.gguf.splitters import SPLITTERS
from specdec.checkpoints.token_bytes import byte_level_bytes

TEXTS = [
    "def f(x):\n    return x + 12_345  # it's DON'T we'LL\n\n\n", "x 1 12 123 1234 12345.678", "e\u0301 \u212b é \r\n",
    "漢字かな交じり文 한국어 Привет नमस्ते किं สวัสดี مرحبا ١٢٣ ½", "HTTPServer camelCase snake_case $5.00 <b>#!</b>//\n",
]  # fmt: skip

#: A text, and its pieces as the splitters of these names make them. Source: llama.cpp, whose approximations of the
#: letters of GPT-4o's kind are left out.
SPLIT_TEXT = "I'LL see 12345, abcDefgh世界¾ किं\n\n!\n\n\n     ok"
PIECES = {
    "I|'|LL| see| 12345|,| abcDefgh世界|¾| क|िं|\n|\n|!|\n\n\n    | ok": "gpt-2 phi-2 mpt olmo trillion exaone4 mellum",
    "I|'|LL| see| |1|2|3|4|5|,| abcDefgh世界|¾| क|िं|\n|\n|!|\n\n\n    | ok": "starcoder smollm command-r exaone",
    "I|'LL| see| |123|45|,| abcDefgh世界|¾| क|िं\n\n|!\n\n\n|    | ok": "llama-bpe dbrx glm4 minicpm5 jais-2",
    "I|'LL| see| |1|2|3|4|5|,| abcDefgh世界|¾| क|िं\n\n|!\n\n\n|    | ok": "qwen2 stablelm2 hunyuan grok-2 bailingmoe",
    "I|'LL| see| |1|2|3|4|5|,| abcDefgh世界|¾| किं|\n\n|!\n\n\n|    | ok": "qwen35",
    "I|'LL| see| |1|2|3|4|5|,| abcDefgh世界|¾| क|िं|\n\n|!|\n\n\n|    | ok": "seed-coder laguna",
    "I|'LL| see| |1|2|3|4|5|,| abcDefgh世界|¾| किं|\n\n|!\n|\n\n|    | ok": "exaone-moe",
    "I'LL| see| |123|45|,| abc|Defgh世界|¾| किं|\n\n|!\n\n\n|    | ok": "gpt-4o llama4 minimax-m2",
    "I'LL| see| |12|345|,| abc|Defgh世界|¾| किं|\n\n|!\n\n\n|    | ok": "tiny_aya cohere2moe",
    "I'LL| see| |123|45|,| abc|Defgh|世界|¾| किं|\n\n|!\n\n\n|    | ok": "kimi-k2",
    "I|'LL| see| |1|2|3|4|5|,| abc|Defgh世界|¾| किं|\n\n|!\n\n\n|    | ok": "tekken",
    "I'LL| see| |1|2|3|4|5|,| abc|Defgh|世界|¾| किं|\n\n|!\n\n\n|    | ok": "youtu",
    "I|'|LL| see| |1|2|3|4|5|,| abcDefgh|世界|¾| |किं|\n|\n|!|\n|\n|\n|    | ok": "deepseek-llm",
    "I|'|LL| see| |1|2|3|4|5|,| abcDefgh|世界|¾| |क|िं|\n|\n|!|\n|\n|\n|    | ok": "deepseek-coder",
    "I|'LL| see| |123|45|,| abcDefgh|世界|¾| किं|\n\n|!\n\n\n|    | ok": "deepseek-v3 hunyuan-dense joyai-llm",
    "I|'LL| see| |1|2|3|4|5|,| abcDefgh|世界|¾| किं|\n|\n|!|\n|\n|\n|    | ok": "spark2_5",
    "I|'LL| see| |12|345|,| abcDefgh|世界|¾| किं|\n\n|!\n\n\n|    | ok": "afmoe",
    "I'LL see |12|345|, abcDefgh世界|¾| किं\n\n!\n\n\n     ok": "superbpe",
    "I'LL| see| 12345|,| abcDefgh世界¾| किं|\n\n!\n\n\n    | ok": "bloom poro-chat gpt3-finnish",
    "I'LL| see| |1|2|3|4|5|,| abcDefgh世界|¾| किं|\n\n!\n\n\n    | ok": "viking",
    "I|'|LL| see| |123|45|,| abcDefgh世界|\\xc2|\\xbe| क|िं|\n\n|!|\n\n\n    | ok": "falcon",
    "I|'|LL| see| |1|2|3|4|5|,| abcDefgh世界|¾| क|िं|\n|\n|!|\n|\n|\n|    | ok": "chameleon",
}


def split(name: str, text: str) -> list[str]:
    state = json.loads(Tokenizer(models.BPE()).to_str())
    state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": list(SPLITTERS[name].steps)}
    return [piece for piece, _ in Tokenizer.from_str(json.dumps(state)).pre_tokenizer.pre_tokenize_str(text)]


def test_texts_are_split_as_llama_cpp_splits_them() -> None:
    for expected, names in PIECES.items():
        for name in names.split():
            found = [byte_level_bytes(piece).decode("utf-8", "backslashreplace") for piece in split(name, SPLIT_TEXT)]
            assert "|".join(found) == expected, name


def test_texts_are_split_as_transformers_splits_them() -> None:
    for name, pattern in GGUF_PRE_TOKENIZER_SPLITS.items():
        steps = [
            pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)
        ]  # fmt: skip
        oracle = pre_tokenizers.Sequence(steps)
        for text in TEXTS:
            assert split(name, text) == [piece for piece, _ in oracle.pre_tokenize_str(text)], (name, text)
