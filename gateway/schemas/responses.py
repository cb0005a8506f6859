"""Requests of /v1/responses."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from gateway.sampling import SamplingFields
from gateway.schemas.chat import MAX_MESSAGES, MAX_TOP_LOGPROBS
from gateway.schemas.common import (
    WHOLE,
    Flag,
    FreeObject,
    Items,
    Object,
    Positive,
    Request,
    StrictInt,
    Text,
    refuse,
    unicode_text,
    without_nulls,
)
from gateway.schemas.constraints import OrNothing, TextFormat
from specdec.client import ChatMessage, Constraint, GenerateOptions
from specdec.client.messages import TextPart
from specdec.contract.errors import InvalidRequest

MAX_METADATA = 16
#: Types of the parts of a message's content that have text.
_TEXT_PARTS = ("input_text", "output_text", "text")
#: The entry of `include` that asks for log-probabilities.
_LOGPROBS = "message.output_text.logprobs"


class InputItem(Request):
    """One message of the input."""

    type: Text = "message"
    """Only "message" is supported."""
    role: Text = ""
    """user, assistant, system or developer."""
    content: Text | Items[Object] = ""
    """Text, or parts of the types input_text and output_text."""

    def message(self, field: str) -> ChatMessage:
        """Return the message for the chat template. Raises InvalidRequest, which names the place under `field`."""
        if self.type != "message":
            raise refuse(f"{field}.type", f"an item must be a message, got {self.type[:64]!r}")
        if not self.role:
            raise InvalidRequest(f"{field}.role: is required", field=f"{field}.role")
        return {"role": unicode_text(self.role, f"{field}.role"), "content": self._content(field)}

    def _content(self, field: str) -> str | list[TextPart]:
        if isinstance(self.content, str):
            return unicode_text(self.content, f"{field}.content")
        parts: list[TextPart] = []
        for number, part in enumerate(self.content):
            where = f"{field}.content[{number}]"
            if part.get("type") not in _TEXT_PARTS:
                raise refuse(f"{where}.type", f"a part must be text, got {str(part.get('type'))[:64]!r}")
            if not isinstance(part.get("text"), str):
                raise InvalidRequest(f"{where}.text: must be text", field=f"{where}.text")
            parts.append({"type": "text", "text": unicode_text(part["text"], f"{where}.text")})
        return parts


class ResponseText(Request):
    """Form of the output."""

    format: Annotated[TextFormat | None, OrNothing] = None
    """Form of the output: text, a JSON object, or JSON of a schema."""


class ResponseRequest(SamplingFields):
    """The next turn of a conversation."""

    form_fields: ClassVar[str] = "text.format"
    carried: ClassVar[Mapping[str, Collection[str]]] = {"text": ("format",)}

    input: Text | Annotated[Items[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]
    """A text of the user, or messages."""
    instructions: Text | None = None
    """Message of the system, which comes first and belongs to this response alone."""
    previous_response_id: Text | None = None
    """Stored response whose conversation is continued."""
    store: Flag | None = True
    """Store the response, so that it can be read and continued."""
    max_output_tokens: Positive | None = None
    """Most output tokens; absent: as many as the context has room for."""
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_TOP_LOGPROBS), WHOLE] | None = None
    """Number of top tokens whose log-probability is returned for each output token."""
    include: Items[Text] | None = None
    """message.output_text.logprobs adds the log-probability of each output token; other entries add nothing."""
    metadata: Annotated[dict[str, Text], Field(max_length=MAX_METADATA), BeforeValidator(without_nulls)] | None = None
    """Texts of the caller, which the response repeats."""
    chat_template_kwargs: FreeObject | None = None
    """Further variables of the chat template."""

    text: ResponseText | None = None
    """Form of the output."""
    background: Flag | None = None
    """Not supported."""
    conversation: Any = None
    """Not supported; use previous_response_id."""
    prompt: Any = None
    """Not supported."""
    reasoning: Object | None = None
    """Not supported."""
    truncation: Text | None = None
    """Only "disabled" is supported."""

    @property
    def text_format(self) -> Mapping[str, Any]:
        """Form of the output, as the response repeats it."""
        output_format = self.text and self.text.format
        return output_format.model_dump(by_alias=True, exclude_none=True) if output_format else {"type": "text"}

    @property
    def has_logprobs(self) -> bool:
        return bool(self.top_logprobs) or _LOGPROBS in (self.include or ())

    def require_supported(self) -> None:
        """Raises InvalidRequest for a field that is not supported, or fields that do not go together."""
        super().require_supported()
        for name, value, reason in (
            ("n", self.num_outputs > 1, "a response has one output"),
            ("background", self.background, "a response is generated while its client waits"),
            ("conversation", self.conversation, "use previous_response_id"),
            ("prompt", self.prompt, "the server stores no prompts; send input and instructions"),
            ("reasoning", any((self.reasoning or {}).values()), "the output is text alone"),
            ("truncation", self.truncation not in (None, "disabled"), "shorten the input"),
        ):
            if value:
                raise refuse(name, reason)
        if self.session_id and self.previous_response_id:
            raise InvalidRequest(
                "session_id: previous_response_id has a session of its own; leave one of both out", field="session_id"
            )

    def new_messages(self) -> list[ChatMessage]:
        """Return the messages of the input. Raises InvalidRequest, which names the field."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": unicode_text(self.input, "input")}]
        return [item.message(f"input[{index}]") for index, item in enumerate(self.input)]

    def constraint(self) -> Constraint | None:
        output_format = self.text and self.text.format
        return output_format.constraint("text.format") if output_format else None

    def options(self, recommended: Mapping[str, float | int]) -> GenerateOptions:
        given = super().options(recommended)
        if self.chat_template_kwargs:
            given["chat_template_kwargs"] = self.chat_template_kwargs
        if self.has_logprobs:
            given["logprobs"] = self.top_logprobs or 0
        return given
