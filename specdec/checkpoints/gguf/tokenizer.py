"""Write the tokenizer of a GGUF file as the checkpoint's own files have it, from the header of the file.

The header has the tokens, and names of a model of tokenizers and of a way of splitting text. Normalizer, pre-tokenizer,
decoder and the tokens around a text follow from these names. Byte-level BPE and SentencePiece's BPE are supported.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specdec.checkpoints.gguf.file import GgufFile
from specdec.checkpoints.gguf.splitters import GPT2, SPLITTERS, Splitter
from specdec.checkpoints.gguf.tokens import BYTE_LEVEL, GEMMA4, KEY, SENTENCEPIECE, SPACE, Tokens, read_tokens, refuse
from specdec.contract.errors import Unsupported

_log = logging.getLogger(__name__)

#: Names of ways of splitting that work on characters instead of bytes.
_NOT_BYTE_LEVEL = {"gemma4", "granite-embed-multi-311m", "mmbert", "sarvam-moe", "whitespace"}
#: A vocabulary with this control token is of a tokenizer that puts a space before the whole text. Others put one before
#: each text between special tokens.
_INSTRUCTION = "[INST]"
#: Special tokens of Phi-3 that swallow the white space after them.
_SWALLOWING = re.compile(r"</s>|<\|(assistant|user|system|end|placeholder\d)\|>")

#: Keys of recommended sampling parameters by their names in a checkpoint.
_SAMPLING = {
    "temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repetition_penalty": "penalty_repeat"
}  # fmt: skip


def write_tokenizer(file: GgufFile, directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, generation_config.json and the chat template of a file.

    Args:
        file: the file.
        directory: an existing folder.

    Raises:
        InvalidRequest: a key of the tokenizer is missing or contradicts another one; the message has the key.
        Unsupported: the model of tokenizers is not supported.
    """
    tokens = read_tokens(file)
    template = file.metadata.get("tokenizer.chat_template", "")
    if not isinstance(template, str):
        refuse(file, "tokenizer.chat_template is no text")
    contents = {
        "tokenizer.json": _tokenizer(tokens),
        "tokenizer_config.json": {
            "backend": "tokenizers", "tokenizer_class": "TokenizersBackend", **tokens.special
        },
        "generation_config.json": {"eos_token_id": tokens.end_token_ids(template), **_recommended_sampling(file)},
    }  # fmt: skip
    for name, content in contents.items():
        (directory / name).write_text(json.dumps(content, ensure_ascii=False), "utf-8")
    if template:
        (directory / "chat_template.jinja").write_text(template, "utf-8")


def _recommended_sampling(file: GgufFile) -> dict[str, Any]:
    """Return the sampling parameters that the checkpoint recommends, as it wrote them."""
    stated = {name: file.metadata.get(f"general.sampling.{key}") for name, key in _SAMPLING.items()}
    return {
        # A number is stored in 32 bits; the shortest decimal number with these bits is the one that was written.
        name: float(str(np.float32(value))) if isinstance(value, float) else value
        for name, value in stated.items()
        if isinstance(value, int | float)
    }


def _tokenizer(tokens: Tokens) -> dict[str, Any]:
    """Return the content of tokenizer.json."""
    splitter = _splitter(tokens.file) if tokens.model == BYTE_LEVEL else None
    adds_bos = tokens.model == SENTENCEPIECE if splitter is None else splitter.adds_bos
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(_added_tokens(tokens)),
        "post_processor": _post_processor(tokens, adds_bos),
        **(_sentencepiece(tokens) if splitter is None else _byte_level(tokens, splitter)),
    }


def _splitter(file: GgufFile) -> Splitter:
    name = file.metadata.get(f"{KEY}pre", "default")
    if not isinstance(name, str):
        refuse(file, f"{KEY}pre is no text")
    if name in SPLITTERS:
        return SPLITTERS[name]
    if name in _NOT_BYTE_LEVEL:
        raise Unsupported(
            f"model {str(file.path)!r} has {KEY}pre {name!r}, which is not supported with {KEY}model {BYTE_LEVEL!r}: "
            "use the original checkpoint",
            field="model",
        )
    reason = "its header does not say how its tokenizer splits text"
    if name != "default":
        reason = f"its tokenizer splits text as {name!r:.64}, which is not known"
    _log.warning("%s: %s; using GPT-2's rules", file.path, reason)
    return GPT2


def _byte_level(tokens: Tokens, splitter: Splitter) -> dict[str, Any]:
    return {
        "normalizer": {"type": "NFC"} if splitter.composes else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(splitter.steps)},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(tokens, ignore_merges=splitter.ignores_merges),
    }


def _sentencepiece(tokens: Tokens) -> dict[str, Any]:
    spelled = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    parts: dict[str, Any] = {"normalizer": spelled, "pre_tokenizer": None}
    decoders: list[Mapping[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}
    ]  # fmt: skip
    if not tokens.is_gemma and tokens.flag("add_space_prefix") is not False:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        parts["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, spelled]}
        if _INSTRUCTION in tokens.ids and tokens.is_control(_INSTRUCTION):
            first = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False}
            parts = {"normalizer": None, "pre_tokenizer": first}
    model = _bpe(tokens, unk_token=tokens.special.get("unk_token"), fuse_unk=True, byte_fallback=True)
    return {**parts, "decoder": {"type": "Sequence", "decoders": decoders}, "model": model}


def _bpe(tokens: Tokens, **options: Any) -> dict[str, Any]:
    rest = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}  # fmt: skip
    return {"type": "BPE", **rest, **options, "vocab": tokens.ids, "merges": tokens.merges()}


def _added_tokens(tokens: Tokens) -> Iterator[dict[str, Any]]:
    swallows = tokens.file.architecture == "phi3" and tokens.model == SENTENCEPIECE
    for token, is_control in tokens.whole():
        yield {
            "id": tokens.ids[token], "content": token, "single_word": False, "lstrip": False,
            "rstrip": swallows and _SWALLOWING.fullmatch(token) is not None,
            "normalized": False, "special": is_control,
        }  # fmt: skip


def _post_processor(tokens: Tokens, adds_bos: bool) -> dict[str, Any]:
    """Return the step that puts BOS before a text and EOS behind it if the file or its model of tokenizers says so."""
    # Files of Gemma 4 say that BOS is added; the checkpoint's tokenizer adds none, because the chat template does.
    bos = None if tokens.model == GEMMA4 else _around(tokens, "bos", default=adds_bos)
    eos = _around(tokens, "eos", default=False)

    def with_special(name: str, type_id: int) -> list[dict[str, Any]]:
        pieces = [("SpecialToken", bos), ("Sequence", name), ("SpecialToken", eos)]
        return [{kind: {"id": piece, "type_id": type_id}} for kind, piece in pieces if piece is not None]

    return {
        "type": "TemplateProcessing",
        "single": with_special("A", 0),
        "pair": [*with_special("A", 0), *with_special("B", 1)],
        "special_tokens": {
            token: {"id": token, "ids": [tokens.ids[token]], "tokens": [token]} for token in (bos, eos) if token
        },
    }


def _around(tokens: Tokens, name: str, *, default: bool) -> str | None:
    """Return the BOS or EOS token if it belongs around every text."""
    stated, token = tokens.flag(f"add_{name}_token"), tokens.special.get(f"{name}_token")
    if stated and token is None:
        refuse(tokens.file, f"{KEY}add_{name}_token is true, and {KEY}{name}_token_id is missing")
    return token if (default if stated is None else stated) else None
