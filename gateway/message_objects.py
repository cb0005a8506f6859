"""Objects and stream events of /v1/messages: an output becomes Anthropic's message, whole or as events."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

from gateway.chunks import provenance_object
from gateway.http_errors import anthropic_error_object, status_of
from gateway.output_items import CALL, REASONING, TEXT, OutputItem, Piece, StreamedItems, items_of
from gateway.outputs import Event
from gateway.schemas.messages import MessagesRequest
from gateway.sse import encode_event
from gateway.usage import metrics_object, warnings_of
from specdec.client import Completion
from specdec.contract.errors import SpecdecError

_STOP_REASONS = {
    "stop": "end_turn",
    "stop_string": "stop_sequence",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}


def message_object(
    message_id: str, model: str, body: MessagesRequest, completion: Completion, stop_sequence: str | None
) -> dict[str, Any]:
    """Return the whole message.

    Args:
        message_id: id of the message.
        model: name of the model.
        body: the request.
        completion: the output.
        stop_sequence: text before which the output ended; None for another end.
    """
    message = _started(message_id, completion.adapter or model) | _ending(completion, stop_sequence)
    message |= {
        "content": [_block(item) for item in items_of(completion)],
        "usage": _usage(completion),
        "session_id": completion.session_id,
    } | warnings_of([completion])
    return message | ({"metrics": metrics_object([completion])} if body.wants_metrics else {})


class MessageEvents:
    """Encodes the events of one message. Use it once."""

    def __init__(
        self,
        message_id: str,
        model: str,
        body: MessagesRequest,
        find_stop: Callable[[Completion], Awaitable[str | None]],
    ) -> None:
        """
        Args:
            message_id: id of the message.
            model: name of the model.
            body: the request.
            find_stop: returns the text before which an output ended, or None.
        """
        self._message_id, self._model, self._body, self._find_stop = message_id, model, body, find_stop
        self._items = StreamedItems()
        self._open: OutputItem | None = None
        """Item whose block has begun and not ended."""

    async def encode(self, events: AsyncIterator[Event]) -> AsyncGenerator[bytes, None]:
        """Yield the encoded events of a whole stream. Raises SpecdecError as `events`."""
        has_begun = False
        async for event in events:
            if not has_begun:
                has_begun = True
                yield self._beginning(event)
            if event.chunk is not None:
                if told := b"".join(map(self._told, self._items.pieces(event.chunk))):
                    yield told
            elif event.completion is not None:
                yield self._end(event.completion, await self._find_stop(event.completion))

    def encode_error(self, error: SpecdecError) -> bytes:
        """Return the end of a stream that has failed."""
        return encode_event(
            json.dumps(anthropic_error_object(error, status_of(error)), ensure_ascii=False), name="error"
        )

    def _beginning(self, event: Event) -> bytes:
        usage = {"input_tokens": event.stream.num_prompt_tokens, "output_tokens": 0}
        message = _started(self._message_id, event.stream.adapter or self._model) | {
            "session_id": event.stream.session_id,
            "usage": usage,
        }
        return _event("message_start", message=message) + _event("ping")

    def _told(self, piece: Piece) -> bytes:
        """Return the events of a piece, with those that end the last block and begin its own."""
        item, has_origin = piece.item, piece.chunk is not None and bool(self._body.return_provenance)
        told = b""
        if item is not self._open:
            told = self._stopped() + _event("content_block_start", index=item.index, content_block=_empty_block(item))
            self._open = item
        if piece.text or has_origin:
            extra = {"specdec": provenance_object(piece.chunk)} if piece.chunk and has_origin else {}
            told += _event("content_block_delta", index=item.index, delta=_delta(item, piece.text), **extra)
        return told

    def _stopped(self) -> bytes:
        """Return the end of the open block."""
        item = self._open
        if item is None:
            return b""
        signature = {"type": "signature_delta", "signature": _signature(item.content)}
        signed = _event("content_block_delta", index=item.index, delta=signature) if item.kind == REASONING else b""
        return signed + _event("content_block_stop", index=item.index)

    def _end(self, completion: Completion, stop_sequence: str | None) -> bytes:
        extra = warnings_of([completion])
        if self._body.wants_metrics:
            extra["metrics"] = metrics_object([completion])
        delta = _ending(completion, stop_sequence)
        return b"".join(
            (
                *map(self._told, self._items.finish()),
                self._stopped(),
                _event("message_delta", delta=delta, usage=_usage(completion), **extra),
                _event("message_stop"),
            )
        )


def _block(item: OutputItem) -> dict[str, Any]:
    """Return the content block of a whole item.

    If the token limit has cut a call, its input is not JSON: the block has an empty one, and the text under `specdec`.
    """
    if item.kind == REASONING:
        return {"type": "thinking", "thinking": item.content, "signature": _signature(item.content)}
    if item.kind == TEXT:
        return {"type": "text", "text": item.content}
    try:
        return _empty_block(item) | {"input": json.loads(item.content)}
    except ValueError:
        return _empty_block(item) | {"specdec": {"partial_json": item.content}}


def _empty_block(item: OutputItem) -> dict[str, Any]:
    """Return the content block of an item at its beginning."""
    if item.kind == CALL:
        return {"type": "tool_use", "id": item.call_id, "name": item.name, "input": {}}
    if item.kind == REASONING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _delta(item: OutputItem, text: str) -> dict[str, Any]:
    if item.kind == CALL:
        return {"type": "input_json_delta", "partial_json": text}
    if item.kind == REASONING:
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "text_delta", "text": text}


def _signature(reasoning: str) -> str:
    """Return the signature of reasoning. Clients send it back as it is, and no request depends on it."""
    return hashlib.blake2b(reasoning.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _started(message_id: str, model: str) -> dict[str, Any]:
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _ending(completion: Completion, stop_sequence: str | None) -> dict[str, Any]:
    return {"stop_reason": _STOP_REASONS.get(completion.finish_reason), "stop_sequence": stop_sequence}


def _usage(completion: Completion) -> dict[str, Any]:
    """Return Anthropic's usage, which counts cached tokens apart from the other tokens of the input."""
    usage = completion.usage
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_prompt_tokens,
        "output_tokens": usage.num_output_tokens,
    }


def _event(kind: str, **fields: Any) -> bytes:
    data = json.dumps({"type": kind, **fields}, ensure_ascii=False, separators=(",", ":"))
    return encode_event(data, name=kind)
