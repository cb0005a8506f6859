"""Requests of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, cast

from pydantic import Field

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
)
from gateway.schemas.constraints import CompletionFields
from gateway.schemas.tools import ChatTools, Effort, chat_definitions, read_choice, template_arguments, tool_options
from specdec.client import ChatMessage, GenerateOptions
from specdec.contract.errors import InvalidRequest

#: Most messages of a conversation.
MAX_MESSAGES = 4096
#: Most top logprobs of a token.
MAX_TOP_LOGPROBS = 20

_RENDERING = "the model's own chat template is used, with a prompt for the assistant at its end"


class Message(Request):
    """One message of a conversation. What a role's message may have is the chat template's subject."""

    role: Text
    content: Text | Items[Object] | None = None
    """Text, or parts of type text."""
    name: Text | None = None
    tool_calls: Items[Object] | None = None
    """Calls that the assistant made."""
    tool_call_id: Text | None = None
    """Call that a message of the role tool answers."""
    reasoning_content: Text | None = None
    """Thoughts of the assistant, for templates that show them."""
    reasoning: Text | None = None
    """Another name of reasoning_content."""

    def for_template(self) -> ChatMessage:
        """Return the message as the SDK takes it."""
        fields = {"content": None, **self.model_dump(exclude_none=True, exclude={"reasoning"})}
        if self.reasoning is not None:
            fields.setdefault("reasoning_content", self.reasoning)
        return cast(ChatMessage, fields)


class ChatRequest(CompletionFields):
    """A conversation, and how to continue it."""

    messages: Annotated[Items[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    """The whole conversation, oldest message first."""
    max_completion_tokens: Positive | None = None
    """Most output tokens; absent: as many as the context has room for."""
    max_tokens: Positive | None = None
    """The former name of max_completion_tokens."""
    logprobs: Flag | None = None
    """Return the log-probability of each output token."""
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_TOP_LOGPROBS), WHOLE] | None = None
    """Number of top tokens whose log-probability is returned for each output token."""
    chat_template_kwargs: FreeObject | None = None
    """Further variables of the chat template."""
    reasoning_effort: Effort | None = None
    """Amount of reasoning, for chat templates that read it: their variables reasoning_effort and enable_thinking."""
    tools: ChatTools | None = None
    """Functions that the model may call."""
    tool_choice: Any = None
    """"auto": the model decides. "none": it calls nothing. "required": it calls at least one tool. {"type": "function",
    "function": {"name": NAME}}: it calls this one."""
    parallel_tool_calls: Flag | None = None
    """false: at most one call."""

    modalities: list[Any] | None = None
    """Only ["text"] is supported."""
    audio: Any = None
    """Not supported."""
    web_search_options: Any = None
    """Not supported."""
    chat_template: Any = None
    """Not supported."""
    documents: Any = None
    """Not supported."""
    echo: Flag | None = None
    """Not supported."""
    continue_final_message: Flag | None = None
    """Not supported."""
    add_generation_prompt: Flag | None = None
    """Only true is supported."""

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def require_supported(self) -> None:
        """Raises InvalidRequest for a field that is not supported, or fields that do not go together."""
        super().require_supported()
        for name, value, reason in (
            ("modalities", self.modalities not in (None, ["text"]), "only text is read and written"),
            ("audio", self.audio, "only text is read and written"),
            ("web_search_options", self.web_search_options is not None, "the model has the prompt alone"),
            ("chat_template", self.chat_template, _RENDERING),
            ("documents", self.documents, _RENDERING),
            ("echo", self.echo, _RENDERING),
            ("continue_final_message", self.continue_final_message, _RENDERING),
            ("add_generation_prompt", self.add_generation_prompt is False, _RENDERING),
        ):
            if value:
                raise refuse(name, reason)
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs: needs logprobs to be true", field="top_logprobs")
        self._require_text_parts()

    def conversation(self) -> list[ChatMessage]:
        return [message.for_template() for message in self.messages]

    def options(self, recommended: Mapping[str, float | int]) -> GenerateOptions:
        given = super().options(recommended)
        given["messages"] = self.conversation()
        if arguments := template_arguments(self.chat_template_kwargs, self.reasoning_effort):
            given["chat_template_kwargs"] = arguments
        given.update(self._tool_options())  # type: ignore[typeddict-item]
        if self.logprobs:
            given["logprobs"] = self.top_logprobs or 0
        return given

    def _tool_options(self) -> dict[str, Any]:
        return tool_options(chat_definitions(self.tools), read_choice(self.tool_choice), self.parallel_tool_calls)

    def _require_text_parts(self) -> None:
        for index, message in enumerate(self.messages):
            for number, part in enumerate(message.content if isinstance(message.content, list) else ()):
                if part.get("type") != "text":
                    field = f"messages[{index}].content[{number}].type"
                    raise refuse(field, f"a part must be text, got {str(part.get('type'))[:64]!r}")
