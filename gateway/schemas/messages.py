"""Requests of /v1/messages and /v1/messages/count_tokens, in the form of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from gateway.sampling import SamplingFields
from gateway.schemas.chat import MAX_MESSAGES
from gateway.schemas.common import (
    GRAMMARS,
    Body,
    FreeObject,
    Items,
    Object,
    Positive,
    Request,
    Text,
    refuse,
    unicode_text,
)
from gateway.schemas.constraints import JsonOutputFormat, OrNothing
from specdec.client import ChatMessage, Constraint, GenerateOptions
from specdec.contract.errors import InvalidRequest

Content = Text | Items[Object]
"""A text, or content blocks."""


class InputMessage(Request):
    """One message of a conversation."""

    role: Literal["user", "assistant"]
    content: Content
    """Text, or blocks of the type text."""


class OutputConfig(Request):
    """Form of the output."""

    format: Annotated[JsonOutputFormat | None, OrNothing] = None
    """JSON schema of the output."""


class Conversation(Body):
    """A conversation with its system prompt."""

    carried: ClassVar[Mapping[str, Collection[str]]] = {"output_config": ("format",)}

    model: Text | None = None
    """Name of the model; absent: the one that is served."""
    messages: Annotated[Items[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    """The whole conversation, oldest message first."""
    system: Content | None = None
    """System prompt: text, or blocks of the type text."""
    chat_template_kwargs: FreeObject | None = None
    """Further variables of the chat template."""
    tools: list[Any] | None = None
    """Not supported."""
    tool_choice: Any = None
    """Only {"type": "none"} is supported."""
    thinking: Object | None = None
    """Only {"type": "disabled"} is supported."""
    output_config: OutputConfig | None = None
    """Form of the output."""
    mcp_servers: Items[Any] | None = None
    """Not supported."""
    container: Any = None
    """Not supported."""

    def require_supported(self) -> None:
        """Raises InvalidRequest for a field that the server knows and does not support."""
        choice = self.tool_choice.get("type") if isinstance(self.tool_choice, dict) else self.tool_choice
        for name, value, reason in (
            ("tools", self.tools, GRAMMARS),
            ("tool_choice", choice not in (None, "none"), GRAMMARS),
            ("thinking", (self.thinking or {}).get("type", "disabled") != "disabled", "the output is text alone"),
            ("mcp_servers", self.mcp_servers, "the model has the conversation alone"),
            ("container", self.container, "the model has the conversation alone"),
        ):
            if value:
                raise refuse(name, reason)
        if self.messages[-1].role != "user":
            field = f"messages[{len(self.messages) - 1}].role"
            raise refuse(field, "the last message must be the user's; an output has no given beginning")

    def conversation(self) -> list[ChatMessage]:
        """Return the messages for the chat template. Raises InvalidRequest for a block that is not text."""
        system = text_of(self.system, "system") if self.system else ""
        first: list[ChatMessage] = [{"role": "system", "content": system}] if system else []
        return first + [
            {"role": message.role, "content": text_of(message.content, f"messages[{index}].content")}
            for index, message in enumerate(self.messages)
        ]


class CountTokensRequest(Conversation):
    """A conversation whose tokens are to be counted."""


class MessagesRequest(SamplingFields, Conversation):
    """A conversation, and how to continue it."""

    form_fields: ClassVar[str] = "output_config.format"
    carried: ClassVar[Mapping[str, Collection[str]]] = Conversation.carried

    max_tokens: Positive
    """Most output tokens."""
    stop_sequences: Items[Text] | None = None
    """Texts before which the output ends."""
    tool_choice: Any = None
    """Only {"type": "none"} is supported."""

    @property
    def stops(self) -> Sequence[str]:
        """Texts before which the output ends."""
        if self.stop_sequences or not self.stop:
            return self.stop_sequences or ()
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def require_supported(self) -> None:
        """Raises InvalidRequest for a field that the server knows and does not support."""
        Conversation.require_supported(self)
        SamplingFields.require_supported(self.model_copy(update={"tool_choice": None}))
        if self.num_outputs > 1:
            raise refuse("n", "a message has one output")

    def constraint(self) -> Constraint | None:
        output_format = self.output_config and self.output_config.format
        return output_format.constraint("output_config.format") if output_format else None

    def options(self, recommended: Mapping[str, float | int]) -> GenerateOptions:
        given = super().options(recommended)
        given["messages"] = self.conversation()
        given["max_new_tokens"] = self.max_tokens
        if self.stops:
            given["stop"] = self.stops
        if self.chat_template_kwargs:
            given["chat_template_kwargs"] = self.chat_template_kwargs
        return given


def text_of(content: Content, field: str) -> str:
    """Return the text of a message. Raises InvalidRequest for a block that is not text, naming its place."""
    if isinstance(content, str):
        return unicode_text(content, field)
    texts = []
    for number, block in enumerate(content):
        where = f"{field}[{number}]"
        if block.get("type") != "text":
            raise refuse(f"{where}.type", f"a block must be text, got {str(block.get('type'))[:64]!r}")
        if not isinstance(block.get("text"), str):
            raise InvalidRequest(f"{where}.text: must be text", field=f"{where}.text")
        texts.append(unicode_text(block["text"], f"{where}.text"))
    return "\n".join(texts)
