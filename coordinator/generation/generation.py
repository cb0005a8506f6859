"""One generation: its rounds, one after another, from admission to the end, and its clean-up whatever ends it.

    admitted --> running --round, publish--> ... --> finished
                    |-- error: subscribers get it; what was committed stays and can be resumed
                    `-- last subscriber gone, drain or deletion: cancelled; the same

From here each round goes to `round/runner`, which asks the replicas and decides; the decided tokens go through
`text/output`, which finds the end of the output, to `publisher`, which commits and shows them. Not here: what it starts
with (`turn_preparer`), what it is made of (`factory`), readers (`stream`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from coordinator.generation.accounting import Account
from coordinator.generation.lease_keeper import LeaseKeeper
from coordinator.generation.publisher import DecidedRound, Publisher
from coordinator.generation.stream import OutputStream, Subscription
from coordinator.learning.turn_record import TurnRecord
from coordinator.replicas.placement import SessionReplicas
from coordinator.replicas.prefixes import Prefixes
from coordinator.requests import Finished, GenerationIdentity, OutputChunk
from coordinator.round.request_router import RequestRouter
from coordinator.round.runner import RoundRunner
from coordinator.round.tokens import SessionTokens
from coordinator.text.output import OutputWriter
from specdec.errors import Internal, NotFound, SessionLost, SpecdecError, Unavailable
from specdec.observability.logging import bind
from specdec.state.store import Lease, SessionStore
from specdec.types import FinishReason

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class GenerationParts:
    """What a generation works with; it owns the lease and the tokens from here on."""

    store: SessionStore
    lease: Lease
    lease_keeper: LeaseKeeper
    runner: RoundRunner
    replicas: SessionReplicas
    prefixes: Prefixes
    tokens: SessionTokens
    writer: OutputWriter
    round_id: int
    account: Account
    stream: OutputStream
    publisher: Publisher
    on_failure: Callable[[bool], Awaitable[None]]
    """Called when the generation failed, before the lease is given back; True: before its first token, and nobody had
    it stopped, so that a session made for it is of no use. Raises NotFound where the session was deleted meanwhile."""
    remember_output: Callable[[Sequence[int]], None]
    """Told what the request has said, however it ended."""
    route: RequestRouter | None = None
    """Where its draft model's pool may change."""
    record: TurnRecord | None = None
    """Of what the target says, where that is logged."""


