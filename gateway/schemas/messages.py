"""Requests of /v1/messages and /v1/messages/count_tokens, in the form of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from gateway.sampling import SamplingFields
from gateway.schemas.chat import MAX_MESSAGES
from gateway.schemas.common import (
    Body,
    Flag,
    FreeObject,
    Items,
    Positive,
    Request,
    Text,
    refuse,
)
from gateway.schemas.constraints import JsonOutputFormat, OrNothing
from gateway.schemas.content_blocks import Content, assistant_message, text_of, user_messages
from gateway.schemas.tools import MAX_TOOLS, Definition, definition, named_choice, tool_options
from specdec.client import ChatMessage, Constraint, GenerateOptions
from specdec.contract.errors import InvalidRequest

#: Choices as the SDK takes them, by those of this API.
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class InputMessage(Request):
    """One message of a conversation."""

    role: Literal["user", "assistant"]
    content: Content
    """Text, or blocks of the types text, thinking, tool_use and tool_result."""


class MessagesTool(Request):
    """A tool that the client runs."""

    type: Text = "custom"
    """Only "custom" is supported: tools of other types are run by the server of the API."""
    name: Text
    """Name: 1 to 64 letters, digits, dashes and underscores."""
    description: Text | None = None
    """Description for the model."""
    input_schema: FreeObject | None = None
    """JSON schema of the input, which is an object."""
    strict: Flag | None = None
    """true: every keyword of the schema is enforced, or the request refused. Else keywords that cannot be enforced are
    ignored, and the answer names them under `specdec.constraint_warnings`."""


class MessagesToolChoice(Request):
    """Choice of tools."""

    type: Literal["auto", "any", "tool", "none"]
    """auto: the model decides. any: it calls at least one tool. tool: it calls the named one. none: it calls none."""
    name: Text | None = None
    """Name of the tool, for the type tool."""
    disable_parallel_tool_use: Flag | None = None
    """true: at most one call."""

    def choice(self) -> str | Mapping[str, Any]:
        """Return the choice as the SDK takes it. Raises InvalidRequest without the name of a tool."""
        if self.type != "tool":
            return _CHOICES[self.type]
        if self.name is None:
            raise InvalidRequest("tool_choice.name: the type tool needs it", field="tool_choice.name")
        return named_choice(self.name)


class Thinking(Request):
    """Reasoning before the answer."""

    type: Literal["enabled", "disabled", "adaptive"]
    """enabled, disabled: the variable enable_thinking of the chat template. adaptive: the template decides."""


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
    tools: Annotated[Items[MessagesTool], Field(max_length=MAX_TOOLS)] | None = None
    """Tools that the model may call, and the client runs."""
    tool_choice: Annotated[MessagesToolChoice | None, OrNothing] = None
    """Choice of tools."""
    thinking: Annotated[Thinking | None, OrNothing] = None
    """Reasoning before the answer, for chat templates that read enable_thinking. Its budget is not enforced."""
    output_config: OutputConfig | None = None
    """Form of the output."""
    mcp_servers: Items[Any] | None = None
    """Not supported."""
    container: Any = None
    """Not supported."""

    def require_supported(self) -> None:
        """Raises InvalidRequest for a field that the server knows and does not support."""
        for name, value, reason in (
            ("mcp_servers", self.mcp_servers, "the model has the conversation alone"),
            ("container", self.container, "the model has the conversation alone"),
        ):
            if value:
                raise refuse(name, reason)
        if self.messages[-1].role != "user":
            field = f"messages[{len(self.messages) - 1}].role"
            raise refuse(field, "the last message must be the user's; an output has no given beginning")

    def conversation(self) -> list[ChatMessage]:
        """Return the messages for the chat template. Raises InvalidRequest for a block that is not supported."""
        system = text_of(self.system, "system") if self.system else ""
        found: list[ChatMessage] = [{"role": "system", "content": system}] if system else []
        for index, message in enumerate(self.messages):
            field = f"messages[{index}].content"
            read = assistant_message if message.role == "assistant" else user_messages
            found += read(message.content, field)
        return found

    def definitions(self) -> list[Definition]:
        """Return the tools as the SDK takes them. Raises InvalidRequest for one that a server would run."""
        found = []
        for index, tool in enumerate(self.tools or ()):
            if tool.type != "custom":
                raise refuse(f"tools[{index}].type", f"it must be custom, got {tool.type[:64]!r}")
            found.append(definition(tool.name, tool.description, tool.input_schema, tool.strict))
        return found

    def template_arguments(self) -> FreeObject | None:
        """Return the variables of the chat template; those that the request states itself come first."""
        if self.thinking is None or self.thinking.type == "adaptive":
            return self.chat_template_kwargs
        return {"enable_thinking": self.thinking.type == "enabled"} | (self.chat_template_kwargs or {})


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

    @property
    def stops(self) -> Sequence[str]:
        """Texts before which the output ends."""
        if self.stop_sequences or not self.stop:
            return self.stop_sequences or ()
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def require_supported(self) -> None:
        """Raises InvalidRequest for a field that the server knows and does not support."""
        Conversation.require_supported(self)
        SamplingFields.require_supported(self)
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
        if arguments := self.template_arguments():
            given["chat_template_kwargs"] = arguments
        choice = self.tool_choice
        is_parallel = False if choice and choice.disable_parallel_tool_use else None
        demanded = choice.choice() if choice else None
        given.update(tool_options(self.definitions(), demanded, is_parallel))  # type: ignore[typeddict-item]
        return given
