"""A stream's text does not depend on how its tokens were divided into chunks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.answers import StreamEncoder
from gateway.chunks import ChatChunks, ChunkEncoder, ChunkOptions, CompletionChunks
from gateway.message_objects import MessageEvents
from gateway.outputs import Event
from gateway.response_objects import ResponseEvents, ResponseShape
from gateway.schemas.messages import MessagesRequest
from gateway.schemas.responses import ResponseRequest
from specdec.client import Chunk, Completion, GenerationStats, Usage

STREAM = SimpleNamespace(session_id="s", target_fingerprint="f" * 64, num_prompt_tokens=3, adapter="")
#: Texts that tokens complete: nothing while a character is not whole, and what JSON and event streams must escape.
TEXTS = st.lists(st.sampled_from(["", "a", "é", "\n", "\n\n", '"', "\\", "data: x", "😀", "\u2028", "\r"]), max_size=12)


def chunks_of(texts: Sequence[str], cuts: Sequence[bool]) -> list[Chunk]:
    """The tokens with these texts, with a chunk's end after each token whose `cuts` entry is true, and at the end."""
    chunks, begin = [], 0
    for end in range(1, len(texts) + 1):
        if end == len(texts) or cuts[end % len(cuts)]:
            chunks.append(Chunk(begin, tuple(range(begin, end)), "".join(texts[begin:end]), ()))
            begin = end
    return chunks


def response_events() -> ResponseEvents:
    shape = ResponseShape("resp_1", "m", 0, ResponseRequest(input="x"))

    async def finish(completion: Completion) -> dict[str, object]:
        return shape.finished(completion)

    return ResponseEvents(shape, finish)


def message_events() -> MessageEvents:
    async def find_stop(_: Completion) -> None:
        return None

    body = MessagesRequest.model_validate({"messages": [{"role": "user", "content": "x"}], "max_tokens": 9})
    return MessageEvents("msg_1", "m", body, find_stop)


def encoded(encoder: StreamEncoder, chunks: Sequence[Chunk]) -> list[bytes]:
    async def events() -> AsyncIterator[Event]:
        for chunk in chunks:
            yield Event(0, STREAM, chunk)  # type: ignore[arg-type]
        text, num_tokens = "".join(chunk.text for chunk in chunks), sum(len(chunk.token_ids) for chunk in chunks)
        completion = Completion("s", "r", text, (), "stop", Usage(3, num_tokens, 0), GenerationStats.nothing())
        yield Event(0, STREAM, None, completion)  # type: ignore[arg-type]

    async def collect() -> list[bytes]:
        return [event async for event in encoder.encode(events())]

    return asyncio.run(collect())


def text_of(event: bytes) -> str:
    """The text that a client reads from an event, as the specification of event streams says."""
    lines = [line for line in event.decode().split("\n") if line]
    (data,) = [line.removeprefix("data: ") for line in lines if not line.startswith("id: ")]
    if data == "[DONE]":
        return ""
    (choice,) = json.loads(data)["choices"]
    return choice["text"] if "text" in choice else choice["delta"].get("content", "")


@pytest.mark.parametrize("kind", [ChatChunks, CompletionChunks])
@given(texts=TEXTS, cuts=st.lists(st.booleans(), min_size=1, max_size=12))
def test_joined_deltas_are_the_text_whatever_the_chunks(
    kind: type[ChunkEncoder], texts: list[str], cuts: list[bool]
) -> None:
    events = encoded(kind(ChunkOptions("id", "m", 0, has_event_ids=True)), chunks_of(texts, cuts))
    assert "".join(map(text_of, events)) == "".join(texts)
    assert events[-1] == b"data: [DONE]\n\n"
    assert all(event.endswith(b"\n\n") and b"\r" not in event for event in events)


def test_an_event_id_counts_the_tokens_up_to_its_event() -> None:
    options = ChunkOptions("id", "m", 0, has_event_ids=True)
    events = encoded(CompletionChunks(options), chunks_of(["a", "b", "c"], [False, True]))
    assert [event.decode().split("\n")[0] for event in events[:-1]] == ["id: s:1", "id: s:3", "id: s:3"]


@pytest.mark.parametrize(
    ("begin", "delta", "end"),
    [(response_events, "response.output_text.delta", "response.completed"),
     (message_events, "content_block_delta", "message_stop")],
)  # fmt: skip
@given(texts=TEXTS, cuts=st.lists(st.booleans(), min_size=1, max_size=12))
def test_joined_deltas_of_responses_and_messages_are_the_text_whatever_the_chunks(
    begin: Callable[[], StreamEncoder], delta: str, end: str, texts: list[str], cuts: list[bool]
) -> None:
    stream = b"".join(encoded(begin(), chunks_of(texts, cuts)))
    named = [event.split("\n") for event in stream.decode().removesuffix("\n\n").split("\n\n")]
    objects = [json.loads(data.removeprefix("data: ")) for _, data in named]
    assert [name.removeprefix("event: ") for name, _ in named] == [each["type"] for each in objects]
    deltas = [each["delta"] for each in objects if each["type"] == delta]
    assert "".join(each if isinstance(each, str) else each["text"] for each in deltas) == "".join(texts)
    assert objects[-1]["type"] == end
