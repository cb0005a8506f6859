"""The bytes of a vocabulary's tokens, as llguidance reads them, and the identity of constraints on that vocabulary.

Building a table takes a hundred megabytes and a second for 130,000 tokens, during which no other thread of Python runs.
Services therefore build theirs before they serve.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

from specdec.checkpoints.token_bytes import decoder_parts, has_fixed_bytes
from specdec.checkpoints.vocabulary import vocabulary_fingerprint
from specdec.contract.constraint import CONSTRAINT_ID_BYTES, Constraint
from specdec.contract.errors import Unsupported

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from transformers import PreTrainedTokenizerFast

_log = logging.getLogger(__name__)


class TokenTable:
    """The tokens of one model. Safe to share between threads."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        eos_token_ids: Sequence[int],
        vocabulary_size: int,
        fingerprint: str | None = None,
    ) -> None:
        """
        Args:
            tokenizer: tokenizer of the model.
            eos_token_ids: end tokens of the model.
            vocabulary_size: number of tokens that a mask has bits for.
            fingerprint: of the tokenizer's vocabulary; None: not known. Computing it takes up to a second.

        Raises:
            Unsupported: llguidance is not installed, the tokens have no fixed bytes, or the model has no end token.
        """
        self._tokenizer: PreTrainedTokenizerFast | None = tokenizer
        """The tokenizer until the table is built, because it takes more memory than the table."""
        self.eos_token_ids = tuple(eos_token_ids)
        self.vocabulary_size = vocabulary_size
        self._lock = threading.Lock()
        self._table: LLTokenizer | None = None
        _require_supported(tokenizer, self.eos_token_ids)
        self._hash = _table_hash(tokenizer, self.eos_token_ids, fingerprint)

    def identity_of(self, constraint: Constraint) -> bytes:
        """Return 16 bytes that are equal where the constraint allows the same tokens of the same vocabulary."""
        fields = [int(constraint.kind), constraint.is_lenient, constraint.text]
        text = json.dumps(fields, separators=(",", ":")).encode()
        return hashlib.blake2b(self._hash + text, digest_size=CONSTRAINT_ID_BYTES).digest()

    def library_table(self) -> LLTokenizer:
        """Return the table, which the first call builds. Raises Unsupported if llguidance cannot read the tokenizer."""
        with self._lock:
            if self._table is None:
                assert self._tokenizer is not None
                began_s = time.monotonic()
                self._table = _build(self._tokenizer, self.eos_token_ids, self.vocabulary_size)
                self._tokenizer = None
                _log.debug("token table built: tokens=%d s=%.2f", self.vocabulary_size, time.monotonic() - began_s)
            return self._table


def _require_supported(tokenizer: PreTrainedTokenizerFast, eos_token_ids: Sequence[int]) -> None:
    try:
        import llguidance  # noqa: F401
    except ImportError as error:
        raise Unsupported(
            "constraint: structured output needs the package llguidance; install specdec-serving[structured]",
            field="constraint",
        ) from error
    model = tokenizer.backend_tokenizer.model
    parts = decoder_parts(tokenizer)
    kinds = {str(part["type"]) for part in parts}
    has_bytes = kinds == {"ByteLevel"} or (has_fixed_bytes(parts) and "ByteFallback" in kinds)
    if type(model).__name__ not in ("BPE", "Unigram") or not has_bytes:
        raise Unsupported(
            f"constraint: a tokenizer of the type {type(model).__name__} without byte tokens cannot follow a "
            "constraint; use a model with a byte-level tokenizer, or with SentencePiece and byte fallback",
            field="constraint",
        )
    if not eos_token_ids:
        raise Unsupported(
            "constraint: the model has no end token, so a constrained output could not end", field="constraint"
        )


def _table_hash(tokenizer: PreTrainedTokenizerFast, eos_token_ids: Sequence[int], fingerprint: str | None) -> bytes:
    from llguidance._lib import get_version

    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    special = sorted(token_id for token_id, token in added.items() if token.special)
    facts: list[Any] = [
        get_version(),
        fingerprint or vocabulary_fingerprint(tokenizer.get_vocab()),
        special,
        sorted(eos_token_ids),
        decoder_parts(tokenizer),
    ]
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=CONSTRAINT_ID_BYTES).digest()


def _build(tokenizer: PreTrainedTokenizerFast, eos_token_ids: Sequence[int], vocabulary_size: int) -> LLTokenizer:
    from llguidance import LLTokenizer

    backend = tokenizer.backend_tokenizer
    if backend.padding or backend.truncation:  # a copy takes a second for 150,000 tokens
        backend = copy(backend)
        backend.no_padding()
        backend.no_truncation()
    try:
        return LLTokenizer(backend.to_str(), n_vocab=vocabulary_size, eos_token=list(eos_token_ids))
    except Exception as error:
        raise Unsupported(
            f"constraint: the tokenizer cannot follow a constraint: {ascii(str(error))[:200]}", field="constraint"
        ) from error
