"""Content blocks of /v1/messages, and the messages for the chat template that they become."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from gateway.schemas.common import Items, Object, Text, refuse, unicode_text
from specdec.client import ChatMessage
from specdec.contract.errors import InvalidRequest

Content = Text | Items[Object]
"""A text, or content blocks."""


def text_of(content: Content, field: str) -> str:
    """Return the text of a message. Raises InvalidRequest for a block that is not text, naming its place."""
    if isinstance(content, str):
        return unicode_text(content, field)
    texts = []
    for where, block in _placed(content, field):
        if block.get("type") != "text":
            raise _refused(block, where, "text")
        texts.append(_text(block, "text", where))
    return "\n".join(texts)


def user_messages(content: Content, field: str) -> list[ChatMessage]:
    """Return the messages of a user's turn: the results of tools, and then its text.

    Raises:
        InvalidRequest: a block is neither text nor the result of a tool.
    """
    if isinstance(content, str):
        return [{"role": "user", "content": unicode_text(content, field)}]
    results: list[ChatMessage] = []
    texts: list[str] = []
    for where, block in _placed(content, field):
        if block.get("type") == "tool_result":
            results.append(_result(block, where))
        elif block.get("type") == "text":
            texts.append(_text(block, "text", where))
        else:
            raise _refused(block, where, "text or tool_result")
    said: list[ChatMessage] = [{"role": "user", "content": "\n".join(texts)}] if texts or not results else []
    return results + said


def assistant_message(content: Content, field: str) -> list[ChatMessage]:
    """Return the message of the assistant, with its calls and its reasoning.

    Raises:
        InvalidRequest: a block is of another type.
    """
    if isinstance(content, str):
        return [{"role": "assistant", "content": unicode_text(content, field)}]
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for where, block in _placed(content, field):
        if block.get("type") == "text":
            texts.append(_text(block, "text", where))
        elif block.get("type") == "thinking":
            thoughts.append(_text(block, "thinking", where))
        elif block.get("type") == "tool_use":
            calls.append(_call(block, where))
        else:
            raise _refused(block, where, "text, thinking or tool_use")
    message: ChatMessage = {"role": "assistant", "content": "\n".join(texts) if texts or not calls else None}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return [message]


def _placed(content: Iterable[Mapping[str, Any]], field: str) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """Yield the blocks with their places."""
    for number, block in enumerate(content):
        yield f"{field}[{number}]", block


def _result(block: Mapping[str, Any], where: str) -> ChatMessage:
    answered = _text(block, "tool_use_id", where)
    content = block.get("content") or ""
    if not isinstance(content, str | list) or not all(isinstance(each, Mapping | str) for each in content):
        raise InvalidRequest(f"{where}.content: must be text or blocks", field=f"{where}.content")
    return {"role": "tool", "tool_call_id": answered, "content": text_of(content, f"{where}.content")}


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, Mapping):
        raise InvalidRequest(f"{where}.input: must be an object", field=f"{where}.input")
    function = {"name": _text(block, "name", where), "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": _text(block, "id", where), "type": "function", "function": function}


def _text(block: Mapping[str, Any], name: str, where: str) -> str:
    """Return a field of a block. Raises InvalidRequest if it is not text."""
    text = block.get(name)
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.{name}: must be text", field=f"{where}.{name}")
    return unicode_text(text, f"{where}.{name}")


def _refused(block: Mapping[str, Any], where: str, known: str) -> InvalidRequest:
    return refuse(f"{where}.type", f"a block must be {known}, got {str(block.get('type'))[:64]!r}")
