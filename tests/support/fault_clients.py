"""Clients of a fault run: a request in one or two turns, over gRPC or HTTP, and what each client received as events.

They use what any client has: the SDK with patient budgets; over HTTP, another gateway after a lost one, the same ids
where nothing was received yet, and `Last-Event-ID` afterwards. Called by `tests.support.fault_run`.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from specdec.client import AsyncClient, Budgets
from tests.support.history import Event

#: Time for which a client tries again; every part comes back much sooner.
PATIENCE_S = 240.0
PATIENT = Budgets(connect_s=PATIENCE_S, target_s=PATIENCE_S, resume_s=PATIENCE_S)

_MODES = ("greedy", "rejection", "block", "coupled")
_PAUSE_S = 0.2
#: Statuses after which the same request may succeed at once or later.
_TEMPORARY = frozenset((409, 429, 500, 502, 503, 504))


@dataclass(frozen=True)
class Work:
    """One generation: its turns, sampling and way in."""

    number: int
    mode: str
    seed: int
    turns: tuple[tuple[tuple[int, ...], int], ...]
    """Prompt tokens and number of output tokens of each turn."""
    has_drafts: bool = True
    """False: the target goes on by itself, in runs."""

    @property
    def has_one_text(self) -> bool:
        """True where prompt, parameters and seed decide the text."""
        return not self.has_drafts or self.mode in ("greedy", "coupled")

    @property
    def sampling(self) -> dict[str, Any]:
        options = {} if self.has_drafts else {"gamma": 0}
        if self.mode == "greedy":
            return {"temperature": 0.0, **options}
        return {"temperature": 1.0, "seed": self.seed, "mode": self.mode, **options}


def make_works(
    number: int, seed: int, *, num_kinds: int, most_tokens: int, vocabulary: int, has_drafts: bool = True
) -> list[Work]:
    """Return `number` generations of `num_kinds` different ones, in a random order that the seed decides."""
    rng = random.Random(seed)
    modes = _MODES if has_drafts else (*_MODES, "off")
    kinds = []
    for kind in range(num_kinds):
        num_turns = 2 if kind % 4 == 3 else 1
        turns = tuple(
            (
                tuple(rng.randrange(3, vocabulary) for _ in range(rng.randint(4, 12))),
                rng.randint(most_tokens // 4, most_tokens) // num_turns,
            )
            for _ in range(num_turns)
        )
        kinds.append((modes[(kind // 4) % len(modes)], rng.randrange(1 << 30), turns))
    return [Work(index, *kinds[rng.randrange(num_kinds)], has_drafts=has_drafts) for index in range(number)]


class GrpcClient:
    """Runs generations through the SDK."""

    def __init__(self, endpoint: str) -> None:
        self._client = AsyncClient(endpoint, budgets=PATIENT)

    async def run(self, work: Work, session: str, note: Callable[[Event], None]) -> list[str | tuple[int, ...]]:
        """Run all turns; return what each one gave. Every chunk is noted as an event."""
        outputs: list[str | tuple[int, ...]] = []
        start = 0
        for turn, (prompt, num_tokens) in enumerate(work.turns):
            start += len(prompt)
            request = f"{session}-{turn}"
            async with self._client.generate(
                prompt_token_ids=prompt, session_id=session, request_id=request, max_new_tokens=num_tokens,
                ignore_eos=True, stream=True, **work.sampling,
            ) as stream:  # fmt: skip
                position = start
                async for chunk in stream:
                    token_ids = list(chunk.token_ids)
                    note(_event("received", "grpc", session, request, start=position, token_ids=token_ids))
                    position += len(token_ids)
                outputs.append((await stream.result()).token_ids)
            start += num_tokens
        return outputs

    async def delete(self, session: str) -> None:
        await self._client.delete_session(session)

    async def close(self) -> None:
        await self._client.close()


class HttpClient:
    """Runs generations through any of the gateways."""

    def __init__(self, addresses: Sequence[str], seed: int) -> None:
        self._addresses = addresses
        self._random = random.Random(seed)
        self._client = httpx2.AsyncClient(timeout=httpx2.Timeout(PATIENCE_S, connect=5.0, read=20.0))

    async def run(self, work: Work, session: str, note: Callable[[Event], None]) -> list[str | tuple[int, ...]]:
        """Run all turns; return the text of each one. Every event of a stream is noted."""
        outputs: list[str | tuple[int, ...]] = []
        start = 0
        for turn, (prompt, num_tokens) in enumerate(work.turns):
            start += len(prompt)
            request = f"{session}-{turn}"
            sampling = work.sampling
            speculation = {"mode": "rejection"} | {
                name: sampling.pop(name) for name in ("mode", "gamma") if name in sampling
            }
            body = {
                "prompt": list(prompt), "max_tokens": num_tokens, "ignore_eos": True, "stream": True,
                "session_id": session, "request_id": request, "speculation": speculation, **sampling,
            }  # fmt: skip
            reading = _Reading(session, request, start, note)
            deadline_s = time.monotonic() + PATIENCE_S
            while not reading.is_done:
                try:
                    await self._attempt(body, reading)
                except (httpx2.HTTPError, _Interrupted) as error:
                    if time.monotonic() > deadline_s:
                        raise AssertionError(f"{request} did not end within {PATIENCE_S:g} s: {error!r}") from error
                    await asyncio.sleep(_PAUSE_S)
            assert reading.num_tokens == num_tokens, (
                f"{request} ended after {reading.num_tokens} of {num_tokens} tokens"
            )
            outputs.append(reading.text)
            start += num_tokens
        return outputs

    async def close(self) -> None:
        await self._client.aclose()

    async def _attempt(self, body: dict[str, Any], reading: _Reading) -> None:
        """Read from one gateway until the end. Raises _Interrupted or HTTPError where the stream does not get there."""
        url = f"http://{self._random.choice(self._addresses)}/v1"
        headers = {"accept": "text/event-stream"}
        if reading.num_tokens:
            headers["last-event-id"] = f"{reading.session}:{reading.num_tokens}"
            url = f"{url}/sessions/{reading.session}?object=text_completion"
            opened = self._client.stream("GET", url, headers=headers)
        else:
            opened = self._client.stream("POST", f"{url}/completions", json=body, headers=headers)
        async with opened as response:
            if response.status_code in _TEMPORARY:
                raise _Interrupted(f"{response.status_code}: {(await response.aread())[:300]!r}")
            assert response.status_code == 200, (response.status_code, await response.aread())
            await reading.read(response)


class _Interrupted(Exception):
    """The stream ended before its end, or was refused for now."""


class _Reading:
    """What one client has received of one request over HTTP."""

    def __init__(self, session: str, request: str, start: int, note: Callable[[Event], None]) -> None:
        self.session, self._request, self._start, self._note = session, request, start, note
        self.num_tokens = 0
        self.text = ""
        self.is_done = False

    async def read(self, response: httpx2.Response) -> None:
        event_id = ""
        async for line in response.aiter_lines():
            name, _, value = line.partition(": ")
            if name == "id":
                event_id = value
            elif name == "data":
                if value == "[DONE]":
                    self.is_done = True
                    return
                self._take(event_id, json.loads(value))
        raise _Interrupted("the stream ended without [DONE]")

    def _take(self, event_id: str, event: dict[str, Any]) -> None:
        if "error" in event:
            raise _Interrupted(str(event["error"]))
        index = int(event_id.rpartition(":")[2])
        text = "".join(choice["text"] for choice in event["choices"])
        num_new = index - self.num_tokens
        if num_new or text:
            start = self._start + self.num_tokens
            self._note(_event("read", "http", self.session, self._request, start=start, num_tokens=num_new, text=text))
        self.num_tokens = index
        self.text += text


def _event(kind: str, client: str, session: str, request: str, **fields: Any) -> Event:
    return {"at": time.time(), "kind": kind, "client": client, "session": session, "request": request, **fields}
