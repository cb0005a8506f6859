"""Runs the outputs of one request: the only place of the gateway that calls `generate`.

Several outputs of one prompt are sessions of their own. The first starts alone and the others follow once its first
token has come, because they then find the keys and values of their common prompt. An encoder such as `gateway.chunks`
makes an answer of what they give.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

from gateway.metrics import GatewayMetrics
from gateway.middleware import time_left_s, traceparent
from gateway.schemas.constraints import StatedConstraint, in_their_words
from gateway.upstream import Served
from specdec.client import AsyncClient, AsyncStream, Chunk, Completion, GenerateOptions
from specdec.contract.errors import InvalidRequest, NotFound, SessionLost, SpecdecError
from specdec.contract.types import NUM_SEEDS

#: Events that an output may be ahead of the others and of the connection.
_MAX_AHEAD = 2

Prompt = str | Sequence[int] | None
"""A text, token ids, or None if the input is among the options."""


@dataclass(frozen=True, slots=True)
class Event:
    """A part of one output: a chunk, or its end."""

    index: int
    """Index of the output among those of the request."""
    stream: AsyncStream
    chunk: Chunk | None
    """None for the end."""
    completion: Completion | None = None
    """The whole output, at its end."""


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """One output to generate."""

    index: int
    prompt: str | None
    options: GenerateOptions
    leader: int
    """Index of the first output of the same prompt."""


@dataclass(frozen=True, slots=True)
class Continued:
    """A session that an output continues, unless the session has gone on or cannot be had at once."""

    client: AsyncClient
    """Client that does not try again."""
    session_id: str
    num_tokens: int
    """Number of tokens that the session must hold."""

    @property
    def options(self) -> GenerateOptions:
        return {"session_id": self.session_id, "expected_session_tokens": self.num_tokens}


def plan(prompts: Sequence[Prompt], num_outputs: int, options: GenerateOptions, seed: int | None) -> list[OutputPlan]:
    """Return the plans of the outputs of a request; those of one prompt are neighbours.

    Args:
        prompts: inputs; None if `options` have the input.
        num_outputs: outputs of each prompt.
        options: options of every output.
        seed: seed of each prompt's first output; the others draw with the numbers after it.
    """
    plans = []
    for number, prompt in enumerate(prompts):
        leader = number * num_outputs
        for place in range(num_outputs):
            own: dict[str, Any] = {**options}
            if prompt is not None and not isinstance(prompt, str):
                own["prompt_token_ids"] = prompt
            if seed is not None:
                own["seed"] = (seed + place) % NUM_SEEDS
            text = prompt if isinstance(prompt, str) else None
            plans.append(OutputPlan(leader + place, text, cast(GenerateOptions, own), leader))
    return plans


def session_options(session_id: str | None, request_id: str | None, num_outputs: int) -> Mapping[str, str]:
    """Return the options that continue a session. Raises InvalidRequest if several outputs would share it."""
    given = {name: value for name, value in (("session_id", session_id), ("request_id", request_id)) if value}
    if given and num_outputs > 1:
        name = next(iter(given))
        raise InvalidRequest(f"{name}: {num_outputs} outputs cannot share one session; leave it out", field=name)
    return given


class Outputs:
    """The outputs of one request. Iterate `events` once, or await `completions`."""

    def __init__(
        self,
        client: AsyncClient,
        plans: Sequence[OutputPlan],
        metrics: GatewayMetrics,
        model: str,
        continued: Continued | None = None,
    ) -> None:
        """
        Args:
            client: client of the request's tenant.
            plans: outputs to generate.
            metrics: receives counts and times.
            model: name under which the request named its model.
            continued: session of the only job; without it, or if it cannot be continued, the job's options count.
        """
        self._client, self._plans, self._metrics = client, plans, metrics
        self._model, self._continued = model, continued
        self._began_s = time.monotonic()
        self._has_begun = [asyncio.Event() for _ in plans]
        """Set for an output that has a token or has ended."""

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yield the parts of all outputs as they come. Closing the iterator cancels what still runs.

        Raises:
            SpecdecError: an output failed; the others are cancelled.
        """
        source = self._output(self._plans[0]) if len(self._plans) == 1 else self._merged()
        is_first = True
        async with aclosing(source) as events:
            async for event in events:
                if is_first:
                    self._metrics.observe_first_token(time.monotonic() - self._began_s)
                    is_first = False
                if event.completion is not None:
                    self._metrics.observe_finished(event.completion)
                yield event

    async def completions(self) -> list[Completion]:
        """Return all outputs in the order of their plans. Raises SpecdecError as `events`."""
        finished: dict[int, Completion] = {}
        async with aclosing(self.events()) as events:
            async for event in events:
                if event.completion is not None:
                    finished[event.index] = event.completion
        return [finished[job.index] for job in self._plans]

    async def _output(self, job: OutputPlan) -> AsyncGenerator[Event, None]:
        """Yield the parts of one output: of the session to continue, or else of the job's own."""
        has_begun, continued = False, self._continued
        if continued is not None:
            try:
                async with aclosing(_generated(continued.client, job, continued.options)) as events:
                    async for event in events:
                        has_begun = True
                        yield event
                    return
            except SpecdecError as error:
                if has_begun or not (error.retryable or isinstance(error, NotFound | SessionLost)):
                    raise
        async with aclosing(_generated(self._client, job)) as events:
            async for event in events:
                yield event

    async def _merged(self) -> AsyncGenerator[Event, None]:
        queue: asyncio.Queue[Event | BaseException] = asyncio.Queue(_MAX_AHEAD * len(self._plans))
        tasks = [asyncio.create_task(self._feed(job, queue)) for job in self._plans]
        try:
            num_left = len(tasks)
            while num_left:
                event = await queue.get()
                if isinstance(event, BaseException):
                    raise event
                num_left -= event.completion is not None
                yield event
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _feed(self, job: OutputPlan, queue: asyncio.Queue[Event | BaseException]) -> None:
        """Put an output's events into the queue, and its error in place of the rest."""
        try:
            if job.index != job.leader:
                await self._has_begun[job.leader].wait()
            async with aclosing(self._output(job)) as events:
                async for event in events:
                    self._has_begun[job.index].set()
                    await queue.put(event)
        except Exception as error:
            await queue.put(error)
        finally:
            self._has_begun[job.index].set()


