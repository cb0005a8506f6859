"""Errors as HTTP answers: status, headers and OpenAI's error object.

Routes raise errors of the tree (`specdec.contract.errors`); `app` installs the handlers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response

from gateway.schemas.common import ForeignField, refuse
from specdec.contract.errors import InvalidRequest, ResourceExhausted, SpecdecError, Unavailable

_STATUS_BY_CODE = {
    "INVALID_ARGUMENT": 400,
    "UNIMPLEMENTED": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "FAILED_PRECONDITION": 409,
    "DATA_LOSS": 409,
    "ABORTED": 409,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 503,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
#: Routes with the errors of Anthropic's API begin with this path.
ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
#: Names of our fields in OpenAI's requests.
_PARAMS = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "prompt_token_ids": "prompt",
    "prompt_token_ids.ids": "prompt",
    "text": "prompt",
    "token_ids": "tokens",
    "resume_from": "Last-Event-ID",
    "adapter": "model",
    "messages.template_arguments_json": "chat_template_kwargs",
    "tools.definitions": "tools",
    "tools.choice": "tool_choice",
    "tools.name": "tool_choice.function.name",
    "tools.parallel": "parallel_tool_calls",
    # Fields of one tool.
    "tool.name": "function.name",
    "tool.description": "function.description",
    "tool.parameters": "function.parameters",
    "tool.parameters_json": "function.parameters",
    "tool.is_strict": "function.strict",
    "tool.strict": "function.strict",
}
#: Those of APIs whose tools have their fields without an object for the function.
_FLAT_TOOLS = {name: param.removeprefix("function.") for name, param in _PARAMS.items() if name.startswith("tool.")} | {
    "tools.name": "tool_choice.name"
}
_TOOL_FIELD = re.compile(
    r"tools(?:\.definitions)?\[(\d+)\]\.(name|description|parameters|parameters_json|is_strict|strict)"
)
#: Path of the other route whose requests have names of their own, and the names of both.
RESPONSES_PATH = "/v1/responses"
_RESPONSES_PARAMS = _PARAMS | _FLAT_TOOLS | {"max_new_tokens": "max_output_tokens", "messages": "input", "text": "text"}
_ANTHROPIC_PARAMS = (
    _PARAMS
    | _FLAT_TOOLS
    | {"stop": "stop_sequences", "tool.parameters": "input_schema", "tool.parameters_json": "input_schema"}
)
#: Part of a request that is too long, in OpenAI's words, by the begin of its path; the prompt on other routes.
_TOO_LONG_PARTS = {"/v1/chat": "messages", RESPONSES_PATH: "input", "/detokenize": "tokens"}
_WITHOUT_OUTPUT = ("/tokenize", "/detokenize")
_CONTEXT_TOO_LONG = "CONTEXT_TOO_LONG"
#: OpenAI's codes of errors that clients act on, by our reasons.
_CODES = {_CONTEXT_TOO_LONG: "context_length_exceeded"}
_OUR_NAMES = re.compile(r"\b(sampling\.)?(max_new_tokens|min_new_tokens|prompt_token_ids)\b|\bsampling\.(?=\w)")
_VALUE_ERROR = re.compile(r"^(Value error|Assertion failed), ")
_MAX_PATH_PARTS = 8


def status_of(error: SpecdecError) -> int:
    """Return the HTTP status of an error."""
    return _STATUS_BY_CODE.get(error.code, 500)


def type_of(status: int) -> str:
    """Return the type of OpenAI's error object for a status."""
    return _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")


def error_object(error: SpecdecError, status: int | None = None, path: str = "") -> dict[str, Any]:
    """Return OpenAI's error object: `{"error": {"message", "type", "param", "code"}}`.

    Args:
        error: the error.
        status: status in place of the error's own.
        path: path of the request, which decides the names of its fields; "" for those of most routes.
    """
    names = _RESPONSES_PARAMS if path.startswith(RESPONSES_PATH) else _PARAMS
    param = error.field if isinstance(error, ForeignField) else param_of(error.field, names)
    return {
        "error": {
            "message": _in_openai_words(error, path) + _in_their_names(error, names),
            "type": type_of(status or status_of(error)),
            "param": param,
            "code": code_of(error.reason),
        }
    }


def code_of(reason: str) -> str:
    """Return the code of OpenAI's error object for a reason."""
    return _CODES.get(reason, reason.lower())


def _in_openai_words(error: SpecdecError, path: str) -> str:
    """Return OpenAI's sentences on a context that is too long, by which clients know it; "" for another error."""
    limit = error.numbers.get("max_context_tokens")
    if error.reason != _CONTEXT_TOO_LONG or limit is None:
        return ""
    part = next((part for begin, part in _TOO_LONG_PARTS.items() if path.startswith(begin)), "prompt")
    num_input, least = _requested(error)
    num_output = 0 if path in _WITHOUT_OUTPUT else error.numbers.get("max_new_tokens") or 1
    parts = f"{num_input} in the {part}" + (f", {num_output} in the completion" if num_output else "")
    return (
        f"This model's maximum context length is {limit} tokens. However, you requested "
        f"{least}{num_input + num_output} tokens ({parts}). Please reduce the length of the {part}"
        f"{' or completion' if num_output else ''}: "
    )


