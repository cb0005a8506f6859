"""Requests as clients without a retry of their own see them: what each one got, and when, from a separate process.

`LoadProcess` keeps the child, `python -m bench.suites.faults.overload_client`. A batch runs in a closed loop (a fixed
number of streams, each of which begins its next request when the last has ended) or in an open loop (requests begin at
a fixed rate, whatever happens to the others). The SDK repeats nothing here, so that each refusal is seen.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import asdict, dataclass, field

from bench.harness.line_child import LineChild
from specdec.client import AsyncClient, Budgets
from specdec.contract.errors import SpecdecError
from specdec.contract.tenant import DEFAULT_TENANT

PROMPT_TOKENS = 64
NUM_TOKENS = 64
_VOCABULARY = 2000
_NO_RETRIES = Budgets(connect_s=0.0, resume_s=0.0)


@dataclass(frozen=True)
class Batch:
    """A load for some time."""

    seconds: float
    num_streams: int = 0
    """Streams of a closed loop, each of at least one request; 0: an open loop."""
    rate: float = 0.0
    """Requests a second of an open loop."""
    deadline_s: float | None = None
    """Deadline of each call; None for none."""
    num_tokens: int = NUM_TOKENS
    prompt_tokens: int = PROMPT_TOKENS
    first_prompt: int = 0
    """Number of the first prompt; each request has a prompt of its own."""
    patience_s: float = 60.0
    """Time after which the calls that are left of an open loop are cancelled: they count as `UNFINISHED`."""


@dataclass
class Outcome:
    """One request as its client saw it; times count from the batch's beginning."""

    began_s: float
    ended_s: float = 0.0
    num_tokens: int = 0
    error: str = ""
    """Reason of the error that ended the request; "" for none."""
    retry_after_s: float | None = None
    """What the error says about a repetition; None where it says nothing."""
    chunk_s: list[float] = field(default_factory=list)
    """Arrival of each chunk."""

    @property
    def is_refused(self) -> bool:
        """Return whether the request failed before any token, with an error that says when to retry."""
        return bool(self.error) and not self.num_tokens and self.retry_after_s is not None

    @property
    def failed_in_stream(self) -> bool:
        return bool(self.error) and self.num_tokens > 0

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first chunk."""
        return (self.chunk_s[-1] - self.chunk_s[0]) / max(1, self.num_tokens - 1)


class LoadProcess(LineChild):
    """A client in a child process."""

    def __init__(self, endpoint: str, tenant: str = DEFAULT_TENANT) -> None:
        """`tenant`: of all requests. The coordinator must trust its callers if it is not the default one."""
        super().__init__("bench.suites.faults.overload_client", "--endpoint", endpoint, "--tenant", tenant)

    def start(self, batch: Batch) -> None:
        """Start a batch; `outcomes` waits for its end."""
        self.send(asdict(batch))

    def outcomes(self) -> list[Outcome]:
        """Return the outcomes of the batch, in the order in which the requests began."""
        return [Outcome(**outcome) for outcome in self.receive()]

    def run(self, batch: Batch) -> list[Outcome]:
        """Run a batch to its end."""
        self.start(batch)
        return self.outcomes()


class _Client:
    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def run(self, batch: Batch) -> list[Outcome]:
        began_s = time.monotonic()
        if batch.num_streams:
            streams = [self._stream(batch, began_s, number) for number in range(batch.num_streams)]
            outcomes = [outcome for each in await asyncio.gather(*streams) for outcome in each]
            return sorted(outcomes, key=lambda outcome: outcome.began_s)
        tasks = []
        for number in range(round(batch.seconds * batch.rate)):
            await asyncio.sleep(max(0.0, began_s + number / batch.rate - time.monotonic()))
            tasks.append(asyncio.create_task(self._request(batch, began_s, batch.first_prompt + number)))
        _, left = await asyncio.wait(tasks, timeout=batch.patience_s)
        for task in left:
            task.cancel()
        return list(await asyncio.gather(*tasks))

    async def _stream(self, batch: Batch, began_s: float, stream: int) -> list[Outcome]:
        outcomes: list[Outcome] = []
        while not outcomes or time.monotonic() < began_s + batch.seconds:
            number = batch.first_prompt + stream + len(outcomes) * batch.num_streams
            outcomes.append(await self._request(batch, began_s, number))
        return outcomes

    async def _request(self, batch: Batch, began_s: float, number: int) -> Outcome:
        outcome = Outcome(time.monotonic() - began_s)
        try:
            async with self._client.generate(
                prompt_token_ids=_prompt(number, batch.prompt_tokens),
                stream=True,
                max_new_tokens=batch.num_tokens,
                temperature=0.0,
                ignore_eos=True,
                timeout=batch.deadline_s,
            ) as stream:
                async for chunk in stream:
                    outcome.chunk_s.append(time.monotonic() - began_s)
                    outcome.num_tokens += len(chunk.token_ids)
        except SpecdecError as error:
            outcome.error, outcome.retry_after_s = error.reason, error.retry_after_s
        except asyncio.CancelledError:
            outcome.error = "UNFINISHED"
        outcome.ended_s = time.monotonic() - began_s
        return outcome


def _prompt(number: int, num_tokens: int) -> list[int]:
    """Return a prompt that depends on the request's number alone."""
    return random.Random(number).choices(range(5, _VOCABULARY), k=num_tokens)


async def _serve(endpoint: str, tenant: str) -> None:
    async with AsyncClient(endpoint, budgets=_NO_RETRIES) as sdk:
        await sdk.info()
        client = _Client(sdk.for_tenant(tenant))
        print("{}", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            outcomes = await client.run(Batch(**json.loads(line)))
            print(json.dumps([asdict(outcome) for outcome in outcomes]), flush=True)


def main() -> None:
    """Run one batch a line until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--tenant", required=True)
    arguments = parser.parse_args()
    asyncio.run(_serve(arguments.endpoint, arguments.tenant))


if __name__ == "__main__":
    main()
