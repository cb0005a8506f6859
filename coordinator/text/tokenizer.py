"""The target's tokenizer: encodes texts and conversations, and decodes token ids.

It loads `PreTrainedTokenizerFast` alone, and so no torch. Encoding a long prompt takes milliseconds, so call it in a
thread. Conversations and very long texts may take longer, and are encoded in another process (`text_process`), which
ends when the call is given up. `detokenizer` decodes text that grows token by token.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from coordinator.text.text_bounds import text_bounds
from coordinator.text.text_process import TextProcess
from specdec.checkpoints.token_bytes import bytes_of_part, bytes_of_token, decoder_parts, has_fixed_bytes
from specdec.checkpoints.vocabulary import (
    continuing_tokenizer,
    is_tokenizer_fault,
    load_tokenizer,
    vocabulary_fingerprint,
    vocabulary_size,
)
from specdec.contract.errors import Internal, InvalidRequest
from specdec.contract.tools import Tools
from specdec.structured.token_table import TokenTable

#: Number of tokens whose spelling is cached. A text uses few of a vocabulary's tokens, so nearly all are found here.
_MAX_REMEMBERED_TOKENS = 1 << 13
#: A longer text is encoded in the other process, where it can be given up. Text of this length takes a tenth of a
#: second to encode, or a second in the worst case.
_MAX_CHARACTERS_HERE = 1 << 17
#: Variables of a chat template that the server sets, beside the special tokens.
_TEMPLATE_VARIABLES = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversations",
        "documents",
        "messages",
        "return_assistant_tokens_mask",
        "tools",
    }
)


@dataclass(frozen=True, slots=True)
class DecodingRules:
    """Properties of a tokenizer that decide when text is final, read once from its decoder."""

    is_byte_level: bool
    """Tokens are bytes in the byte-level alphabet, and no other decoder follows."""
    has_byte_tokens: bool
    """Tokens such as `<0xE2>` stand for bytes, and a run of such tokens is decoded as a whole."""
    may_end_in_half_character: bool
    """Another decoder follows the byte-level one, so text that ends in U+FFFD may change with the next token."""
    cleans_up_spaces: bool
    """The decoded text goes through the clean-up of spaces before punctuation."""
    special_token_ids: frozenset[int]
    """Ids that add no text."""


class ServedTokenizer:
    """The tokenizer of a model. Immutable after construction; safe to share between threads."""

    def __init__(self, model: str | Path) -> None:
        """Load the tokenizer.

        Args:
            model: a model directory, a GGUF file or a hub id.

        Raises:
            InvalidRequest: the tokenizer cannot be loaded; the message names `model` and what is missing.
        """
        self._tokenizer = load_tokenizer(model)
        self.model = str(model)
        """The model, as given."""
        vocabulary = self._tokenizer.get_vocab()
        self.vocabulary_size = vocabulary_size(vocabulary)
        """Number of rows of the id-to-token map."""
        self.fingerprint = vocabulary_fingerprint(vocabulary)
        """Fingerprint that `EngineInfo.vocabulary_fingerprint` of every replica must equal."""
        try:
            parts = decoder_parts(self._tokenizer)
            self.rules = _read_rules(self._tokenizer)
            self._template = self._tokenizer.get_chat_template() if self._tokenizer.chat_template else None
            special_tokens = _special_tokens(self._tokenizer)
            self._bounds = text_bounds(self._tokenizer, vocabulary)
            self._continuing = continuing_tokenizer(self._tokenizer)
        except BaseException as error:
            if not is_tokenizer_fault(error):
                raise
            raise InvalidRequest(f"model {self.model!r} has an unusable tokenizer: {error}", field="model") from error
        setting = {"model": self.model, "template": self._template, "special_tokens": special_tokens}
        # Two processes, because a long text takes many seconds, for which conversations should not wait.
        self._templates, self._long_texts = TextProcess(setting), TextProcess(setting)
        self._token = lru_cache(maxsize=_MAX_REMEMBERED_TOKENS)(self._tokenizer.backend_tokenizer.id_to_token)
        token_bytes = partial(_token_bytes, self._tokenizer.backend_tokenizer, parts, self.rules.special_token_ids)
        self._token_bytes = lru_cache(maxsize=_MAX_REMEMBERED_TOKENS)(token_bytes)
        self._token_tables: dict[tuple[int, ...], TokenTable] = {}
        self._marker_ids = _marker_ids(self._tokenizer)
        self.whole_token_ids = self.rules.special_token_ids | frozenset(self._marker_ids.values())
        """Ids of tokens that are more than their text."""
        self.has_fixed_bytes = has_fixed_bytes(parts)
        """True if the bytes of a token do not depend on its neighbours."""
        self._set_variables = _TEMPLATE_VARIABLES | special_tokens.keys()

    def token_table(self, eos_token_ids: Sequence[int]) -> TokenTable:
        """Return the tokens as constraints see them. Takes a while at the first call, so call it in a thread.

        Raises Unsupported if the tokenizer cannot follow constraints.
        """
        key = tuple(eos_token_ids)
        if (table := self._token_tables.get(key)) is None:
            table = self._token_tables[key] = TokenTable(self._tokenizer, key, self.vocabulary_size, self.fingerprint)
        return table

    def marker_ids(self, markers: Iterable[str]) -> dict[str, int]:
        """Return the ids of those markers that are single tokens, which constraints keep apart from text.

        llguidance does so for special tokens, and for added tokens between angle brackets.
        """
        return {marker: self._marker_ids[marker] for marker in markers if marker in self._marker_ids}

    @property
    def chat_template(self) -> str:
        """The chat template; "" if the model has none."""
        return self._template or ""

    @property
    def response_template(self) -> Mapping[str, Any]:
        """The checkpoint's own description of its outputs, as transformers reads it; empty if there is none."""
        declared = getattr(self._tokenizer, "response_template", None)
        return declared if isinstance(declared, Mapping) else {}

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool,
        continues: bool = False,
        field: str = "prompt",
        max_tokens: int | None = None,
        given_up: threading.Event | None = None,
    ) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: a text of any length.
            add_special_tokens: true for the first text of a session.
            continues: true for a text that is appended to another, so that no space is put before it.
            field: request field that holds the text, for errors.
            max_tokens: limit that the text's length is checked against before any work (`text_bounds`). A text that
                passes may still have more tokens.
            given_up: when set, the work on a long text ends.

        Raises:
            InvalidRequest: CONTEXT_TOO_LONG, or the tokenizer cannot take the text.
            GivenUp: `given_up` was set.
        """
        self._check_length(text, field, max_tokens)
        if len(text) > _MAX_CHARACTERS_HERE:
            request = {"text": text, "add_special_tokens": add_special_tokens, "continues": continues}
            token_ids: list[int] = self._long_texts.ask(request, field, given_up or threading.Event())["token_ids"]
            return token_ids
        try:
            tokenizer = self._continuing if continues else self._tokenizer
            # `verbose` would warn of long texts; the limit is checked later, against the whole session.
            encoded: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
            return encoded
        except BaseException as error:
            if not is_tokenizer_fault(error):
                raise
            raise InvalidRequest(
                f"the tokenizer refuses {field}: {type(error).__name__}: {ascii(str(error))[:200]}", field=field
            ) from error

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template_arguments_json: str = "",
        tools: Tools | None = None,
        max_tokens: int | None = None,
        given_up: threading.Event | None = None,
    ) -> list[int]:
        """Return the token ids of a whole conversation, with the opening of the assistant's next turn.

        Args:
            messages: messages with `role`, `content` and further fields.
            template_arguments_json: JSON object with further variables of the template; "": none.
            tools: tools that the template tells the model of.
            max_tokens: as for `encode`.
            given_up: as for `encode`.

        Raises:
            InvalidRequest: the model has no chat template (NO_CHAT_TEMPLATE), an argument has the name of a variable
                that the server sets, the template refuses the messages or takes too much time or memory for them, or
                as `encode`.
            GivenUp: `given_up` was set.
        """
        given_up = given_up or threading.Event()
        text = self.render_chat(messages, template_arguments_json, tools, given_up)
        # The template writes the special tokens.
        return self.encode(text, add_special_tokens=False, field="messages", max_tokens=max_tokens, given_up=given_up)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_arguments_json: str,
        tools: Tools | None,
        given_up: threading.Event,
    ) -> str:
        """Return the text of a conversation; arguments and errors as `encode_chat`."""
        if not self.has_chat_template:
            raise InvalidRequest(
                f"messages cannot be used: the model {self.model!r} has no chat template",
                reason="NO_CHAT_TEMPLATE",
                field="messages",
            )
        arguments = json.loads(template_arguments_json) if template_arguments_json else {}
        self._check_argument_names(arguments)
        request = {"messages": [dict(message) for message in messages], "template_arguments": arguments}
        if tools is not None:
            request["tools"] = [tool.for_template() for tool in tools.definitions]
        text: str = self._templates.ask(request, "messages", given_up)["text"]
        return text

    def _check_argument_names(self, arguments: Collection[str]) -> None:
        """Refuse variables that the server sets. A template ignores any other name that it does not read."""
        for name in arguments:
            if name in self._set_variables:
                raise InvalidRequest(
                    f"messages.template_arguments_json must not hold {name}, which the server sets",
                    field="messages.template_arguments_json",
                )

    def _check_length(self, text: str, field: str, max_tokens: int | None) -> None:
        if max_tokens is None or (excess := self._bounds.excess(text, max_tokens)) is None:
            return
        num_characters, max_characters = excess
        raise InvalidRequest(
            f"{field} is far too long: it has {num_characters} characters, and the {max_tokens} tokens there is room "
            f"for hold {max_characters} at most",
            reason="CONTEXT_TOO_LONG",
            field=field,
            numbers={"min_prompt_tokens": max_tokens + 1},
        )

    def decode(self, token_ids: Sequence[int], *, keep_special_tokens: bool = False) -> str:
        """Return the text of a whole output, cleaned up if the tokenizer does so.

        Special tokens add no text unless `keep_special_tokens`, which adds their names.
        """
        with _panics_as_errors():
            return self._tokenizer.decode(  # type: ignore[return-value]
                list(token_ids), skip_special_tokens=not keep_special_tokens
            )

    def decode_uncleaned(self, token_ids: Sequence[int]) -> str:
        """Return the text as `decode` does, but before the clean-up of spaces."""
        with _panics_as_errors():
            return self._tokenizer.backend_tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def token(self, token_id: int) -> str | None:
        """Return the token as the vocabulary spells it; None for an id without a token."""
        return self._token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for: a special token's name; b"" for an id without a token.

        The bytes of an output's tokens join to the UTF-8 of its text, also if a character is split over tokens. A
        space that the decoder removes at the start of a text, or in a clean-up, is included. With a decoder that treats
        a token by its neighbours, the bytes are those of the token decoded by itself.
        """
        return self._token_bytes(token_id)


