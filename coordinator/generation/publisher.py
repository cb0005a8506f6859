"""Publishes the rounds of a generation: commits each round to the session's log, then shows it to the readers.

A decided round comes from `generation`. Its commit goes to the store (`specdec.state.store`) together with the commits
of other generations, and its tokens then go to `stream`. A round is committed while the next one runs, and at most one
commit is under way for a generation (docs/adr/0003-commit-beside-next-round).
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from coordinator.generation.accounting import Account
from coordinator.generation.request_log import encode_stats, record_of
from coordinator.generation.request_trace import RequestTrace
from coordinator.generation.stream import OutputStream
from coordinator.generation.turn import Turn
from coordinator.round.outcome import RoundOutcome
from coordinator.round.timeline import RoundTimeline
from coordinator.text.output import OutputStep
from specdec.contract.errors import SessionLost, SpecdecError, Unavailable
from specdec.state.store import Commit, Lease, SessionStore

#: Pauses between attempts of a commit while the store refuses connections; the lease outlives their sum. Where one
#: attempt alone takes longer than a lease, no other is made: another coordinator may reach the store.
_RETRY_PAUSES_S = (0.05, 0.2, 0.5, 1.0)

#: Shortest interval between two blocks of one generation, for each generation of the coordinator. To commit and show a
#: block takes about 0.1 ms of processor time, so blocks take a tenth of a core however many streams run.
BLOCK_INTERVAL_S = 0.001

#: Number of rounds that make a block at once, and for which a generation waits for the store. With as many in the block
#: before, a run is as far ahead as it may be.
MAX_BLOCK_ROUNDS = 4

_log = logging.getLogger(__name__)


class CommitQueue:
    """Sends the commits of all generations to the store in batches, one batch at a time.

    Commits that are added while a batch is under way go with the next batch. Each commit stays an atomic step of its
    own, with its own answer.
    """

    def __init__(self, store: SessionStore) -> None:
        self._store = store
        self._waiting: list[tuple[Lease, Commit, asyncio.Future[None]]] = []
        self._sender: asyncio.Task[None] | None = None
        self.num_publishers = 0
        """Number of generations that publish."""

    def add(self, lease: Lease, commit: Commit) -> asyncio.Future[None]:
        """Ask for a commit.

        Returns:
            A future that is done when the store has the commit, or fails as `SessionStore.commit` does. Cancelling the
            future does not take the commit back.
        """
        committed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((lease, commit, committed))
        if self._sender is None:
            # An own context: its records must not have the ids of the request that came first.
            self._sender = asyncio.create_task(self._send_all(), name="commits", context=contextvars.Context())
        return committed

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                await self._send(batch)
        finally:
            self._sender = None

    async def _send(self, batch: list[tuple[Lease, Commit, asyncio.Future[None]]]) -> None:
        answers: list[Exception | None]
        try:
            answers = [*await self._store.commit_all([(lease, commit) for lease, commit, _ in batch])]
        except Exception as error:
            answers = [error] * len(batch)
        if all(isinstance(answer, Unavailable) for answer in answers):
            # Commits that arrived in the meantime fail too, or they would wait as long again for the same store.
            later, self._waiting = self._waiting, []
            batch, answers = [*batch, *later], [*answers, *answers[:1] * len(later)]
        for (_, _, committed), answer in zip(batch, answers, strict=True):
            if committed.done():  # its caller cancelled it
                continue
            if answer is None:
                committed.set_result(None)
            else:
                committed.set_exception(answer)


class DecidedRound(NamedTuple):
    """A round whose tokens are decided but not committed."""

    round_id: int
    base_len: int
    """Length of the session before the round."""
    outcome: RoundOutcome
    output: OutputStep
    """The round's tokens up to the end of the output."""


