"""Chunks of chat and completion streams: events of outputs become OpenAI's stream objects, as bytes.

This is the hot path of a stream, so a chunk is put together from text that stays the same and the few values that
change. The text of a stream does not depend on how its tokens were divided into chunks. `gateway.sse` sends the chunks.

An event has an id, `SESSION:NUM_TOKENS`, only for a client that accepts `text/event-stream` by name: a stream with ids
can be resumed, but programs that take every block for a line of data would not read it.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.http_errors import error_object
from gateway.logprobs import chat_logprobs, completion_logprobs
from gateway.outputs import Event
from gateway.schemas.common import StreamOptions
from gateway.sse import DONE, encode_event
from gateway.usage import finish_reason_of, metrics_object, usage_object, usage_of, warnings_of
from specdec.client import AsyncStream, Chunk, Completion, TokenDetail
from specdec.contract.errors import SpecdecError
from specdec.contract.tools import AnswerText, OutputPart, ReasoningText
from specdec.contract.types import TokenSource

FINGERPRINT_CHARS = 12


@dataclass(frozen=True, slots=True)
class ChunkOptions:
    """Contents of one answer's chunks beside text."""

    answer_id: str
    model: str
    created: int
    """Unix time, in seconds."""
    num_outputs: int = 1
    """Number of outputs of the whole request."""
    outputs_per_prompt: int = 1
    stream_options: StreamOptions = field(default_factory=StreamOptions)
    has_logprobs: bool = False
    has_provenance: bool = False
    has_metrics: bool = False
    has_event_ids: bool = False
    num_received: int = 0
    """Output tokens that the client of a resumed stream holds; the ids of its events count from there."""
    first_texts: Sequence[str] = ()
    """Text that each prompt's outputs begin with (`echo`); empty for none."""


