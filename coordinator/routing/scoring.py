"""Spans of committed tokens on their way to the draft pools that did not draft them: in the background, or not at all.

A queue of bounded length, one span at a time, one call a pool, to a draft replica or to a target that drafts by itself;
a replica that is needed refuses, and then that pool goes without. No round ever waits for any of it. Not here: what a
score says of a pool (`expected_rounds`), where spans come from and what is made of them
(`coordinator.round.routing_table`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coordinator.replicas.pool import ReplicaPools
from coordinator.replicas.replica import Replica
from specdec.errors import SpecdecError
from specdec.types import Score, ScoreRequest

#: Spans that wait; the oldest go first.
MAX_WAITING = 32

#: Tokens before a span, at most: scoring runs all of them where they were not run before.
MAX_CONTEXT_TOKENS = 2048

#: Between two attempts at a span whose replicas were needed by others, and how many there are.
RETRY_S = 1.2
ATTEMPTS = 3

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Span:
    """Committed tokens, and what has to be known to score them."""

    request: ScoreRequest
    p: tuple[float, ...]
    """Of each token, what the target gave it after filters."""
    pools: tuple[str, ...]
    """That are to score it."""
    on_scored: Callable[[str, Score], None]
    """Told what a pool's replica answered."""
    on_end: Callable[[], None]
    """Called once when no more will be told."""


class ScoreQueue:
    """Scores spans, one after the other. Used from one event loop."""

    def __init__(self, pools: ReplicaPools, retry_s: float = RETRY_S) -> None:
        self._pools = pools
        self._retry_s = retry_s
        self._waiting: deque[Span] = deque()
        self._worker: asyncio.Task[None] | None = None
        self.num_dropped = 0

    def put(self, span: Span) -> None:
        """Takes a span in; returns at once."""
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.popleft()
            self.num_dropped += 1
        self._waiting.append(span)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work(), name="scores")

    async def settle(self) -> None:
        """Waits until nothing waits."""
        if self._worker is not None:
            await asyncio.wait([self._worker])

    async def close(self) -> None:
        """Drops what waits. Idempotent."""
        self._waiting.clear()
        if self._worker is not None:
            self._worker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._worker

    async def _work(self) -> None:
        while self._waiting:
            span = self._waiting.popleft()
            try:
                await self._score(span)
            except Exception:
                _log.exception("a span was not scored")

    async def _score(self, span: Span) -> None:
        left = list(span.pools)
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(self._retry_s)
            left = [pool for pool in left if not await self._ask(span, pool)]
            if not left or self._waiting:  # newer spans say as much, and find as many replicas idle
                break
        span.on_end()

    async def _ask(self, span: Span, pool: str) -> bool:
        """Whether the pool need not be asked again."""
        local_pool = pool if pool in self._pools.local_pools else ""
        drafting = self._pools.local_targets(pool) if local_pool else self._pools.drafts(pool)
        replica = _idlest(drafting)
        if replica is None:
            return True
        asked = replace(span.request, local_pool=local_pool)
        if asked.position.committed_len + len(asked.token_ids) > replica_context(replica):
            return True
        try:
            span.on_scored(pool, await replica.link.score(asked))
        except SpecdecError as error:
            _log.debug("%s replica %s did not score: %s", replica.role, replica.address, error)
            return error.reason != "REPLICA_BUSY"
        return True


def replica_context(replica: Replica[Any]) -> int:
    """Tokens that it can hold."""
    return replica.info.max_context_tokens if replica.info else 0


def _idlest(replicas: Sequence[Replica[Any]]) -> Replica[Any] | None:
    """The live replica with the least to do."""
    live = [replica for replica in replicas if replica.takes_sessions]
    return min(live, key=lambda replica: replica.num_running, default=None)
