"""Restore sessions' KV from the cold tier before their prefill, and offer new KV to the tier.

    begun with blocks, KV missing ─▶ worth it? ─▶ held ─▶ runs are copied in one by one ─▶ resumed; prefill the others
                                       │ no                │ no further run, damaged, or too late
                                       ▼                   ▼
                                     prefill             resumed

A held call keeps its blocks and can be superseded, abandoned or released like a running one; data that arrives for an
ended call is dropped. Copied KV counts at once, so a call that resumes early computes only the missing part. Copying
happens between steps, one run at a time, so that other sessions' steps wait for at most one run.

`TierWriter` offers every run of KV blocks once its last block is published. The device thread only names the blocks of
a run; the tier's own thread copies their bytes while steps run. No pins are needed: a published block is not written
again before it is evicted, so a copy is valid if the stamps of its blocks are unchanged afterwards
(`BlockManager.stamps`), and is dropped otherwise.

`cold_tier` has the contract of the tier and its rule. Called by `device_loop`, `steps` and `call_desk` on the device
thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import partial

from specdec.contract.types import BLOCK_TOKENS
from specdec.engine.base import Worker
from specdec.engine.cold_tier import ColdTier, Fetch, Payload
from specdec.engine.loop.delivery import Waiter
from specdec.engine.loop.inbox import Inbox
from specdec.engine.loop.job import Job
from specdec.engine.schedule.scheduler import Scheduler
from specdec.engine.sessions.calls import Calls
from specdec.engine.sessions.sequence import Sequence
from specdec.engine.sessions.table import SessionTable


class TierWriter:
    """Writer of one worker's blocks to one tier."""

    def __init__(self, tier: ColdTier, worker: Worker, sessions: SessionTable) -> None:
        self._tier = tier
        self._worker = worker
        self._sessions = sessions

    def publish(self, sequence: Sequence, committed_len: int) -> None:
        """Publish blocks as `SessionTable.publish` does, and offer the runs that are complete. Device thread only."""
        num_blocks = self._tier.run_blocks
        num_before = sequence.num_published // num_blocks
        self._sessions.publish(sequence, committed_len)
        for run in range(num_before, sequence.num_published // num_blocks):
            names = sequence.block_names(run * num_blocks, (run + 1) * num_blocks)
            block_ids = sequence.block_table[run * num_blocks : (run + 1) * num_blocks]
            self._tier.offer(names[-1], block_ids, partial(self._read, names))

    def _read(self, names: Many[bytes]) -> Payload | None:
        """Return the blocks published under these names, or None if one is not published. Any thread may call this."""
        blocks = self._sessions.blocks
        stamps = blocks.stamps(names)
        if stamps is None:
            return None
        rows = self._worker.read_blocks([block_id for block_id, _ in stamps])
        return rows if blocks.stamps(names) == stamps else None


_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Restore:
    """One held call and the runs that it waits for."""

    job: Job
    first_run: int
    """Index of the first requested run, counted from the session's start."""
    next_run: int
    """Index of the run that arrives next."""
    fetch: Fetch | None = None
    end_s: float = float("inf")
    """Time, on the loop's clock, at which the call resumes without further runs."""


class TierRestorer:
    """The calls that are held for KV from the tier."""

    def __init__(
        self,
        tier: ColdTier,
        worker: Worker,
        calls: Calls[Job, Waiter],
        *,
        scheduler: Scheduler,
        inbox: Inbox,
        clock: Callable[[], float],
    ) -> None:
        self._tier = tier
        self._worker = worker
        self._calls = calls
        self._scheduler = scheduler
        self._inbox = inbox
        self._clock = clock
        self._open: dict[Job, _Restore] = {}

    @property
    def end_s(self) -> float:
        """Time, on the loop's clock, at which the first held call resumes at the latest."""
        return min((restore.end_s for restore in self._open.values()), default=float("inf"))

    def turn(self, begun: Iterable[Job]) -> None:
        """Hold the beginning calls whose KV is worth fetching, and resume those that waited too long."""
        for job in begun:
            self._begin(job)
        if self._open:
            self._end_late()

    def _begin(self, job: Job) -> None:
        num_blocks = self._tier.run_blocks
        run_tokens = num_blocks * BLOCK_TOKENS
        kv_len = job.sequence.kv_len
        # The last committed token must run, because its logits are needed.
        runs = range(kv_len // run_tokens, (job.call.position.committed_len - 1) // run_tokens)
        if not runs:
            return
        ends = range(runs.start + 1, runs.stop + 1)
        names = [job.sequence.block_names(end * num_blocks - 1, end * num_blocks)[0] for end in ends]
        replay_s = [self._scheduler.predict_replay_s(end * run_tokens - kv_len, kv_len) for end in ends]
        restore = _Restore(job, runs.start, runs.start)
        fetch = self._tier.fetch(names, replay_s, partial(self._post, restore))
        if fetch is None:
            return
        restore.fetch, restore.end_s = fetch, self._clock() + fetch.patience_s
        self._open[job] = restore
        self._calls.hold(job)

    def _post(self, restore: _Restore, payload: Payload | None) -> None:
        """Pass arrived data to the device thread; called in a thread of the tier."""
        self._inbox.post(partial(self._take, restore, payload), even_closed=True)

    def _take(self, restore: _Restore, payload: Payload | None) -> None:
        if restore.job not in self._open:
            return  # the call resumed without this run
        if payload is None or restore.fetch is None or restore.job not in self._calls.restoring:
            self._end(restore)
            return
        began_s = time.monotonic()
        try:
            self._copy_in(restore, restore.fetch, payload)
        except Exception:
            _log.exception("copying KV from the cold tier failed")
            self._end(restore)
            return
        restore.fetch.note_copied(payload.nbytes, time.monotonic() - began_s)

    def _copy_in(self, restore: _Restore, fetch: Fetch, payload: Payload) -> None:
        num_blocks, sequence = self._tier.run_blocks, restore.job.sequence
        first, end = restore.next_run * num_blocks, (restore.next_run + 1) * num_blocks
        # A partly filled block is private and is written as a whole. Full blocks stay unchanged.
        begin = max(first, sequence.kv_len // BLOCK_TOKENS)
        block_ids = sequence.block_table[begin:end]
        fetch.copy_parts(restore.next_run - restore.first_run, begin - first, block_ids)
        self._worker.write_blocks(block_ids, payload[begin - first :])
        sequence.kv_len = end * BLOCK_TOKENS
        restore.next_run += 1
        self._calls.sessions.publish(sequence, restore.job.call.position.committed_len)

    def _end_late(self) -> None:
        now_s = self._clock()
        for restore in [restore for restore in self._open.values() if restore.end_s <= now_s]:
            self._end(restore, is_late=restore.job in self._calls.restoring)

    def _end(self, restore: _Restore, *, is_late: bool = False) -> None:
        """End a restore and resume its call, unless the call has ended."""
        del self._open[restore.job]
        if restore.fetch is not None:
            restore.fetch.stop(is_late=is_late)
        if restore.job in self._calls.restoring:
            self._calls.go_on(restore.job)