class Generation:
    """A running request of one session, in its own task."""

    def __init__(self, identity: GenerationIdentity, parts: GenerationParts) -> None:
        self.stream = parts.stream
        self._identity = identity
        self._parts = parts
        self._num_readers = 0
        self._cancel_reason: SpecdecError | None = None
        self._has_begun = False
        self._is_ending = False
        self.task = asyncio.create_task(self._run(), name=f"generation {identity.session_id}")

    @property
    def is_cancelled(self) -> bool:
        return self._cancel_reason is not None

    def subscribe(self, start: int, replayed: OutputChunk | None = None) -> Subscription:
        """See `Subscription`."""
        self._num_readers += 1
        return Subscription(self.stream, start, self._drop_reader, replayed)

    def cancel(self, reason: SpecdecError) -> None:
        """Stops after what is committed; readers get `reason`. Await `task` to see everything released.

        A generation that is ending anyway ends as it would have.
        """
        if not (self.task.done() or self._is_ending or self.is_cancelled):
            self._cancel_reason = reason
            if self._has_begun:  # else its first step sees the reason; a task cancelled before never cleans up
                self.task.cancel()

    def _drop_reader(self) -> None:
        self._num_readers -= 1
        if self._num_readers == 0 and not self.stream.is_over:
            self.cancel(Unavailable("the request was cancelled by its client"))

    async def _run(self) -> None:
        with bind(session_id=self._identity.session_id, epoch=self._parts.lease.epoch):
            await self._live()

    async def _live(self) -> None:
        self._parts.lease_keeper.keep(self._parts.lease)
        finished: Finished | None = None
        error: SpecdecError | None = None
        self._has_begun = True
        try:
            if self.is_cancelled:
                raise asyncio.CancelledError
            finished = await self._run_rounds()
        except asyncio.CancelledError:
            error = self._cancel_reason or Unavailable("the coordinator is shutting down", reason="DRAINING")
        except SpecdecError as raised:
            error = raised
        except Exception:
            _log.exception("a generation failed")
            error = Internal("the generation failed; the log of the coordinator says why")
        finally:
            self._is_ending = True
            if error is not None and error.reason == "STORE_UNAVAILABLE":
                self._end(None, error)  # giving the lease back waits for the store as long again
            # Nothing may interrupt this: a lease left behind blocks the session until it expires.
            error = await asyncio.shield(self._clean_up(error))
        self._end(finished, error)

    def _end(self, finished: Finished | None, error: SpecdecError | None) -> None:
        """Tells the readers how it ended, once."""
        if self.stream.is_over:
            return
        if finished is not None:
            self.stream.finish(finished)
        elif error is not None:
            reason = "CANCELLED" if self.is_cancelled else error.reason
            self._parts.account.count_failure(reason, self.stream.num_tokens)
            self.stream.fail(error)

    async def _run_rounds(self) -> Finished:
        parts = self._parts
        is_first = True
        while True:
            outcome = await parts.runner.run(parts.round_id, parts.writer.remaining)

            output = parts.writer.write(outcome.token_ids)
            decided = DecidedRound(parts.round_id, len(parts.tokens), outcome, output)
            parts.round_id += 1
            parts.tokens.extend(output.token_ids)
            parts.replicas.truncate_to(len(parts.tokens))
            if parts.route is not None:
                parts.route.note(outcome, len(output.token_ids))
            if parts.record is not None:
                parts.record.note(outcome.supports, outcome.verification, len(output.token_ids))

            await parts.publisher.publish(decided)
            if output.finish_reason is not None:
                await parts.publisher.wait()
                return self._finished(output.finish_reason)
            if is_first:
                is_first = False
                self._note_prefixes()  # other sessions may begin as this one does, before it ends

    async def _clean_up(self, error: SpecdecError | None) -> SpecdecError | None:
        """Lets the last commit end, then gives the lease back; returns what the readers are told."""
        await self._parts.publisher.close()
        if self._parts.route is not None:
            self._parts.route.end(self._parts.account.stats if error is None else None)
        if self._parts.record is not None:
            self._parts.record.end(self._parts.tokens, self._identity.output_start + self.stream.num_tokens)
        self._parts.remember_output(self._parts.tokens.tail(self._identity.output_start).tolist())
        self._parts.lease_keeper.drop(self._parts.lease)
        stats = self._parts.account.stats
        self._parts.replicas.end_turn(stats.num_rounds + stats.num_draft_tokens if error is None else None)
        try:
            if error is not None and not (self.is_cancelled and isinstance(error, NotFound)):
                await self._parts.on_failure(not self.stream.num_tokens and not self.is_cancelled)
            self._note_prefixes()
            # A log shorter than what was shown is not left in order.
            await self._parts.store.release(
                self._parts.lease, left=not isinstance(error, SessionLost), locations=self._parts.replicas.homes
            )
        except NotFound as deletion:
            return deletion
        except SpecdecError as failure:
            _log.warning("cleaning up a generation failed: %s", failure)
        return error

    def _note_prefixes(self) -> None:
        """Tells the directory which replicas hold the committed tokens, as far as is known by now."""
        tokens = self._parts.tokens
        held = {holder: min(count, len(tokens)) for holder, count in self._parts.replicas.num_held.items()}
        self._parts.prefixes.note(tokens.prefix_hash, held)

    def _finished(self, reason: FinishReason) -> Finished:
        account = self._parts.account
        account.count_finish(reason, self.stream.num_tokens)
        return Finished(reason, self._identity.output_start, self.stream.num_tokens, account.stats)