def _in_anthropic_words(error: SpecdecError) -> str:
    """Return Anthropic's sentences in place of OpenAI's."""
    limit = error.numbers.get("max_context_tokens")
    if error.reason != _CONTEXT_TOO_LONG or limit is None:
        return ""
    num_input, least = _requested(error)
    if num_input < limit:
        return (
            "prompt is too long: input length and `max_tokens` exceed context limit: "
            f"{num_input} + {error.numbers.get('max_new_tokens', 1)} > {limit}, decrease input length or `max_tokens` "
            "and try again: "
        )
    return f"prompt is too long: {least}{num_input} tokens > {min(limit, num_input - 1)} maximum: "


def _requested(error: SpecdecError) -> tuple[int, str]:
    """Return the requested tokens of the input, and "at least " if they were not counted."""
    if (num_counted := error.numbers.get("num_prompt_tokens")) is not None:
        return num_counted, ""
    return error.numbers.get("min_prompt_tokens", 0), "at least "


def error_headers(error: SpecdecError) -> dict[str, str]:
    """Return the headers of an error: when to try again, and how to send a key."""
    headers = {}
    if isinstance(error, ResourceExhausted | Unavailable) or error.retryable:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s or 1.0)))
    if error.code == "UNAUTHENTICATED":
        headers["www-authenticate"] = "Bearer"
    return headers


def param_of(field: str, names: Mapping[str, str] = _PARAMS) -> str | None:
    """Return the name of a field in OpenAI's requests; None without a field."""
    name = field.removeprefix("sampling.")
    if found := _TOOL_FIELD.fullmatch(name):
        return f"tools[{found[1]}].{names[f'tool.{found[2]}']}"
    return names.get(name, name) or None


def read_validation_error(errors: Sequence[Mapping[str, Any]], content_type: str) -> InvalidRequest:
    """Return the error of a request body that pydantic has refused.

    Args:
        errors: pydantic's errors, one of which is told.
        content_type: the request's header.
    """
    first = _most_telling(errors)
    kind, message = str(first["type"]), str(first["msg"])
    if kind == "json_invalid":
        detail = (first.get("ctx") or {}).get("error", message)
        return InvalidRequest(f"the request body is not valid JSON: {detail}")
    field = _path(first["loc"])
    if not field and "json" not in content_type.lower():
        return InvalidRequest("the request body must be JSON: send the header content-type: application/json")
    if not field and kind == "missing":
        return InvalidRequest("the request body must be a JSON object, got none")
    if kind == "extra_forbidden":
        return refuse(field, "it is not known here, and could demand something of the output; leave it out")
    message = _VALUE_ERROR.sub("", message).replace("Input should", "must").replace("Field required", "is required")
    return InvalidRequest(f"{field or 'the request body'}: {message}", field=field)


def _path(location: Sequence[Any]) -> str:
    """Return a location in a body as a path, such as `messages[0].content`, without the names of alternatives."""
    path = ""
    for part in location[1:_MAX_PATH_PARTS]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif re.fullmatch(r"[a-z][a-z0-9_]{0,63}", str(part)) and not (path and str(part) in _ALTERNATIVES):
            path += f".{part}" if path else str(part)
    return path


def _most_telling(errors: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the first error, or one of another alternative of its field that the value comes closer to.

    A list with a wrong element, or of a wrong length, is also no text where a text may stand in its place.
    """

    def closeness(error: Mapping[str, Any]) -> tuple[int, bool]:
        path = _path(error["loc"])
        return path.count(".") + path.count("["), not error["type"].endswith("_type")

    at = _path(errors[0]["loc"])
    return max((error for error in errors if _path(error["loc"]).startswith(at)), key=closeness)


#: Names that pydantic gives to the alternatives of a union.
_ALTERNATIVES = frozenset(("str", "int", "float", "bool", "list", "dict", "constrained"))


def _in_their_names(error: SpecdecError, names: Mapping[str, str] = _PARAMS) -> str:
    """Return the message with the names that its field and others have in OpenAI's requests."""
    message = error.message
    if isinstance(error, ForeignField):
        return message
    if error.field and message.startswith(error.field):
        message = f"{param_of(error.field, names)}{message.removeprefix(error.field)}"
    return _OUR_NAMES.sub(lambda found: names.get(found[2], "") if found[2] else "", message)


def error_response(
    error: SpecdecError, path: str, *, status: int | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """Return the answer to a request that failed.

    Args:
        error: the error.
        path: path of the request; those of Anthropic's API get its error object.
        status: status in place of the error's own.
        headers: headers beside the error's own.
    """
    status = status or status_of(error)
    is_anthropic = path.startswith(ANTHROPIC_PATH)
    told = anthropic_error_object(error, status) if is_anthropic else error_object(error, status, path)
    body = json.dumps(told, ensure_ascii=False).encode("utf-8", "backslashreplace")
    return Response(body, status, media_type="application/json", headers={**error_headers(error), **(headers or {})})


def anthropic_error_object(error: SpecdecError, status: int) -> dict[str, Any]:
    """Return Anthropic's error object: `{"type": "error", "error": {"type", "message"}}`."""
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": _in_anthropic_words(error) + _in_their_names(error, _ANTHROPIC_PARAMS)},
    }
