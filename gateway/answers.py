"""Answers that several routes give in the same form."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, Protocol

from pydantic import BaseModel
from starlette.responses import Response

from gateway.chunks import provenance_object
from gateway.context import Gateway
from gateway.outputs import Event, Outputs
from gateway.schemas.errors import AnthropicErrorAnswer, ErrorAnswer
from gateway.sse import EventStream
from specdec.client import Chunk, Completion
from specdec.contract.errors import SpecdecError

_STATUSES = {
    400: "The request can never succeed unchanged; `param` names the field.",
    401: "The API key is missing or unknown.",
    403: "The API key lacks a right.",
    404: "The model, session or draft pool does not exist.",
    408: "The body arrived too slowly.",
    409: "The session runs another request, or is lost.",
    413: "The body is too large.",
    415: "The body has a content encoding other than gzip.",
    429: "A queue, the KV cache or a quota is full; see Retry-After.",
    500: "The server failed.",
    503: "No coordinator or no target replica can be reached; see Retry-After.",
    504: "A deadline has passed.",
}

Answers = dict[int | str, dict[str, Any]]
"""Answers of a route by status, for the OpenAPI document."""

_OUTPUTS: Answers = {
    200: {
        "description": "The outputs; with `stream`, as server-sent events.",
        "content": {
            "application/json": {"schema": {"type": "object"}},
            "text/event-stream": {"schema": {"type": "string"}},
        },
    }
}


def _errors(model: type[BaseModel]) -> Answers:
    return {status: {"description": text, "model": model} for status, text in _STATUSES.items()}


ERRORS = _errors(ErrorAnswer)
"""Failed answers of every route that calls a coordinator."""
ANSWERS: Answers = {**_OUTPUTS, **ERRORS}
"""Answers of routes that generate."""
ANTHROPIC_ERRORS = _errors(AnthropicErrorAnswer)
"""`ERRORS` in the form of Anthropic's API."""
ANTHROPIC_ANSWERS: Answers = {**_OUTPUTS, **ANTHROPIC_ERRORS}
"""`ANSWERS` in the form of Anthropic's API."""


def json_response(answer: Mapping[str, Any], status: int = 200) -> Response:
    """Return an object as the answer."""
    body = json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")
    return Response(body, status, media_type="application/json")


class StreamEncoder(Protocol):
    """Encodes the events of one answer."""

    def encode(self, events: AsyncIterator[Event]) -> AsyncGenerator[bytes, None]:
        """Yield the encoded events of a whole stream. Raises SpecdecError as `events`."""
        ...

    def encode_error(self, error: SpecdecError) -> bytes:
        """Return the end of a stream that has failed."""
        ...


def stream(gateway: Gateway, encoder: StreamEncoder, outputs: Outputs) -> EventStream:
    """Return the outputs of a request as a stream."""
    return event_stream(gateway, encoder, aclosing(outputs.events()))


def event_stream(
    gateway: Gateway, encoder: StreamEncoder, opening: AbstractAsyncContextManager[AsyncIterator[Event]]
) -> EventStream:
    """Return the events that `opening` gives as a stream."""

    async def encoded() -> AsyncGenerator[bytes, None]:
        async with opening as events, aclosing(encoder.encode(events)) as chunks:
            async for chunk in chunks:
                yield chunk

    return EventStream(
        encoded(),
        encode_error=encoder.encode_error,
        keep_alive_s=gateway.settings.keep_alive_s,
        on_disconnect=gateway.metrics.observe_disconnect,
    )


def provenance_of(completion: Completion) -> dict[str, Any]:
    """Return the field of a choice that tells where its tokens came from."""
    whole = Chunk(0, completion.token_ids, completion.text, completion.details)
    return {"specdec": {"tokens": provenance_object(whole)["tokens"]}}
