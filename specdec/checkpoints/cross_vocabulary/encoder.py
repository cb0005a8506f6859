"""Tokenise a piece of a text, given as bytes, independently of its place in the text.

At the start of a text a tokenizer may add a space and a begin-of-sequence token. This encoder adds neither. Bytes that
are not UTF-8, such as an incomplete character at the end of a piece, become tokens of single bytes. Thread-safe. Loads
no torch. Used by `draft_vocabulary_text`, `retokenizer` and `token_map`.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from specdec.checkpoints.token_bytes import byte_level_spelling, bytes_of_tokens, decoder_parts
from specdec.checkpoints.vocabulary import is_tokenizer_fault
from specdec.contract.errors import Internal, InvalidRequest

#: Bytes that are not UTF-8, after decoding with `surrogateescape`.
_FOREIGN = re.compile("([\udc80-\udcff]+)")


class PieceEncoder:
    """Encodes pieces of text with one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Take over `tokenizer` and change it: it no longer adds anything at the start of a text.

        Raises:
            Unsupported: the bytes of its tokens are unknown (`bytes_of_tokens`).
            InvalidRequest: it fails on a one-letter text.
        """
        self.token_bytes = bytes_of_tokens(tokenizer)
        """Bytes of every token, by id; b"" for special tokens and for ids without a token."""
        self._is_byte_level = decoder_parts(tokenizer)[0]["type"] == "ByteLevel"
        try:
            self.opens_with_blank = self._bytes(tokenizer.encode("a", add_special_tokens=False)) == b" a"
            """True if the tokenizer, as it was given, adds a space at the start of a text."""
            opened = tokenizer.encode("a")
            self._backend = tokenizer.backend_tokenizer
            _leave_out_openings(self._backend)
        except BaseException as error:
            if not is_tokenizer_fault(error):
                raise
            raise InvalidRequest(
                f"the tokenizer fails on a test text: {ascii(str(error))[:200]}", field="model"
            ) from error
        begins = bool(opened) and opened[0] == tokenizer.bos_token_id
        self.opening_ids: tuple[int, ...] = (opened[0],) if begins else ()
        """Begin-of-sequence token that the tokenizer, as it was given, adds; () if it adds none."""
        self._byte_ids = self._single_bytes()

    def encode(self, piece: bytes) -> list[int]:
        """Return the tokens of a piece of a text. Bytes for which the vocabulary has no token are left out.

        Raises:
            Internal: the tokenizer fails on the piece.
        """
        try:
            return self._encode(piece)
        except BaseException as error:  # panics of the Rust tokenizer do not derive from Exception
            if not is_tokenizer_fault(error):
                raise
            raise Internal(f"the tokenizer fails on a text: {ascii(str(error))[:200]}") from error

    def _encode(self, piece: bytes) -> list[int]:
        token_ids: list[int] = []
        for index, part in enumerate(_FOREIGN.split(piece.decode("utf-8", errors="surrogateescape"))):
            if index % 2:
                token_ids += self._encode_bytes(part.encode("utf-8", errors="surrogateescape"))
            elif part:
                token_ids += self._backend.encode(part, add_special_tokens=False).ids
        return token_ids

    def _encode_bytes(self, piece: bytes) -> list[int]:
        if self._is_byte_level:
            try:
                return [token.id for token in self._backend.model.tokenize(byte_level_spelling(piece))]
            except Exception:  # the vocabulary lacks some bytes; encode the others one by one
                pass
        return [self._byte_ids[byte] for byte in piece if byte in self._byte_ids]

    def _single_bytes(self) -> dict[int, int]:
        """Return the token of each byte that has one."""
        return {piece[0]: token_id for token_id, piece in enumerate(self.token_bytes) if len(piece) == 1}

    def _bytes(self, token_ids: list[int]) -> bytes:
        return b"".join(self.token_bytes[token_id] for token_id in token_ids)


def _leave_out_openings(backend: Tokenizer) -> None:
    """Remove what the tokenizer adds at the start of a text, and let it read names of special tokens as plain text."""
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    nothing = Tokenizer(BPE())
    steps = {}
    for name in ("normalizer", "pre_tokenizer"):
        step = getattr(backend, name)
        steps[name] = None if step is None else _without_opening(json.loads(step.__getstate__()))
    changed = Tokenizer.from_str(json.dumps({**json.loads(nothing.to_str()), **steps}))
    backend.normalizer = changed.normalizer or normalizers.Sequence([])
    backend.pre_tokenizer = changed.pre_tokenizer or pre_tokenizers.Sequence([])


def _without_opening(step: Any) -> Any:
    """Return a tokenizer's step without what it adds at the start of a text; None if nothing is left of the step."""
    if step["type"] == "Prepend":
        return None
    for name in ("normalizers", "pretokenizers"):
        if name in step:
            return {**step, name: [part for part in map(_without_opening, step[name]) if part is not None]}
    if step["type"] == "Metaspace":
        return {**step, "prepend_scheme": "never"}
    return {**step, "add_prefix_space": False} if step["type"] == "ByteLevel" else step