class Publisher:
    """Publishes the rounds of one generation in their order. Used by the generation's task alone.

    Rounds that are decided while a commit is under way are committed together, as one block. So are rounds that follow
    one another faster than `BLOCK_INTERVAL_S` permits, except the first and the last of an output.
    """

    def __init__(
        self,
        turn: Turn,
        stream: OutputStream,
        account: Account,
        *,
        store: SessionStore,
        commits: CommitQueue,
        on_committed: Callable[[int], None] = lambda committed_len: None,
        trace: RequestTrace | None = None,
    ) -> None:
        """
        Args:
            turn: the generation's turn; gives the lease, and the tokens for a repair of the log.
            stream: shows committed tokens to the readers.
            account: counts published rounds and tokens.
            store: sessions of the turn's tenant; receives commits that are repeated, and repairs.
            commits: receives the first attempt of each commit.
            on_committed: called with the number of committed tokens of the session after each commit.
            trace: receives each round with its timeline.
        """
        self._turn = turn
        self._stream = stream
        self._account = account
        self._store = store
        self._commits = commits
        self._on_committed = on_committed
        self._trace = trace
        self._waiting: list[DecidedRound] = []
        self._progress = asyncio.Event()
        """Set when a block was shown or could not be committed."""
        self._wake = asyncio.Event()
        """Set when the rounds that wait are to be committed."""
        self._timer: asyncio.TimerHandle | None = None
        """Sets `_wake` once the interval since the last block is over."""
        self._block_s = -math.inf
        """Time at which the last block began, by the event loop's clock."""
        self._task: asyncio.Task[None] | None = None
        self._is_idle = True
        """True while no round waits and no commit is under way."""

    async def publish(self, decided: DecidedRound) -> None:
        """Let a round be committed and shown after those before it; wait while too many are not.

        Raises:
            SpecdecError: an earlier round could not be committed (see `SessionStore.commit`). Neither is shown.
        """
        if len(self._waiting) >= MAX_BLOCK_ROUNDS:
            await self._wait_while(lambda: len(self._waiting) >= MAX_BLOCK_ROUNDS)
        if self._task is None:
            self._task = asyncio.create_task(self._run())
            self._commits.num_publishers += 1
        elif self._task.done():
            self._task.result()
        self._waiting.append(decided)
        self._is_idle = False
        if decided.output.finish_reason is not None or len(self._waiting) >= MAX_BLOCK_ROUNDS:
            self._wake.set()
        elif self._timer is None:
            self._wake_when_due()

    def _wake_when_due(self) -> None:
        """Have the rounds that wait committed once the interval since the last block is over."""
        event_loop = asyncio.get_running_loop()
        due_s = self._block_s + self._commits.num_publishers * BLOCK_INTERVAL_S
        if due_s <= event_loop.time():
            self._wake.set()
        else:
            self._timer = event_loop.call_at(due_s, self._wake.set)

    async def wait(self) -> None:
        """Wait until every round is shown. Raises as `SessionStore.commit` if one cannot be committed."""
        self._wake.set()
        await self._wait_while(lambda: not self._is_idle)

    async def close(self) -> None:
        """Wait until the commit that is under way, and those that wait, have ended. An error is logged only."""
        try:
            await self.wait()
        except Exception as failure:  # whatever it is, the session is to be given back
            _log.debug("the last commit failed: %s", failure)
        if self._task is not None:
            self._task.cancel()
            self._task = None
            self._commits.num_publishers -= 1

    async def _wait_while(self, holds: Callable[[], bool]) -> None:
        began_s = time.monotonic()
        while holds():
            if self._task is not None and self._task.done():
                self._task.result()
            self._progress.clear()
            await self._progress.wait()
        self._account.count_store_wait(time.monotonic() - began_s)

    async def _run(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                if not self._waiting:
                    continue
                self._block_s = asyncio.get_running_loop().time()
                if self._timer is not None:
                    self._timer.cancel()
                    self._timer = None
                if self._waiting[-1].output.finish_reason is None:
                    # The next round hands its first call to the transport in this turn of the event loop; the transport
                    # writes it in the next turn. Yielding once lets that write go first.
                    await asyncio.sleep(0)
                block, self._waiting = self._waiting, []
                await self._commit_and_show(block)
                self._is_idle = not self._waiting
                self._progress.set()
        finally:
            self._progress.set()

    async def _commit_and_show(self, block: list[DecidedRound]) -> None:
        first, last = block[0], block[-1]
        for decided in block:
            self._account.count_round(decided.outcome)
        token_ids = [token_id for decided in block for token_id in decided.output.token_ids]
        committed_len = first.base_len + len(token_ids)
        began_s = time.monotonic()
        await self._commit(
            Commit(
                round_id=first.round_id,
                base_len=first.base_len,
                token_ids=np.array(token_ids, dtype=np.uint32),
                stats_json=encode_stats(self._account.stats),
                finish_reason=last.output.finish_reason,
                chain_hash=self._turn.tokens.prefix_hash(committed_len),
                num_rounds=len(block),
            )
        )
        committed_s = time.monotonic()
        self._account.count_commit(committed_s - began_s)
        self._on_committed(committed_len)
        self._account.count_chunk(len(token_ids), is_first=not self._stream.num_tokens)
        for decided in block:
            self._stream.publish(decided.output, decided.outcome.provenance)
            if self._trace is not None and decided.outcome.timeline is not None:
                self._record(self._trace, decided, decided.outcome.timeline, committed_s)

    def _record(self, trace: RequestTrace, decided: DecidedRound, timeline: RoundTimeline, committed_s: float) -> None:
        """Record the times of a round that was just shown."""
        timeline.committed_s, timeline.shown_s = committed_s, time.monotonic()
        trace.note_round(decided.round_id, len(decided.output.token_ids), decided.outcome, timeline)

    async def _commit(self, commit: Commit) -> None:
        """Commit, and try again after errors that may pass. Raises as `SessionStore.commit`."""
        began_s, lease = time.monotonic(), self._turn.lease
        try:
            return await self._commits.add(lease, commit)
        except (SessionLost, Unavailable) as failure:
            error: SpecdecError = failure
        pauses_s, was_lost = iter(_RETRY_PAUSES_S), False
        while True:
            is_lost = isinstance(error, SessionLost)
            if was_lost or not is_lost:  # a loss is repaired at once, also one that the last attempt has found
                pause_s = next(pauses_s, None)
                if pause_s is None or time.monotonic() - began_s > lease.ttl_s:
                    raise error
                await asyncio.sleep(pause_s)
            was_lost = is_lost
            try:
                if is_lost:
                    await self._repair(commit)
                return await self._store.commit(lease, commit)
            except (SessionLost, Unavailable) as failure:
                error = failure

    async def _repair(self, commit: Commit) -> None:
        """Write what the store has lost of this turn before a round, its beginning included, from this turn's copy.

        A store that lost the beginning of the turn holds the log of an older turn, which may have other tokens.
        """
        turn, lease = self._turn, self._turn.lease
        record = await self._store.load(lease.session_id)
        stored = (await self._store.read_tokens(lease.session_id))[: record.num_tokens if record else 0]
        held = turn.tokens.tail(0)[: commit.base_len]
        num_compared = min(len(stored), len(held))
        is_other = stored[:num_compared] != held[:num_compared]
        keep = int(is_other.argmax()) if is_other.any() else num_compared
        lost = held[keep:]
        _log.warning("writing tokens that the store lost: session=%s num_tokens=%d", lease.session_id, len(lost))
        request = replace(record_of(turn.identity), stats_json=commit.stats_json)
        await self._store.begin_request(lease, request, keep=keep, token_ids=lost, round_id=commit.round_id)
