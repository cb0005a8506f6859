"""The engines' contract: what a service warms up, serves, watches and closes. The only one there is.

It lives beside `specdec.types` because both sides of it may import neither the other: `specdec.engine` implements it
without grpc, `specdec.rpc` and `specdec.service` serve whatever implements it without an engine. A round goes from a
servicer through `propose` or `verify` into the engine's gate (`specdec.engine.sessions.calls`).

Not here: any implementation, and what engines are made of (`specdec.engine.base`).
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from specdec.types import EngineInfo, Proposal, ProposeRequest, Score, ScoreRequest, Verification, VerifyRequest


class Engine(Protocol):
    """What does not depend on the role. Safe to call from any number of asyncio loops, any number of calls at once."""

    async def warm_up(self) -> None:
        """Runs what the first real call would find cold, and keeps nothing of it."""
        ...

    async def score(self, request: ScoreRequest) -> Score:
        """Says what it would have drawn committed tokens with; keeps nothing of it, and yields to every other call.

        Raises:
            InvalidRequest: the request can never run.
            ResourceExhausted: others are served, now or by the time it would have been done (REPLICA_BUSY).
            Unavailable: draining (DRAINING), or the device hangs (REPLICA_UNAVAILABLE).
            Unsupported: it drafts nothing by itself.
        """
        ...

    async def release(self, session_ids: list[str]) -> None:
        """Frees sessions' KV; calls in flight on them miss. Idempotent; unknown ids are fine."""
        ...

    def info(self) -> EngineInfo:
        """What this replica is, with its load now."""
        ...

    @property
    def is_stalled(self) -> bool:
        """Whether the device hangs: calls fail with Unavailable (REPLICA_UNAVAILABLE) until its step ends."""
        ...

    def share_event_loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop of the thread that runs the steps, in which calls may be made as well; None: it has none.

        It stands still while a step runs, and is closed when the engine is.
        """
        ...

    async def wait_ended(self) -> None:
        """Returns once the engine has been closed.

        Raises:
            Internal: it broke down by itself, or its device failed for good; nothing will be answered any more.
        """
        ...

    async def close(self) -> None:
        """Finishes what is in flight, then frees everything. Idempotent."""
        ...


class DraftEngine(Engine, Protocol):
    """What the draft service serves."""

    async def propose(self, request: ProposeRequest) -> Proposal:
        """Drafts up to gamma tokens. Idempotent by (session, epoch, round) and the request's digest.

        Cancelling the call abandons it: the session's KV stays consistent, nothing is answered.

        Raises:
            InvalidRequest: the request can never run; nothing of it is kept.
            KvMiss: the replica needs earlier tokens.
            StaleEpoch: an older epoch, or a round older than the newest seen.
            ResourceExhausted: no KV block is left (KV_EXHAUSTED).
            Unavailable: draining (DRAINING), or the device hangs (REPLICA_UNAVAILABLE).
        """
        ...


class TargetEngine(Engine, Protocol):
    """What the target service serves. The same guarantees as `DraftEngine`."""

    async def verify(self, request: VerifyRequest) -> Verification:
        """Runs the draft tokens through the model in one pass and answers p. Idempotent; raises as `propose` does."""
        ...
