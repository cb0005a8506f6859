"""Checks a conversation: its messages, their further fields, and the arguments of the chat template.

`validation` and `servicer` call it on decoded messages. What a template makes of checked messages is decided in
`text/tokenizer`. The limits also bound the time for which reading the JSON holds up other streams.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NoReturn

from coordinator.requests import ChatTurn
from specdec.contract.errors import InvalidRequest

MAX_MESSAGES = 4096
#: Limit on the further fields of all messages of a conversation together.
MAX_EXTRA_CHARACTERS = 1 << 20
MAX_TEMPLATE_ARGUMENTS_CHARACTERS = 1 << 16

_TEMPLATE_ARGUMENTS = "messages.template_arguments_json"
_TEXT_FIELDS = ("name", "tool_call_id", "reasoning_content")
_EXTRA_FIELDS = (*_TEXT_FIELDS, "tool_calls", "content")


def check_num_messages(num_messages: int) -> None:
    """Raise InvalidRequest for an empty or too long conversation. A front calls this before it decodes the messages."""
    if not num_messages:
        raise _invalid("messages", "must not be empty")
    if num_messages > MAX_MESSAGES:
        raise _invalid("messages", f"must hold at most {MAX_MESSAGES} messages, got {num_messages}")


def validate_messages(messages: Sequence[ChatTurn]) -> tuple[ChatTurn, ...]:
    """Check a conversation.

    Raises:
        InvalidRequest: it is empty or too long, a role is missing, or the further fields of a message are not those
            that a message may have.
    """
    check_num_messages(len(messages))
    num_characters = sum(len(message.extra_json) for message in messages)
    if num_characters > MAX_EXTRA_CHARACTERS:
        raise _invalid(
            "messages",
            f"must hold at most {MAX_EXTRA_CHARACTERS} characters of extra_json together, got {num_characters}",
        )
    for index, message in enumerate(messages):
        if not message.role:
            raise _invalid(f"messages[{index}].role", "must not be empty")
        if message.content_parts and "\n".join(message.content_parts) != message.content:
            raise _invalid(f"messages[{index}].content_parts", "must join to content by line breaks")
        if message.extra_json:
            _check_extra(f"messages[{index}]", message)
    return tuple(messages)


def check_template_arguments(arguments_json: str) -> None:
    """Raise InvalidRequest unless the arguments of the chat template are a JSON object of limited length, or empty."""
    if len(arguments_json) > MAX_TEMPLATE_ARGUMENTS_CHARACTERS:
        raise _invalid(
            _TEMPLATE_ARGUMENTS,
            f"must have at most {MAX_TEMPLATE_ARGUMENTS_CHARACTERS} characters, got {len(arguments_json)}",
        )
    if arguments_json:
        _read_object(_TEMPLATE_ARGUMENTS, arguments_json)


def _check_extra(where: str, message: ChatTurn) -> None:
    field = f"{where}.extra_json"
    extra = _read_object(field, message.extra_json)
    for key, value in extra.items():
        if key not in _EXTRA_FIELDS:
            known = ", ".join(_EXTRA_FIELDS)
            raise _invalid(field, f"must hold only {known}; got {ascii(key)[:64]}")
        if key in _TEXT_FIELDS and not isinstance(value, str):
            raise _invalid(field, f"must hold a text as {key}, got {type(value).__name__}")
    calls = extra.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise _invalid(field, "must hold a list of JSON objects as tool_calls")
    for number, call in enumerate(calls):
        _check_call(f"{where}.tool_calls[{number}]", call)
    if "content" in extra and (extra["content"] is not None or message.content or not calls):
        raise _invalid(field, "may hold content only as null, for a message with tool_calls and without a text")


def _check_call(field: str, call: dict[str, Any]) -> None:
    """Raise InvalidRequest unless the arguments of a tool call are a JSON object; absent ones mean an empty object."""
    function = call
    if "function" in call:
        field, function = f"{field}.function", call["function"]
    if not isinstance(function, dict):
        raise _invalid(field, f"must be an object with name and arguments, got {type(function).__name__}")
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments:
        _read_object(f"{field}.arguments", arguments)
    elif arguments and not isinstance(arguments, dict):
        kind = type(arguments).__name__
        raise _invalid(f"{field}.arguments", f"must be a JSON object, or a text that spells one, got {kind}")


def _read_object(field: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise _invalid(field, f"must be a JSON object: {ascii(str(error))[1:-1][:200]}") from None
    if not isinstance(value, dict):
        raise _invalid(field, f"must be a JSON object, got {type(value).__name__}")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _invalid(field: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{field} {problem}", field=field)
