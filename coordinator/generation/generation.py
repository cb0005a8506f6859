"""One generation: runs the rounds of a turn one after another, and cleans up at the end, however it comes.

    admitted --> running --round, publish--> ... --> finished
                    |-- error: the readers get it; committed tokens stay and can be resumed
                    `-- last reader gone, drain or deletion: cancelled; committed tokens stay

Each round goes to `round/runner`, which calls the replicas and decides the tokens. They go through `text/output`, which
finds the end of the output, to `publisher`, which commits and shows them. `generation_factory` builds a generation, and
`generation_service` cancels it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from coordinator.admission.slots import RunningSlot
from coordinator.audit.turn_audit import TurnAudit
from coordinator.generation.accounting import Account
from coordinator.generation.held_session import HeldSession
from coordinator.generation.publisher import DecidedRound, Publisher
from coordinator.generation.stream import OutputStream, Subscription, end_of
from coordinator.generation.turn import Turn
from coordinator.learning.turn_record import TurnRecord
from coordinator.requests import Finished, OutputChunk, RequestStats
from coordinator.round.outcome import RoundOutcome
from coordinator.round.request_router import RequestRouter
from coordinator.round.runner import RoundRunner
from coordinator.round.session_calls import SessionCalls
from specdec.contract.errors import Internal, SpecdecError, StaleEpoch, Unavailable
from specdec.contract.types import FinishReason
from specdec.observability.logging import bind

_log = logging.getLogger(__name__)


class CancelCause(StrEnum):
    """Ways in which a client ends its request early. Such a request counts as cancelled, not as failed."""

    CLIENT_LEFT = "client_left"
    SESSION_DELETED = "session_deleted"


@dataclass(frozen=True, slots=True)
class Learners:
    """The parts of the coordinator that learn from the rounds of one turn."""

    remember_output: Callable[[Sequence[int]], None]
    """Takes the output, in which later drafts are looked up."""
    router: RequestRouter | None = None
    """Learns how each draft pool does; None if the request keeps one pool."""
    record: TurnRecord | None = None
    """Takes the target's distributions to the learning log; None if they are not logged."""
    audit: TurnAudit | None = None
    """Chooses rounds that are verified again; None if none are."""

    def note_round(self, outcome: RoundOutcome, num_tokens: int) -> None:
        """Learn from a round of which `num_tokens` tokens were taken into the session."""
        if self.router is not None:
            self.router.note(outcome, num_tokens)
        if self.record is not None:
            self.record.note(outcome.supports, outcome.verification, num_tokens)
        if self.audit is not None:
            self.audit.note(outcome, num_tokens)

    def end(self, turn: Turn, stats: RequestStats | None, num_shown: int) -> None:
        """Learn from the whole turn; `stats` is None if it was not completed."""
        output_start = turn.identity.output_start
        if self.router is not None:
            self.router.end(stats)
        if self.record is not None:
            self.record.end(turn.tokens, output_start + num_shown)
        self.remember_output(turn.tokens.tail(output_start).tolist())


@dataclass(frozen=True, slots=True)
class Collaborators:
    """The objects that a generation works with, all made for its turn."""

    runner: RoundRunner
    calls: SessionCalls
    session: HeldSession
    publisher: Publisher
    stream: OutputStream
    account: Account
    learners: Learners
    slot: RunningSlot