async def _generated(
    client: AsyncClient, job: OutputPlan, session: GenerateOptions | None = None
) -> AsyncGenerator[Event, None]:
    """Yield the parts of one output; the options of `session` replace the job's."""
    options = cast(
        GenerateOptions, {**job.options, **(session or {}), "traceparent": traceparent(), "timeout": time_left_s()}
    )
    constraint = options.get("constraint")
    try:
        async with client.generate(job.prompt, stream=True, **options) as stream:
            async for chunk in stream:
                yield Event(job.index, stream, chunk)
            yield Event(job.index, stream, None, await stream.result())
    except SpecdecError as error:
        if isinstance(constraint, StatedConstraint):
            raise in_their_words(error, constraint.field) from None
        raise


@contextlib.asynccontextmanager
async def resumed(stream: AsyncStream, metrics: GatewayMetrics) -> AsyncIterator[AsyncGenerator[Event, None]]:
    """Give the events of a stream of `AsyncClient.resume`, as the only output of a request.

    The stream must have provenance, which tells tokens that were generated now from replayed ones: an output that is
    only replayed was counted when it ended.
    """

    async def events() -> AsyncGenerator[Event, None]:
        is_continued = False
        async for chunk in stream:
            is_continued = is_continued or any(detail.source is not None for detail in chunk.details)
            yield Event(0, stream, chunk)
        completion = await stream.result()
        if is_continued:
            metrics.observe_finished(completion)
        yield Event(0, stream, None, completion)

    metrics.observe_resumed()
    async with stream:
        yield events()


async def room_of(client: AsyncClient, served: Served, options: GenerateOptions) -> int:
    """Return the limit on an output without one: the room in the context, at most what the model recommends.

    The room is known only once the conversation has been tokenized, so a request without a limit costs one more call.
    """
    prompt = await client.tokenize(
        messages=options["messages"],
        chat_template_kwargs=options.get("chat_template_kwargs"),
        tools=options.get("tools"),
    )
    room = max(1, served.max_context_tokens - len(prompt))
    return int(min(room, served.default_sampling.get("max_new_tokens", room)))
