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
    Positive,
    Request,
    StrictInt,
    Text,
    refuse,
    unicode_text,
    without_nulls,
)
from gateway.schemas.constraints import OrNothing, TextFormat
from gateway.schemas.input_items import InputItem, messages_of
from gateway.schemas.tools import (
    Effort,
    ResponseTools,
    read_choice,
    response_definitions,
    template_arguments,
    tool_options,
)
from specdec.client import ChatMessage, Constraint, GenerateOptions
from specdec.contract.errors import InvalidRequest

MAX_METADATA = 16
#: The entry of `include` that asks for log-probabilities.
_LOGPROBS = "message.output_text.logprobs"
_NO_SUMMARY = "the reasoning is returned as a whole"


class Reasoning(Request):
    """Reasoning before the answer."""

    effort: Effort | None = None
    """Amount of reasoning, for chat templates that read it: their variables reasoning_effort and enable_thinking."""
    summary: Text | None = None
    """Not supported."""
    generate_summary: Text | None = None
    """Not supported."""


class ResponseText(Request):
    """Form of the output."""

    format: Annotated[TextFormat | None, OrNothing] = None
    """Form of the output: text, a JSON object, or JSON of a schema."""


class ResponseRequest(SamplingFields):
    """The next turn of a conversation."""

    form_fields: ClassVar[str] = "text.format"
    carried: ClassVar[Mapping[str, Collection[str]]] = {"text": ("format",)}

    input: Text | Annotated[Items[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]
    """A text of the user, or messages, calls, answers to calls and reasoning."""
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
    reasoning: Annotated[Reasoning | None, OrNothing] = None
    """Reasoning before the answer."""
    tools: ResponseTools | None = None
    """Functions that the model may call."""
    tool_choice: Any = None
    """"auto": the model decides. "none": it calls nothing. "required": it calls at least one tool. {"type": "function",
    "name": NAME}: it calls this one."""
    parallel_tool_calls: Flag | None = None
    """false: at most one call."""
    truncation: Text | None = None
    """Only "disabled" is supported."""

    @property
    def text_format(self) -> Mapping[str, Any]:
        """Form of the output, as the response repeats it."""
        output_format = self.text and self.text.format
        return output_format.model_dump(by_alias=True, exclude_none=True) if output_format else {"type": "text"}

    @property
    def effort(self) -> Effort | None:
        """Amount of reasoning that the request asks for."""
        return self.reasoning.effort if self.reasoning else None

    @property
    def has_logprobs(self) -> bool:
        return bool(self.top_logprobs) or _LOGPROBS in (self.include or ())

    def require_supported(self) -> None:
        """Raises InvalidRequest for a field that is not supported, or fields that do not go together."""
        super().require_supported()
        reasoning = self.reasoning
        for name, value, reason in (
            ("n", self.num_outputs > 1, "a response has one output"),
            ("background", self.background, "a response is generated while its client waits"),
            ("conversation", self.conversation, "use previous_response_id"),
            ("prompt", self.prompt, "the server stores no prompts; send input and instructions"),
            ("reasoning.summary", reasoning and reasoning.summary, _NO_SUMMARY),
            ("reasoning.generate_summary", reasoning and reasoning.generate_summary, _NO_SUMMARY),
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
        return messages_of(self.input)

    def constraint(self) -> Constraint | None:
        output_format = self.text and self.text.format
        return output_format.constraint("text.format") if output_format else None

    def options(self, recommended: Mapping[str, float | int]) -> GenerateOptions:
        given = super().options(recommended)
        if arguments := template_arguments(self.chat_template_kwargs, self.effort):
            given["chat_template_kwargs"] = arguments
        definitions = response_definitions(self.tools)
        demanded = tool_options(definitions, read_choice(self.tool_choice), self.parallel_tool_calls)
        given.update(demanded)  # type: ignore[typeddict-item]
        if self.has_logprobs:
            given["logprobs"] = self.top_logprobs or 0
        return given
