"""The target's tokenizer as the coordinator serves it: text and conversations to token ids, and token ids to text.

Not here: text that grows token by token (`detokenizer`). Loads `PreTrainedTokenizerFast` alone, so no torch. Called by
the coordinator's prompt and output code. Encoding a long prompt takes milliseconds: call it in a thread. What may take
longer, conversations and very long texts, is done in a process of its own (`text_process`) that ends with the call.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from coordinator.text.text_bounds import text_bounds
from coordinator.text.text_process import TextProcess
from specdec.checkpoints.token_bytes import decoder_parts
from specdec.checkpoints.vocabulary import is_tokenizer_fault, load_tokenizer, vocabulary_fingerprint, vocabulary_size
from specdec.errors import Internal, InvalidRequest

#: Tokens whose spelling is at hand.
_MAX_REMEMBERED_TOKENS = 1 << 16
#: A longer text is encoded where it can be given up. A tenth of a second of ordinary text, a second of the worst.
_MAX_CHARACTERS_HERE = 1 << 17


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
            model: a model directory, a GGUF file or a hub id.

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
        try:
            self.rules = _read_rules(self._tokenizer)
            self._template = self._tokenizer.get_chat_template() if self._tokenizer.chat_template else None
            special_tokens = _special_tokens(self._tokenizer)
            self._bounds = text_bounds(self._tokenizer, vocabulary)
        except BaseException as error:
            if not is_tokenizer_fault(error):
                raise
            raise InvalidRequest(f"model {self._model!r} has an unusable tokenizer: {error}", field="model") from error
        setting = {"model": self._model, "template": self._template, "special_tokens": special_tokens}
        # Two: a long text takes many seconds, which conversations should not have to wait for.
        self._templates, self._long_texts = TextProcess(setting), TextProcess(setting)
        self._token = lru_cache(maxsize=_MAX_REMEMBERED_TOKENS)(self._tokenizer.backend_tokenizer.id_to_token)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool,
        field: str = "prompt",
        max_tokens: int | None = None,
        given_up: threading.Event | None = None,
    ) -> list[int]:
        """Token ids of a text.

        Args:
            text: of any length.
            add_special_tokens: belongs to a session's first text alone.
            field: the request field it came from, for errors.
            max_tokens: refuse, before any work, a text that cannot be of so few, or has more characters for each than
                text has (`text_bounds`). What passes is not counted here.
            given_up: once set, the rest of the work on a long text is left.

        Raises:
            InvalidRequest: CONTEXT_TOO_LONG, or the tokenizer cannot take the text.
            GivenUp: `given_up` was set.
        """
        self._check_length(text, field, max_tokens)
        if len(text) > _MAX_CHARACTERS_HERE:
            request = {"text": text, "add_special_tokens": add_special_tokens}
            token_ids: list[int] = self._long_texts.ask(request, field, given_up or threading.Event())["token_ids"]
            return token_ids
        try:
            # Not verbose: the context limit is checked against the whole session later, and refused by name.
            encoded: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
            return encoded
        except BaseException as error:
            if not is_tokenizer_fault(error):
                raise
            raise InvalidRequest(
                f"the tokenizer refuses {field}: {type(error).__name__}: {ascii(str(error))[:200]}", field=field
            ) from error

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        max_tokens: int | None = None,
        given_up: threading.Event | None = None,
    ) -> list[int]:
        """Token ids of a whole conversation, the opening of the assistant's next turn included.

        Args:
            messages: each with `role` and `content`.
            max_tokens, given_up: as `encode`.

        Raises:
            InvalidRequest: the model has no chat template (NO_CHAT_TEMPLATE), the template refuses the messages or
                takes too much time or memory for them, or as `encode`.
            GivenUp: `given_up` was set.
        """
        if not self.has_chat_template:
            raise InvalidRequest(
                f"messages cannot be used: the model {self._model!r} has no chat template",
                reason="NO_CHAT_TEMPLATE",
                field="messages",
            )
        given_up = given_up or threading.Event()
        request = {"messages": [dict(message) for message in messages]}
        text: str = self._templates.ask(request, "messages", given_up)["text"]
        # The template has written the special tokens.
        return self.encode(text, add_special_tokens=False, field="messages", max_tokens=max_tokens, given_up=given_up)

    def _check_length(self, text: str, field: str, max_tokens: int | None) -> None:
        if max_tokens is None or (excess := self._bounds.excess(text, max_tokens)) is None:
            return
        num_characters, max_characters = excess
        raise InvalidRequest(
            f"{field} is far too long: it has {num_characters} characters, and the {max_tokens} tokens there is room for "
            f"hold {max_characters} at most",
            reason="CONTEXT_TOO_LONG",
            field=field,
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a whole output: special tokens left out, spaces cleaned up where the tokenizer says so."""
        with _panics_as_errors():
            return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)  # type: ignore[return-value]

    def decode_uncleaned(self, token_ids: Sequence[int]) -> str:
        """As `decode`, before the clean-up of spaces."""
        with _panics_as_errors():
            return self._tokenizer.backend_tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None for an id without one."""
        return self._token(token_id)


@contextmanager
def _panics_as_errors() -> Iterator[None]:
    """A panic of the tokenizer is no Exception, and would pass every handler on its way to the event loop."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or not is_tokenizer_fault(error):
            raise
        raise Internal(f"the tokenizer cannot decode: {ascii(str(error))[:200]}") from error


def _special_tokens(tokenizer: Any) -> dict[str, str | list[str]]:
    """What templates know by name."""
    return {
        name: [str(one) for one in token] if isinstance(token, list | tuple) else str(token)
        for name, token in tokenizer.special_tokens_map.items()
    }


def _read_rules(tokenizer: Any) -> DecodingRules:
    backend = tokenizer.backend_tokenizer
    kinds = tuple(str(part["type"]) for part in decoder_parts(tokenizer))
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
