"""Commits of all generations: those asked for in one turn of the event loop go to the store together.

Each stays its own atomic step with its own answer. Not here: what a generation does when the store refuses (`session`),
what a commit is (`specdec.state.store`). Called by `session`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from specdec.state.store import Commit, Lease, SessionStore

_log = logging.getLogger(__name__)

OnCommitted = Callable[[Exception | None], None]


class CommitQueue:
    """Sends batches one at a time: what is asked for while one is under way goes with the next."""

    def __init__(self, store: SessionStore) -> None:
        self._store = store
        self._waiting: list[tuple[Lease, Commit, OnCommitted]] = []
        self._sender: asyncio.Task[None] | None = None

    def add(self, lease: Lease, commit: Commit, on_committed: OnCommitted) -> None:
        """Asks for a commit; `on_committed` is called once, with None or with what `SessionStore.commit` raises."""
        self._waiting.append((lease, commit, on_committed))
        if self._sender is None:
            self._sender = asyncio.create_task(self._send_all(), name="commits")

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                await self._send(batch)
        finally:
            self._sender = None

    async def _send(self, batch: list[tuple[Lease, Commit, OnCommitted]]) -> None:
        answers: list[Exception | None]
        try:
            answers = [*await self._store.commit_all([(lease, commit) for lease, commit, _ in batch])]
        except Exception as error:
            answers = [error] * len(batch)
        for (lease, _, on_committed), answer in zip(batch, answers, strict=True):
            try:
                on_committed(answer)
            except Exception:  # the others wait for theirs
                _log.exception("a commit of session %s was not told", lease.session_id)
