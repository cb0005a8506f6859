"""Conversations as `generate` and `tokenize` take them: messages in OpenAI's form, and arguments of the chat template.

The fields of a message beside its role and text travel as JSON, and the chat template reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict

from specdec.client.fields import as_json, assign, extend
from specdec.contract.errors import InvalidRequest
from specdec.v1 import coordinator_pb2 as pb

_EXTRA_FIELDS = ("name", "tool_calls", "tool_call_id", "reasoning_content")


class TextPart(TypedDict):
    """Part of a message in OpenAI's form. Text is the only supported type."""

    type: Literal["text"]
    text: str


class ChatMessage(TypedDict):
    """One message of a conversation, in the form that chat templates take. A further field that is None is absent."""

    role: str
    content: NotRequired[str | Sequence[TextPart] | None]
    """Text of the message. Line breaks join parts for a chat template that reads no parts. Only a message with
    `tool_calls` may be without."""
    name: NotRequired[str | None]
    tool_calls: NotRequired[Sequence[Mapping[str, Any]] | None]
    """Calls that the assistant made. Their arguments are an object, or JSON text that spells one."""
    tool_call_id: NotRequired[str | None]
    reasoning_content: NotRequired[str | None]


def fill_messages(
    target: pb.ChatMessages, messages: Sequence[ChatMessage], template_arguments: Mapping[str, Any] | None
) -> None:
    """Write a conversation into a message.

    Args:
        target: message to fill.
        messages: the conversation.
        template_arguments: further variables of the chat template.

    Raises:
        InvalidRequest: a message has an unknown field, or a value does not fit its field.
    """
    target.SetInParent()
    for index, message in enumerate(messages):
        _fill_message(target.messages.add(), message, f"messages[{index}]")
    if template_arguments is not None:
        target.template_arguments_json = as_json(template_arguments, "chat_template_kwargs")


def _fill_message(entry: pb.ChatMessage, message: Any, where: str) -> None:
    if not isinstance(message, Mapping) or not {"role"} <= message.keys() <= {"role", "content", *_EXTRA_FIELDS}:
        got = ", ".join(map(str, message)) if isinstance(message, Mapping) else type(message).__name__
        raise InvalidRequest(
            f"{where} must have role and content, and may have {', '.join(_EXTRA_FIELDS)}; got {got}", field="messages"
        )
    assign(entry, "role", message["role"], f"{where}.")
    extra = {name: message[name] for name in _EXTRA_FIELDS if message.get(name) is not None}
    content = message.get("content")
    if content is None and extra.get("tool_calls"):
        extra["content"] = None
    elif "content" not in message:
        raise InvalidRequest(f"{where} must have content, unless it has tool_calls", field="messages")
    else:
        texts = _texts(content, f"{where}.content")
        assign(entry, "content", content if texts is None else "\n".join(texts), f"{where}.")
        if texts is not None and len(texts) > 1:
            extend(entry, "content_parts", texts, f"{where}.")
    if extra:
        entry.extra_json = as_json(extra, where)


def _texts(content: Any, where: str) -> list[str] | None:
    """Return the texts of a message's parts; None for content that is not a list of parts."""
    if isinstance(content, str | bytes) or not isinstance(content, Sequence):
        return None
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text":
            raise InvalidRequest(
                f'{where}[{index}] must be {{"type": "text", "text": ...}}, got type {str(kind)[:64]!r}', field=where
            )
        if not isinstance(text, str):
            raise InvalidRequest(f"{where}[{index}].text: must be text", field=f"{where}[{index}].text")
        texts.append(text)
    return texts
