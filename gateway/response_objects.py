"""Objects and stream events of /v1/responses: an output becomes OpenAI's response, whole or as events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.chunks import FINGERPRINT_CHARS, provenance_object
from gateway.http_errors import RESPONSES_PATH, error_object
from gateway.logprobs import chat_logprobs
from gateway.output_items import CALL, REASONING, TEXT, OutputItem, Piece, StreamedItems, items_of
from gateway.outputs import Event
from gateway.schemas.responses import ResponseRequest
from gateway.sse import encode_event
from gateway.usage import metrics_object, warnings_of
from specdec.client import Completion, TokenDetail
from specdec.contract.errors import SpecdecError

COMPLETED = "completed"
_IN_PROGRESS = "in_progress"
_ITEM_TYPES = {REASONING: "reasoning", TEXT: "message", CALL: "function_call"}
_ID_PREFIXES = {REASONING: "rs", TEXT: "msg", CALL: "fc"}
#: Names of the events about an item's text.
_TEXT_EVENTS = {REASONING: "reasoning_text", TEXT: "output_text", CALL: "function_call_arguments"}


@dataclass(frozen=True, slots=True)
class ResponseShape:
    """What one response says beside its output."""

    response_id: str
    model: str
    created: int
    """Unix time, in seconds."""
    body: ResponseRequest

    def item_id(self, item: OutputItem) -> str:
        """Return the id of an item, which differs from those of all other items."""
        number = f"_{item.index}" if item.kind == CALL else ""
        return f"{_ID_PREFIXES[item.kind]}_{self.response_id.removeprefix('resp_')}{number}"

    def failed(self, code: str, message: str) -> dict[str, Any]:
        """Return the response that an error has ended. It is never stored."""
        return self.started("failed") | {"error": {"code": code, "message": message}, "store": False}

    def started(self, status: str = "in_progress") -> dict[str, Any]:
        """Return the response without an output."""
        body = self.body
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.effort, "summary": None},
            "store": body.store is not False,
            "temperature": body.temperature,
            "text": {"format": body.text_format},
            "tool_choice": body.tool_choice or ("auto" if body.tools else "none"),
            "tools": [tool.echo() for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def finished(self, completion: Completion) -> dict[str, Any]:
        """Return the whole response."""
        is_cut = completion.finish_reason == "length"
        answer = self.started("incomplete" if is_cut else "completed") | {
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self.items(completion),
            "usage": _usage(completion),
            "model": completion.adapter or self.model,
            "session_id": completion.session_id,
            "system_fingerprint": completion.target_fingerprint[:FINGERPRINT_CHARS],
        }
        answer |= warnings_of([completion])
        return answer | ({"metrics": metrics_object([completion])} if self.body.wants_metrics else {})

    def items(self, completion: Completion) -> list[dict[str, Any]]:
        """Return the items of a whole output."""
        items = items_of(completion)
        last = end_status(completion)
        return [self.item(item, last if item is items[-1] else COMPLETED, completion.details) for item in items]

    def item(self, item: OutputItem, status: str = _IN_PROGRESS, details: Sequence[TokenDetail] = ()) -> dict[str, Any]:
        """Return an item of the output, which is empty while it is in progress.

        Args:
            item: the item.
            status: in_progress, completed or incomplete.
            details: details of the tokens, for the logprobs of text.
        """
        fields = {"id": self.item_id(item), "type": _ITEM_TYPES[item.kind], "status": status}
        is_begun = status == _IN_PROGRESS
        if item.kind == CALL:
            arguments = "" if is_begun else item.content
            return fields | {"call_id": item.call_id, "name": item.name, "arguments": arguments}
        content = [] if is_begun else [self.part(item, item.content, details)]
        if item.kind == REASONING:
            return fields | {"summary": [], "content": content}
        return fields | {"role": "assistant", "content": content}

    def part(self, item: OutputItem, text: str = "", details: Sequence[TokenDetail] = ()) -> dict[str, Any]:
        """Return the content of an item of reasoning or text."""
        if item.kind == REASONING:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs(details)}

    def logprobs(self, details: Sequence[TokenDetail]) -> list[dict[str, Any]]:
        """Return the logprobs of tokens, none unless the request asks for them."""
        return chat_logprobs(details)["content"] if self.body.has_logprobs and details else []


def end_status(completion: Completion) -> str:
    """Return the status of an output's last item."""
    return "incomplete" if completion.finish_reason == "length" else COMPLETED


