"""Items of the input of /v1/responses, and the messages for the chat template that they become.

The reasoning, the text and the calls of one turn are items of their own, and one message of the assistant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.schemas.common import Items, Object, Request, Text, refuse, unicode_text
from specdec.client import ChatMessage
from specdec.client.messages import TextPart
from specdec.contract.errors import InvalidRequest

#: Types of the parts of a message's content that have text.
_TEXT_PARTS = ("input_text", "output_text", "text")
_TYPES = "message, function_call, function_call_output or reasoning"


class InputItem(Request):
    """One item of the input: a message, a call, the answer to a call, or reasoning."""

    type: Text = "message"
    """message, function_call, function_call_output or reasoning."""
    role: Text = ""
    """Role of a message: user, assistant, system or developer."""
    content: Text | Items[Object] = ""
    """Text, or parts of the types input_text and output_text; of reasoning, parts of the type reasoning_text."""
    call_id: Text = ""
    """Id of a call, which its answer repeats."""
    name: Text = ""
    """Name of the called tool."""
    arguments: Text = ""
    """JSON text of a call's arguments."""
    output: Text | Items[Object] = ""
    """Answer to a call: text, or parts of the type input_text."""

    def message(self, field: str) -> ChatMessage:
        """Return the message for the chat template. Raises InvalidRequest, which names the place under `field`."""
        if self.type == "message":
            content = _content(self.content, f"{field}.content")
            return {"role": self._required("role", field), "content": content}
        if self.type == "function_call":
            return {"role": "assistant", "content": None, "tool_calls": [self._call(field)]}
        if self.type == "function_call_output":
            output = _content(self.output, f"{field}.output")
            return {"role": "tool", "tool_call_id": self._required("call_id", field), "content": output}
        if self.type == "reasoning":
            return {"role": "assistant", "content": "", "reasoning_content": self._reasoning(field)}
        raise refuse(f"{field}.type", f"an item must be {_TYPES}, got {self.type[:64]!r}")

    def _call(self, field: str) -> dict[str, Any]:
        arguments = unicode_text(self.arguments, f"{field}.arguments")
        function = {"name": self._required("name", field), "arguments": arguments}
        return {"id": self._required("call_id", field), "type": "function", "function": function}

    def _reasoning(self, field: str) -> str:
        where = f"{field}.content"
        parts = _content(self.content, where, ("reasoning_text",))
        return parts if isinstance(parts, str) else "".join(part["text"] for part in parts)

    def _required(self, name: str, field: str) -> str:
        text = str(getattr(self, name))
        if not text:
            raise InvalidRequest(f"{field}.{name}: is required", field=f"{field}.{name}")
        return unicode_text(text, f"{field}.{name}")


def messages_of(items: Sequence[InputItem]) -> list[ChatMessage]:
    """Return the messages of the input, with the items of one turn joined. Raises InvalidRequest."""
    messages: list[ChatMessage] = []
    for index, item in enumerate(items):
        message = item.message(f"input[{index}]")
        is_continued = bool(messages) and _continues(messages[-1], message)
        if is_continued:
            _join(messages[-1], message)
        else:
            messages.append(message)
    return messages


def _continues(last: ChatMessage, message: ChatMessage) -> bool:
    """Return whether a message belongs to the turn of the last one: a call, or the text after reasoning."""
    if last["role"] != "assistant" or message["role"] != "assistant" or message.get("reasoning_content"):
        return False
    is_reasoning_alone = not last.get("content") and not last.get("tool_calls")
    return bool(message.get("tool_calls")) or is_reasoning_alone


def _join(last: ChatMessage, message: ChatMessage) -> None:
    if calls := message.get("tool_calls"):
        last["tool_calls"] = [*(last.get("tool_calls") or ()), *calls]
        last["content"] = last.get("content") or None
    else:
        last["content"] = message.get("content")


def _content(
    content: str | Sequence[dict[str, Any]], field: str, types: Sequence[str] = _TEXT_PARTS
) -> str | list[TextPart]:
    """Return text, or parts of text. Raises InvalidRequest for a part of another type."""
    if isinstance(content, str):
        return unicode_text(content, field)
    parts: list[TextPart] = []
    for number, part in enumerate(content):
        where = f"{field}[{number}]"
        if part.get("type") not in types:
            raise refuse(f"{where}.type", f"a part must be text, got {str(part.get('type'))[:64]!r}")
        if not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{where}.text: must be text", field=f"{where}.text")
        parts.append({"type": "text", "text": unicode_text(part["text"], f"{where}.text")})
    return parts