@dataclass(slots=True)
class _Output:
    """The state of one output's stream."""

    head: str
    """Start of the output's chunks."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_characters: int = 0
    completion: Completion | None = None


class ChunkEncoder(ABC):
    """Encodes the events of one answer. Use it once."""

    object_name: str

    def __init__(self, options: ChunkOptions) -> None:
        self._options = options
        self._outputs: dict[int, _Output] = {}

    async def encode(self, events: AsyncIterator[Event]) -> AsyncGenerator[bytes, None]:
        """Yield the encoded events of a whole stream, `[DONE]` included. Raises SpecdecError as `events`."""
        async for event in events:
            output = self._outputs.get(event.index)
            if output is None:
                output = self._outputs[event.index] = _Output(
                    self._head_of(event), event.stream.num_prompt_tokens, self._options.num_received
                )
                if first := self._first_choice(self._first_text(event.index)):
                    yield self._event(event, output, f"{first},{_NO_LOGPROBS},{_UNFINISHED}")
            if event.chunk is not None:
                *first_choices, last = self._choices(event.chunk, output) or [""]
                for choice in first_choices:
                    yield self._event(event, output, choice)
                if last:
                    yield self._event(event, output, last, self._provenance(event.chunk))
            elif event.completion is not None:
                output.completion = event.completion
                reason = json.dumps(finish_reason_of(event.completion))
                is_last = len(self._completions()) == self._options.num_outputs
                extra = self._summary() if is_last else ""
                yield self._event(event, output, f'{self._delta("")},{_NO_LOGPROBS},"finish_reason":{reason}', extra)
        yield (self._usage_event() if self._options.stream_options.include_usage else b"") + DONE

    def encode_error(self, error: SpecdecError) -> bytes:
        """Return the end of a stream that has failed."""
        return encode_event(json.dumps(error_object(error), ensure_ascii=False)) + DONE

    @abstractmethod
    def _first_choice(self, text: str) -> str:
        """Return the fields of a choice before any token; "" for none."""

    @abstractmethod
    def _delta(self, text: str) -> str:
        """Return the fields of a choice with more text."""

    @abstractmethod
    def _logprobs(self, details: Sequence[TokenDetail], num_characters: int) -> dict[str, Any]:
        """Return the logprobs of a chunk's tokens after a text of `num_characters`."""

    def _deltas(self, chunk: Chunk) -> list[str]:
        """Return the fields of the choices that tell what a chunk holds."""
        return [self._delta(chunk.text)] if chunk.text else []

    def _choices(self, chunk: Chunk, output: _Output) -> list[str]:
        """Return the fields of a chunk's choices, none if it has nothing to tell. The last one has the logprobs."""
        output.num_output_tokens = chunk.index + len(chunk.token_ids)
        deltas = self._deltas(chunk)
        if not (deltas or self._options.has_logprobs or self._options.has_provenance):
            return []
        *first, last = deltas or [self._delta("")]
        logprobs = _NO_LOGPROBS
        if self._options.has_logprobs:
            logprobs = f'"logprobs":{_json(self._logprobs(chunk.details, output.num_characters))}'
        output.num_characters += len(chunk.text)
        return [*(f"{each},{_NO_LOGPROBS},{_UNFINISHED}" for each in first), f"{last},{logprobs},{_UNFINISHED}"]

    def _event(self, event: Event, output: _Output, choice: str, extra: str = "") -> bytes:
        options = self._options
        if options.stream_options.continuous_usage_stats:
            extra += f',"usage":{_json(usage_object(output.num_prompt_tokens, output.num_output_tokens, 0))}'
        elif options.stream_options.include_usage:
            extra += ',"usage":null'
        event_id = f"{event.stream.session_id}:{output.num_output_tokens}" if options.has_event_ids else ""
        return encode_event(f"{output.head}{choice}}}]{extra}}}", event_id=event_id)

    def _head_of(self, event: Event) -> str:
        fields = self._fields(event.stream) | {"session_id": event.stream.session_id}
        return f'{_json(fields)[:-1]},"choices":[{{"index":{event.index},'

    def _fields(self, output: AsyncStream | Completion | None) -> dict[str, Any]:
        return {
            "id": self._options.answer_id,
            "object": self.object_name,
            "created": self._options.created,
            "model": (output.adapter if output else "") or self._options.model,
            "system_fingerprint": output.target_fingerprint[:FINGERPRINT_CHARS] if output else "",
        }

    def _first_text(self, index: int) -> str:
        texts = self._options.first_texts
        return texts[index // self._options.outputs_per_prompt] if texts else ""

    def _provenance(self, chunk: Chunk) -> str:
        return f',"specdec":{_json(provenance_object(chunk))}' if self._options.has_provenance else ""

    def _summary(self) -> str:
        """Return the fields of the last choice's last chunk that are about the whole request."""
        completions = self._completions()
        fields = warnings_of(completions)
        if not self._options.stream_options.include_usage:
            fields |= self._metrics(completions)
        return f",{_json(fields)[1:-1]}" if fields else ""

    def _usage_event(self) -> bytes:
        completions = self._completions()
        fields = self._fields(completions[0] if completions else None)
        fields |= {"choices": [], "usage": usage_of(completions, self._options.outputs_per_prompt)}
        return encode_event(_json(fields | self._metrics(completions)))

    def _metrics(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the field of the metrics, which belongs to the last event: as in vLLM, to that of the usage."""
        return {"metrics": metrics_object(completions)} if self._options.has_metrics else {}

    def _completions(self) -> list[Completion]:
        return [output.completion for _, output in sorted(self._outputs.items()) if output.completion is not None]


class ChatChunks(ChunkEncoder):
    """Encodes chunks of /v1/chat/completions."""

    object_name = "chat.completion.chunk"

    def _first_choice(self, text: str) -> str:
        return '"delta":{"role":"assistant","content":""}'

    def _delta(self, text: str) -> str:
        return f'"delta":{{"content":{_json(text)}}}' if text else '"delta":{}'

    def _deltas(self, chunk: Chunk) -> list[str]:
        """Return one delta for each part of a chunk, or a single one if events have ids.

        An event's id stands for all tokens of its chunk, so a stream that is resumed after it would repeat or lose
        what other events of the same chunk tell.
        """
        if not chunk.parts:
            return super()._deltas(chunk)
        deltas = [delta for part in chunk.parts for delta in _deltas_of(part)]
        return [f'"delta":{_json(delta)}' for delta in (_merged(deltas) if self._options.has_event_ids else deltas)]

    def _logprobs(self, details: Sequence[TokenDetail], num_characters: int) -> dict[str, Any]:
        return chat_logprobs(details)


class CompletionChunks(ChunkEncoder):
    """Encodes chunks of /v1/completions."""

    object_name = "text_completion"

    def _first_choice(self, text: str) -> str:
        return self._delta(text) if text else ""

    def _delta(self, text: str) -> str:
        return f'"text":{_json(text)}'

    def _logprobs(self, details: Sequence[TokenDetail], num_characters: int) -> dict[str, Any]:
        return completion_logprobs(details, num_characters)


def reasoning_fields(text: str) -> dict[str, str]:
    """Return reasoning under both names that clients read."""
    return {"reasoning_content": text, "reasoning": text}


def _deltas_of(part: OutputPart) -> list[dict[str, Any]]:
    """Return the deltas of a part. A call's first one has all but the arguments, and no other has an id or a name."""
    if isinstance(part, AnswerText):
        return [{"content": part.text}]
    if isinstance(part, ReasoningText):
        return [reasoning_fields(part.text)]
    function = {"name": part.name, "arguments": ""}
    begun = [{"index": part.index, "id": part.id, "type": "function", "function": function}] if part.name else []
    more = [{"index": part.index, "function": {"arguments": part.arguments}}] if part.arguments else []
    return [{"tool_calls": [call]} for call in (*begun, *more)]


def _merged(deltas: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return deltas as one."""
    whole: dict[str, Any] = {}
    for delta in deltas:
        for name, value in delta.items():
            whole[name] = whole[name] + value if name in whole else value
    return [whole] if whole else []


def provenance_object(chunk: Chunk) -> dict[str, Any]:
    """Return where the tokens of a chunk came from, and what the chunk's round accepted."""
    tokens = [
        {
            "token_id": token_id,
            "text": detail.text,
            **_origin_of(detail),
        }
        for token_id, detail in zip(chunk.token_ids, chunk.details, strict=True)
    ]
    is_replayed = any(detail.source is None for detail in chunk.details)
    return {"tokens": tokens, "round": None if is_replayed else _round_of(chunk)}


def _origin_of(detail: TokenDetail) -> dict[str, Any]:
    """Return source and probabilities of a token, null for a replayed one."""
    if detail.source is None:
        return {"source": None, "p": None, "q": None, "draft_pool": None}
    return {"source": detail.source.name.lower(), "p": detail.p, "q": detail.q, "draft_pool": detail.draft_pool}


def _round_of(chunk: Chunk) -> dict[str, Any]:
    return {
        "index": chunk.index,
        "num_tokens": len(chunk.token_ids),
        "num_draft_tokens": chunk.num_draft_tokens,
        "num_accepted_tokens": sum(detail.source is TokenSource.ACCEPTED for detail in chunk.details),
    }


_NO_LOGPROBS = '"logprobs":null'
_UNFINISHED = '"finish_reason":null'


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