class ResponseEvents:
    """Encodes the events of one response. Use it once."""

    def __init__(self, shape: ResponseShape, finish: Callable[[Completion], Awaitable[Mapping[str, Any]]]) -> None:
        """
        Args:
            shape: what the response says beside its output.
            finish: stores the whole response, if it is to be stored, and returns it.
        """
        self._shape, self._finish = shape, finish
        self._sequence_number = 0
        self._items = StreamedItems()
        self._open: OutputItem | None = None
        """Item that has begun and not ended."""
        self._details: list[TokenDetail] = []
        """Details of the text's tokens."""

    async def encode(self, events: AsyncIterator[Event]) -> AsyncGenerator[bytes, None]:
        """Yield the encoded events of a whole stream. Raises SpecdecError as `events`."""
        has_begun = False
        async for event in events:
            if not has_begun:
                has_begun = True
                yield self._beginning()
            if event.chunk is not None:
                if told := b"".join(map(self._told, self._items.pieces(event.chunk))):
                    yield told
            elif event.completion is not None:
                yield self._end(event.completion, await self._finish(event.completion))

    def encode_error(self, error: SpecdecError) -> bytes:
        """Return the end of a stream that has failed."""
        told = error_object(error, path=RESPONSES_PATH)["error"]
        return self._event("response.failed", response=self._shape.failed(told["code"], told["message"]))

    def _beginning(self) -> bytes:
        response = self._shape.started()
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def _told(self, piece: Piece) -> bytes:
        """Return the events of a piece, with those that end the last item and begin its own."""
        told = b""
        if piece.item is not self._open:
            told = self._done(COMPLETED) + self._added(piece.item)
            self._open = piece.item
        body = self._shape.body
        is_told_without_text = piece.chunk is not None and (body.has_logprobs or body.return_provenance)
        return told + (self._delta(piece) if piece.text or is_told_without_text else b"")

    def _added(self, item: OutputItem) -> bytes:
        """Return the beginning of an item."""
        shape = self._shape
        added = self._event("response.output_item.added", output_index=item.index, item=shape.item(item))
        if item.kind == CALL:
            return added
        return added + self._event("response.content_part.added", **self._place(item), part=shape.part(item))

    def _delta(self, piece: Piece) -> bytes:
        body, item, chunk = self._shape.body, piece.item, piece.chunk
        extra: dict[str, Any] = {}
        if item.kind == TEXT:
            details = chunk.details if chunk else ()
            self._details.extend(details)
            extra["logprobs"] = self._shape.logprobs(details)
        if chunk is not None and body.return_provenance:
            extra["specdec"] = provenance_object(chunk)
        return self._event(f"response.{_TEXT_EVENTS[item.kind]}.delta", **self._place(item), delta=piece.text, **extra)

    def _done(self, status: str) -> bytes:
        """Return the end of the open item."""
        item, shape = self._open, self._shape
        if item is None:
            return b""
        kind = f"response.{_TEXT_EVENTS[item.kind]}.done"
        if item.kind == CALL:
            done = self._event(kind, **self._place(item), arguments=item.content, name=item.name)
        else:
            part = shape.part(item, item.content, self._details)
            told = {name: part[name] for name in ("text", "logprobs") if name in part}
            done = self._event(kind, **self._place(item), **told)
            done += self._event("response.content_part.done", **self._place(item), part=part)
        whole = shape.item(item, status, self._details)
        return done + self._event("response.output_item.done", output_index=item.index, item=whole)

    def _end(self, completion: Completion, response: Mapping[str, Any]) -> bytes:
        told = b"".join(map(self._told, self._items.finish()))
        told += self._done(end_status(completion))
        return told + self._event(f"response.{response['status']}", response=response)

    def _place(self, item: OutputItem) -> dict[str, Any]:
        place = {"item_id": self._shape.item_id(item), "output_index": item.index}
        return place if item.kind == CALL else place | {"content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        fields = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return encode_event(json.dumps(fields, ensure_ascii=False, separators=(",", ":")), name=kind)


def _usage(completion: Completion) -> dict[str, Any]:
    usage = completion.usage
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_prompt_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
    }