@contextmanager
def _panics_as_errors() -> Iterator[None]:
    """Raise Internal for a panic of the tokenizer, which is not derived from Exception and would pass all handlers."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or not is_tokenizer_fault(error):
            raise
        raise Internal(f"the tokenizer cannot decode: {ascii(str(error))[:200]}") from error


def _token_bytes(
    backend: Any, parts: Sequence[Mapping[str, Any]], special_token_ids: Collection[int], token_id: int
) -> bytes:
    token: str | None = backend.id_to_token(token_id)
    if token is None:
        return b""
    if token_id in special_token_ids:
        return token.encode()
    if has_fixed_bytes(parts):
        return bytes_of_token(token, parts)
    if (piece := bytes_of_part(token, parts)) is not None:
        return piece
    with _panics_as_errors():
        text: str = backend.decode([token_id], skip_special_tokens=True)
    return text.encode()


def _special_tokens(tokenizer: Any) -> dict[str, str | list[str]]:
    """Return the special tokens by the names that templates use."""
    return {
        name: [str(one) for one in token] if isinstance(token, list | tuple) else str(token)
        for name, token in tokenizer.special_tokens_map.items()
    }


def _marker_ids(tokenizer: Any) -> dict[str, int]:
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    return {
        token.content: token_id
        for token_id, token in added.items()
        if token.special or (token.content.startswith("<") and token.content.endswith(">"))
    }


def _read_rules(tokenizer: Any) -> DecodingRules:
    backend = tokenizer.backend_tokenizer
    kinds = tuple(str(part["type"]) for part in decoder_parts(tokenizer))
    # As in transformers: BPE text is cleaned up only on a second, explicit setting, since real spaces would be lost.
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
