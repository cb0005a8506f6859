"""Compute the bytes that each token stands for, from its tokenizer's decoder.

Tokens of two tokenizers can be compared by their bytes but not by their spellings: byte-level BPE writes " é" as `ĠÃ©`,
SentencePiece as `▁é`. Special tokens stand for no bytes. This module imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from specdec.contract.errors import Unsupported

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

#: Spelling of a token for one byte in a vocabulary with byte fallback.
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

#: Steps of a SentencePiece decoder, and those of them that define how a space is spelled.
_PIECES = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
_BLANKS = {"Replace", "Metaspace"}

#: Limits: several times the largest vocabulary, the longest token and the longest decoder in use today.
_MAX_TOKENS = 1 << 21
_MAX_TOKEN_BYTES = 1 << 12
_MAX_PARTS = 32


def decoder_parts(tokenizer: PreTrainedTokenizerFast) -> list[Mapping[str, Any]]:
    """Return the steps of a tokenizer's decoder, as `tokenizer.json` has them; [] if it has no decoder."""
    decoder = tokenizer.backend_tokenizer.decoder
    return [] if decoder is None else list(_flattened(json.loads(decoder.__getstate__())))


def _flattened(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _flattened(part)
    else:
        yield decoder


def bytes_of_tokens(tokenizer: PreTrainedTokenizerFast) -> list[bytes]:
    """Return the bytes of every token, by id; b"" for special tokens and for ids without a token.

    A decoder may remove a space from the first token of a text. The bytes returned here include that space.

    Raises:
        Unsupported: the decoder is neither byte-level nor of SentencePiece's kind, so that the bytes of a token may
            depend on its neighbours; or the vocabulary, a token or the decoder exceeds a limit.
    """
    parts = decoder_parts(tokenizer)
    if not has_fixed_bytes(parts):
        decoder_types = ", ".join(sorted({str(part["type"]) for part in parts})) or "nothing"
        raise Unsupported(
            f"tokens decoded by {decoder_types[:200]} have no fixed bytes; use a byte-level or SentencePiece tokenizer"
        )
    if len(parts) > _MAX_PARTS:
        raise Unsupported(f"the decoder has {len(parts)} steps; the limit is {_MAX_PARTS}")
    vocabulary = tokenizer.get_vocab()
    largest = max(vocabulary.values())
    if largest >= _MAX_TOKENS:
        raise Unsupported(f"token id {largest} is above the limit of {_MAX_TOKENS:,} tokens")
    special = {
        token_id
        for token_id, added in tokenizer.backend_tokenizer.get_added_tokens_decoder().items()
        if added.special or added.content in tokenizer.all_special_tokens
    }
    table = [b""] * (largest + 1)
    for token, token_id in vocabulary.items():
        if token_id not in special:
            piece = bytes_of_token(token, parts)
            _check_length(len(piece))
            table[token_id] = piece
    return table


def has_fixed_bytes(parts: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a decoder is byte-level or of SentencePiece's kind, so that a token's bytes are its own."""
    kinds = {str(part["type"]) for part in parts}
    return kinds == {"ByteLevel"} or (kinds <= _PIECES and not kinds.isdisjoint(_BLANKS))


def bytes_of_token(token: str, parts: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the bytes of a token that is not special.

    Args:
        token: the token as the vocabulary spells it.
        parts: steps of a decoder for which `has_fixed_bytes` is true.

    Raises:
        Unsupported: the token exceeds the limit.
    """
    for part in parts:
        kind = part["type"]
        if kind == "ByteLevel":
            return _byte_level_bytes(token)
        if kind == "ByteFallback" and (matched := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(matched[1], 16)])
        if kind == "Replace" and isinstance(pattern := part["pattern"].get("String"), str):
            _check_length(len(token) + token.count(pattern) * (len(part["content"]) - len(pattern)))
            token = token.replace(pattern, part["content"])
        if kind == "Metaspace":
            token = token.replace(part["replacement"], " ")
    return token.encode("utf-8", errors="surrogatepass")


def bytes_of_part(token: str, parts: Sequence[Mapping[str, Any]]) -> bytes | None:
    """Return the bytes of a token that is a part of a character, whose decoded text would be U+FFFD; None for another.

    Unlike `bytes_of_token`, this works with every decoder that knows such tokens, whatever its other steps are.
    """
    kinds = {part["type"] for part in parts}
    if "ByteFallback" in kinds and (matched := BYTE_TOKEN.fullmatch(token)):
        return bytes([int(matched[1], 16)])
    if "ByteLevel" in kinds:
        piece = _byte_level_bytes(token)
        return piece if "\ufffd" in piece.decode("utf-8", "replace") else None
    return None


def _check_length(num_bytes: int) -> None:
    """Raise Unsupported if a token is too long. The limit bounds the text that sessions keep and tokenise again."""
    if num_bytes > _MAX_TOKEN_BYTES:
        raise Unsupported(f"a token has {num_bytes:,} bytes; the limit is {_MAX_TOKEN_BYTES:,}")


@lru_cache(maxsize=1 << 16)
def byte_level_bytes(token: str) -> bytes:
    """Return the bytes that a token spells in the byte-level alphabet, or its UTF-8 if it has any other character."""
    return _byte_level_bytes(token)


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:
        return token.encode("utf-8")


def byte_level_spelling(piece: bytes) -> str:
    """Return the spelling of bytes in the byte-level alphabet."""
    return "".join(_CHARACTER_OF_BYTE[byte] for byte in piece)


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte of each character of byte-level BPE's alphabet.

    Printable Latin-1 bytes are spelled by themselves, and the other bytes by the characters from U+0100 on.

    Source: Radford et al. 2019 (GPT-2).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_level_alphabet()
_CHARACTER_OF_BYTE = {byte: character for character, byte in _BYTE_OF_CHARACTER.items()}
