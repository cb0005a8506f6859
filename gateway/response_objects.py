"""Objects and stream events of /v1/responses: an output becomes OpenAI's response, whole or as events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.chunks import FINGERPRINT_CHARS, provenance_object
from gateway.http_errors import RESPONSES_PATH, error_object
from gateway.logprobs import chat_logprobs
from gateway.outputs import Event
from gateway.schemas.responses import ResponseRequest
from gateway.sse import encode_event
from gateway.usage import metrics_object, warnings_of
from specdec.client import Chunk, Completion
from specdec.contract.errors import SpecdecError

_PLACE = {"output_index": 0, "content_index": 0}


@dataclass(frozen=True, slots=True)
class ResponseShape:
    """What one response says beside its output."""

    response_id: str
    model: str
    created: int
    """Unix time, in seconds."""
    body: ResponseRequest

    @property
    def item_id(self) -> str:
        return f"msg_{self.response_id.removeprefix('resp_')}"

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
            "parallel_tool_calls": False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": body.store is not False,
            "temperature": body.temperature,
            "text": {"format": body.text_format},
            "tool_choice": "none",
            "tools": [],
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
            "output": [self.item(completion)],
            "usage": _usage(completion),
            "session_id": completion.session_id,
            "system_fingerprint": completion.target_fingerprint[:FINGERPRINT_CHARS],
        }
        answer |= warnings_of([completion])
        return answer | ({"metrics": metrics_object([completion])} if self.body.wants_metrics else {})

    def item(self, completion: Completion | None = None) -> dict[str, Any]:
        """Return the message in the output; without a completion, at its beginning."""
        status = "in_progress"
        if completion is not None:
            status = "incomplete" if completion.finish_reason == "length" else "completed"
        return {
            "id": self.item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [] if completion is None else [self.part(completion)],
        }

    def part(self, completion: Completion | None = None) -> dict[str, Any]:
        """Return the text in the message; without a completion, at its beginning."""
        has_logprobs = completion is not None and self.body.has_logprobs
        return {
            "type": "output_text",
            "text": "" if completion is None else completion.text,
            "annotations": [],
            "logprobs": chat_logprobs(completion.details)["content"] if completion and has_logprobs else [],
        }


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

    async def encode(self, events: AsyncIterator[Event]) -> AsyncGenerator[bytes, None]:
        """Yield the encoded events of a whole stream. Raises SpecdecError as `events`."""
        has_begun = False
        async for event in events:
            if not has_begun:
                has_begun = True
                yield self._beginning()
            if event.chunk is not None:
                body = self._shape.body
                if event.chunk.text or body.has_logprobs or body.return_provenance:
                    yield self._delta(event.chunk)
            elif event.completion is not None:
                yield self._end(event.completion, await self._finish(event.completion))

    def encode_error(self, error: SpecdecError) -> bytes:
        """Return the end of a stream that has failed."""
        told = error_object(error, path=RESPONSES_PATH)["error"]
        return self._event("response.failed", response=self._shape.failed(told["code"], told["message"]))

    def _beginning(self) -> bytes:
        shape, response = self._shape, self._shape.started()
        return b"".join(
            (
                self._event("response.created", response=response),
                self._event("response.in_progress", response=response),
                self._event("response.output_item.added", output_index=0, item=shape.item()),
                self._event("response.content_part.added", item_id=shape.item_id, **_PLACE, part=shape.part()),
            )
        )

    def _delta(self, chunk: Chunk) -> bytes:
        body = self._shape.body
        extra = {"specdec": provenance_object(chunk)} if body.return_provenance else {}
        return self._event(
            "response.output_text.delta",
            item_id=self._shape.item_id,
            **_PLACE,
            delta=chunk.text,
            logprobs=chat_logprobs(chunk.details)["content"] if body.has_logprobs else [],
            **extra,
        )

    def _end(self, completion: Completion, response: Mapping[str, Any]) -> bytes:
        shape, part = self._shape, self._shape.part(completion)
        place = {"item_id": shape.item_id, **_PLACE}
        text, logprobs = part["text"], part["logprobs"]
        return b"".join(
            (
                self._event("response.output_text.done", **place, text=text, logprobs=logprobs),
                self._event("response.content_part.done", **place, part=part),
                self._event("response.output_item.done", output_index=0, item=shape.item(completion)),
                self._event(f"response.{response['status']}", response=response),
            )
        )

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
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
    }