class Generation:
    """A running turn, in a task of its own. It owns the turn and its lease."""

    def __init__(self, turn: Turn, collaborators: Collaborators) -> None:
        self.turn = turn
        self.stream = collaborators.stream
        self._runner = collaborators.runner
        self._calls = collaborators.calls
        self._session = collaborators.session
        self._publisher = collaborators.publisher
        self._account = collaborators.account
        self._learners = collaborators.learners
        self._slot = collaborators.slot
        self._num_readers = 0
        self._cancel_error: SpecdecError | None = None
        self._cancel_cause: CancelCause | None = None
        self._has_begun = False
        self._is_ending = False
        self.task = asyncio.create_task(self._run(), name=f"generation {turn.identity.session_id}")

    @property
    def stats(self) -> RequestStats:
        return self._account.stats

    @property
    def is_cancelled(self) -> bool:
        return self._cancel_error is not None

    def subscribe(self, start: int, replayed: OutputChunk | None = None) -> Subscription:
        """Add a reader from output token `start` on (see `Subscription`)."""
        self._num_readers += 1
        return Subscription(self.stream, start, self._drop_reader, replayed)

    def cancel(self, error: SpecdecError, cause: CancelCause | None = None) -> None:
        """Stop after the tokens that are committed. Await `task` to see everything released.

        A generation that already ends is not changed.

        Args:
            error: what the readers get.
            cause: what a client did to end the request; None: the request counts as failed, with the error's reason.
        """
        if not (self.task.done() or self._is_ending or self.is_cancelled):
            self._cancel_error, self._cancel_cause = error, cause
            if self._has_begun:  # a task that is cancelled before its first step would never clean up
                self.task.cancel()

    def _drop_reader(self, cut_off: SpecdecError | None) -> None:
        self._num_readers -= 1
        if self._num_readers > 0 or self.stream.is_over:
            return
        if cut_off is not None:
            self.cancel(cut_off)
        else:
            self.cancel(Unavailable("the request was cancelled by its client"), CancelCause.CLIENT_LEFT)

    async def _run(self) -> None:
        with bind(session_id=self.turn.identity.session_id, epoch=self.turn.lease.epoch):
            await self._run_and_clean_up()

    async def _run_and_clean_up(self) -> None:
        self._session.keep()
        finished: Finished | None = None
        error: SpecdecError | None = None
        self._has_begun = True
        try:
            if self.is_cancelled:
                raise asyncio.CancelledError
            finished = await self._run_rounds()
        except asyncio.CancelledError:
            error = self._cancel_error or Unavailable("the coordinator is shutting down", reason="DRAINING")
        except SpecdecError as raised:
            error = raised
        except Exception:
            _log.exception("generation failed")
            error = Internal("the generation failed; the coordinator's log has the cause")
        finally:
            self._is_ending = True
            may_resume = finished is None and self._cancel_cause is not CancelCause.SESSION_DELETED
            self._session.give_back(may_resume=may_resume)
            if error is not None and error.reason == "STORE_UNAVAILABLE":
                self._end(None, error)  # the readers need not wait while the release waits for the store again
            # Nothing may interrupt the clean-up: a lease that is left behind blocks the session until it expires.
            error = await asyncio.shield(self._clean_up(error))
        self._end(finished, error)

    async def _run_rounds(self) -> Finished:
        turn, replicas = self.turn, self._session.replicas
        is_first = True
        while True:
            outcome = await self._run_round()
            output = turn.writer.write(outcome.token_ids)
            decided = DecidedRound(turn.round_id, len(turn.tokens), outcome, output)
            turn.round_id += 1
            turn.tokens.extend(output.token_ids)
            replicas.truncate_to(len(turn.tokens))
            self._learners.note_round(outcome, len(output.token_ids))

            await self._publisher.publish(decided)
            if output.finish_reason is not None:
                await self._publisher.wait()
                return self._finished(output.finish_reason)
            if is_first:
                is_first = False
                self._session.note_prefixes()  # other sessions may start with the same prompt before this one ends

    async def _run_round(self) -> RoundOutcome:
        """Run the next round, under a higher epoch if a replica has seen a newer one than the store gave."""
        turn, calls = self.turn, self._calls
        while True:
            if calls.seen_epoch > calls.epoch:
                await self._publisher.wait()  # its commit belongs to the epoch before
                calls.epoch = await self._session.raise_epoch(calls.seen_epoch)
            await self._slot.begin_round()
            try:
                return await self._runner.run(turn.round_id, turn.writer.remaining)
            except StaleEpoch:
                if calls.seen_epoch <= calls.epoch:
                    raise
            finally:
                self._slot.end_round()

    async def _clean_up(self, error: SpecdecError | None) -> SpecdecError | None:
        """Let the last commit end, then release the session; return the error for the readers."""
        self._runner.close()
        await self._publisher.close()
        stats = self.stats if error is None else None
        self._learners.end(self.turn, stats, self.stream.num_tokens)
        self._session.end_turn(None if stats is None else stats.num_rounds + stats.num_draft_tokens)
        return await self._session.release(error, num_shown=self.stream.num_tokens, is_cancelled=self.is_cancelled)

    def _finished(self, reason: FinishReason) -> Finished:
        self._account.count_finish(reason, self.stream.num_tokens)
        return end_of(self.stream, reason, self.turn.writer, self.stats)

    def _end(self, finished: Finished | None, error: SpecdecError | None) -> None:
        """Tell the readers how the generation ended; the second call does nothing."""
        if self.stream.is_over:
            return
        if finished is not None:
            self.stream.finish(finished)
        elif error is not None:
            if self._cancel_cause is not None:
                self._account.count_cancellation(self._cancel_cause, self.stream.num_tokens)
            else:
                self._account.count_failure(error.reason, self.stream.num_tokens)
            self.stream.fail(error)
