"""What a client has read of a generation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import grpc

from specdec.v1 import coordinator_pb2 as pb


@dataclass
class Output:
    """A stream's events, gathered."""

    started: pb.Started | None = None
    chunks: list[pb.TokenChunk] = field(default_factory=list)
    finished: pb.Finished | None = None

    def add(self, response: pb.GenerateResponse) -> None:
        kind = response.WhichOneof("event")
        if kind == "tokens":
            self.chunks.append(response.tokens)
        elif kind == "started":
            self.started = response.started
        else:
            self.finished = response.finished

    @property
    def token_ids(self) -> list[int]:
        return [token_id for chunk in self.chunks for token_id in chunk.token_ids]

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def details(self) -> list[pb.TokenDetail]:
        return [detail for chunk in self.chunks for detail in chunk.details]


async def read_until(stream: Any, num_tokens: int) -> Output:
    """Reads a stream's events until it has at least `num_tokens` tokens."""
    output = Output()
    while len(output.token_ids) < num_tokens:
        output.add(await stream.read())
    return output


async def read_rest(stream: Any, output: Output) -> Output:
    """Adds a stream's remaining events to `output`."""
    while (response := await stream.read()) is not grpc.aio.EOF:
        output.add(response)
    return output
