"""Bytes of a text to tokens, wherever in the text they stand: a tokenizer without what it does to whole texts only.

A tokenizer opens a text: it puts a blank before it, and perhaps a token that begins sequences. Pieces of a running text
get neither. Bytes that are no UTF-8, as of a character that has only begun, become tokens of bytes.

Not here: which pieces (`draft_vocabulary_text`, `retokenizer`), conversations. Safe to share between threads. Loads no
torch.
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
from specdec.errors import Internal, InvalidRequest

#: Bytes that are no UTF-8, once they are decoded with surrogates for them.
_FOREIGN = re.compile("([\udc80-\udcff]+)")


class PieceEncoder:
    """One tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Takes `tokenizer` over: it opens no text any more.

        Raises:
            Unsupported: its tokens have no bytes of their own.
            InvalidRequest: it breaks on the simplest text.
        """
        self.token_bytes = bytes_of_tokens(tokenizer)
        """Of every id; b"" for special tokens and for ids without a token."""
        self._is_byte_level = decoder_parts(tokenizer)[0]["type"] == "ByteLevel"
        try:
            self.opens_with_blank = self._bytes(tokenizer.encode("a", add_special_tokens=False)) == b" a"
            """Whether it puts a blank before a text."""
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
        """What it begins a sequence with."""
        self._byte_ids = self._single_bytes()

    def encode(self, piece: bytes) -> list[int]:
        """Tokens of a piece of a text. Bytes that no token stands for are left out.

        Raises:
            Internal: the tokenizer fails on it.
        """
        try:
            return self._encode(piece)
        except BaseException as error:  # its panics are no Exceptions
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
            except Exception:  # a vocabulary that lacks bytes; the others are told one by one
                pass
        return [self._byte_ids[byte] for byte in piece if byte in self._byte_ids]

    def _single_bytes(self) -> dict[int, int]:
        """A token for each byte that has one."""
        return {piece[0]: token_id for token_id, piece in enumerate(self.token_bytes) if len(piece) == 1}

    def _bytes(self, token_ids: list[int]) -> bytes:
        return b"".join(self.token_bytes[token_id] for token_id in token_ids)


def _leave_out_openings(backend: Tokenizer) -> None:
    """Makes every text one that goes on, and special tokens' names in it text."""
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
    """A step of a tokenizer without what it puts before a text; None where it does nothing else."""
    if step["type"] == "Prepend":
        return None
    for name in ("normalizers", "pretokenizers"):
        if name in step:
            return {**step, name: [part for part in map(_without_opening, step[name]) if part is not None]}
    if step["type"] == "Metaspace":
        return {**step, "prepend_scheme": "never"}
    return {**step, "add_prefix_space": False} if step["type"] == "ByteLevel" else step
