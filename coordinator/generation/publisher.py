"""Publishing one generation's rounds: each is committed to the session's log, and shown to readers after its commit.

A decided round comes from `generation`; its commit goes to `commits` and its tokens, once that is through, to `stream`.
The commit of a round runs beside the next round, and at most one is under way (docs/adr/0003-commit-beside-next-round).
Not here: what is published (`round/runner`, `text/output`), who reads it (`stream`), the lease.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import NamedTuple

import numpy as np

from coordinator.generation.accounting import Account
from coordinator.generation.commits import CommitQueue
from coordinator.generation.request_log import encode_stats
from coordinator.generation.stream import OutputStream
from coordinator.round.outcome import RoundOutcome
from coordinator.round.timeline import RoundTimeline, TimelineLog
from coordinator.round.tokens import SessionTokens
from coordinator.text.output import OutputStep
from specdec.errors import LeaseLost, SessionLost, SpecdecError, Unavailable
from specdec.state.store import Commit, Lease, SessionStore

#: Pauses between attempts of a commit while the store cannot be reached; the lease outlives them. A store that does not
#: even refuse takes longer for one attempt than a lease lives: another coordinator may reach it.
_RETRY_PAUSES_S = (0.05, 0.2, 0.5, 1.0)

_log = logging.getLogger(__name__)


class DecidedRound(NamedTuple):
    """A round whose tokens are known and not committed yet."""

    round_id: int
    base_len: int
    """Tokens of the session before it."""
    outcome: RoundOutcome
    output: OutputStep
    """Of the round's tokens, those up to the end of the output."""


class Publisher:
    """Publishes the rounds of one generation in their order. Used by the generation's task alone."""

    def __init__(
        self,
        store: SessionStore,
        commits: CommitQueue,
        lease: Lease,
        tokens: SessionTokens,
        stream: OutputStream,
        account: Account,
        timelines: TimelineLog | None = None,
    ) -> None:
        """
        Args:
            store: where a commit is repeated, and repaired.
            commits: takes the first attempt of each commit, together with those of other generations.
            lease: of the session.
            tokens: of the session, those of rounds that are not committed yet included.
            stream: what readers see.
            account: counts what is published.
            timelines: told when rounds that note it did what.
        """
        self._store = store
        self._commits = commits
        self._lease = lease
        self._tokens = tokens
        self._stream = stream
        self._account = account
        self._timelines = timelines
        self._publication: asyncio.Task[None] | None = None
        """Of the latest round."""

    async def publish(self, decided: DecidedRound) -> None:
        """Begins to publish a round as soon as the round before is shown; does not wait until this one is.

        Cancelling does not stop the publication of the round before, and does not begin this one.

        Raises:
            SpecdecError: as `SessionStore.commit`, of the round before. Neither round is shown.
        """
        await self.wait()
        self._publication = asyncio.create_task(self._commit_and_show(decided))

    async def wait(self) -> None:
        """Returns when the latest round is shown. Raises as `SessionStore.commit` when it cannot be.

        Cancelling does not stop its publication.
        """
        if self._publication is not None:
            # A round takes longer than a commit, so that there is hardly ever anything to wait for.
            if not self._publication.done():
                await asyncio.shield(self._publication)
            self._publication.result()

    async def close(self) -> None:
        """Lets the publication that is under way end, well or not."""
        if self._publication is not None:
            await asyncio.wait([self._publication])
            if not self._publication.cancelled() and (failure := self._publication.exception()):
                _log.debug("the last commit failed: %s", failure)

    async def _commit_and_show(self, decided: DecidedRound) -> None:
        output = decided.output
        if output.finish_reason is None:
            # The next round asks its first replica in this turn of the event loop, and that is written in the next one;
            # this task begins in the next one, too, and gives way to the writing.
            await asyncio.sleep(0)

        self._account.count_round(decided.outcome)
        await self._commit(
            Commit(
                round_id=decided.round_id,
                base_len=decided.base_len,
                token_ids=np.array(output.token_ids, dtype=np.uint32),
                stats_json=encode_stats(self._account.stats),
                finish_reason=output.finish_reason,
            )
        )

        committed_s = time.monotonic()
        self._account.count_chunk(len(output.token_ids), is_first=not self._stream.num_tokens)
        self._stream.publish(output, decided.outcome.provenance)
        if self._timelines is not None and decided.outcome.timeline is not None:
            self._log_timeline(self._timelines, decided, decided.outcome.timeline, committed_s)

    def _log_timeline(
        self, timelines: TimelineLog, decided: DecidedRound, timeline: RoundTimeline, committed_s: float
    ) -> None:
        timeline.committed_s, timeline.shown_s = committed_s, time.monotonic()
        timelines.write(self._lease.session_id, decided.round_id, decided.outcome.num_draft_tokens, timeline)
        if decided.output.finish_reason is not None:
            timelines.flush()

    async def _commit(self, commit: Commit) -> None:
        """Commits, and tries again where that may help. Raises as `SessionStore.commit`."""
        began_s = time.monotonic()
        try:
            return await self._commits.add(self._lease, commit)
        except (SessionLost, Unavailable) as failure:
            error: SpecdecError = failure
        for pause_s in _RETRY_PAUSES_S:
            if isinstance(error, SessionLost):
                await self._repair(commit.base_len)
            elif time.monotonic() - began_s > self._lease.ttl_s:
                break
            else:
                await asyncio.sleep(pause_s)
            try:
                return await self._store.commit(self._lease, commit)
            except (SessionLost, Unavailable) as failure:
                error = failure
        raise error

    async def _repair(self, base_len: int) -> None:
        """Appends again what the store has lost of the session's first `base_len` tokens: their owner knows them."""
        session_id = self._lease.session_id
        record = await self._store.load(session_id)
        if record is None:
            raise LeaseLost(f"session {session_id} is gone from the store")
        lost = self._tokens.tail(record.num_tokens)[: base_len - record.num_tokens]
        _log.warning("the store lost %d tokens of a session; appending them again", len(lost))
        await self._store.repair(self._lease, base_len=record.num_tokens, token_ids=lost)
