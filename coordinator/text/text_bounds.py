"""How much text a token can stand for at most, so that a text far beyond the context is refused before it is encoded.

Only for tokenizers in which every character counts: byte-level BPE, and BPE that falls back to bytes. Where something
may swallow text (a normalizer that strips, words of any length that are one unknown token, added tokens that take the
space around them), there is no such bound, and what is valid must not be refused. Called by `tokenizer`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

#: The most characters that composition makes one of: the longest canonical decomposition.
_COMPOSED_CHARACTERS = 4
_COMPOSING = frozenset(("NFC", "NFKC"))
_KEEPING_NORMALIZERS = frozenset(("NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel")) | _COMPOSING
_KEEPING_PRE_TOKENIZERS = frozenset(("ByteLevel", "Digits", "Metaspace"))
_SPLITTING = frozenset(("Split", "Punctuation"))
_NUM_BYTES = 256


def characters_per_token(tokenizer: Any, vocabulary: Collection[str]) -> int | None:
    """The most characters of text that one token can stand for; None where there is no bound.

    Args:
        tokenizer: a `PreTrainedTokenizerFast`.
        vocabulary: its tokens, added ones included.
    """
    backend = tokenizer.backend_tokenizer
    normalizers, splitters = list(_parts(backend.normalizer)), list(_parts(backend.pre_tokenizer))
    swallows = (
        type(backend.model).__name__ != "BPE"
        or any(added.lstrip or added.rstrip for added in backend.get_added_tokens_decoder().values())
        or not all(map(_keeps_text, normalizers))
        or not all(map(_keeps_words, splitters))
    )
    if swallows or not _knows_every_byte(backend.model, [*normalizers, *splitters], vocabulary):
        return None
    composed = _COMPOSED_CHARACTERS if any(part["type"] in _COMPOSING for part in normalizers) else 1
    return max(map(len, vocabulary)) * composed


def _parts(component: Any) -> Iterator[Mapping[str, Any]]:
    """A normalizer or pre-tokenizer, taken apart."""
    return _flat(json.loads(component.__getstate__())) if component is not None else iter(())


def _flat(part: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if part["type"] != "Sequence":
        yield part
        return
    for inner in part.get("normalizers") or part.get("pretokenizers") or ():
        yield from _flat(inner)


def _keeps_text(part: Mapping[str, Any]) -> bool:
    if part["type"] == "Replace":
        pattern = part["pattern"].get("String")
        return pattern is not None and len(part["content"]) >= len(pattern)
    return part["type"] in _KEEPING_NORMALIZERS


def _keeps_words(part: Mapping[str, Any]) -> bool:
    if part["type"] in _SPLITTING:
        return bool(part["behavior"] != "Removed")
    return part["type"] in _KEEPING_PRE_TOKENIZERS


def _knows_every_byte(model: Any, parts: list[Mapping[str, Any]], vocabulary: Collection[str]) -> bool:
    """Whether no text is unknown: unknown text may be left out, or a run of it be one token."""
    if any(part["type"] == "ByteLevel" for part in parts):
        from tokenizers.pre_tokenizers import ByteLevel

        return all(symbol in vocabulary for symbol in ByteLevel.alphabet())
    return bool(model.byte_fallback) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(_NUM_BYTES))
