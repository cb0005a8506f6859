"""Many concurrent streams from a separate process, as their clients see them chunk by chunk.

`StreamProcess` keeps the child, `python -m bench.harness.streams`. The streams of one batch begin at given offsets,
all at once or as arrivals.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.harness.line_child import LineChild
from specdec.client import AsyncClient, Tls


@dataclass(frozen=True)
class StreamRequest:
    """One stream to run."""

    prompt_token_ids: list[int]
    options: dict[str, Any]
    """Further keyword arguments of `AsyncClient.generate`."""
    offset_s: float = 0.0
    """Start after the batch's beginning, in seconds."""


@dataclass(frozen=True)
class StreamRun:
    """One stream as its client saw it; times count from the batch's beginning."""

    began_s: float
    chunk_s: list[float]
    """Arrival of each chunk, one a round."""
    chunk_tokens: list[int]
    stats: dict[str, Any] = field(repr=False)
    """`specdec.client.GenerationStats`, field by field."""
    num_cached_prompt_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(self.chunk_tokens)

    @property
    def ttft_s(self) -> float:
        return self.chunk_s[0] - self.began_s

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first."""
        return (self.chunk_s[-1] - self.chunk_s[0]) / max(1, self.num_tokens - 1)

    def steady_round_s(self, num_left_out: int = 2) -> float:
        """Mean time per round between the first chunk and the last ones, which the token limit cuts short."""
        times = self.chunk_s[:-num_left_out]
        return (times[-1] - times[0]) / (len(times) - 1)

    def steady_token_s(self, num_left_out: int = 2) -> float:
        """Mean time per token over the same rounds."""
        times, tokens = self.chunk_s[:-num_left_out], self.chunk_tokens[1:-num_left_out]
        return (times[-1] - times[0]) / sum(tokens)


def tokens_per_s(runs: Sequence[StreamRun]) -> float:
    """Tokens of a whole batch a second, until the last stream's last token: prefill included."""
    return sum(run.num_tokens for run in runs) / max(run.chunk_s[-1] for run in runs)


class StreamProcess(LineChild):
    """A client in a child process."""

    def __init__(self, endpoint: str, *, api_key: str = "", tls_ca: str = "") -> None:
        """
        Args:
            endpoint: HOST:PORT of a coordinator.
            api_key: key that the client sends; "": none.
            tls_ca: PEM file of the authority of the coordinator's certificate; "": plaintext.
        """
        flags = ("--endpoint", endpoint, "--api-key", api_key, "--tls-ca", tls_ca)
        super().__init__("bench.harness.streams", *flags)

    def run(self, requests: Sequence[StreamRequest]) -> list[StreamRun]:
        """Run a batch to its end, in the order of `requests`; sessions are deleted afterwards."""
        return [StreamRun(**run) for run in self.ask([asdict(request) for request in requests])]


async def _run_stream(client: AsyncClient, request: StreamRequest, batch_began_s: float) -> tuple[StreamRun, str]:
    await asyncio.sleep(max(0.0, batch_began_s + request.offset_s - time.monotonic()))
    began_s = time.monotonic() - batch_began_s
    times: list[float] = []
    counts: list[int] = []
    stream = client.generate(prompt_token_ids=request.prompt_token_ids, stream=True, **request.options)
    async with stream:
        async for chunk in stream:
            times.append(time.monotonic() - batch_began_s)
            counts.append(len(chunk.token_ids))
        completion = await stream.result()
    run = StreamRun(began_s, times, counts, asdict(completion.stats), completion.usage.num_cached_prompt_tokens)
    return run, completion.session_id


async def _run_batch(client: AsyncClient, requests: Sequence[StreamRequest]) -> list[StreamRun]:
    began_s = time.monotonic()
    done = await asyncio.gather(*(_run_stream(client, request, began_s) for request in requests))
    await asyncio.gather(*(client.delete_session(session_id) for _, session_id in done))
    return [run for run, _ in done]


async def _serve(endpoint: str, api_key: str, tls_ca: str) -> None:
    tls = Tls(ca=tls_ca) if tls_ca else None
    async with AsyncClient(endpoint, api_key=api_key or None, tls=tls) as client:
        await client.info()
        print("{}", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            runs = await _run_batch(client, [StreamRequest(**request) for request in json.loads(line)])
            print(json.dumps([asdict(run) for run in runs]), flush=True)


def main() -> None:
    """Run one batch a line until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--api-key", default="")
    parser.add_argument("--tls-ca", default="")
    arguments = parser.parse_args()
    asyncio.run(_serve(arguments.endpoint, arguments.api_key, arguments.tls_ca))


if __name__ == "__main__":
    main()
