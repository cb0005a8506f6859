"""The queue of token spans that draft pools score in the background.

Spans of committed tokens are scored by the pools that did not draft them: one span at a time, with one call per pool,
to a draft replica or to a target that drafts by itself. A busy replica refuses, and then its pool gets no score. The
queue is bounded, and no round waits for it. `coordinator.round.request_router` adds spans and learns from the scores
(`expected_rounds`).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coordinator.replicas.pool import ReplicaPools
from coordinator.replicas.replica import Replica
from specdec.contract.constraint import Constraint
from specdec.contract.errors import ConstraintMiss, SpecdecError
from specdec.contract.types import Score, ScoreRequest

#: Largest number of waiting spans; the oldest ones are dropped first.
MAX_WAITING = 32

#: Largest number of tokens before a span. A replica that has not run them before prefills all of them to score it.
MAX_CONTEXT_TOKENS = 2048

#: Seconds between two attempts at a span whose replicas were busy, and the number of attempts.
RETRY_S = 1.2
ATTEMPTS = 3

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Committed tokens, and what is needed to score them."""

    request: ScoreRequest
    p: tuple[float, ...]
    """Target probability of each token after filters."""
    pools: tuple[str, ...]
    """Pools that are to score the span."""
    on_scored: Callable[[str, Score], None]
    """Called with the score of each pool that answered."""
    on_end: Callable[[], None]
    """Called once when no further score will follow."""
    constraint: Constraint | None = None
    """Constraint of the request, for a replica that does not know its text."""


class ScoreQueue:
    """The queue. Spans are scored one after the other. Used from one event loop."""

    def __init__(self, pools: ReplicaPools, retry_s: float = RETRY_S) -> None:
        self._pools = pools
        self._retry_s = retry_s
        self._waiting: deque[TokenSpan] = deque()
        self._worker: asyncio.Task[None] | None = None
        self.num_dropped = 0

    def put(self, span: TokenSpan) -> None:
        """Add a span to the queue; return at once."""
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.popleft()
            self.num_dropped += 1
        self._waiting.append(span)
        if self._worker is None or self._worker.done():
            # An own context: its records must not have the ids of the request that came first.
            self._worker = asyncio.create_task(self._work(), name="scores", context=contextvars.Context())

    async def settle(self) -> None:
        """Wait until the queue is empty."""
        if self._worker is not None:
            await asyncio.wait([self._worker])

    async def close(self) -> None:
        """Drop the waiting spans. Idempotent."""
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
                _log.exception("scoring a span failed")

    async def _score(self, span: TokenSpan) -> None:
        left = list(span.pools)
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(self._retry_s)
            left = [pool for pool in left if not await self._score_by(span, pool)]
            if not left or self._waiting:  # a newer span is worth as much, and may find the replicas idle
                break
        span.on_end()

    async def _score_by(self, span: TokenSpan, pool: str) -> bool:
        """Have one pool score a span; return whether no further attempt is needed."""
        local_pool = pool if pool in self._pools.local_pools else ""
        drafting = self._pools.local_targets(pool) if local_pool else self._pools.drafts(pool)
        replica = _idlest(drafting)
        if replica is None:
            return True
        request = replace(span.request, local_pool=local_pool)
        if request.position.committed_len + len(request.token_ids) > replica_context(replica):
            return True
        try:
            span.on_scored(pool, await _answer(replica, request, span.constraint))
        except SpecdecError as error:
            _log.debug("%s replica %s failed to score: %s", replica.role, replica.address, error)
            return error.reason != "REPLICA_BUSY"
        return True


async def _answer(replica: Replica[Any], request: ScoreRequest, constraint: Constraint | None) -> Score:
    try:
        score: Score = await replica.link.score(request)
    except ConstraintMiss:
        score = await replica.link.score(replace(request, position=replace(request.position, constraint=constraint)))
    return score


def replica_context(replica: Replica[Any]) -> int:
    """Return the number of tokens that a replica can hold."""
    return replica.info.max_context_tokens if replica.info else 0


def _idlest(replicas: Sequence[Replica[Any]]) -> Replica[Any] | None:
    """Return the live replica with the fewest running sessions."""
    live = [replica for replica in replicas if replica.takes_sessions]
    return min(live, key=lambda replica: replica.num_running, default=None)
