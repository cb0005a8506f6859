"""Answers and stream events of the HTTP API: what the gateway's own encoders make of one fixed output.

The output has three tokens of one round: two draft tokens that were accepted, and the target's token after them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from gateway.answers import StreamEncoder
from gateway.chunks import ChatChunks, ChunkOptions, CompletionChunks
from gateway.message_objects import MessageEvents, message_object
from gateway.outputs import Event
from gateway.response_objects import ResponseEvents, ResponseShape
from gateway.routes import chat, completions, gateway_info, sessions
from gateway.schemas.chat import ChatRequest
from gateway.schemas.common import StreamOptions
from gateway.schemas.completions import CompletionRequest
from gateway.schemas.messages import MessagesRequest
from gateway.schemas.responses import ResponseRequest
from gateway.upstream import Served
from specdec.client import (
    AsyncStream,
    Chunk,
    Completion,
    GenerationStats,
    Pool,
    Replica,
    ServerInfo,
    Session,
    TokenDetail,
    Usage,
)
from specdec.contract.types import TokenSource
from tools.reference.markdown import WIDTH

MODEL = "target"
SESSION = "4f1c0d2e9a7b4c58b1d3e6f7a8091b2c"
_CREATED = 1_790_000_000
_FINGERPRINT = "5d0f3a9c71be"
_MESSAGES = [{"role": "user", "content": "import os"}]
_STATS = GenerationStats(1, 2, 2, (1, 1), 0, 0.031, 0.031, 0.012, 0.018, 1843)
_DETAILS = (
    TokenDetail(TokenSource.ACCEPTED, 0.93, 0.88, "draft", -0.0726, (), "\n", b"\n"),
    TokenDetail(TokenSource.ACCEPTED, 0.81, 0.64, "draft", -0.2107, (), "import", b"import"),
    TokenDetail(TokenSource.BONUS, 0.52, 0.0, "draft", -0.6539, (), " sys", b" sys"),
)
_CHUNK = Chunk(0, (10, 287, 1044), "\nimport sys", _DETAILS, 2)
_COMPLETION = Completion(
    SESSION, "", _CHUNK.text, _CHUNK.token_ids, "length", Usage(9, 3, 0), _STATS, _DETAILS, _FINGERPRINT
)
_STREAM = cast(
    AsyncStream,
    SimpleNamespace(session_id=SESSION, num_prompt_tokens=9, target_fingerprint=_FINGERPRINT, adapter=""),
)
_INFO = ServerInfo(
    "0.2.0", "models/demo/target", "c1d2", 4096, 2048, 16,
    (
        Pool("default", "target", "models/demo/target", (Replica("target-0", "10.0.0.2:50071", False, 1, 0.1),)),
        Pool("draft", "draft", "models/demo/draft", (Replica("draft-0", "10.0.0.3:50061", False, 1, 0.1),)),
    ),
    default_sampling={"temperature": 0.7},
)  # fmt: skip


class SentEvent(NamedTuple):
    """One event of a stream."""

    name: str
    event_id: str
    data: Any
    """Object, or the text [DONE]."""


def chat_answer() -> dict[str, Any]:
    body = ChatRequest.model_validate({"messages": _MESSAGES, "return_metrics": True, "return_provenance": True})
    return chat._answer("chatcmpl-1", MODEL, body, [_COMPLETION]) | {"created": _CREATED}


def completion_choice() -> dict[str, Any]:
    body = CompletionRequest.model_validate({"prompt": "import os", "logprobs": 0})
    return dict(completions._answer("cmpl-1", MODEL, body, [_COMPLETION], ())["choices"][0])


def response_answer() -> dict[str, Any]:
    return _shape().finished(_COMPLETION)


def message_answer() -> dict[str, Any]:
    return message_object("msg_1", MODEL, _message_body(), _COMPLETION, None)


def model_answer() -> dict[str, Any]:
    return gateway_info._model(MODEL, Served((MODEL,), 2048, _INFO.default_sampling, _INFO))


def session_answer() -> dict[str, Any]:
    return sessions._record(Session(SESSION, "idle", 12, (), 1, 3600.0, _STATS))


def chat_chunk() -> dict[str, Any]:
    """Return the chunk that has the tokens."""
    return dict(_events(ChatChunks(_chunk_options("chatcmpl-1", has_provenance=True)))[1].data)


def completion_chunk() -> dict[str, Any]:
    """Return the chunk that has the tokens."""
    return dict(_events(CompletionChunks(_chunk_options("cmpl-1")))[0].data)


def response_events() -> list[SentEvent]:
    async def finish(completion: Completion) -> dict[str, Any]:
        return _shape().finished(completion)

    return _events(ResponseEvents(_shape(), finish))


def message_events() -> list[SentEvent]:
    async def find_stop(completion: Completion) -> None:
        return None

    return _events(MessageEvents("msg_1", MODEL, _message_body(), find_stop))


def shown(value: Any, indent: int = 0, used: int = 0) -> str:
    """Return a value as JSON, each object and list on one line if it fits.

    Args:
        value: the value.
        indent: columns before the lines of the value after its first.
        used: columns of the first line before and after the value.
    """
    line = json.dumps(value, ensure_ascii=False)
    if len(line) + indent + used <= WIDTH or not isinstance(value, dict | list):
        return line
    inner = " " * (indent + 2)
    if isinstance(value, list):
        parts, (opening, closing) = [shown(each, indent + 2, 1) for each in value], "[]"
    else:
        parts = [f"{json.dumps(key)}: {shown(each, indent + 2, len(key) + 5)}" for key, each in value.items()]
        opening, closing = "{}"
    return f"{opening}\n{inner}" + f",\n{inner}".join(parts) + f"\n{' ' * indent}{closing}"


def _shape() -> ResponseShape:
    body = ResponseRequest.model_validate({"input": "import os", "max_output_tokens": 3})
    return ResponseShape("resp_1", MODEL, _CREATED, body)


def _message_body() -> MessagesRequest:
    return MessagesRequest.model_validate({"messages": _MESSAGES, "max_tokens": 3})


def _chunk_options(answer_id: str, *, has_provenance: bool = False) -> ChunkOptions:
    options = StreamOptions(include_usage=True)
    return ChunkOptions(
        answer_id, MODEL, _CREATED, stream_options=options, has_provenance=has_provenance, has_event_ids=True
    )


def _events(encoder: StreamEncoder) -> list[SentEvent]:
    """Return the events of the whole stream of the output."""

    async def source() -> AsyncIterator[Event]:
        yield Event(0, _STREAM, _CHUNK)
        yield Event(0, _STREAM, None, _COMPLETION)

    async def encoded() -> bytes:
        return b"".join([part async for part in encoder.encode(source())])

    blocks = asyncio.run(encoded()).decode().split("\n\n")
    return [_read(block) for block in blocks if block]


def _read(block: str) -> SentEvent:
    fields = dict(line.split(": ", 1) for line in block.split("\n"))
    data = fields["data"]
    return SentEvent(fields.get("event", ""), fields.get("id", ""), data if data == "[DONE]" else json.loads(data))
