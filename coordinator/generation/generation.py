"""One generation: rounds, commits, and publishing to a stream that any number of subscribers read.

    admitted --> running --round, commit, publish--> ... --> finished
                    |-- error: subscribers get it; what was committed stays and can be resumed
                    `-- last subscriber gone, drain or deletion: cancelled; the same

A token is published only after its commit. The commit of a round runs beside the next round, which shows nothing
before it is done. Not here: admission and resumption (`generations`), a round (`round`), text (`output`),
readers (`stream`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from coordinator.generation.accounting import Account
from coordinator.generation.commits import CommitQueue
from coordinator.generation.lease_keeper import LeaseKeeper
from coordinator.generation.request_log import encode_stats
from coordinator.generation.stream import OutputStream, Subscription
from coordinator.replicas.placement import SessionReplicas
from coordinator.requests import Finished, GenerationIdentity, OutputChunk, Provenance
from coordinator.round.runner import RoundOutcome, RoundRunner
from coordinator.round.tokens import SessionTokens
from coordinator.text.output import OutputStep, OutputWriter
from specdec.errors import Internal, LeaseLost, SessionLost, SpecdecError, Unavailable
from specdec.observability.logging import bind
from specdec.state.store import Commit, Lease, SessionStore
from specdec.types import FinishReason

_log = logging.getLogger(__name__)

#: Pauses between attempts of a commit while the store cannot be reached; the lease outlives them.
_COMMIT_RETRY_PAUSES_S = (0.05, 0.2, 0.5, 1.0)


def _call_once_sent(callback: Callable[[], None]) -> None:
    """Calls back when what is asked of a link in this turn of the event loop has been written, in the next."""
    event_loop = asyncio.get_running_loop()
    event_loop.call_soon(event_loop.call_soon, callback)


@dataclass(slots=True)
class GenerationParts:
    """What a generation works with; it owns the lease and the tokens from here on."""

    store: SessionStore
    commits: CommitQueue
    lease: Lease
    lease_keeper: LeaseKeeper
    runner: RoundRunner
    replicas: SessionReplicas
    tokens: SessionTokens
    writer: OutputWriter
    round_id: int
    account: Account
    on_barren_failure: Callable[[], Awaitable[None]]
    """Called when the generation failed before its first token; the lease is still held."""


class Generation:
    """A running request of one session, in its own task."""

    def __init__(self, identity: GenerationIdentity, parts: GenerationParts, replayed: OutputStep | None) -> None:
        """`replayed`: output that the log already holds."""
        self.stream = OutputStream(identity)
        if replayed is not None:
            self.stream.publish(replayed)
        self._identity = identity
        self._parts = parts
        self._num_readers = 0
        self._cancel_reason: SpecdecError | None = None
        self._is_ending = False
        self._publication: asyncio.Future[None] | None = None
        self._insisting: asyncio.Task[None] | None = None
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
        try:
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
            # Nothing may interrupt this: a lease left behind blocks the session until it expires.
            await asyncio.shield(self._clean_up(error))
        if finished is not None:
            self.stream.finish(finished)
        elif error is not None:
            self._parts.account.count_failure("CANCELLED" if self.is_cancelled else error.reason)
            self.stream.fail(error)

    async def _run_rounds(self) -> Finished:
        parts = self._parts
        while True:
            outcome = await parts.runner.run(parts.round_id, parts.writer.remaining)
            step = parts.writer.write(outcome.token_ids)
            base_len = len(parts.tokens)
            parts.tokens.extend(step.token_ids)
            parts.replicas.settle(len(parts.tokens))
            if self._publication is not None:
                # A round takes longer than a commit, so that there is hardly ever anything to wait for.
                if not self._publication.done():
                    await asyncio.shield(self._publication)
                self._publication.result()
            self._publication = asyncio.get_running_loop().create_future()
            commit = partial(self._commit, parts.round_id, base_len, outcome, step, self._publication)
            parts.round_id += 1
            if step.finish_reason is not None:
                commit()
                await asyncio.shield(self._publication)
                return self._finished(step.finish_reason)
            _call_once_sent(commit)

    def _commit(
        self, round_id: int, base_len: int, outcome: RoundOutcome, step: OutputStep, shown: asyncio.Future[None]
    ) -> None:
        """Accounts for a round and commits it, then shows it; `shown` is done then, or has why it was not."""
        try:
            self._parts.account.count_round(outcome)
            commit = Commit(
                round_id=round_id,
                base_len=base_len,
                token_ids=np.array(step.token_ids, dtype=np.uint32),
                stats_json=encode_stats(self._parts.account.stats),
                finish_reason=step.finish_reason,
            )
        except Exception as error:  # the event loop called, and the generation waits
            shown.set_exception(error)
            return

        def settle(error: Exception | None) -> None:
            if error is None:
                show()
                shown.set_result(None)
            elif isinstance(error, SessionLost | Unavailable):
                self._insisting = asyncio.create_task(self._insist(commit, show, error, shown))
            else:
                shown.set_exception(error)

        show = partial(self._show, step, outcome.provenance)
        self._parts.commits.add(self._parts.lease, commit, settle)

    def _show(self, step: OutputStep, provenance: Provenance) -> None:
        self._parts.account.count_chunk(len(step.token_ids), is_first=not self.stream.num_tokens)
        self.stream.publish(step, provenance)

    async def _insist(
        self, commit: Commit, show: Callable[[], None], error: SpecdecError, shown: asyncio.Future[None]
    ) -> None:
        """Settles a publication whose commit met `error`."""
        try:
            await self._commit_again(commit, error)
        except asyncio.CancelledError:
            shown.cancel()
            raise
        except Exception as failure:
            shown.set_exception(failure)
        else:
            show()
            shown.set_result(None)

    async def _commit_again(self, commit: Commit, error: SpecdecError) -> None:
        """Tries on as long as it may help. Raises as `SessionStore.commit`."""
        for pause_s in _COMMIT_RETRY_PAUSES_S:
            if isinstance(error, SessionLost):
                await self._repair(commit.base_len)
            else:
                await asyncio.sleep(pause_s)
            try:
                return await self._parts.store.commit(self._parts.lease, commit)
            except (SessionLost, Unavailable) as again:
                error = again
        raise error

    async def _repair(self, base_len: int) -> None:
        """The store lost its latest writes; this owner still knows them."""
        record = await self._parts.store.load(self._identity.session_id)
        if record is None:
            raise LeaseLost(f"session {self._identity.session_id} is gone from the store")
        lost = self._parts.tokens.tail(record.num_tokens)[: base_len - record.num_tokens]
        _log.warning("the store lost %d tokens of a session; appending them again", len(lost))
        await self._parts.store.repair(self._parts.lease, base_len=record.num_tokens, token_ids=lost)

    async def _clean_up(self, error: SpecdecError | None) -> None:
        """Lets the last commit end, then gives the lease back."""
        if self._publication is not None:
            await asyncio.wait([self._publication])
            if not self._publication.cancelled() and (failure := self._publication.exception()):
                _log.debug("the last commit failed: %s", failure)
        self._parts.lease_keeper.drop(self._parts.lease)
        try:
            if error is not None and not self.stream.num_tokens and not self.is_cancelled:
                await self._parts.on_barren_failure()
            # A log shorter than what was shown is not left in order.
            await self._parts.store.release(self._parts.lease, left=not isinstance(error, SessionLost))
        except SpecdecError as failure:
            _log.warning("cleaning up a generation failed: %s", failure)

    def _finished(self, reason: FinishReason) -> Finished:
        account = self._parts.account
        account.count_finish(reason, self.stream.num_tokens)
        return Finished(reason, self._identity.output_start, self.stream.num_tokens, account.stats)
