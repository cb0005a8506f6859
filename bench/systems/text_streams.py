"""Streams of text as clients of the gateway and of the coordinator see them, over HTTP and over gRPC.

Both sides run in the event loop of the suite, with as little code as possible between the connection and the times.
Sessions are deleted after each batch, outside the measured time. Called by the suites `gateway` and `crowd`.
"""

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.harness.http_stream import stream_events
from bench.systems.http_servers import GatewayServer
from bench.systems.process import Run
from specdec.client import AsyncClient

HTTP, GRPC = "http", "grpc"

Speculation = Mapping[str, Any]


@dataclass(frozen=True)
class TextStream:
    """One streamed output; times count from the moment at which its batch was sent."""

    session_id: str
    chunk_s: list[float]
    """Arrival of each chunk that has text."""
    end_s: float
    """Arrival of the last token's event, which may have no text."""
    num_tokens: int
    text: str

    @property
    def ttft_s(self) -> float:
        return self.chunk_s[0]


def tokens_per_s(streams: Sequence[TextStream]) -> float:
    """Return the tokens a second of a whole batch until its last stream ends, prefill included."""
    return sum(stream.num_tokens for stream in streams) / max(stream.end_s for stream in streams)


class StreamingClient(ABC):
    """A client that streams one greedy output for each prompt of a batch, all at once."""

    def __init__(self, client: AsyncClient) -> None:
        """
        Args:
            client: connection to the coordinator, by which sessions are deleted.
        """
        self._client = client

    async def run(self, prompts: Sequence[list[int]], num_tokens: int, **speculation: object) -> list[TextStream]:
        """Return the outputs in the order of their prompts; EOS ends none.

        Args:
            prompts: token ids.
            num_tokens: tokens of each output.
            speculation: `mode` and `gamma`, if they are not the server's choice.
        """
        began_s = time.perf_counter()
        streams = await asyncio.gather(*(self._stream(prompt, num_tokens, began_s, speculation) for prompt in prompts))
        await asyncio.gather(*(self._client.delete_session(stream.session_id) for stream in streams))
        short = [stream.num_tokens for stream in streams if stream.num_tokens != num_tokens]
        if short:
            raise RuntimeError(f"a stream ended after {short[0]} of {num_tokens} tokens")
        return list(streams)

    @abstractmethod
    async def _stream(self, prompt: list[int], num_tokens: int, began_s: float, speculation: Speculation) -> TextStream:
        """Stream one output."""


class GrpcStreams(StreamingClient):
    """Streams from the coordinator by the SDK."""

    async def _stream(self, prompt: list[int], num_tokens: int, began_s: float, speculation: Speculation) -> TextStream:
        chunk_s: list[float] = []
        texts: list[str] = []
        stream = self._client.generate(
            prompt_token_ids=prompt, stream=True, max_new_tokens=num_tokens, temperature=0.0, ignore_eos=True,
            **speculation,
        )  # fmt: skip
        async with stream:
            async for chunk in stream:
                if chunk.text:
                    chunk_s.append(time.perf_counter() - began_s)
                    texts.append(chunk.text)
            end_s = time.perf_counter() - began_s
            completion = await stream.result()
        num_generated = completion.usage.num_output_tokens
        return TextStream(stream.session_id, chunk_s, end_s, num_generated, "".join(texts))


class HttpStreams(StreamingClient):
    """Streams of /v1/completions from a gateway."""

    def __init__(self, client: AsyncClient, port: int) -> None:
        super().__init__(client)
        self._port = port

    async def _stream(self, prompt: list[int], num_tokens: int, began_s: float, speculation: Speculation) -> TextStream:
        chunk_s: list[float] = []
        texts: list[str] = []
        session_id, num_generated, end_s = "", 0, 0.0
        async for event in stream_events(self._port, "/v1/completions", _request(prompt, num_tokens, speculation)):
            for choice in event["choices"]:
                session_id = event["session_id"]
                end_s = time.perf_counter() - began_s
                if choice["text"]:
                    chunk_s.append(end_s)
                    texts.append(choice["text"])
            if event["usage"]:
                num_generated = event["usage"]["completion_tokens"]
        return TextStream(session_id, chunk_s, end_s, num_generated, "".join(texts))


def _request(prompt: list[int], num_tokens: int, speculation: Speculation) -> dict[str, object]:
    return {
        "prompt": prompt, "max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True}, "speculation": speculation or None,
    }  # fmt: skip


@contextlib.contextmanager
def text_clients(run: Run, endpoint: str, gateway: GatewayServer) -> Iterator[dict[str, StreamingClient]]:
    """Start a gateway in front of the coordinator at `endpoint`; yield a client of each by the name of its protocol."""
    run(gateway.start())
    client = AsyncClient(endpoint)
    try:
        run(client.info())
        yield {HTTP: HttpStreams(client, gateway.port), GRPC: GrpcStreams(client)}
    finally:
        run(client.close())
        run(gateway.stop())
