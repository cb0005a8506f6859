"""The target's tokenizer as the coordinator serves it: text and conversations to token ids, and token ids to text.

Not here: text that grows token by token (`detokenizer`). Loads `PreTrainedTokenizerFast` alone, so no torch. Called by
the coordinator's prompt and output code. Encoding a long prompt takes milliseconds: call it in a thread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from specdec.errors import InvalidRequest
from specdec.vocabulary import load_tokenizer, vocabulary_fingerprint, vocabulary_size

#: Tokens whose spelling is at hand.
_MAX_REMEMBERED_TOKENS = 1 << 16


@dataclass(frozen=True, slots=True)
class DecodingRules:
    """What of a tokenizer decides when text is final, read once from its decoder."""

    is_byte_level: bool
    """Tokens are bytes in the byte-level alphabet, and nothing else happens to them."""
    has_byte_tokens: bool
    """Tokens such as `<0xE2>` stand for bytes, and a run of them is decoded as a whole."""
    may_end_in_half_character: bool
    """Bytes meet some other decoder: text that ends in U+FFFD may change with the next token."""
    cleans_up_spaces: bool
    """The whole text then goes through the clean-up of spaces before punctuation."""
    special_token_ids: frozenset[int]
    """Left out of text."""


class ServedTokenizer:
    """A model's tokenizer. Immutable after construction; safe to share between threads."""

    def __init__(self, model: str | Path) -> None:
        """Loads it.

        Args:
            model: a model directory or a hub id.

        Raises:
            InvalidRequest: one sentence that names `model` and what is missing.
        """
        self._tokenizer = load_tokenizer(model)
        self._model = str(model)
        vocabulary = self._tokenizer.get_vocab()
        self.vocabulary_size = vocabulary_size(vocabulary)
        """Rows of the id-to-token map."""
        self.fingerprint = vocabulary_fingerprint(vocabulary)
        """As `EngineInfo.vocabulary_fingerprint` of every replica must be."""
        self.rules = _read_rules(self._tokenizer)
        self._token = lru_cache(maxsize=_MAX_REMEMBERED_TOKENS)(self._tokenizer.backend_tokenizer.id_to_token)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. `add_special_tokens` belongs to a session's first text alone."""
        # Not verbose: the context limit is checked against the whole session later, and refused by name.
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a whole conversation, the opening of the assistant's next turn included.

        Args:
            messages: each with `role` and `content`.

        Raises:
            InvalidRequest: the model has no chat template (NO_CHAT_TEMPLATE), or the template refuses the messages.
        """
        if not self.has_chat_template:
            raise InvalidRequest(
                f"messages cannot be used: the model {self._model!r} has no chat template",
                reason="NO_CHAT_TEMPLATE",
                field="messages",
            )
        try:
            token_ids: list[int] = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                tokenizer_kwargs={"verbose": False},
            )
        except TemplateError as error:
            raise InvalidRequest(f"the chat template refuses messages: {error}", field="messages") from error
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a whole output: special tokens left out, spaces cleaned up where the tokenizer says so."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)  # type: ignore[return-value]

    def decode_uncleaned(self, token_ids: Sequence[int]) -> str:
        """As `decode`, before the clean-up of spaces."""
        return self._tokenizer.backend_tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None for an id without one."""
        return self._token(token_id)


def _read_rules(tokenizer: Any) -> DecodingRules:
    backend = tokenizer.backend_tokenizer
    kinds = _decoder_kinds(json.loads(backend.decoder.__getstate__())) if backend.decoder is not None else ()
    # transformers itself leaves BPE text alone unless told twice: there the clean-up would eat real spaces.
    insists = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    is_bpe = type(backend.model).__name__ == "BPE"
    return DecodingRules(
        is_byte_level=kinds == ("ByteLevel",),
        has_byte_tokens="ByteFallback" in kinds,
        may_end_in_half_character="ByteLevel" in kinds and len(kinds) > 1,
        cleans_up_spaces=bool(tokenizer.clean_up_tokenization_spaces) and (insists or not is_bpe),
        special_token_ids=frozenset(
            token_id for token_id, added in backend.get_added_tokens_decoder().items() if added.special
        ),
    )


def _decoder_kinds(decoder: Mapping[str, Any]) -> tuple[str, ...]:
    if decoder["type"] == "Sequence":
        return tuple(kind for part in decoder["decoders"] for kind in _decoder_kinds(part))
    return (str(decoder["type"]),)
